"""What a calibration runs on."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvq.calibration.data import CalibrationData
from kvq.checkpoint import CheckpointView
from kvq.geometry import Geometry
from kvq.quantizers import QUERY, QuantizerConfig

if TYPE_CHECKING:
    from kvq.calibration.amax import Observer
    from kvq.pipeline.calibrate import CalibrateOptions

AUTO_BATCH_TOKENS = {"cuda": 16384}  # elsewhere sequences run one by one
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

    @property
    def attentions(self) -> list[str]:
        """Paths of the attention modules."""
        return [layer.attention for layer in self.geometry.layers]

    @property
    def work(self) -> Path:
        """Where a run keeps what it may need again, beside the folder that it writes."""
        return progress_folder(self.target)

    def observer(self) -> "Observer":
        """Return an observer that has seen nothing."""
        from kvq.calibration.amax import Observer

        queries = any(config and n.endswith(QUERY) for n, config in self.quantizers.items())
        return Observer(self.geometry.layers, queries=queries)

    def batch_size(self, device: str) -> int:
        """Return how many sequences share a batch, from the device's kind alone."""
        longest = max(len(sequence) for sequence in self.data.sequences)
        automatic = max(1, AUTO_BATCH_TOKENS.get(device, 0) // longest)
        return self.options.batch_size or automatic


def progress_folder(target: Path) -> Path:
    """Return where the progress of a run that writes `target` is kept."""
    return target.with_name(f".{target.name}.kvq-progress")
