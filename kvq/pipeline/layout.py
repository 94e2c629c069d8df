"""The files of an export: what of the source comes along, and under which name."""

import re
from collections.abc import Mapping
from typing import Any

from kvq.checkpoint import CONFIG_NAME, INDEX_NAME, CheckpointView
from kvq.dialects import find
from kvq.dialects.documents import LEGACY_NAME
from kvq.dialects.sglang_json import FILE_NAME
from kvq.files import MARKER, read_json
from kvq.geometry import Geometry

_OWN = (MARKER, INDEX_NAME)
# The weights once more, in a form that is read where there is no safetensors file.
_OTHER_WEIGHTS = re.compile(
    r"(pytorch_model.*\.bin(\.index\.json)?|consolidated.*\.pth|.*\.(gguf|h5|msgpack|onnx|ckpt))"
)


_SUFFIXES = (".k_scale", ".v_scale", ".q_scale", ".kv_scale", ".k_zero_point", ".v_zero_point",
             ".q_zero_point", ".k_proj.k_bias", ".v_proj.v_bias")  # fmt: skip


def old_scales(view: CheckpointView, geometry: Geometry) -> set[str]:
    """Return the names of all scales of a cache, and of their zero points and affine biases.

    A tensor that is only called like one, outside of attention and with many numbers, is a
    parameter of the model.
    """
    attentions = (*(layer.attention for layer in geometry.layers), *geometry.drafts)
    inside = tuple(f"{path}." for path in attentions)
    named = {
        name
        for name in view.tensors
        if name.endswith(_SUFFIXES) and (name.startswith(inside) or view.tensors[name].numel == 1)
    }
    return named | {scale.tensor for scale in find(view, geometry).all}


def index_metadata(view: CheckpointView) -> dict[str, Any]:
    """Return what a checkpoint's index says beside its map, empty where there is no index."""
    if view.weight_map is None:
        return {}
    found = read_json(view.root / INDEX_NAME).get("metadata")
    return dict(found) if isinstance(found, dict) else {}


def draft_scales(view: CheckpointView, geometry: Geometry) -> set[str]:
    """Return the names of scales of draft layers, which no calibration observes."""
    return {scale.tensor for scale in find(view, geometry).drafts}


def declares_more(view: CheckpointView, stripped: Mapping[str, Any]) -> bool:
    """Whether the JSON files say something that they do not say without their cache."""
    return any(
        _without_null(document)
        != _without_null(view.config if name == CONFIG_NAME else read_json(view.root / name))
        for name, document in stripped.items()
    )


def _without_null(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: _without_null(inner) for key, inner in value.items() if inner is not None}


def shard_name(number: int, count: int) -> str:
    """Return the one naming that vLLM, SGLang, TensorRT-LLM and transformers all read."""
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def left_behind(view: CheckpointView, documents: Mapping[str, Any], carry: str) -> list[str]:
    """Return in words what does not come along, and why."""
    notices = []
    consolidated = [name for name in view.files if name.startswith("consolidated")]
    if consolidated:
        notices.append(
            f"{', '.join(consolidated)} not carried along: vLLM would read it instead of the "
            "shards and never see the scales"
        )
    reasons = {
        LEGACY_NAME: "TensorRT-LLM would follow it, not config.json",
        FILE_NAME: "its scales may be others",
    }
    for name, reason in reasons.items():
        stale = name not in documents and _is_stale(name, carry)
        if stale and (view.root / name).exists():
            notices.append(f"{name} not carried along: {reason}")
    notices += [
        f"{name} not carried along: it declared the cache only"
        for name, document in documents.items()
        if document is None
    ]
    stray = [name for name in view.unindexed_files if name not in consolidated]
    if stray:
        notices.append(f"{', '.join(stray)} not carried along: the index does not name it")
    others = [
        path.name
        for path in sorted(view.root.iterdir())
        if not path.name.startswith(".")
        and (
            not path.is_file()
            or _is_other_weights(path.name)
            or path.match("adapter_*.safetensors")
        )
    ]
    if others:
        notices.append(
            f"{', '.join(others)} not carried along: only files are, in one form of the weights"
        )
    code = sorted(path.name for path in view.root.glob("*.py"))
    if code:
        notices.append(f"code of the model is copied, never run: {', '.join(code)}")
    return notices


def _is_other_weights(name: str) -> bool:
    return bool(_OTHER_WEIGHTS.fullmatch(name))


def _is_stale(name: str, carry: str) -> bool:
    """Whether a side file that is not written anew would contradict what is."""
    return name == FILE_NAME or (name == LEGACY_NAME and carry == "compressed-tensors")


def side_files(view: CheckpointView, documents: Mapping[str, Any], carry: str) -> tuple[str, ...]:
    """Return the names of the files that are copied as they are."""
    return tuple(
        sorted(
            path.name
            for path in view.root.iterdir()
            if path.is_file()
            and path.suffix != ".safetensors"
            and not _is_other_weights(path.name)
            and path.name not in (*_OWN, *documents)
            and not _is_stale(path.name, carry)
        )
    )
