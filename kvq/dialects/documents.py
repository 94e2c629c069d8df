"""JSON documents that declare a quantized cache: copies with one place changed."""

from collections.abc import Mapping
from typing import Any

from kvq.errors import DialectError

LEGACY_NAME = "hf_quant_config.json"
# Methods whose layers of attention read no scale in any engine: a scale would be dropped, and an
# FP8 cache run at 1.0 (vLLM `layers/quantization/*.py`: no KV cache method).
NO_KV_METHOD = (
    "awq", "awq_marlin", "gptq", "gptq_marlin", "mxfp4", "torchao", "bitsandbytes", "experts_int8",
    "auto-round", "inc", "gguf", "hqq", "higgs", "aqlm", "vptq", "bitnet", "eetq", "fbgemm_fp8",
)  # fmt: skip


def method_of(config: Mapping[str, Any] | None) -> str | None:
    """Return the quantization method as engines compare it: lower case, one spelling."""
    method = (config or {}).get("quant_method")
    return None if method is None else str(method).lower().replace("compressed_t", "compressed-t")


def at_place(
    config: Mapping[str, Any], place: str, quantization: Mapping[str, Any] | None
) -> dict[str, Any]:
    """Return a copy of config.json with another quantization at `place`; None removes it."""
    key, _, rest = place.partition(".")
    if rest:
        return {**config, key: at_place(config[key], rest, quantization)}
    if quantization is None:
        return {name: value for name, value in config.items() if name != key}
    return {**config, key: dict(quantization)}


def other_method(method: str, dialect: str | None) -> DialectError:
    """Return the error for a base that another method quantized."""
    if method in NO_KV_METHOD:
        return DialectError(
            f"the checkpoint is quantized with `{method}`: no engine reads scales of attention "
            "beside it, and an fp8 cache would run at scale 1.0",
            code="dialect.no_kv_method",
            hint="export onto the unquantized checkpoint, or one quantized with compressed-tensors "
            "or ModelOpt",
        )
    return DialectError(
        f"the checkpoint is quantized with `{method}`; scales in another dialect would not be read",
        code="dialect.base",
        hint=f"--dialect {dialect}" if dialect else "leave --dialect out, to follow the checkpoint",
    )
