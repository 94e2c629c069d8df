"""Options that several commands share."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

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
    typer.Option("--engine-version", help="Refuse to predict for another version than this."),
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
