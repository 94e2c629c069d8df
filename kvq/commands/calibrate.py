"""`kvq calibrate`."""

import re
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer

from kvq import console
from kvq.commands.options import Json, Out, Overwrite
from kvq.errors import InputError, MissingDependencyError

EXAMPLES = """\
Examples:

  kvq calibrate ./model -o calibration

  kvq calibrate ./model --kv-cfg NVFP4_KV_CFG --dataset data.jsonl -o calibration

  torchrun --nproc-per-node 2 -m kvq calibrate ./model -o calibration
"""


def calibrate(
    model: Annotated[str, typer.Argument(help="Checkpoint folder, or a hub id.")],
    out: Out,
    kv_cfg: Annotated[str, typer.Option(help="Named configuration.")] = "FP8_KV_CFG",
    dataset: Annotated[
        str, typer.Option(help="`builtin`, a jsonl/json/parquet/csv/txt file, or a hub id.")
    ] = "builtin",
    split: Annotated[str | None, typer.Option(help="Rows to take, e.g. train[:512].")] = None,
    text_column: Annotated[str | None, typer.Option(help="Column that holds the text.")] = None,
    target_column: Annotated[
        str | None, typer.Option(help="Column that an encoder-decoder model's decoder answers.")
    ] = None,
    chat_template: Annotated[
        bool | None, typer.Option(help="Render chat columns with the template.")
    ] = None,
    num_samples: Annotated[int, typer.Option(help="Number of sequences.")] = 512,
    seq_len: Annotated[int, typer.Option(help="Tokens per sequence.")] = 2048,
    pack: Annotated[
        bool, typer.Option(help="Join rows with EOS, or keep one row per sequence.")
    ] = True,
    min_tokens: Annotated[int, typer.Option(help="Fewest tokens that count as enough.")] = 256,
    batch_size: Annotated[str, typer.Option(help="Sequences per batch, or auto.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:N.")] = "auto",
    device_map: Annotated[
        str | None, typer.Option(help="auto: spread the model over all devices.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16, float32.")] = "auto",
    compile: Annotated[
        bool, typer.Option("--compile", help="Compile the layers; CUDA, for long runs.")
    ] = False,
    skip_layers: Annotated[
        str | None, typer.Option(help="Layers for the engine to leave unquantized: auto, or 0,27.")
    ] = None,
    margin: Annotated[float, typer.Option(help="Scales cover amax times this.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Choice of builtin documents.")] = 0,
    trust_remote_code: Annotated[
        bool, typer.Option("--trust-remote-code", help="Run model code from the checkpoint.")
    ] = False,
    streaming: Annotated[
        bool, typer.Option("--streaming", help="Load one layer at a time, as when all do not fit.")
    ] = False,
    memory_budget: Annotated[
        str | None,
        typer.Option(help="Hidden states kept in memory while streaming, e.g. 8GiB; else files."),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with an unfinished calibration of the same.")
    ] = False,
    stop_when_stable: Annotated[
        bool,
        typer.Option(
            "--stop-when-stable",
            help="End once the second half of the batches so far raised no maximum.",
        ),
    ] = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Observe a model's keys and values on data; write their amax per layer and head."""
    if dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise InputError(
            f"unknown --dtype `{dtype}`; known: auto, bfloat16, float16, float32",
            code="option.dtype",
        )
    try:
        from kvq.calibration.data import DataOptions
        from kvq.calibration.distributed import ranks
        from kvq.outliers import skip_flag
        from kvq.pipeline.calibrate import CalibrateOptions
        from kvq.pipeline.calibrate import calibrate as run
        from kvq.pipeline.inspect import inspect_calibration
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "kvq":
            raise
        raise MissingDependencyError(
            f"calibrate needs `{error.name}`, which is not installed",
            code="dependency.calibrate",
            hint='pip install "kvq[calibrate]"',
        ) from error
    data = DataOptions(
        dataset=dataset, split=split, text_column=text_column, target_column=target_column,
        chat_template=chat_template,
        pack=pack, seq_len=seq_len, num_samples=num_samples, seed=seed, min_tokens=min_tokens,
    )  # fmt: skip
    options = CalibrateOptions(
        kv_cfg=kv_cfg, data=data, batch_size=_batch_size(batch_size), device=device, dtype=dtype,
        skip_layers=skip_layers, margin=margin,
        overwrite=overwrite, trust_remote_code=trust_remote_code, streaming=streaming,
        device_map=device_map, compile=compile, resume=resume, stop_when_stable=stop_when_stable,
        memory_budget=None if memory_budget is None else _bytes(memory_budget),
    )  # fmt: skip
    first = ranks().first
    with console.Progress() if first else nullcontext() as progress:
        calibration = run(model, Path(out), options, notify=console.note, progress=progress)
    if not first:
        return
    shown = inspect_calibration(calibration)
    if json:
        console.document({**shown.to_json(), "command": "calibrate", "out": str(out)})
        return
    console.answer(shown.tree)
    console.layer_table(shown)
    for sentence in (*shown.convergence, shown.summary, f"wrote {out}"):
        console.answer(sentence)
    if calibration.skip_layers:
        console.answer(f"serve it with: vllm serve ... {skip_flag(calibration.skip_layers)}")


def _batch_size(text: str) -> int | None:
    if text == "auto":
        return None
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"--batch-size is `{text}`, expected a number or `auto`", code="option.batch_size"
        ) from None


_UNITS = {"k": 10, "m": 20, "g": 30, "t": 40}


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(?:i?b)?|b)?", text.strip().lower())
    if match is None:
        raise InputError(
            f"--memory-budget is `{text}`, expected a size such as 8GiB or 500M",
            code="option.memory_budget",
        )
    return int(float(match[1]) * (1 << _UNITS[match[2]] if match[2] else 1))
