"""`kvq verify`."""

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
from kvq.errors import InputError

EXAMPLES = """\
Examples:

  kvq verify checkpoint

  kvq verify checkpoint --against calibration --report github

  kvq verify checkpoint --engine vllm

  kvq verify checkpoint --require kv-scales
"""
FORMS = ("human", "json", "junit", "github")


def verify(
    context: typer.Context,
    checkpoint: Annotated[Path, typer.Argument(help="Checkpoint folder.")],
    against: Annotated[
        Path | None, typer.Option(help="Calibration, checkpoint or scales JSON to compare with.")
    ] = None,
    rtol: Annotated[float, typer.Option(help="Relative tolerance of --against.")] = 0.0,
    engine: Engines = None,
    engine_version: EngineVersion = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    kv_cache_dtype_skip_layers: SkipLayers = None,
    platform: Platform = "sm90",
    tp: TensorParallel = 1,
    live: Annotated[
        str | None, typer.Option(help="Load it in the real engine: vllm or transformers.")
    ] = None,
    python: Annotated[str | None, typer.Option(help="The Python that has it.")] = None,
    require: Annotated[
        list[str] | None,
        typer.Option("--require", help="Fail without it: kv-scales or provenance. Repeatable."),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Warnings count as errors.")] = False,
    report: Annotated[str, typer.Option(help="human, json, junit or github.")] = "human",
    json: Json = False,
) -> None:
    """Check that every layer's scales are there, plausible and declared; exit 1 if not."""
    from kvq.pipeline.verify import EngineQuestion
    from kvq.pipeline.verify import verify as run

    if report not in FORMS:
        raise InputError(
            f"unknown --report `{report}`; known: {', '.join(FORMS)}", code="option.report"
        )
    if json and report not in ("human", "json"):
        raise InputError(f"--json contradicts --report {report}", code="option.report")
    refuse_without(context, OF_ENGINES, "--engine or --live", given=bool(engine or live))
    refuse_without(context, ["python"], "--live", given=live is not None)
    refuse_without(context, ["rtol"], "--against", given=against is not None)
    options = engine_options(kv_cache_dtype, platform, tp, kv_cache_dtype_skip_layers)
    ask = EngineQuestion(engine or (), options, live, python, engine_version)
    found = run(checkpoint, against=against, rtol=rtol, ask=ask, require=require or ())
    console.report(found, form="json" if json else report, strict=strict)
    if not found.ok(strict=strict):
        raise typer.Exit(1)
