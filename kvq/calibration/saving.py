"""Save progress as a run goes on, and before a signal ends it."""

import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

from kvq.calibration.amax import Observer
from kvq.calibration.progress import Folder, exists, write_state

SHARE = 10  # a save takes at most about one part in so many of the time
LEAST_SECONDS = 0.005  # what a save is taken to cost at least
BYTES_PER_SECOND = 1 << 30  # what a disk is taken to write before the first save
_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Notify = Callable[[str], None]


class Saver:
    """Writes the state of a run now and then, so that saving costs little of its time.

    Args:
        folder: where to.
        mode: `memory` or `streaming`.
        identity: what the run depends on.
        observer: what it has seen.
        notify: receives one sentence at a time for the user.
        size: how many bytes a save writes.
    """

    def __init__(
        self, folder: Folder, mode: str, identity: Mapping[str, Any], observer: Observer,
        notify: Notify, *, size: int = 0,
    ) -> None:  # fmt: skip
        self.folder, self.mode, self.identity = folder, mode, identity
        self.observer, self.notify = observer, notify
        self.cost = max(LEAST_SECONDS, size / BYTES_PER_SECOND)
        self._last = time.monotonic()
        self._stopped_by: int | None = None
        self._stopped_at = 0.0
        self._failed = False

    def after_batch(
        self, position: Callable[[], Mapping[str, Any] | None],
        commit: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        """Save if it is time, and end the run if a signal came; between two batches only.

        Args:
            position: returns what it takes to go on from here; None where that is not possible.
            commit: called when that is on disk.

        Raises:
            KeyboardInterrupt: a signal came; the user has been told how to continue.
        """
        if self._stopped_by is None and time.monotonic() - self._last < SHARE * self.cost:
            return
        start = time.monotonic()
        try:
            found = position()
            if found is not None:
                path = self.folder.path
                write_state(path, self.mode, self.identity, found, self.observer)
                commit()
        except OSError as error:
            if not self._failed:
                self.notify(f"Progress cannot be saved: {error.strerror}.")
            self._failed = True
        self._last = time.monotonic()
        self.cost = max(LEAST_SECONDS, self._last - start)
        if self._stopped_by is not None:
            name = signal.Signals(self._stopped_by).name
            self.notify(
                f"{name}: stopped; the same command with --resume goes on."
                if exists(self.folder.path)
                else f"{name}: stopped before there was anything to save."
            )
            raise KeyboardInterrupt

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Let SIGINT and SIGTERM end the run after its batch; a second SIGINT ends it at once."""
        if threading.current_thread() is not threading.main_thread():
            yield  # signals are not ours to take
            return
        before = {number: signal.signal(number, self._stop) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _stop(self, number: int, _: FrameType | None) -> None:
        if self._stopped_by is not None:
            # torchrun repeats what a terminal has sent to all processes already
            if number == signal.SIGINT and time.monotonic() - self._stopped_at > 1:
                raise KeyboardInterrupt
            return
        self._stopped_by, self._stopped_at = number, time.monotonic()
        with suppress(RuntimeError):  # the signal came while something was being written
            self.notify(f"{signal.Signals(number).name}: stopping after this batch.")
