"""`kvq merge`."""

from pathlib import Path
from typing import Annotated

import typer

from kvq import console
from kvq.commands.options import Json, Out, Overwrite

EXAMPLES = """\
Examples:

  kvq merge english code chat -o calibration
"""


def merge(
    calibrations: Annotated[
        list[Path], typer.Argument(help="Calibrations of one model, on other data.")
    ],
    out: Out,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Merge calibrations of one model by exact maximum; all sources are recorded."""
    from kvq.pipeline.inspect import inspect_calibration
    from kvq.pipeline.merge import merge as run

    merged = run(calibrations, out, overwrite=overwrite)
    shown = inspect_calibration(merged)
    if json:
        console.document({**shown.to_json(), "command": "merge", "out": str(out)})
        return
    console.layer_table(shown)
    for sentence in (*shown.convergence, shown.summary, f"wrote {out}"):
        console.answer(sentence)
