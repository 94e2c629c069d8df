"""The statistics of calibration: exact running maxima of magnitude per head, and their spread."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kvq.calibration.magnitudes import count_magnitudes
from kvq.errors import CalibrationError
from kvq.geometry import CROSS, LayerGeometry
from kvq.quantizers import QUERY

Key = tuple[str, str]  # attention path, quantizer


def head_amax(states: Tensor) -> Tensor:
    """Return the maximum magnitude per head; NaN and infinity propagate.

    Args:
        states: [batch, heads, seq_len, head_size], any strides.

    Returns:
        float32 [heads]. Exact: a maximum rounds nothing, and float32 holds every bfloat16/float16.
    """
    per_token = states.transpose(1, 2).flatten(0, 1)  # [tokens, heads, head_size], as in memory
    if states.element_size() != 2:
        return per_token.abs().amax(0).amax(-1).float()
    # magnitudes of two bytes are in the order of their bits, NaN last; integers take half the time
    bits = per_token.view(torch.int16) & torch.iinfo(torch.int16).max
    return bits.amax(0).amax(-1).view(states.dtype).float()


def merge_repeated_heads(amax: Tensor, heads: int) -> Tensor | None:
    """Return amax [heads] of states whose heads were repeated before they were cached.

    Falcon's new decoder repeats each KV head for its query heads first; an engine stores it once.

    Args:
        amax: [heads * repeats], the repeats of a head beside each other.
        heads: the number of KV heads.

    Returns:
        amax [heads]; None if these are not repeats, which are equal to the last bit.
    """
    if amax.numel() % heads:
        return None
    groups = amax.reshape(heads, -1)
    first = groups[:, :1]
    same = (groups == first) | (groups.isnan() & first.isnan())
    return first[:, 0].contiguous() if bool(same.all()) else None


class Observer:
    """Running maxima: (attention path, quantizer) → amax [heads], and what they stand out from.

    Beside them: how many tokens were seen, and how the magnitudes of a sample are distributed.

    Args:
        layers: the attention modules to observe. Those that share another's cache have no keys
            and values of their own; their queries are observed.
        queries: observe queries too.
    """

    def __init__(self, layers: Sequence[LayerGeometry], *, queries: bool) -> None:
        self.layers = {layer.attention: layer for layer in layers}
        self.queries = queries
        self.batch = 0  # the number of what is running, which only grows
        self.amax: dict[Key, Tensor] = {}
        self.raised: dict[Key, Tensor] = {}  # int64 [heads]: the batch that first showed `amax`
        self.counts: dict[Key, Tensor] = {}  # int64 [BINS]: magnitudes of all heads together
        self.tokens: dict[Key, int] = {}

    @property
    def expected(self) -> list[Key]:
        """Everything that a forward pass must show, in the order of the layers."""
        return [
            (layer.attention, quantizer)
            for layer in self.layers.values()
            for quantizer in layer.quantizers
            if (self.queries if quantizer == QUERY else layer.shared_from is None)
        ]

    def heads(self, key: Key) -> int:
        """Return how many heads the states of a key have, and so its maxima."""
        layer = self.layers[key[0]]
        return layer.num_attention_heads if key[1] == QUERY else layer.num_key_value_heads

    def see(self, key: Key, states: Tensor) -> None:
        """Fold one batch of states [batch, heads, seq_len, head_size] into the maximum.

        Raises:
            CalibrationError: heads or head size are not those of the geometry.
        """
        size, heads = states.shape[-1], self.heads(key)
        sizes = dict(self.layers[key[0]].cached)
        if states.ndim != 4 or size != sizes.get(key[1], size):
            raise self._other_shape(key, states, heads, sizes.get(key[1], size))
        states = states.detach()
        amax = head_amax(states)
        if amax.numel() != heads:
            merged = merge_repeated_heads(amax, heads)
            if merged is None:
                raise self._other_shape(key, states, heads, size)
            amax = merged
        seen = self.amax.get(key)
        if seen is None:
            self.raised[key] = torch.full_like(amax, self.batch, dtype=torch.int64)
        else:
            seen = seen.to(amax.device)  # restored ones may be elsewhere, if a model is spread
            raised = self.raised[key].to(amax.device)
            self.raised[key] = torch.where(amax > seen, self.batch, raised)
            amax = torch.maximum(seen, amax)
        self.amax[key] = amax
        counts = count_magnitudes(states)
        before = self.counts.get(key)
        if before is None:
            self.counts[key] = counts.long()
        else:
            self.counts[key] = before.to(counts.device).add_(counts)
        self.tokens[key] = self.tokens.get(key, 0) + states.shape[0] * states.shape[2]

    def _other_shape(self, key: Key, states: Tensor, heads: int, size: int) -> CalibrationError:
        return CalibrationError(
            f"{_listed([key])} is {list(states.shape)}, expected [batch, {heads}, seq_len, {size}] "
            "from config.json or its class's defaults; the maxima would be those of something else",
            code="calibrate.shape",
            hint="please report this architecture with its config.json",
        )

    def results(self) -> dict[Key, Tensor]:
        """Return all maxima on the CPU.

        Raises:
            CalibrationError: a layer or side was never observed, or saw NaN or infinity; all of
                them are named.
        """
        missing = [key for key in self.expected if key not in self.amax]
        if missing:
            crossing = all(self.layers[path].kind == CROSS for path, _ in missing)
            raise CalibrationError(
                f"0 observations of {_listed(missing)}",
                code="calibrate.not_observed",
                hint="these layers keep caches of image features, which text never fills: give "
                "images through the Python API, `kvq.calibrate(model, batches)`"
                if crossing
                else "as it runs here, this architecture does not hand them to transformers' "
                "common cache or attention function; please report it",
            )
        results = {key: self.amax[key].cpu() for key in self.expected}
        nonfinite = [key for key in self.expected if not results[key].isfinite().all()]
        if nonfinite:
            raise CalibrationError(
                f"NaN or infinity in {_listed(nonfinite)}; nothing was written",
                code="calibrate.nonfinite",
                hint="float16 overflows where bfloat16 does not: try --dtype bfloat16 or float32",
            )
        return results


def _listed(keys: Sequence[Key]) -> str:
    return ", ".join(f"`{attention}.{quantizer}`" for attention, quantizer in keys)
