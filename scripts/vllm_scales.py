"""Print the KV scales that real vLLM holds after loading checkpoints on the CPU.

Usage: VLLM_PYTHON scripts/vllm_scales.py CHECKPOINT...

One JSON object per line: {"checkpoint", "cache_dtype", "layers": {name: {"k", "v", "dtype"}}} or
{"checkpoint", "error"}. It builds the model the way the server does and runs its weight loader and
`process_weights_after_loading`; it allocates no cache and starts no engine.
"""

import json
import os
import sys
import tempfile

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model
from vllm.v1.worker.cpu_model_runner import _set_torch_accelerator_to_noop


def start_world() -> None:
    """A world of one process; the loader needs one."""
    _set_torch_accelerator_to_noop()
    with set_current_vllm_config(VllmConfig()):
        store = os.path.join(tempfile.mkdtemp(prefix="kvq-"), "store")
        init_distributed_environment(1, 0, f"file://{store}", 0, backend="gloo")
        initialize_model_parallel(1, 1)


def load(path: str) -> dict[str, object]:
    arguments = EngineArgs(model=path, max_model_len=64, enforce_eager=True,
                           skip_tokenizer_init=True)  # fmt: skip
    config = arguments.create_engine_config()
    with set_current_vllm_config(config):
        model = get_model(vllm_config=config)
    layers = {
        name: {"k": m._k_scale_float, "v": m._v_scale_float, "dtype": m.kv_cache_dtype,
               "k_all": m._k_scale.flatten().tolist(), "v_all": m._v_scale.flatten().tolist()}
        for name, m in model.named_modules()
        if hasattr(m, "_k_scale_float")
    }  # fmt: skip
    return {"checkpoint": path, "cache_dtype": config.cache_config.cache_dtype, "layers": layers}


def main() -> None:
    start_world()
    for path in sys.argv[1:]:
        try:
            print(json.dumps(load(path)), flush=True)
        except Exception as error:  # the error is the answer for this checkpoint
            print(json.dumps({"checkpoint": path, "error": f"{type(error).__name__}: {error}"}),
                  flush=True)  # fmt: skip


main()
