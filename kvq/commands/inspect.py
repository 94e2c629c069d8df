"""`kvq inspect`."""

from pathlib import Path
from typing import Annotated

import typer

from kvq import console
from kvq.commands.options import Engines, Json, KvCacheDtype

EXAMPLES = """\
Examples:

  kvq inspect calibration

  kvq inspect checkpoint --scales --json > scales.json

  kvq inspect checkpoint --engine vllm
"""


def inspect(
    path: Annotated[Path, typer.Argument(help="Calibration, checkpoint or .safetensors file.")],
    scales: Annotated[bool, typer.Option("--scales", help="Print the per-layer table.")] = False,
    engine: Engines = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    json: Json = False,
) -> None:
    """Print the module tree with every quantizer's amax, the scales, one sentence of summary."""
    from kvq.pipeline.inspect import inspect as run

    if engine:
        from kvq.engines.base import EngineOptions
        from kvq.engines.document import to_document
        from kvq.pipeline.inspect import read_engines

        readings = read_engines(path, engine, EngineOptions(kv_cache_dtype=kv_cache_dtype))
        if json:
            documents = [to_document(reading) for reading in readings]
            console.document({"schema": 1, "command": "inspect", "engines": documents})
            return
        for reading in readings:
            console.engine_table(reading)
        return
    shown = run(path)
    if json:
        console.document(shown.scales() if scales else shown.to_json())
        return
    if scales:
        console.layer_table(shown.rows)
    elif shown.tree:
        console.answer(shown.tree)
    console.answer(shown.summary)
