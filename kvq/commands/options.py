"""Options that several commands share."""

from pathlib import Path
from typing import Annotated

import typer

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
KvCfg = Annotated[
    str | None,
    typer.Option("--kv-cfg", help="Named configuration, e.g. FP8_KV_CFG, NVFP4_KV_CFG."),
]
