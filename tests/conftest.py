import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings

from kvq.cli import run

settings.register_profile("kvq", deadline=None)  # timings are not tests
settings.load_profile("kvq")


class Result:
    def __init__(self, code: int, out: str, err: str):
        self.code, self.out, self.err = code, out, err

    @property
    def json(self):
        return json.loads(self.out)


@pytest.fixture
def kvq(capfd) -> Callable[..., Result]:
    """Run one command line as a user would; paths and numbers are turned into text."""

    def call(*argv: object) -> Result:
        capfd.readouterr()
        code = run([str(argument) for argument in argv])
        out, err = capfd.readouterr()
        return Result(code, out, err)

    return call


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory) -> Callable[..., Path]:
    """Tiny checkpoints with random weights, by family; made once per session."""
    from tests import models

    root = tmp_path_factory.mktemp("checkpoints")

    def get(family: str, **changes: object) -> Path:
        name = "-".join([family, *(f"{key}={value}" for key, value in changes.items())])
        path = root / "".join(c if c.isalnum() or c in "-=" else "_" for c in name)
        if not path.exists():
            models.save(family, path, **changes)
        return path

    return get


@pytest.fixture(scope="session")
def rows(tmp_path_factory) -> Path:
    """A jsonl of 24 `input_ids` rows, 8 each of 5, 17 and 40 tokens."""
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    generator = np.random.default_rng(0)
    lengths = [5, 17, 40] * 8
    lines = [json.dumps({"input_ids": generator.integers(0, 128, n).tolist()}) for n in lengths]
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture
def calibrated(kvq, checkpoints, rows, tmp_path) -> Callable[..., tuple[Path, Path]]:
    """Calibrate a tiny family on `rows`; returns (checkpoint, calibration)."""

    def call(family: str = "llama", *options: object) -> tuple[Path, Path]:
        target = tmp_path / "calibration"
        result = kvq(
            "calibrate", checkpoints(family), "--dataset", rows, "--seq-len", 64,
            "--num-samples", 24, "-o", target, "--overwrite", *options,
        )  # fmt: skip
        assert result.code == 0, result.err
        return checkpoints(family), target

    return call


@pytest.fixture
def exported(kvq, calibrated, tmp_path) -> Callable[..., Path]:
    """Calibrate and export a tiny family; returns the new checkpoint."""

    def call(family: str = "llama", *options: object, kv_cfg: str = "FP8_KV_CFG") -> Path:
        model, calibration = calibrated(family, "--kv-cfg", kv_cfg)
        target = tmp_path / "checkpoint"
        result = kvq(
            "export", model, "--scales", calibration, "-o", target, "--overwrite",
            "--link", "copy", *options,
        )  # fmt: skip
        assert result.code == 0, result.err
        return target

    return call


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real model: SmolLM2-135M-Instruct in bfloat16."""
    return Path(os.environ["KVQ_TEST_MODEL"])


def pytest_collection_modifyitems(config, items):
    absent = {"real_model": "KVQ_TEST_MODEL", "client_vllm": "KVQ_VLLM_PYTHON"}
    for item in items:
        for marker, variable in absent.items():
            if item.get_closest_marker(marker) and variable not in os.environ:
                item.add_marker(pytest.mark.skip(reason=f"{variable} is not set"))
