"""Attention over long sequences without a tensor of length x length.

Where a model would make a mask of every query and every key, as for sliding windows, it gets one
that says how to make any part of itself. The model's own attention function then runs on blocks of
queries, each with the keys that it may see and its part of the mask. Scores are summed in another
order than in one piece, so that results differ by the rounding of their dtype.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    sdpa_mask,
)

from kvq.calibration.attention import Function, exchanged_attention
from kvq.calibration.memory import FULL, available_bytes
from kvq.errors import CalibrationError

LONG = 64 << 20  # elements of a mask from which on none is made
BLOCK_BYTES = 64 << 20  # of the scores of a block in float32
_FEWEST, _MOST = 32, 4096  # queries of a block
IMPLEMENTATIONS = ("sdpa", "eager")


def is_long(batch: int, length: int) -> bool:
    """Whether a mask over `batch` sequences of this length is too large to be made."""
    return batch * length * length > LONG


def has_long(inputs: Mapping[str, Any]) -> bool:
    """Whether any of a model's inputs is a batch of such sequences."""
    shapes = [value.shape for value in inputs.values() if isinstance(value, Tensor)]
    return any(len(shape) > 1 and is_long(shape[0], shape[1]) for shape in shapes)


def described(implementation: str, *, long: bool) -> str:
    """Return how a run attends, for its record."""
    if not long or implementation not in IMPLEMENTATIONS:
        return implementation
    return f"{implementation}, in blocks of queries where a long mask can be divided"


@contextmanager
def in_blocks(model: nn.Module, inputs: Mapping[str, Any]) -> Iterator[None]:
    """Have the model attend in blocks of queries inside the block, if its inputs are long."""
    if not has_long(inputs):
        yield
        return
    with exchanged_attention(model, _blocked, _unmade, only=IMPLEMENTATIONS):
        yield


class Unmade(Tensor):
    """A mask [batch, 1, queries, keys] that is made in parts; as a whole only where it fits.

    Attributes:
        function: transformers' mask function.
        arguments: of its call.
    """

    function: Function
    arguments: dict[str, Any]

    @staticmethod
    def of(function: Function, arguments: dict[str, Any]) -> "Unmade":
        """Return the mask that a call would make."""
        size = [arguments[name] for name in ("batch_size", "q_length", "kv_length")]
        one = torch.empty(0).as_subclass(Unmade)
        one.function, one.arguments = function, arguments
        dtype = one.part((0, 1), (0, 1)).dtype  # eager attention adds floats
        mask = torch.empty((size[0], 1, *size[1:]), dtype=dtype, device="meta")
        mask = mask.as_subclass(Unmade)
        mask.function, mask.arguments = function, arguments
        return mask

    def part(self, queries: tuple[int, int], keys: tuple[int, int]) -> Tensor:
        """Return the mask of queries [from, to) and keys [from, to)."""
        given = self.arguments
        changes = {
            "q_length": queries[1] - queries[0],
            "q_offset": given.get("q_offset", 0) + queries[0],
            "kv_length": keys[1] - keys[0],
            "kv_offset": given.get("kv_offset", 0) + keys[0],
            "allow_is_causal_skip": False,
            "allow_is_bidirectional_skip": False,
        }
        made: Tensor = self.function(**{**given, **changes})
        return made

    @property
    def window(self) -> int | None:
        """How many keys up to its own a query may see; None if it may see later ones too."""
        pieces = list(_pieces(self.arguments["mask_function"]))
        if causal_mask_function not in pieces:
            return None
        overlays = [piece for piece in pieces if _name(piece) in _WINDOWS]
        sizes = [int(_closed(piece)[_WINDOWS[_name(piece)]]) for piece in overlays]
        return min(sizes, default=int(self.arguments["kv_length"]))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.clone, Tensor.contiguous, Tensor.detach):
            return args[0]
        if func is torch.equal:
            return all(isinstance(one, Unmade) for one in args) and _alike(
                args[0].arguments, args[1].arguments
            )
        with torch._C.DisableTorchFunctionSubclass():
            if func == Tensor.device.__get__:
                return torch.device(args[0].arguments["device"])
            if func is Tensor.untyped_storage:
                return torch.UntypedStorage(0)
            if getattr(func, "__name__", "") in ("__get__", "size", "dim", "numel"):
                return func(*args, **kwargs or {})
        return func(*_whole(tuple(args)), **_whole(dict(kwargs or {})))


