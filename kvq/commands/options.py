"""Options that several commands share."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvq.errors import InputError

if TYPE_CHECKING:
    from kvq.engines.base import EngineOptions

Out = Annotated[Path, typer.Option("--out", "-o", help="Folder to write.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Engines = Annotated[
    list[str] | None,
    typer.Option(
        "--engine", help="Predict what vllm, sglang, transformers or tensorrt-llm would use."
    ),
]
KvCacheDtype = Annotated[
    str, typer.Option("--kv-cache-dtype", help="The engine's option of that name.")
]
EngineVersion = Annotated[
    str | None,
    typer.Option("--engine-version", help="Which version of it: one that is modelled."),
]
Platform = Annotated[
    str, typer.Option("--platform", help="Where the engine runs: sm90, sm100, gfx942, cpu, ...")
]
TensorParallel = Annotated[int, typer.Option("--tp", help="GPUs that share the heads.")]
SkipLayers = Annotated[
    str | None,
    typer.Option(
        "--kv-cache-dtype-skip-layers", help="vLLM's option: e.g. 0,27 or sliding_window."
    ),
]


OF_ENGINES = ("engine_version", "kv_cache_dtype", "kv_cache_dtype_skip_layers", "platform", "tp")


def refuse_without(
    context: typer.Context, options: Sequence[str], needed: str, *, given: bool
) -> None:
    """Refuse options that say nothing without another one, which is not given.

    Args:
        context: what was typed.
        options: parameters of the command, by name.
        needed: what they need, in words.
        given: whether that is there.

    Raises:
        InputError: one of them was typed, if with its default.
    """
    for name in options:
        source = context.get_parameter_source(name)
        if not given and source is not None and source.name == "COMMANDLINE":
            option = f"--{name.replace('_', '-')}"
            raise InputError(
                f"{option} says nothing without {needed}",
                code=f"option.{name}",
                hint=f"give {needed} as well, or leave {option} out",
            )


def engine_options(
    kv_cache_dtype: str, platform: str, tp: int, skip_layers: str | None
) -> "EngineOptions":
    """Return how the asked engines run."""
    from kvq.engines.base import EngineOptions

    skipped = tuple(part.strip() for part in skip_layers.split(",")) if skip_layers else ()
    return EngineOptions(kv_cache_dtype, platform, tp, skipped)


KvCfg = Annotated[
    str | None,
    typer.Option("--kv-cfg", help="Named configuration, e.g. FP8_KV_CFG, NVFP4_KV_CFG."),
]
