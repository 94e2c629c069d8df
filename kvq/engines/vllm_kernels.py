"""Which attention backends of vLLM 0.32 keep a quantized cache on an NVIDIA GPU.

No kernel was run: tests/goldens/vllm_backends.json holds what vLLM's own classes say of GPUs that
were made up for them, made by scripts/record_vllm_backends.py.

Sources: `v1/attention/backends/flash_attn.py`, `fa_utils.py`, `flashinfer.py`, `triton_attn.py`.
"""

import re

_NVIDIA = re.compile(r"sm([0-9]+)a?")
FLASHINFER_HEADS = (64, 128, 256, 512)
_TRITON_FROM = 89  # its FP8 kernels need the conversion that came with this capability
_FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")


def backends(cache_dtype: str | None, platform: str, head_dim: int) -> tuple[str, ...] | None:
    """Return the backends that keep a cache of this dtype; None where nothing is known."""
    match = _NVIDIA.fullmatch(platform)
    if match is None or cache_dtype not in (*_FP8, "nvfp4"):
        return None
    capability = int(match[1])
    flashinfer = 80 <= capability <= 121 and head_dim in FLASHINFER_HEADS
    if cache_dtype == "nvfp4":
        family = capability // 10
        misread = family != 10 and head_dim == 64  # "fa2 prefill misreads" it, says vLLM
        return ("FlashInfer",) if flashinfer and family in (8, 9, 10, 12) and not misread else ()
    found = ["FlashAttention"] if _flash_attention(cache_dtype, capability, head_dim) else []
    found += ["FlashInfer"] if flashinfer else []
    found += ["Triton"] if capability >= _TRITON_FROM and head_dim >= 32 else []
    return tuple(found)


def _flash_attention(cache_dtype: str, capability: int, head_dim: int) -> bool:
    """Version 3 on SM90, version 4 on SM100; never E5M2."""
    largest = {9: 256, 10: 512}.get(capability // 10, 0)
    return cache_dtype != "fp8_e5m2" and head_dim % 8 == 0 and head_dim <= largest
