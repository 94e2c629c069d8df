"""Ask the real engine: load a checkpoint there, and compare its scales with the prediction."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from kvq.checks.engine_fixes import load_fix
from kvq.checks.findings import Finding
from kvq.engines import LIVE
from kvq.engines.base import EngineReading
from kvq.errors import InputError, MissingDependencyError

_REPORT = (
    "trust the engine, not the prediction; compare `--engine-version` with the version that ran, "
    "and report it if they are the same"
)


def probe(engine: str, checkpoint: Path, *, python: str | None, kv_cache_dtype: str) -> Any:
    """Load a checkpoint in the real engine and return the scales in use, as its probe prints them.

    Args:
        engine: `vllm` or `transformers`.
        checkpoint: the folder.
        python: the interpreter that has the engine; None for this one.
        kv_cache_dtype: the engine's option of that name.

    Raises:
        InputError: no such engine, or no such interpreter.
        MissingDependencyError: the interpreter does not have the engine, or it gave no answer.
    """
    if engine not in LIVE:
        raise InputError(f"unknown --live `{engine}`; known: {', '.join(LIVE)}", code="live.engine")
    interpreter = python or sys.executable
    with as_file(files("kvq.engines") / "probes" / f"probe_{engine}.py") as script:
        argv = [interpreter, str(script), "--kv-cache-dtype", kv_cache_dtype, str(checkpoint)]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, check=False)
        except OSError as error:
            raise InputError(
                f"cannot run `{interpreter}`: {error.strerror}",
                code="live.python",
                hint=f"give the Python that has {engine} as --python",
            ) from error
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if not answers:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise MissingDependencyError(
            f"`{interpreter}` does not run {engine}: {last}",
            code="live.missing",
            hint=f"give the Python that has {engine} as --python",
        )
    return json.loads(answers[-1])


def live_findings(predicted: EngineReading, live: Any) -> Iterator[Finding]:
    """Yield every layer where the real engine holds other scales than predicted from the files."""
    engine = predicted.engine
    if "error" in live:
        if predicted.error is None:
            yield Finding(
                "live.load", "error", f"{engine} fails to load this checkpoint: {live['error']}",
                expected="a checkpoint that loads", found=live["error"],
                fix=load_fix(replace(predicted, error=live["error"])),
            )  # fmt: skip
        return
    if predicted.error is not None:
        yield Finding(
            "live.prediction", "warning", f"{engine} loads this checkpoint against the prediction",
            expected=predicted.error, found="no error", fix=_REPORT,
        )  # fmt: skip
    held = {name.removesuffix(".attn"): layer for name, layer in live["layers"].items()}
    for layer in predicted.layers:
        found = held.get(layer.engine_name)
        for side, used in (("k", layer.k), ("v", layer.v)):
            values = None if found is None else found[f"{side}_all"]
            expected = None if used.value is None else list(used.value)
            if values != expected and not (found is None and used.tensor is None):
                yield Finding(
                    "live.value", "error",
                    f"{engine} holds another {side} scale in `{layer.engine_name}` than predicted",
                    layer.layer_idx, used.tensor, expected=repr(expected), found=repr(values),
                    fix=_REPORT,
                )  # fmt: skip
