import json

import numpy as np
import pytest

from kvq.errors import CheckpointError
from kvq.scales import compute_scales
from kvq.state import read_calibration, write_calibration


def test_what_is_written_reads_back_and_writes_the_same_bytes(calibrated, tmp_path):
    _, path = calibrated()
    write_calibration(read_calibration(path), tmp_path / "again", overwrite=False)
    for name in ("calibration.safetensors", "config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (path / name).read_bytes()


@pytest.mark.parametrize(
    ("edit", "code"),
    [
        (lambda c: c.update(schema=99), "calibration.schema"),
        (lambda c: c.pop("layers"), "calibration.damaged"),
        (lambda c: c["layers"][0].update(attention="elsewhere"), "calibration.layer_missing"),
        (lambda c: c["quantizers"].update(x={"format": "fp8_e4m3", "y": 1}), "calibration.damaged"),
    ],
)
def test_a_damaged_folder_is_one_clear_error(calibrated, edit, code):
    _, path = calibrated()
    config = json.loads((path / "config.json").read_text())
    edit(config)
    (path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        read_calibration(path)
    assert caught.value.code == code


def test_any_format_follows_from_the_same_statistics(calibrated):
    from kvq.configs import get_config

    _, path = calibrated()
    calibration = read_calibration(path)
    for name, divisor in (("FP8_KV_CFG", 448), ("NVFP4_KV_CFG", 448), ("INT8_KV_CFG", 127)):
        for stats, layer in zip(calibration.layers, compute_scales(
            calibration, get_config(name)).layers, strict=True):  # fmt: skip
            for side in "kv":
                amax = stats.amax[f"{side}_bmm_quantizer"].max()
                assert layer.scales[side] == (float(amax / np.float32(divisor)),)
