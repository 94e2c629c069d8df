"""The bytes of a page of the KV cache.

A cache is a tensor `[num_pages, num_kv_heads, elements]`; what `elements` holds, by format, with
`half(d) = 16 * ceil(d / 32)` bytes, `pairs = half / 16` and `chunks = page_size / chunk`:

| format     | K                                    | V                                         |
|------------|--------------------------------------|-------------------------------------------|
| bfloat16,  | `[page_size, head_dim]`              | `[page_size, v_head_dim]`                 |
| float16    |                                      |                                           |
| fp8_e4m3   | codes `[page_size, head_dim]`        | codes `[chunks, v_head_dim, chunk]`       |
| nvfp4      | codes `[page_size, half]`, then      | codes `[chunks, half, chunk]`, then       |
|            | block scales `[page_size, pairs, 2]` | block scales `[chunks, pairs, chunk, 2]`  |

Quantized V is token-contiguous within a chunk, because the sum with P runs over tokens: tensor
cores read eight-bit operands only along the dimension they sum over, and a thread that has several
tokens of a dimension reads their bytes at once. A chunk of an FP8 page is the largest power of two
that divides its tokens, at most 128: what a tile reads of a page at once is then one piece of
memory. A chunk of an NVFP4 page is 16 tokens: the bytes of a block and a chunk are one operand of a
tensor core, whatever the page's size.

An NVFP4 byte holds two dimensions of one token, `d` and `d + half`, so that a byte has one writer
and each half of the head has its own blocks, whose scales lie in pairs. With s e e m the code of
`d` and S E E M that of `d + half`, the byte's bits are `S e e m E E M s`: the second code lies
where the first byte of a float16 has these bits, and two shifts bring the first there. A block
covers 16 dimensions. Dimensions and blocks past the head's end are zero.
"""

import math
from dataclasses import dataclass
from typing import Literal

from kvq.errors import InputError
from kvq.formats import FP8_E4M3, NVFP4_KV, KVFormat

PageFormat = Literal["bfloat16", "float16", "fp8_e4m3", "nvfp4"]
SIXTEEN_BITS = ("bfloat16", "float16")
PAGE_FORMATS = (*SIXTEEN_BITS, "fp8_e4m3", "nvfp4")
PAGE_MULTIPLE = 16
LARGEST_CHUNK = 128  # tokens of a tile of decode attention
BLOCK_SIZE = NVFP4_KV.block_size or 0


def half(size: int) -> int:
    """Bytes of the NVFP4 codes of `size` dimensions; byte 0's high code is this dimension."""
    return BLOCK_SIZE * math.ceil(size / (2 * BLOCK_SIZE))


def blocks(size: int) -> int:
    """Block scales of `size` dimensions, an even number."""
    return 2 * half(size) // BLOCK_SIZE


@dataclass(frozen=True)
class PageLayout:
    """Shape and format of a paged KV cache of one layer.

    Attributes:
        format: how K and V are stored.
        page_size: tokens of a page, a multiple of 16.
        num_kv_heads: KV heads.
        head_dim: dimensions of a K row.
        v_head_dim: dimensions of a V row; None for `head_dim`.
        shared: V is the first `v_head_dim` dimensions of the K row and has no pages of its own
            (MLA: `kv_lora_rank` of `kv_lora_rank + qk_rope_head_dim`).
    """

    format: PageFormat
    page_size: int
    num_kv_heads: int
    head_dim: int
    v_head_dim: int | None = None
    shared: bool = False

    def __post_init__(self) -> None:
        if self.format not in PAGE_FORMATS:
            raise InputError(
                f"unknown page format `{self.format}`; known: {', '.join(PAGE_FORMATS)}",
                code="kernel.format",
            )
        if self.page_size <= 0 or self.page_size % PAGE_MULTIPLE:
            raise InputError(
                f"page_size is {self.page_size}, not a multiple of {PAGE_MULTIPLE}",
                code="kernel.page_size",
            )
        for name, size in (("head_dim", self.head_dim), ("v_head_dim", self.value_dim)):
            if size <= 0 or size % BLOCK_SIZE:
                raise InputError(
                    f"{name} is {size}, not a multiple of {BLOCK_SIZE}", code="kernel.head_dim"
                )
        if self.num_kv_heads <= 0:
            raise InputError(f"num_kv_heads is {self.num_kv_heads}", code="kernel.heads")
        if self.shared and self.value_dim > self.head_dim:
            raise InputError(
                f"v_head_dim {self.value_dim} is more than the row's {self.head_dim}",
                code="kernel.head_dim",
            )

    @property
    def value_dim(self) -> int:
        """Dimensions of a V row."""
        return self.head_dim if self.v_head_dim is None else self.v_head_dim

    @property
    def kv_format(self) -> KVFormat | None:
        """The number format of the codes; None for 16-bit pages."""
        return {"fp8_e4m3": FP8_E4M3, "nvfp4": NVFP4_KV}.get(self.format)

    @property
    def k_elements(self) -> int:
        """Elements of one K page of one head; bytes if quantized."""
        return self.page_size * self._row(self.head_dim)

    @property
    def v_elements(self) -> int:
        """Elements of one V page of one head; bytes if quantized; 0 if shared."""
        return 0 if self.shared else self.page_size * self._row(self.value_dim)

    @property
    def chunk(self) -> int:
        """Tokens of which V's numbers of one dimension lie side by side in a quantized page."""
        largest = PAGE_MULTIPLE if self.format == "nvfp4" else LARGEST_CHUNK
        return math.gcd(self.page_size, largest)

    @property
    def k_scales_offset(self) -> int:
        """Where the K block scales of an NVFP4 page begin."""
        return self.page_size * half(self.head_dim)

    @property
    def v_scales_offset(self) -> int:
        """Where the V block scales of an NVFP4 page begin."""
        return self.page_size * half(self.value_dim)

    @property
    def bytes_per_token(self) -> int:
        """Stored bytes of one token, K and V, all heads."""
        size = 2 if self.format in SIXTEEN_BITS else 1
        return self.num_kv_heads * (self.k_elements + self.v_elements) * size // self.page_size

    def _row(self, size: int) -> int:
        return half(size) + blocks(size) if self.format == "nvfp4" else size
