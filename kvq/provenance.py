"""What kvq records beside the scales it writes, in the metadata of the added shard."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvq.checkpoint import CheckpointView
from kvq.errors import CheckpointError
from kvq.files import parse_json
from kvq.quantizers import KEY_PE, KV_C

UNKNOWN = "unknown"  # weights: where scales came with no word about them


@dataclass(frozen=True)
class Provenance:
    """Where scales come from; maps are keyed by attention path.

    `amax` is keyed by `<attention>.<quantizer>` and holds one float per head; `status` says per
    side (`k`, `v`, `q`) whether a scale is `calibrated` or `constant`.
    """

    format: str
    granularity: str
    weight_fingerprint: str
    attention_class: str | None = None
    amax: Mapping[str, list[float]] = field(default_factory=dict)
    tokens: Mapping[str, int] = field(default_factory=dict)
    status: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    margin: float = 1.0
    skip_layers: tuple[int, ...] = ()
    calibration: str | None = None
    exported_onto: str | None = None  # fingerprint of other weights, where that was asked for

    @property
    def weights(self) -> str | None:
        """The fingerprint that the weights must have; None where nothing says."""
        known = None if self.weight_fingerprint == UNKNOWN else self.weight_fingerprint
        return self.exported_onto or known

    @property
    def constant(self) -> bool:
        """Whether every scale is a constant by request."""
        found = {status for sides in self.status.values() for status in sides.values()}
        return found == {"constant"}

    def observed(self, attention: str, side: str) -> list[float] | None:
        """Return the amax per head that a scale of `side` (`k`, `v`, `q`) covers.

        Under MLA it is the larger one of latent and rotary part, for K and V alike.
        """
        latent = self.amax.get(f"{attention}.{KV_C}")
        if side != "q" and latent:
            return [max(latent + self.amax.get(f"{attention}.{KEY_PE}", []))]
        return self.amax.get(f"{attention}.{side}_bmm_quantizer")


def read_provenance(view: CheckpointView, scales: Iterable[str]) -> Provenance | None:
    """Return what kvq recorded in the shard that holds `scales`, None if it recorded nothing.

    Raises:
        CheckpointError: the record is there, but damaged.
    """
    files = {view.tensors[name].path.name for name in scales}
    for name in sorted(files):
        text = view.files[name].metadata.get("kvq")
        if text is not None:
            where = f"the kvq metadata of `{name}`"
            return _parse(parse_json(text.encode(), where=where), where)
    return None


def _parse(record: dict[str, Any], where: str) -> Provenance:
    try:
        known = {key: record[key] for key in Provenance.__annotations__ if key in record}
        found = Provenance(**known)
        strings = (found.format, found.granularity, found.weight_fingerprint)
        optional = (found.attention_class, found.calibration, found.exported_onto)
        named = all(value is None or isinstance(value, str) for value in optional)
        words = [word for sides in found.status.values() for word in sides.values()]
        sound = (
            named
            and all(isinstance(value, str) for value in strings)
            and all(isinstance(values, list) for values in found.amax.values())
            and all(_is_number(value) for values in found.amax.values() for value in values)
            and all(type(value) is int for value in found.tokens.values())
            and all(isinstance(word, str) for word in words)
            and _is_number(found.margin)
            and isinstance(found.skip_layers, list | tuple)
            and all(type(layer) is int for layer in found.skip_layers)
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{where} is damaged: {error!r}", code="provenance.damaged"
        ) from error
    if not sound:
        raise CheckpointError(f"{where} is damaged", code="provenance.damaged")
    return found


def _is_number(value: Any) -> bool:
    """Whether a value is a number that float32 holds."""
    return type(value) in (int, float) and abs(value) < 2.0**127
