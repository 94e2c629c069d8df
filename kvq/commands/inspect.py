"""`kvq inspect`."""

from pathlib import Path
from typing import Annotated

import typer

from kvq import console
from kvq.commands.options import Json

EXAMPLES = """\
Examples:

  kvq inspect calibration

  kvq inspect checkpoint --scales --json > scales.json
"""


def inspect(
    path: Annotated[Path, typer.Argument(help="Calibration, checkpoint or .safetensors file.")],
    scales: Annotated[bool, typer.Option("--scales", help="Print the per-layer table.")] = False,
    json: Json = False,
) -> None:
    """Print the module tree with every quantizer's amax, the scales, one sentence of summary."""
    from kvq.pipeline.inspect import inspect as run

    shown = run(path)
    if json:
        console.document(shown.scales() if scales else shown.to_json())
        return
    if scales:
        console.layer_table(shown.rows)
    elif shown.tree:
        console.answer(shown.tree)
    console.answer(shown.summary)
