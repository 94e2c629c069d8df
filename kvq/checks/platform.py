"""What an engine's reading does not hold: the GPU it runs on, and classes that nobody compared."""

from collections.abc import Iterator
from itertools import groupby

from kvq.checks.findings import Finding
from kvq.engines.base import EngineReading, LayerReading
from kvq.engines.vllm_kernels import backends
from kvq.engines.vllm_values import FNUZ_PLATFORMS
from kvq.formats import E4M3, E4M3_FNUZ_MAX
from kvq.geometry import Geometry, LayerGeometry

_COMMON = ("sm80", "sm89", "sm90", "sm100", "sm120")


def platform_findings(reading: EngineReading, geometry: Geometry) -> Iterator[Finding]:
    """Yield what stands in the way of a reading although the checkpoint loads.

    Args:
        reading: which number the engine uses for each layer.
        geometry: of the checkpoint.
    """
    if reading.error is not None:
        return
    engine, platform = f"{reading.engine} {reading.version}", reading.options.platform
    if not reading.checked:
        yield Finding(
            "engine.unchecked", "warning",
            f"{engine} never loaded a checkpoint of `{geometry.architecture}` for comparison: "
            "what is said of it cannot be promised",
            expected="a model class that was compared", found=geometry.architecture,
            fix="`kvq verify --live vllm` asks the engine itself",
        )  # fmt: skip
    if reading.engine != "vllm":
        return  # of no other engine is a table known
    for (dtype, head_dim), layers in _alike(reading, geometry):
        yield from _kernel_findings(f"{engine} on {platform}", platform, dtype, head_dim, layers)
    yield from _fnuz_findings(engine, reading)


def _alike(
    reading: EngineReading, geometry: Geometry
) -> Iterator[tuple[tuple[str, int], list[LayerReading]]]:
    """Yield the layers by cache dtype and head size; latent rows have kernels of their own."""
    by_path: dict[str, LayerGeometry] = {layer.attention: layer for layer in geometry.layers}

    def kind(layer: LayerReading) -> tuple[str, int]:
        found = by_path[layer.attention]
        return str(layer.cache_dtype), max(found.head_dim, found.v_head_dim)

    layers = [x for x in reading.layers if by_path[x.attention].kv_lora_rank is None]
    for key, group in groupby(sorted(layers, key=kind), key=kind):
        yield key, list(group)


def _kernel_findings(
    where: str, platform: str, dtype: str, head_dim: int, layers: list[LayerReading]
) -> Iterator[Finding]:
    found = backends(dtype, platform, head_dim)
    what = f"a `{dtype}` cache with heads of {head_dim} ({len(layers)} layers)"
    if found == ():
        yield Finding(
            "engine.kernel", "error",
            f"{where} has no attention backend for {what}: it does not start (source only)",
            expected="a backend that keeps such a cache", found="none",
            fix=_elsewhere(dtype, head_dim),
        )  # fmt: skip
    elif _is_scarce(dtype, found):
        yield Finding(
            "engine.kernel", "warning",
            f"{where} keeps {what} in FlashInfer alone, and does not start where that is not "
            "installed or not chosen (source only)",
            expected="more than one backend", found="FlashInfer", fix=_elsewhere(dtype, head_dim),
        )  # fmt: skip


def _is_scarce(dtype: str, found: tuple[str, ...] | None) -> bool:
    """Whether there is no backend, or one that is installed apart although others keep FP8."""
    return found == () or (found == ("FlashInfer",) and dtype != "nvfp4")


def _elsewhere(dtype: str, head_dim: int) -> str:
    """Return where such a cache has backends to choose from, or what to do where none has."""
    able = [p for p in _COMMON if not _is_scarce(dtype, backends(dtype, p, head_dim))]
    other = "a checkpoint of these weights without the declaration"
    return f"serve it on {', '.join(able)}; here, {other}" if able else f"serve {other}"


def _fnuz_findings(engine: str, reading: EngineReading) -> Iterator[Finding]:
    """Yield scales that are used undoubled where an FP8 code means half the number."""
    if reading.options.platform not in FNUZ_PLATFORMS:
        return
    for layer in reading.layers:
        tensors = [used.tensor for used in (layer.k, layer.v) if used.tensor is not None]
        doubled = any("doubled" in used.reason for used in (layer.k, layer.v))
        if tensors and not doubled and str(layer.cache_dtype).startswith("fp8"):
            yield Finding(
                "engine.fnuz", "error",
                f"{engine} does not double this scale for {reading.options.platform}, whose codes "
                f"end at {E4M3_FNUZ_MAX:g}: larger values clip (source only)",
                layer.layer_idx, tensors[0],
                expected=f"twice the scale of amax / {E4M3.max:g}", found="the scale itself",
                fix="serve with --kv-cache-dtype bfloat16 there, or on another GPU",
            )  # fmt: skip
