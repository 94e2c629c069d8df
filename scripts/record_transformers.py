"""Record what transformers, beside compressed-tensors, makes of tests/engines/variants.py.

Usage: python scripts/record_transformers.py [NAME...]

Writes tests/goldens/transformers.json; with names, only their entries change. Each variant is
loaded by `AutoModelForCausalLM.from_pretrained(folder, dtype="auto")`, on the CPU; variants whose
options are vLLM's alone are left out. One process loads them all; a variant that ends it is
recorded as a crash, and a new process takes over.

Per attention module: `dtype` is "auto" where the cache stays as it is, else what compressed-tensors
rounds K and V to before they are cached; `k` and `v` are its scales, "uninitialised" where no
tensor was read into them, null where there are none.

`stage` says where an error came from: "config" (config.json), "quantizer" (its quantization
config), "files" (which files to read), "construction" (the modules), "renaming" (how names of
tensors become names of parameters), "loading" (the weights), "processing" (after all weights are
there), "crash".
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "goldens" / "transformers.json"
WORKER = "--worker"
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0", "TRANSFORMERS_VERBOSITY": "error"}
STAGES = {  # function on the stack → stage; the first that matches
    "_finalize_model_loading": "processing", "postprocess_model": "processing",
    "_load_pretrained_model": "loading", "preprocess_model": "construction",
    "_get_resolved_checkpoint_files": "files", "get_hf_quantizer": "quantizer",
    "get_model_conversion_mapping": "renaming", "__init__": "construction",
}  # fmt: skip
ERROR_LENGTH = 240
UNINITIALISED = "uninitialised"


def main() -> None:
    if sys.argv[1:] == [WORKER]:
        work()
        return
    sys.path.insert(0, str(ROOT))
    from tests.engines.variants import VARIANTS, write

    plain = [name for name, variant in VARIANTS.items()
             if variant.kv_cache_dtype == "auto" and not variant.skip_layers]  # fmt: skip
    names = sys.argv[1:] or sorted(plain)
    recorded = json.loads(GOLDEN.read_text()) if sys.argv[1:] else {"variants": {}}
    with tempfile.TemporaryDirectory(prefix="kvq-") as folder:
        jobs = []
        for name in names:
            write(name, path := Path(folder, name))
            jobs.append({"name": name, "path": str(path)})
        while jobs:
            jobs = run(jobs, recorded, log=Path(folder, "log"))
    GOLDEN.write_text(text_of(recorded))


def run(jobs: list[dict], recorded: dict, *, log: Path) -> list[dict]:
    """Give the jobs to one process; return those that it left undone."""
    with log.open("w") as stderr, subprocess.Popen(
        [sys.executable, __file__, WORKER], stdin=subprocess.PIPE, stderr=stderr,
        stdout=subprocess.PIPE, text=True,
        env=os.environ | ENVIRONMENT | {"TMPDIR": str(log.parent)},
    ) as process:  # fmt: skip
        process.stdin.write(json.dumps(jobs))
        process.stdin.close()
        try:
            recorded["versions"] = json.loads(process.stdout.readline())
        except ValueError:
            sys.exit(f"transformers did not start:\n{log.read_text()[-3000:]}")
        done = 0
        for line in process.stdout:
            recorded["variants"][jobs[done]["name"]] = answer = json.loads(line)
            done += 1
            print(f"{done}/{len(jobs)} {jobs[done - 1]['name']}: {answer['error'] or 'loaded'}")
    if done < len(jobs):
        crash = {"layers": {}, "stage": "crash", "error": f"exit status {process.returncode}"}
        recorded["variants"][jobs[done]["name"]] = crash
        done += 1
    return jobs[done:]


def text_of(recorded: dict) -> str:
    """One line per variant, so that a change shows as one."""
    lines = [f"  {json.dumps(name)}: {json.dumps(answer, sort_keys=True, allow_nan=False)}"
             for name, answer in sorted(recorded["variants"].items())]  # fmt: skip
    versions = json.dumps(recorded["versions"], sort_keys=True)
    return '{\n "variants": {\n' + ",\n".join(lines) + f'\n }},\n "versions": {versions}\n}}\n'


def work() -> None:
    """Load the checkpoints named on standard input; one line of JSON each on standard output."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints
    jobs = json.load(sys.stdin)
    import compressed_tensors
    import transformers

    versions = {module.__name__.replace("_", "-"): module.__version__
                for module in (transformers, compressed_tensors)}  # fmt: skip
    print(json.dumps(versions), file=answers)
    for job in jobs:
        print(json.dumps(load(job["path"]), allow_nan=False), file=answers)


def load(path: str) -> dict:
    """Return what transformers holds of one checkpoint, or why it holds nothing."""
    from transformers import AutoModelForCausalLM

    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype="auto", output_loading_info=True
        )
    except Exception as error:  # the error is the answer for this checkpoint
        return {"layers": {}, "stage": stage_of(error), "error": text_of_error(error, path)}
    missing = set(info["missing_keys"])
    layers = {
        name: layer_of(name, module, missing)
        for name, module in model.named_modules()
        if hasattr(module, "kv_cache")
        or (hasattr(module, "layer_idx") and "attention" in type(module).__name__.lower())
    }
    return {"layers": layers, "stage": None, "error": None}


def layer_of(name: str, module, missing: set[str]) -> dict:
    scheme = getattr(module, "quantization_scheme", None)
    dtype = "auto"
    if hasattr(module, "kv_cache") and scheme is not None:
        arguments = scheme.input_activations
        kind = getattr(arguments.type, "value", arguments.type).replace("float", "fp")
        dtype = f"{kind}{arguments.num_bits}"
    sides = {side: values(f"{name}.{side}_scale", module, missing) for side in "kv"}
    return {"dtype": dtype, **sides}


def values(name: str, module, missing: set[str]) -> list[float | str] | str | None:
    parameter = getattr(module, name.rpartition(".")[2], None)
    if parameter is None:
        return None
    if name in missing:
        return UNINITIALISED
    return [number(value) for value in parameter.flatten().tolist()]


def number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def text_of_error(error: Exception, folder: str) -> str:
    """Type and first line, without our path and without the list of all that there is."""
    text = str(error)
    if type(error).__name__ == "ValidationError":  # of pydantic, whose first line says nothing
        first = error.errors()[0]
        text = f"{'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    line = text.strip().partition("\n")[0].partition(" - supported types are")[0]
    line = line.replace(f"{folder}/", "").replace(folder, Path(folder).name)[:ERROR_LENGTH]
    return f"{type(error).__name__}: {line}"


def stage_of(error: Exception) -> str:
    frames, traceback = set(), error.__traceback__
    while traceback:
        frames.add(traceback.tb_frame.f_code.co_name)
        traceback = traceback.tb_next
    return next((stage for name, stage in STAGES.items() if name in frames), "config")


if __name__ == "__main__":
    main()
