"""Print the KV scales that real vLLM holds after loading checkpoints on the CPU.

Usage: PYTHON_WITH_VLLM kvq/engines/probes/probe_vllm.py [--kv-cache-dtype DTYPE] CHECKPOINT...

It is run by `kvq verify --live vllm`, by the Python that has vLLM; kvq is not needed there.

One JSON object per line, {"checkpoint", "cache_dtype", "layers": {name: {"k", "v", "k_all",
"v_all", "heads", "dtype"}}} or {"checkpoint", "error"}. It builds the model the way the server does
and runs its weight loader and `process_weights_after_loading`; it allocates no cache and starts no
engine.

The classes of vision-language models import torchvision, whose wheel does not fit vLLM's torch on
the CPU. Loading weights needs none of it, so a package of that name with empty contents stands in.
"""

import argparse
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
import tempfile
from unittest.mock import MagicMock

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


class StandIn(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `torchvision` and all modules in it."""

    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] != "torchvision":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def exec_module(self, module):
        module.__version__ = "0"
        module.__getattr__ = stand_in


def stand_in(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name)


if importlib.util.find_spec("torchvision") is None:
    sys.meta_path.append(StandIn())

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.model_executor.models import registry
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop


def start_world() -> None:
    """A world of one process; the loader needs one."""
    _set_torch_accelerator_to_noop()
    registry._run_in_subprocess = lambda inspect: inspect()  # 7 s each otherwise
    with set_current_vllm_config(VllmConfig()):
        store = os.path.join(tempfile.mkdtemp(prefix="kvq-"), "store")
        init_distributed_environment(1, 0, f"file://{store}", 0, backend="gloo")
        initialize_model_parallel(1, 1)


def load(path: str, kv_cache_dtype: str) -> dict[str, object]:
    arguments = EngineArgs(model=path, max_model_len=64, enforce_eager=True,
                           skip_tokenizer_init=True, kv_cache_dtype=kv_cache_dtype)  # fmt: skip
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config)
    layers = {
        name: {"k": m._k_scale_float, "v": m._v_scale_float, "dtype": m.kv_cache_dtype,
               "heads": m.num_kv_heads,
               "k_all": m._k_scale.flatten().tolist(), "v_all": m._v_scale.flatten().tolist()}
        for name, m in model.named_modules()
        if hasattr(m, "_k_scale_float")
    }  # fmt: skip
    return {"checkpoint": path, "cache_dtype": config.cache_config.cache_dtype, "layers": layers}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kv-cache-dtype", default="auto")
    parser.add_argument("checkpoints", nargs="+")
    arguments = parser.parse_args()
    start_world()
    for path in arguments.checkpoints:
        gc.freeze()  # the loader collects garbage, 0.4 s over all that was imported
        try:
            print(json.dumps(load(path, arguments.kv_cache_dtype)), flush=True)
        except Exception as error:  # the error is the answer for this checkpoint
            print(json.dumps({"checkpoint": path, "error": f"{type(error).__name__}: {error}"}),
                  flush=True)  # fmt: skip


main()
