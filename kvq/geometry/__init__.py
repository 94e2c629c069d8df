"""The decoder's layers and their caches, from config.json and tensor names; no torch."""

from kvq.geometry.config import CROSS, MAX_POSITIONS, count, text_config, with_defaults
from kvq.geometry.layers import Geometry, LayerGeometry, read_geometry
from kvq.geometry.paths import KEY_NORMS, KEY_PROJECTIONS, is_key_or_value_weight, is_text_path

__all__ = [
    "CROSS",
    "KEY_NORMS",
    "KEY_PROJECTIONS",
    "MAX_POSITIONS",
    "Geometry",
    "LayerGeometry",
    "count",
    "is_key_or_value_weight",
    "is_text_path",
    "read_geometry",
    "text_config",
    "with_defaults",
]
