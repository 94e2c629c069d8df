"""Preconditions shared by the kernels and their twins, checked without reading device memory."""

import math
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from kvq.errors import InputError
from kvq.formats import KVFormat
from kvq.kernels.pages import SIXTEEN_BITS, PageLayout
from kvq.kernels.simulation import Simulation

FLOATS = (torch.bfloat16, torch.float16, torch.float32)
Scale: TypeAlias = Tensor | float | None
Variant = Literal["fast", "default", "exact"]
VARIANTS = ("fast", "default", "exact")


def require(condition: bool, message: str, code: str) -> None:
    """Raise an InputError unless the condition holds."""
    if not condition:
        raise InputError(message, code=f"kernel.{code}")


def storage_dtype(layout: PageLayout) -> torch.dtype:
    """Element type of a cache: bytes if quantized."""
    return getattr(torch, layout.format) if layout.format in SIXTEEN_BITS else torch.uint8


def new_cache(
    layout: PageLayout, num_pages: int, device: torch.device | str
) -> tuple[Tensor, Tensor | None]:
    """Return a zeroed K and V cache; V is None if shared."""
    dtype = storage_dtype(layout)
    k_cache = torch.zeros(
        num_pages, layout.num_kv_heads, layout.k_elements, dtype=dtype, device=device
    )
    if layout.shared:
        return k_cache, None
    shape = (num_pages, layout.num_kv_heads, layout.v_elements)
    return k_cache, torch.zeros(shape, dtype=dtype, device=device)


def check_caches(k_cache: Tensor, v_cache: Tensor | None, layout: PageLayout) -> None:
    """Refuse caches that are not of this layout, or whose pages are not contiguous."""
    require(
        (v_cache is None) == layout.shared,
        f"v_cache must be {'None: the layout is shared' if layout.shared else 'given'}",
        "cache",
    )
    caches = [("k_cache", k_cache, layout.k_elements)]
    if v_cache is not None:
        caches.append(("v_cache", v_cache, layout.v_elements))
        require(k_cache.shape[0] == v_cache.shape[0], "K and V differ in num_pages", "cache")
    for name, cache, elements in caches:
        wanted = (layout.num_kv_heads, elements)
        require(
            cache.dim() == 3 and tuple(cache.shape[1:]) == wanted,
            f"{name} is {tuple(cache.shape)}, expected (num_pages, {wanted[0]}, {wanted[1]})",
            "cache",
        )
        dtype = storage_dtype(layout)
        require(cache.dtype == dtype, f"{name} is {cache.dtype}, expected {dtype}", "cache")
        aligned = cache.stride(2) == 1 and all(
            stride * cache.element_size() % 16 == 0 for stride in cache.stride()[:2]
        )
        require(
            aligned and cache.data_ptr() % 16 == 0,
            f"a page of {name} must be contiguous and 16-byte aligned, strides {cache.stride()}",
            "cache",
        )


def head_scale(scale: Scale, heads: int, fmt: KVFormat | None, name: str, like: Tensor) -> Tensor:
    """Return the scale as float32 `[heads]`, with stride 0 if one serves all; 1 without a format.

    A number is checked here; a tensor's values are not read, so that nothing synchronises.
    """
    if fmt is None:
        require(scale is None, f"{name} given, but 16-bit pages have no scale", "scale")
        return torch.ones((), dtype=torch.float32, device=like.device).expand(heads)
    require(scale is not None, f"`{fmt.name}` pages need {name}", "scale")
    if isinstance(scale, Tensor):
        require(
            scale.dtype == torch.float32 and scale.device == like.device,
            f"{name} must be float32 on {like.device}, found {scale.dtype} on {scale.device}",
            "scale",
        )
        require(
            scale.numel() in (1, heads),
            f"{name} has {scale.numel()} values, expected 1 or {heads}",
            "scale",
        )
        return scale.detach().reshape(-1).expand(heads)
    assert scale is not None
    require(
        math.isfinite(scale) and scale > 0,
        f"{name} is {scale}: a scale is finite and above zero",
        "scale",
    )
    return torch.full((1,), scale, dtype=torch.float32, device=like.device).expand(heads)


