import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def pytest_collection_modifyitems(items):
    """`gpu` tests run on CUDA, `interpreter` tests on the CPU, those with both marks on either."""
    for item in items:
        marks = {mark.name for mark in item.iter_markers()} & {"gpu", "interpreter"}
        can_run = "interpreter" if INTERPRETED else "gpu" if torch.cuda.is_available() else None
        if marks and can_run not in marks:
            wanted = {"gpu": "CUDA", "interpreter": "TRITON_INTERPRET=1"}
            reason = " or ".join(wanted[mark] for mark in sorted(marks))
            item.add_marker(pytest.mark.skip(reason=f"needs {reason}"))


@pytest.fixture(autouse=INTERPRETED)
def faithful_interpreter():
    from tests.kernels.interpreter import faithful

    with faithful():
        yield
