"""`kvq inspect`."""

from pathlib import Path
from typing import Annotated

import typer

from kvq import console
from kvq.commands.options import (
    OF_ENGINES,
    Engines,
    EngineVersion,
    Json,
    KvCacheDtype,
    Platform,
    SkipLayers,
    TensorParallel,
    engine_options,
    refuse_without,
)

EXAMPLES = """\
Examples:

  kvq inspect calibration

  kvq inspect checkpoint --scales --json > scales.json

  kvq inspect checkpoint --engine vllm
"""


def inspect(
    context: typer.Context,
    path: Annotated[Path, typer.Argument(help="Calibration, checkpoint or .safetensors file.")],
    scales: Annotated[bool, typer.Option("--scales", help="Print the per-layer table.")] = False,
    engine: Engines = None,
    engine_version: EngineVersion = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    kv_cache_dtype_skip_layers: SkipLayers = None,
    platform: Platform = "sm90",
    tp: TensorParallel = 1,
    json: Json = False,
) -> None:
    """Print the module tree with every quantizer's amax, the scales, one sentence of summary."""
    from kvq.pipeline.inspect import inspect as run

    refuse_without(context, OF_ENGINES, "--engine", given=bool(engine))
    if engine:
        from kvq.engines.document import to_document
        from kvq.pipeline.predict import read_engines

        options = engine_options(kv_cache_dtype, platform, tp, kv_cache_dtype_skip_layers)
        readings = read_engines(path, engine, options, engine_version)
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
        console.layer_table(shown)
    elif shown.tree:
        console.answer(shown.tree)
    for sentence in (*shown.convergence, shown.summary):
        console.answer(sentence)
