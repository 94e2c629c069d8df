import pytest

from kvq.checkpoint import open_checkpoint
from kvq.configs import get_config
from kvq.dialects import DIALECTS, get_dialect, read_scales
from kvq.errors import DialectError
from kvq.geometry import read_geometry
from kvq.scales import compute_scales
from kvq.state import read_calibration


@pytest.mark.parametrize(
    "kv_cfg", ["FP8_KV_CFG", "FP8_PER_HEAD_KV_CFG", "FP8_ATTN_CFG", "FP8_PER_HEAD_ATTN_CFG",
               "FP8_CAST_KV_CFG"],
)  # fmt: skip
def test_what_is_planned_and_written_reads_back(calibrated, exported, kv_cfg):
    checkpoint = exported("gemma3", kv_cfg=kv_cfg)
    _, calibration = calibrated("gemma3", "--kv-cfg", kv_cfg)
    planned = compute_scales(read_calibration(calibration), get_config(kv_cfg))
    view = open_checkpoint(checkpoint)
    found = read_scales(view, read_geometry(view.config, view.tensors))
    assert (found.format, found.granularity) == (planned.format, planned.granularity)
    assert [(layer.attention, layer.scales) for layer in found.layers] == [
        (layer.attention, layer.scales) for layer in planned.layers
    ]


def test_an_unknown_dialect_names_the_known_ones():
    with pytest.raises(DialectError, match="known: auto, " + ", ".join(DIALECTS)) as caught:
        get_dialect("compressed-tensor")
    assert caught.value.hint == "did you mean `compressed-tensors`?"
