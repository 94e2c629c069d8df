"""How a scale set is written into a checkpoint and read back; loaded late, by name."""

from difflib import get_close_matches
from importlib import import_module

from kvq.checkpoint import CheckpointView
from kvq.dialects.base import Dialect
from kvq.dialects.documents import LEGACY_NAME, method_of
from kvq.dialects.spellings import FoundScale, FoundScales, find_scales
from kvq.errors import DialectError
from kvq.geometry import Geometry
from kvq.scales import LayerScales, ScaleSet

__all__ = ["DIALECTS", "dialect_of", "find", "get_dialect", "read_scales"]

DIALECTS = {
    "compressed-tensors": "kvq.dialects.compressed_tensors:CompressedTensors",
    "modelopt": "kvq.dialects.modelopt:ModelOpt",
    "fp8": "kvq.dialects.fp8:FP8",
    "sglang-json": "kvq.dialects.sglang_json:SGLangJSON",
}


def get_dialect(name: str) -> Dialect:
    """Return a dialect by name.

    Raises:
        DialectError: unknown name; the message lists all names.
    """
    if name not in DIALECTS:
        near = get_close_matches(name, DIALECTS, n=1)
        raise DialectError(
            f"unknown dialect `{name}`; known: auto, {', '.join(DIALECTS)}",
            code="dialect.unknown",
            hint=f"did you mean `{near[0]}`?" if near else None,
        )
    module, attribute = DIALECTS[name].split(":")
    dialect: Dialect = getattr(import_module(module), attribute)()
    return dialect


def dialect_of(view: CheckpointView) -> Dialect:
    """Return the dialect that a checkpoint speaks: by its method, else by its scales' names."""
    method = method_of(view.quantization_config) or ""
    if method.startswith("modelopt"):
        return get_dialect("modelopt")
    if method == "fp8":
        return get_dialect("fp8")
    if view.quantization_config is None and (view.root / LEGACY_NAME).is_file():
        return get_dialect("modelopt")
    if not method and any(name.endswith(".k_proj.k_scale") for name in view.tensors):
        return get_dialect("modelopt")
    return get_dialect("compressed-tensors")


def find(view: CheckpointView, geometry: Geometry) -> FoundScales:
    """Find a checkpoint's scales under every spelling, that of its own dialect first."""
    return find_scales(view, geometry, dialect_of(view).spelling)


def read_scales(
    view: CheckpointView, geometry: Geometry, found: FoundScales | None = None
) -> ScaleSet:
    """Return the scales of all layers as they are stored; a layer may have none.

    A format that the configuration does not name is taken to be FP8 E4M3, which is what engines
    take it for; granularity is that of the tensors.

    Raises:
        CheckpointError: a tensor cannot be read.
    """
    found = found or find(view, geometry)
    by_layer: dict[str, dict[str, FoundScale]] = {}
    for scale in found.scales:
        by_layer.setdefault(scale.attention, {})[scale.side] = scale
    layers, per_head = [], False
    for layer in geometry.layers:
        scales = {
            side: tuple(float(value) for value in view.read(scale.tensor).ravel())
            for side, scale in by_layer.get(layer.attention, {}).items()
        }
        per_head |= any(len(scales.get(side, ())) > 1 for side in ("k", "v"))
        status = dict.fromkeys(scales, "unknown")
        layers.append(LayerScales(layer.layer_idx, layer.attention, scales, status))
    declared = dialect_of(view).declared(view)
    granularity = "head" if per_head or declared.granularity == "head" else "tensor"
    return ScaleSet(declared.format or "fp8_e4m3", granularity, tuple(layers))
