"""Go on with an unfinished calibration, or refuse to."""

import glob
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvq.calibration.batches import describe_plan
from kvq.checkpoint import config_digest
from kvq.errors import InputError, KvqError
from kvq.pipeline.job import Job, Notify, progress_folder
from kvq.pipeline.record import versions

if TYPE_CHECKING:
    from kvq.calibration.amax import Observer
    from kvq.calibration.distributed import Ranks
    from kvq.calibration.progress import Folder, State
    from kvq.calibration.saving import Saver

# Errors after which the same state may still be of use; others would come again.
_PASSING = ("calibrate.memory", "streaming.disk", "ranks.lost")


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


def check_resumable(target: Path, ranks: "Ranks", *, resume: bool, overwrite: bool) -> None:
    """Refuse to lose the progress of an unfinished run that nobody has mentioned.

    Raises:
        InputError: there is some, and neither option says what to do with it.
    """
    from kvq.calibration.progress import exists

    folders = target.parent.glob(f".{glob.escape(target.name)}.kvq-progress*")
    found = sorted(folder for folder in folders if exists(folder))
    of_others = [f for f in found if f not in _of_same_number(target, ranks)]
    if found and not resume and not overwrite:
        raise InputError(
            f"`{found[0]}` holds the progress of an unfinished calibration",
            code="progress.exists",
            hint="--resume goes on with it, --overwrite starts over",
        )
    if of_others and resume:
        raise InputError(
            f"`{of_others[0]}` holds the progress of another number of processes",
            code="progress.other_run",
            hint="run as many as before, or start over with --overwrite instead of --resume",
        )
    for folder in of_others if ranks.first else ():
        shutil.rmtree(folder, ignore_errors=True)


def _of_same_number(target: Path, ranks: "Ranks") -> list[Path]:
    return [progress_folder(target, replace(ranks, rank=i)) for i in range(ranks.world)]


@contextmanager
def session(job: Job, notify: Notify) -> Iterator[Session]:
    """Hold the folder of a run's progress inside the block; a run that ends well deletes it.

    Raises:
        KvqError: the progress there is not whole, or of another run.
    """
    from kvq.calibration.distributed import check_same
    from kvq.calibration.progress import Folder, check_identity, exists, read_state

    identity = _identity(job)
    check_same(job.ranks, identity)
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


def _identity(job: Job) -> dict[str, Any]:
    """Return everything that the statistics depend on, named as a user knows it."""
    import torch

    from kvq.calibration.progress import weights_digest
    from kvq.calibration.run import cpu_threads

    name = job.device.type
    if name == "cuda":
        name = torch.cuda.get_device_name(job.device)
    options = job.options
    return {
        "version": versions(),
        "model": {"config": config_digest(job.view.config), "weights": weights_digest(job.view)},
        "data": dict(job.data.identity),
        "plan": describe_plan(job.data.sequences, job.batch_size),
        "layers": [asdict(layer) for layer in job.geometry.layers],
        "options": {
            "--compile": options.compile,
            "--kv-cfg": options.kv_cfg,
            "--device-map": options.device_map,
            "--dtype": options.dtype,
            "--margin": options.margin,
            "--skip-layers": options.skip_layers,
            "--stop-when-stable": options.stop_when_stable,
        },
        "device": name,
        "threads": cpu_threads(),
    }
