"""Record what real vLLM makes of every checkpoint in tests/engines/variants.py.

Usage: KVQ_VLLM_PYTHON=/path/to/python python scripts/record_vllm.py [NAME...]

Writes tests/goldens/vllm.json; with names, only their entries change. Where the vLLM is an earlier
one than that of the file, what differs goes to tests/goldens/vllm_earlier.json instead.

vLLM runs in a process of its own, on the CPU: it builds the model the way the server does, runs
its weight loader and `process_weights_after_loading`, allocates no cache and starts no engine. A
variant that ends the process is recorded as a crash, and a new process takes over.

`stage` says where an error came from: "config" (the engine config), "construction" (the modules),
"loading" (the weights), "processing" (after all weights are there), "crash".
"""

import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import MagicMock

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "goldens" / "vllm.json"
EARLIER = ROOT / "tests" / "goldens" / "vllm_earlier.json"
WORKER = "--worker"
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr", "PYTHONHASHSEED": "0",
}  # fmt: skip
STAGES = {  # function on the stack → stage; the first that matches
    "process_weights_after_loading": "processing", "load_weights": "loading",
    "initialize_model": "construction",
}  # fmt: skip
ERROR_LENGTH = 240


def main() -> None:
    if sys.argv[1:] == [WORKER]:
        work()
        return
    sys.path.insert(0, str(ROOT))
    from tests.engines.variants import VARIANTS, write

    names = sys.argv[1:] or sorted(VARIANTS)
    recorded = json.loads(GOLDEN.read_text()) if sys.argv[1:] else {"variants": {}}
    with tempfile.TemporaryDirectory(prefix="kvq-") as folder:
        jobs = []
        for name in names:
            write(name, path := Path(folder, name))
            options = {"kv_cache_dtype": VARIANTS[name].kv_cache_dtype,
                       "kv_cache_dtype_skip_layers": list(VARIANTS[name].skip_layers)}  # fmt: skip
            jobs.append({"name": name, "path": str(path), "options": options})
        while jobs:
            jobs = run(jobs, recorded, log=Path(folder, "log"))
    save(recorded)


def run(jobs: list[dict], recorded: dict, *, log: Path) -> list[dict]:
    """Give the jobs to one process; return those that it left undone."""
    with log.open("w") as stderr, subprocess.Popen(
        [os.environ["KVQ_VLLM_PYTHON"], __file__, WORKER], stdin=subprocess.PIPE, stderr=stderr,
        stdout=subprocess.PIPE, text=True,
        env=os.environ | ENVIRONMENT | {"TMPDIR": str(log.parent)},
    ) as process:  # fmt: skip
        process.stdin.write(json.dumps(jobs))
        process.stdin.close()
        try:
            recorded["vllm"] = json.loads(process.stdout.readline())
        except ValueError:
            sys.exit(f"vLLM did not start:\n{log.read_text()[-3000:]}")
        done = 0
        for line in process.stdout:
            recorded["variants"][jobs[done]["name"]] = answer = json.loads(line)
            done += 1
            print(f"{done}/{len(jobs)} {jobs[done - 1]['name']}: {answer['error'] or 'loaded'}")
    if done < len(jobs):
        error = f"exit status {process.returncode}"
        crash = {"cache_dtype": None, "layers": {}, "stage": "crash", "error": error}
        recorded["variants"][jobs[done]["name"]] = crash
        done += 1
    return jobs[done:]


