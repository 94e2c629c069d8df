"""CUDA: states that are copied beside the computation are those that were meant."""

import pytest
import torch

from kvq.calibration.streaming.activations import Activations

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("in_files", [False, True])
def test_many_layers_over_many_batches_lose_nothing(tmp_path, in_files):
    device = torch.device("cuda")
    shapes = [(4, 512 + 64 * (i % 5), 256) for i in range(24)]
    made = Activations(shapes, torch.bfloat16, device, tmp_path, in_files=in_files)
    for i, shape in enumerate(shapes):
        made.write(i, torch.full(shape, float(i), dtype=torch.bfloat16, device=device))
    right = torch.ones((), dtype=torch.bool, device=device)
    busy = torch.randn(2048, 2048, device=device)
    for layer in range(8):
        for i in range(len(shapes)):
            states = made.read(i)
            for _ in range(5):  # the device is behind, so that copies could overtake it
                busy = busy @ busy / 100
            right &= (states == i + layer).all()  # asked for at the end: it would wait
            made.write(i, states + 1)
    assert bool(right)
    saved = made.prepare()
    again = Activations(shapes, torch.bfloat16, device, tmp_path, in_files=in_files, saved=saved)
    for i in range(len(shapes)):
        assert bool((again.read(i) == i + 8).all())
