"""Copies between pinned memory and a CUDA device that run beside what the device computes."""

import torch
from torch import Tensor


class Transfers:
    """Brings in the states of the next batch, and takes out those of the last, during this one.

    Each direction has a stream. What a stream reads or writes has been ordered after whatever was
    asked for before it, and tensors are marked for every stream that uses them, so that their
    memory is not given away too early.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._inward, self._outward = torch.cuda.Stream(device), torch.cuda.Stream(device)
        self._ahead: dict[int, Tensor] = {}  # of at most one batch

    def read(self, batch: int, host: Tensor, following: Tensor | None) -> Tensor:
        """Return a batch's states on the device; begin to bring in those of the next one.

        Args:
            batch: its number.
            host: its states in pinned memory.
            following: those of the next batch, if there is one.
        """
        found = self._ahead.pop(batch, None)
        self._ahead.clear()
        found = self._fetch(host) if found is None else found
        computing = torch.cuda.current_stream(self.device)
        computing.wait_stream(self._inward)
        found.record_stream(computing)
        if following is not None:
            self._ahead[batch + 1] = self._fetch(following)
        return found

    def write(self, host: Tensor, states: Tensor) -> None:
        """Begin to take states out into pinned memory."""
        self._outward.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._outward):
            host.copy_(states, non_blocking=True)
        states.record_stream(self._outward)

    def finish(self) -> None:
        """Wait until everything has been taken out."""
        self._outward.synchronize()

    def _fetch(self, host: Tensor) -> Tensor:
        self._inward.wait_stream(torch.cuda.current_stream(self.device))
        self._inward.wait_stream(self._outward)  # an earlier layer's states, on their way out
        with torch.cuda.stream(self._inward):
            return host.to(self.device, non_blocking=True)