def _whole(value: Any) -> Any:
    """Return a mask as a whole, for a model that does more with it than to attend."""
    if type(value) in (tuple, list):
        return type(value)(map(_whole, value))
    if type(value) is dict:
        return {key: _whole(inner) for key, inner in value.items()}
    if not isinstance(value, Unmade):
        return value
    batch, _, queries, keys = value.shape
    heads = getattr(value.arguments.get("config"), "num_attention_heads", 1)
    there = available_bytes(value.device)
    if batch * queries * keys * (1 + 4 * heads) > FULL * there:
        raise CalibrationError(
            f"this model makes attention masks of {queries} x {keys} in a way that kvq cannot "
            f"divide, and {value.device} has {there / 2**30:.1f} GiB left",
            code="calibrate.long_context",
            hint="lower --seq-len, or --batch-size",
        )
    return value.part((0, queries), (0, keys))


def _unmade(original: Function) -> Function:
    def mask(**arguments: Any) -> Any:
        size = [arguments[name] for name in ("batch_size", "q_length", "kv_length")]
        padding = arguments.get("attention_mask")
        padded = padding is not None and not bool(padding.all())
        if padded or math.prod(size) <= LONG or _is_skipped(original, arguments):
            return original(**arguments)
        return Unmade.of(original, {**arguments, "attention_mask": None})

    return mask


def _is_skipped(original: Function, arguments: dict[str, Any]) -> bool:
    """Whether a mask function makes no mask, as for plain causal attention; asked with 2 tokens."""
    window, length = arguments.get("local_size"), arguments["kv_length"]
    if arguments["q_length"] != length or arguments.get("q_offset", 0):
        return False
    small = {
        "q_length": 2, "kv_length": 2, "attention_mask": None,
        "local_size": None if window is None or length < window else 1,
    }  # fmt: skip
    return original(**{**arguments, **small}) is None


_WINDOWS = {"sliding_window_overlay": "sliding_window", "chunked_overlay": "chunk_size"}


def _pieces(function: Function) -> Iterator[Function]:
    """Yield mask functions all of which must agree."""
    if _name(function) == "and_masks":
        for piece in _closed(function)["mask_functions"]:
            yield from _pieces(piece)
    else:
        yield function


def _name(function: Function) -> str:
    return function.__qualname__.partition(".")[0]


def _closed(function: Function) -> dict[str, Any]:
    """Return the variables that a function has kept from where it was made."""
    cells = function.__closure__ or ()
    return dict(zip(function.__code__.co_freevars, (c.cell_contents for c in cells), strict=True))


def _alike(one: Any, other: Any) -> bool:
    """Whether two values are equal, functions by what they do."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, FunctionType) and isinstance(other, FunctionType):
        return one.__code__ is other.__code__ and _alike(_closed(one), _closed(other))
    return one is other or bool(one == other)


def _blocked(original: Function) -> Function:
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor,
        attention_mask: Tensor | None = None, **kwargs: Any,
    ) -> Any:  # fmt: skip
        mask = attention_mask
        if mask is None:
            mask = _mask_of_a_square(module, query, key, value, kwargs)
        if not isinstance(mask, Unmade) or kwargs.get("position_bias") is not None:
            return original(module, query, key, value, attention_mask, **kwargs)
        outputs = []
        for queries, keys in _blocks(mask, query, key):
            some = slice(*keys)
            found, _ = original(
                module, query[:, :, slice(*queries)], key[:, :, some], value[:, :, some],
                mask.part(queries, keys), **kwargs,
            )  # fmt: skip
            outputs.append(found)
        return torch.cat(outputs, dim=1), None

    return attention


def _mask_of_a_square(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]
) -> Unmade | None:
    """Return a mask for attention without one, if torch would make all scores at once for it."""
    batch, heads, length, _ = query.shape
    causal = kwargs.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    keys = key.shape[2]
    if batch * length * keys <= LONG or (causal and length != keys):
        return None
    chosen = torch._fused_sdp_choice(
        query, key, value, None, 0.0, causal, scale=kwargs.get("scaling"),
        enable_gqa=heads != key.shape[1],
    )  # fmt: skip
    if chosen != SDPBackend.MATH.value:
        return None
    function = causal_mask_function if causal else bidirectional_mask_function
    return Unmade.of(sdpa_mask, {
        "batch_size": batch, "q_length": length, "kv_length": keys, "device": query.device,
        "mask_function": function,
    })  # fmt: skip


def _blocks(
    mask: Unmade, query: Tensor, key: Tensor
) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield blocks of queries, each with the keys that they may see."""
    batch, heads, length, _ = query.shape
    keys, window = key.shape[2], mask.window
    assert mask.shape[2:] == (length, keys)
    seen = keys if window is None else min(keys, 2 * window)  # of a block as long as the window
    count = max(_FEWEST, min(_MOST, BLOCK_BYTES // (4 * batch * heads * seen)))
    if window is not None:
        count = min(count, max(_FEWEST, window))
    for start in range(0, length, count):
        end = min(start + count, length)
        if window is None:
            yield (start, end), (0, keys)
        else:  # a query sees itself, and `window` - 1 keys before it
            yield (start, end), (max(0, start - window + 1), min(end, keys))
