"""Where a model goes, and whether what is asked for can run there."""

from collections import Counter
from typing import TYPE_CHECKING, Any

from kvq.errors import InputError
from kvq.pipeline.job import Job

if TYPE_CHECKING:
    import torch

    from kvq.pipeline.calibrate import CalibrateOptions

MaxMemory = dict[int | str, int]


def check_placement(options: "CalibrateOptions", device: "torch.device") -> None:
    """Refuse options that contradict each other, or what the device cannot do.

    Raises:
        InputError: they do.
    """
    if options.device_map not in (None, "auto"):
        raise InputError(
            f"--device-map is `{options.device_map}`, expected `auto`", code="option.device_map"
        )
    alone = "--streaming" if options.streaming else None
    alone = "--device" if options.device != "auto" else alone
    if options.device_map and alone:
        raise InputError(
            f"--device-map and {alone} both say where the model goes",
            code="option.device_map",
            hint="leave one of them out",
        )
    if not options.compile:
        return
    other = "--streaming" if options.streaming else "--device-map" if options.device_map else None
    if other:
        raise InputError(
            f"--compile needs the whole model on one device, and {other} says otherwise",
            code="option.compile",
            hint="leave one of them out",
        )
    if device.type != "cuda":
        raise InputError(
            f"--compile is for CUDA devices, and this runs on `{device}`",
            code="option.compile",
            hint="leave --compile out",
        )


def memory_of_devices(job: Job) -> MaxMemory | None:
    """Return how many bytes accelerate may use of each device; None where nothing is spread.

    Processes of one machine share its CUDA devices evenly, each taking its own ones.
    """
    if job.options.device_map is None:
        return None
    from accelerate.utils import get_max_memory

    own = job.ranks.cuda_devices()
    found: MaxMemory = get_max_memory()
    memory = {place: size for place, size in found.items() if place in own}
    return {**memory, "cpu": found["cpu"] // job.ranks.local_world}


def places(model: Any) -> str:
    """Return where accelerate has put the parts of a model."""
    found = getattr(model, "hf_device_map", {"": "cpu"}).values()
    counts = Counter(f"cuda:{place}" if type(place) is int else str(place) for place in found)
    return "Spread over " + ", ".join(f"{p} ({n} parts)" for p, n in sorted(counts.items())) + "."
