"""What a calibration runs on."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvq.calibration.batches import plan_batches
from kvq.calibration.data import CalibrationData
from kvq.checkpoint import CheckpointView
from kvq.geometry import Geometry
from kvq.quantizers import QUERY, QuantizerConfig

if TYPE_CHECKING:
    import torch

    from kvq.calibration.amax import Observer
    from kvq.calibration.distributed import Ranks
    from kvq.pipeline.calibrate import CalibrateOptions

# 2 GiB beside the weights of an 8B model; elsewhere sequences run one by one
AUTO_BATCH_TOKENS = {"cuda": 16384}
Notify = Callable[[str], None]
Progress = Callable[[int, int, float], None]


@dataclass(frozen=True)
class Job:
    """All that a calibration runs on."""

    view: CheckpointView
    geometry: Geometry
    data: CalibrationData
    quantizers: Mapping[str, QuantizerConfig | None]
    options: "CalibrateOptions"
    target: Path
    device: "torch.device"
    ranks: "Ranks"

    @property
    def attentions(self) -> list[str]:
        """Paths of the attention modules."""
        return [layer.attention for layer in self.geometry.layers]

    @property
    def work(self) -> Path:
        """Where a run keeps what it may need again, beside the folder that it writes."""
        return progress_folder(self.target, self.ranks)

    def observer(self) -> "Observer":
        """Return an observer that has seen nothing."""
        from kvq.calibration.amax import Observer

        queries = any(config and n.endswith(QUERY) for n, config in self.quantizers.items())
        return Observer(self.geometry.layers, queries=queries)

    @property
    def batch_size(self) -> int:
        """How many sequences share a batch, from the device's kind alone."""
        longest = max(len(sequence) for sequence in self.data.sequences)
        automatic = max(1, AUTO_BATCH_TOKENS.get(self.device.type, 0) // longest)
        return self.options.batch_size or automatic

    @property
    def whole_plan(self) -> Sequence[tuple[int, ...]]:
        """All batches, as indices into the sequences."""
        return plan_batches(self.data.sequences, self.batch_size)

    @property
    def long_tokens(self) -> int | None:
        """The length of the longest sequences over whose batch no mask is to be made, if any."""
        from kvq.calibration.blocks import is_long

        alone = self.device.type == "cpu"
        found = ((len(b), max(self.data.sequences[b[0]].lengths)) for b in self.whole_plan)
        long = (length for count, length in found if is_long(1 if alone else count, length))
        return max(long, default=None)

    @property
    def plan(self) -> Sequence[tuple[int, ...]]:
        """The batches that this process runs."""
        return self.ranks.own(self.whole_plan)

    @property
    def numbers(self) -> Sequence[int]:
        """Their numbers in the whole plan."""
        return self.ranks.own(range(len(self.whole_plan)))

    @property
    def boundaries(self) -> Sequence[int]:
        """After how many batches of the whole plan the run may end early."""
        from kvq.calibration.stability import boundaries

        if not self.options.stop_when_stable:
            return ()
        tokens = [sum(len(self.data.sequences[i]) for i in batch) for batch in self.whole_plan]
        return boundaries(tokens, self.options.data.min_tokens)


def progress_folder(target: Path, ranks: "Ranks") -> Path:
    """Return where the progress of a run that writes `target` is kept, of each process apart."""
    own = "" if ranks.world == 1 else f"-{ranks.rank}-of-{ranks.world}"
    return target.with_name(f".{target.name}.kvq-progress{own}")
