"""Go on with an unfinished calibration, or refuse to."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.calibration.batches import describe_plan
from kvq.checkpoint import config_digest
from kvq.errors import InputError, KvqError
from kvq.pipeline.job import Job, Notify
from kvq.pipeline.record import versions

if TYPE_CHECKING:
    import torch

    from kvq.calibration.amax import Observer
    from kvq.calibration.progress import Folder, State
    from kvq.calibration.saving import Saver

# Errors after which the same state may still be of use; others would come again.
_PASSING = ("calibrate.memory", "streaming.disk")


@dataclass
class Session:
    """A run that saves its progress; `state` is what an earlier one has left."""

    folder: "Folder"
    identity: dict[str, Any]
    state: "State | None"
    notify: Notify

    def saver(self, mode: str, observer: "Observer", *, size: int = 0) -> "Saver":
        """Return what saves a run of this mode, which writes `size` bytes each time."""
        from kvq.calibration.saving import Saver

        return Saver(self.folder, mode, self.identity, observer, self.notify, size=size)

    def start_over(self) -> None:
        """Forget what was saved."""
        self.state = None
        self.folder.clear()


def check_resumable(folder: Path, *, resume: bool, overwrite: bool) -> None:
    """Refuse to lose the progress of an unfinished run that nobody has mentioned.

    Raises:
        InputError: there is some, and neither option says what to do with it.
    """
    from kvq.calibration.progress import exists

    if exists(folder) and not resume and not overwrite:
        raise InputError(
            f"`{folder}` holds the progress of an unfinished calibration",
            code="progress.exists",
            hint="--resume goes on with it, --overwrite starts over",
        )


@contextmanager
def session(job: Job, device: "torch.device", notify: Notify) -> Iterator[Session]:
    """Hold the folder of a run's progress inside the block; a run that ends well deletes it.

    Raises:
        KvqError: the progress there is not whole, or of another run.
    """
    from kvq.calibration.progress import Folder, check_identity, exists, read_state

    identity = _identity(job, device)
    folder = Folder(job.work)
    try:
        state = None
        if job.options.resume and exists(job.work):
            state = read_state(job.work)
            mode = "streaming" if job.options.streaming else state.mode
            check_identity(state, {**identity, "mode": mode})
        elif job.options.resume:
            notify("There is no progress to resume: starting from the beginning.")
        elif exists(job.work):
            notify("The progress of an unfinished calibration is discarded.")
        if state is None:
            folder.clear()
        try:
            yield Session(folder, identity, state, notify)
        except KvqError as error:
            if error.code not in _PASSING:
                folder.clear()
            raise
        folder.clear()
    finally:
        folder.close()


def _identity(job: Job, device: "torch.device") -> dict[str, Any]:
    """Return everything that the statistics depend on, named as a user knows it."""
    import torch

    from kvq.calibration.progress import weights_digest
    from kvq.calibration.run import cpu_threads

    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    options = job.options
    return {
        "version": versions(),
        "model": {"config": config_digest(job.view.config), "weights": weights_digest(job.view)},
        "data": dict(job.data.identity),
        "plan": describe_plan(job.data.sequences, job.batch_size(device.type)),
        "layers": [asdict(layer) for layer in job.geometry.layers],
        "options": {
            "--kv-cfg": options.kv_cfg,
            "--dtype": options.dtype,
            "--margin": options.margin,
            "--skip-layers": options.skip_layers,
        },
        "device": name,
        "threads": cpu_threads(),
    }
