"""Record which attention backends of real vLLM say that they keep a quantized cache.

Usage: /path/to/python-with-vllm scripts/record_vllm_backends.py

Writes tests/goldens/vllm_backends.json. vLLM's own classes answer (`validate_configuration`, and
for Triton its constructor, which refuses more), on the CPU: the GPU they ask about is made up, with
FlashAttention 3 on SM90, 4 on SM100 and 2 elsewhere, and kernels of TensorRT-LLM on SM100.
FlashInfer, which is not installed beside a CPU build, is an empty stand-in: its kernels were not
asked.
"""

import importlib
import importlib.machinery
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

GOLDEN = Path(__file__).parents[1] / "tests" / "goldens" / "vllm_backends.json"
CAPABILITIES = ((7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (11, 0), (12, 0), (12, 1))
HEADS = (16, 24, 32, 64, 80, 96, 112, 128, 192, 256, 512)
DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2", "nvfp4")
BACKENDS = {
    "FlashAttention": ("flash_attn", "FlashAttentionBackend"),
    "FlashInfer": ("flashinfer", "FlashInferBackend"),
    "Triton": ("triton_attn", "TritonAttentionBackend"),
}


class StandIn:
    """An import hook that makes any module of FlashInfer out of nothing."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Take FlashInfer's names, and leave all others."""
        if name.partition(".")[0] == "flashinfer":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        """Return a module that has every attribute."""
        return MagicMock(name=spec.name, __path__=[], __spec__=spec, __name__=spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing."""


def main() -> None:
    capability = [0, 0]
    modules = imported(capability)
    found: dict[str, dict[str, dict[str, list[str]]]] = {}
    for capability[:] in CAPABILITIES:
        platform = "sm{}{}".format(*capability)
        for dtype in DTYPES:
            rows = {head: answers(modules, tuple(capability), head, dtype) for head in HEADS}
            found.setdefault(platform, {})[dtype] = {str(head): rows[head] for head in HEADS}
    lines = [
        f'  "{platform}": {{\n'
        + ",\n".join(f'    "{dtype}": {json.dumps(rows)}' for dtype, rows in dtypes.items())
        + "\n  }"
        for platform, dtypes in found.items()
    ]
    GOLDEN.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(CAPABILITIES) * len(DTYPES) * len(HEADS)} answers in {GOLDEN}")


def imported(capability: list[int]) -> dict[str, ModuleType]:
    """Import the backends, and then put the made-up GPU in the place of the CPU."""
    sys.meta_path.insert(0, StandIn())
    sys.modules["vllm._C_stable_libtorch"] = MagicMock()  # what the CUDA platform imports
    import vllm.platforms
    from vllm.platforms.cuda import CudaPlatformBase
    from vllm.platforms.interface import DeviceCapability

    class MadeUp(CudaPlatformBase):
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability:
            return DeviceCapability(*capability)

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return "made up"

    place = "vllm.v1.attention.backends"
    modules = {name: importlib.import_module(f"{place}.{m}") for name, (m, _) in BACKENDS.items()}
    vllm.platforms._current_platform = MadeUp()
    for name, module in list(sys.modules.items()):
        if name.startswith("vllm") and "current_platform" in vars(module):
            module.current_platform = vllm.platforms._current_platform

    def version(**_: Any) -> int:
        return {9: 3, 10: 4}.get(capability[0], 2)

    for module in (modules["FlashAttention"], importlib.import_module(f"{place}.fa_utils")):
        module.get_flash_attn_version = version
        module.is_fa_version_supported = lambda number: number <= version()
    modules["FlashInfer"].supports_trtllm_attention = lambda **_: capability[0] == 10
    return modules


def answers(
    modules: dict[str, ModuleType], capability: tuple[int, ...], head_size: int, dtype: str
) -> list[str]:
    """Return the backends that have nothing against such a cache."""
    import torch
    from vllm.platforms.interface import DeviceCapability

    found = []
    for name, (_, class_name) in BACKENDS.items():
        reasons = getattr(modules[name], class_name).validate_configuration(
            head_size=head_size, dtype=torch.bfloat16, kv_cache_dtype=dtype, block_size=None,
            use_mla=False, has_sink=False, use_sparse=False, use_mm_prefix=False,
            use_per_head_quant_scales=False, device_capability=DeviceCapability(*capability),
            attn_type="decoder",
        )  # fmt: skip
        if not reasons and not (name == "Triton" and refuses(modules[name], head_size, dtype)):
            found.append(name)
    return found


def refuses(triton: ModuleType, head_size: int, dtype: str) -> bool:
    """Whether Triton's attention refuses the cache once it is built."""
    try:
        triton.TritonAttentionImpl(
            num_heads=4, head_size=head_size, scale=1.0, num_kv_heads=2, alibi_slopes=None,
            sliding_window=None, kv_cache_dtype=dtype,
        )  # fmt: skip
    except ValueError as error:
        if "is not supported by the Triton attention backend" not in str(error):
            raise
        return True
    return False


if __name__ == "__main__":
    main()