def save(recorded: dict) -> None:
    """Write all answers, or those of an earlier version that differ."""
    latest = json.loads(GOLDEN.read_text())
    version = recorded["vllm"]
    if [int(part) for part in version.split(".")] >= [int(x) for x in latest["vllm"].split(".")]:
        GOLDEN.write_text(text_of(recorded))
        return
    earlier = json.loads(EARLIER.read_text()) if EARLIER.exists() else {}
    earlier[version] = {
        name: answer
        for name, answer in recorded["variants"].items()
        if answer != latest["variants"][name]
    }
    parts = [
        f" {json.dumps(one)}: {{\n" + ",\n".join(lines_of(earlier[one])) + "\n }"
        for one in sorted(earlier)
    ]
    EARLIER.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def lines_of(answers: dict) -> list[str]:
    return [f"  {json.dumps(name)}: {json.dumps(answer, sort_keys=True, allow_nan=False)}"
            for name, answer in sorted(answers.items())]  # fmt: skip


def text_of(recorded: dict) -> str:
    """One line per variant, so that a change shows as one."""
    lines = lines_of(recorded["variants"])
    return '{\n "variants": {\n' + ",\n".join(lines) + (
        f'\n }},\n "vllm": {json.dumps(recorded["vllm"])}\n}}\n'
    )  # fmt: skip


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `torchvision`, which classes of vision-language models import, and all in it."""

    def find_spec(self, name, path=None, target=None):  # noqa: D102
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module):  # noqa: D102
        module.__version__ = "0"
        module.__getattr__ = stand_in


def stand_in(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)


def work() -> None:
    """Load the checkpoints named on standard input; one line of JSON each on standard output."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints
    jobs = json.load(sys.stdin)
    if importlib.util.find_spec("torchvision") is None:
        sys.meta_path.append(StandIn())
    import vllm

    start_world()
    print(json.dumps(vllm.__version__), file=answers)
    for job in jobs:
        gc.freeze()  # the loader collects garbage, 0.4 s over all that was imported
        print(json.dumps(load(job), allow_nan=False), file=answers)


def start_world() -> None:
    """A world of one process; the loader needs one."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.models import registry
    from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop

    _set_torch_accelerator_to_noop()
    registry._run_in_subprocess = lambda inspect: inspect()  # 7 s each otherwise
    with set_current_vllm_config(VllmConfig()):
        store = os.path.join(tempfile.mkdtemp(prefix="kvq-"), "store")
        init_distributed_environment(1, 0, f"file://{store}", 0, backend="gloo")
        initialize_model_parallel(1, 1)


def load(job: dict) -> dict:
    """Return what vLLM holds of one checkpoint, or why it holds nothing."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    answer = {"cache_dtype": None, "layers": {}, "stage": None, "error": None}
    try:
        arguments = EngineArgs(model=job["path"], max_model_len=64, enforce_eager=True,
                               skip_tokenizer_init=True, **job["options"])  # fmt: skip
        config = arguments.create_engine_config()
        answer["cache_dtype"] = config.cache_config.cache_dtype
        with set_current_vllm_config(config):
            model = get_model(vllm_config=config)
    except Exception as error:  # the error is the answer for this checkpoint
        return answer | {"stage": stage_of(error), "error": text_of_error(error, job["path"])}
    answer["cache_dtype"] = config.cache_config.cache_dtype  # attention layers may change it
    answer["layers"] = {
        name.removesuffix(".attn"): layer_of(module)
        for name, module in model.named_modules()
        if hasattr(module, "_k_scale_float")
    }
    return answer


def layer_of(module) -> dict:
    return {
        "k": number(module._k_scale_float), "v": number(module._v_scale_float),
        "k_all": [number(value) for value in module._k_scale.flatten().tolist()],
        "v_all": [number(value) for value in module._v_scale.flatten().tolist()],
        "q_all": [number(value) for value in module._q_scale.flatten().tolist()],
        "dtype": module.kv_cache_dtype,
    }  # fmt: skip


def number(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def text_of_error(error: Exception, folder: str) -> str:
    """Type and first line, without our path and without the list of all that there is."""
    text = str(error)
    if type(error).__name__ == "ValidationError":  # of pydantic, whose first line says nothing
        text = error.errors()[0]["msg"]
    line = text.partition("\n")[0].partition(" The available parameters belonging")[0]
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
