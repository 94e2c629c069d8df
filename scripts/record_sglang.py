"""Record what pieces of real SGLang make of the Llama checkpoints in tests/engines/variants.py.

Usage: KVQ_SGLANG_PYTHON=/path/to/python python scripts/record_sglang.py

Writes tests/goldens/sglang.json. That Python needs torch and transformers, and `sglang` installed
without its dependencies (`pip install --no-deps sglang==0.5.23`); those that are only imported are
stubbed. No server runs, and no model is built: SGLang's own functions find the quantization config
and the cache's dtype, build each attention layer, rename tensors, load them and process what was
loaded. The loop around them is ours, after `LlamaForCausalLM.load_weights`.
"""

import importlib.abc
import importlib.machinery
import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "goldens" / "sglang.json"
WORKER = "--worker"
STUBBED = ("torchvision", "orjson", "IPython", "gguf")
ERROR_LENGTH = 160


def main() -> None:
    if sys.argv[1:] == [WORKER]:
        work()
        return
    sys.path.insert(0, str(ROOT))
    from tests.engines.variants import VARIANTS, write

    names = sorted(name for name, v in VARIANTS.items() if v.architecture == "llama")
    with tempfile.TemporaryDirectory(prefix="kvq-") as folder:
        jobs = []
        for name in names:
            write(name, path := Path(folder, name))
            jobs.append({"path": str(path), "dtype": VARIANTS[name].kv_cache_dtype})
        answered = subprocess.run(
            [os.environ["KVQ_SGLANG_PYTHON"], __file__, WORKER], input=json.dumps(jobs),
            stdout=subprocess.PIPE, text=True, check=True,
        ).stdout.splitlines()  # fmt: skip
    version, *answers = map(json.loads, answered[-len(names) - 1 :])
    variants = dict(zip(names, answers, strict=True))
    lines = [f"  {json.dumps(name)}: {json.dumps(variants[name])}" for name in names]
    GOLDEN.write_text(
        f'{{"sglang": {json.dumps(version)}, "variants": {{\n' + ",\n".join(lines) + "\n}}\n"
    )
    print(f"{len(names)} checkpoints, {sum(a['error'] is not None for a in answers)} refused")


class Stubs(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Modules that are imported and never used."""

    def find_spec(self, name, path=None, target=None):
        """Say that a stub is to be had."""
        if name.split(".")[0] in STUBBED:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        """Return a module that has everything."""
        module = MagicMock(name=spec.name)
        module.__path__, module.__spec__, module.__name__ = [], spec, spec.name
        module.__version__ = "99.0"
        return module

    def exec_module(self, module):
        """Do nothing: there is nothing to run."""


def work() -> None:
    jobs = json.loads(sys.stdin.read())
    sys.meta_path.append(Stubs())
    from importlib.metadata import version

    import sglang.srt.configs.model_config  # noqa: F401

    print(json.dumps(version("sglang")))
    for job in jobs:
        stage = ["config"]
        answer = {"error": None, "stage": None, "cache_dtype": None, "layers": {}}
        try:
            answer |= load(Path(job["path"]), job["dtype"], stage)
        except Exception as error:
            text = f"{type(error).__name__}: {str(error)[:ERROR_LENGTH]}"
            answer |= {"error": text.replace(job["path"], ""), "stage": stage[0]}
        print(json.dumps(answer), flush=True)


def load(path: Path, dtype: str, stage: list[str]) -> dict:
    import torch
    from safetensors import safe_open
    from sglang.srt.configs.load_config import LoadConfig
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.mem_cache.kv_cache_dtype import configure_kv_cache_dtype
    from sglang.srt.model_loader import weight_utils

    config = model_config(path)
    quantization = None
    if config.quantization is not None:
        quantization = weight_utils.get_quant_config(config, LoadConfig(), {})
    stage[0] = "cache dtype"
    resolved, _ = configure_kv_cache_dtype(
        server_args_kv_cache_dtype=dtype, model=SimpleNamespace(quant_config=quantization),
        model_dtype=torch.bfloat16, is_draft_worker=False, is_dflash=False,
        speculative_draft_attention_backend="",
    )  # fmt: skip
    stage[0] = "loading"
    layers = {
        f"model.layers.{i}.self_attn.attn": RadixAttention(
            4, 32, 1.0, 2, i, quant_config=quantization, prefix=f"model.layers.{i}.self_attn.attn"
        )
        for i in range(2)
    }
    parameters = {
        f"{name}.{key}": parameter
        for name, layer in layers.items()
        for key, parameter in layer.named_parameters()
    }
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                found = name
                if "scale" in name:
                    found = weight_utils.maybe_remap_kv_scale_name(name, parameters)
                if found in parameters:
                    loaded = tensors.get_tensor(name)
                    weight_utils.default_weight_loader(parameters[found], loaded)
    stage[0] = "processing"
    for layer in layers.values():
        if layer.quant_method is not None:
            layer.quant_method.process_weights_after_loading(layer)
    return {
        "cache_dtype": resolved or dtype,
        "layers": {name: [number(x.k_scale_float), number(x.v_scale_float)]
                   for name, x in layers.items()},
    }  # fmt: skip


def model_config(path: Path):
    """SGLang's model config, without what needs a model of known size."""
    from sglang.srt.configs.model_config import ModelConfig
    from transformers import AutoConfig

    config = object.__new__(ModelConfig)
    config.hf_config = AutoConfig.from_pretrained(path)
    config.model_path, config.revision, config.quantization = str(path), None, None
    config.is_draft_model, config.dtype = False, None
    config._verify_quantization()
    return config


def number(value: float | None) -> float | str | None:
    """Numbers that JSON does not have are text."""
    return repr(value) if value is not None and not math.isfinite(value) else value


if __name__ == "__main__":
    main()