def check_append(
    k: Tensor, v: Tensor | None, slot_mapping: Tensor, layout: PageLayout, k_cache: Tensor
) -> None:
    """Refuse new tokens that do not fit the layout."""
    require((v is None) == layout.shared, "v is given exactly for layouts not shared", "tokens")
    rows = [("k", k, layout.head_dim)]
    if v is not None:
        rows.append(("v", v, layout.value_dim))
    for name, x, size in rows:
        wanted = (k.shape[0], layout.num_kv_heads, size)
        require(
            tuple(x.shape) == wanted, f"{name} is {tuple(x.shape)}, expected {wanted}", "tokens"
        )
        require(x.dtype in FLOATS, f"{name} is {x.dtype}", "tokens")
        require(
            layout.kv_format is not None or x.dtype == storage_dtype(layout),
            f"{name} is {x.dtype}, the pages are {layout.format}",
            "tokens",
        )
        require(x.device == k_cache.device, f"{name} is on {x.device}", "device")
    check_indices(slot_mapping, "slot_mapping", (k.shape[0],), k_cache)


def check_indices(x: Tensor, name: str, shape: tuple[int, ...], like: Tensor) -> None:
    """Refuse an index tensor of another shape, type or device."""
    require(tuple(x.shape) == shape, f"{name} is {tuple(x.shape)}, expected {shape}", "indices")
    require(
        x.dtype in (torch.int32, torch.int64),
        f"{name} is {x.dtype}, expected int32 or int64",
        "indices",
    )
    require(x.device == like.device, f"{name} is on {x.device}, not {like.device}", "device")


def check_query(
    q: Tensor,
    k_cache: Tensor,
    block_table: Tensor,
    seq_lens: Tensor,
    layout: PageLayout,
    head_vectors: dict[str, Tensor | None],
) -> None:
    """Refuse queries, tables or per-head vectors that do not fit the layout."""
    require(
        q.dim() == 3 and q.shape[2] == layout.head_dim,
        f"q is {tuple(q.shape)}, expected (batch, num_heads, {layout.head_dim})",
        "query",
    )
    require(q.dtype in FLOATS[:2], f"q is {q.dtype}, expected bfloat16 or float16", "query")
    require(
        layout.kv_format is not None or q.dtype == storage_dtype(layout),
        f"q is {q.dtype}, the pages are {layout.format}",
        "query",
    )
    require(q.device == k_cache.device, f"q is on {q.device}, the cache is not", "device")
    heads = q.shape[1]
    require(
        heads > 0 and heads % layout.num_kv_heads == 0,
        f"{heads} query heads are no multiple of {layout.num_kv_heads} KV heads",
        "heads",
    )
    require(block_table.dim() == 2, "block_table must be (batch, max_pages)", "indices")
    check_indices(block_table, "block_table", (q.shape[0], block_table.shape[1]), q)
    check_indices(seq_lens, "seq_lens", (q.shape[0],), q)
    for name, vector in head_vectors.items():
        if vector is not None:
            require(
                tuple(vector.shape) == (heads,) and vector.dtype == torch.float32,
                f"{name} must be float32 ({heads},), found {vector.dtype} {tuple(vector.shape)}",
                "heads",
            )
            require(vector.device == q.device, f"{name} is on {vector.device}", "device")


def check_options(
    softcap: float | None, window: int | None, num_kv_splits: int | None, variant: str
) -> None:
    """Refuse options outside their range."""
    require(
        softcap is None or (math.isfinite(softcap) and softcap > 0),
        f"softcap is {softcap}, not above zero",
        "softcap",
    )
    require(window is None or window > 0, f"window is {window}, not above zero", "window")
    require(
        num_kv_splits is None or 1 <= num_kv_splits <= 256,
        f"num_kv_splits is {num_kv_splits}, expected 1 to 256",
        "splits",
    )
    require(variant in VARIANTS, f"unknown variant `{variant}`", "variant")


def check_simulation(simulate: Simulation | None, layout: PageLayout) -> None:
    """Refuse to simulate quantized P or V over pages that are quantized or shared."""
    if simulate is None:
        return
    require(
        layout.kv_format is None,
        f"P and V are simulated over 16-bit pages, found {layout.format}: these hold quantized V"
        + (', and `variant="fast"` rounds P to E4M3' if layout.format == "fp8_e4m3" else ""),
        "simulation",
    )
    require(
        not layout.shared, "P and V are not simulated over rows that K and V share", "simulation"
    )
