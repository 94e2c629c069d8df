"""Quantize-dequantize and packing against a copy, on one CUDA device.

Usage: python scripts/bench_qdq.py [--tokens 262144]

Correctness first: results are compared bit for bit with the reference on a part of the input. Times
are medians of `triton.testing.do_bench`; the inputs are many times the L2 cache. Bandwidth counts
the bytes that must be read and written, and is given as a part of what `copy_` of the same tensor
reaches in the same run.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from triton.testing import do_bench

from kvq.formats import FP8_E4M3, INT8, MXFP4, MXFP8, NVFP4, NVFP4_KV
from kvq.kernels import pack, qdq, reference
from kvq.kernels.checks import new_cache
from kvq.kernels.pages import PageLayout

HEADS, HEAD_DIM = 8, 128
CHECKED = 256  # tokens
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
TARGET = 0.85


def median(call) -> float:
    return do_bench(call, warmup=25, rep=100, return_mode="median")


def show(name: str, time: float, size: int, copy: float) -> None:
    rate = size / time / 1e9
    verdict = "met" if rate >= TARGET * copy else "missed"
    print(f"{name} | {time:.4f} ms | {rate:.2f} TB/s | {rate / copy:.2f} ({verdict})", flush=True)


def slots_of(tokens: int, page_size: int) -> dict[str, torch.Tensor]:
    """One request in pages in order, and requests of many lengths in pages in any order."""
    pages = iter(torch.randperm(tokens // page_size).tolist())
    ragged: list[int] = []
    for length in torch.randint(1, 2000, (tokens // 1200,)).tolist():
        for begin in range(0, length, page_size):
            page = next(pages)
            ragged += range(page * page_size, page * page_size + min(page_size, length - begin))
    return {"in order": torch.arange(tokens), "ragged": torch.tensor(ragged)}


def pack_table(k: torch.Tensor, v: torch.Tensor, amax: torch.Tensor, copy: float) -> None:
    for name, fmt in (("fp8_e4m3", FP8_E4M3), ("nvfp4", NVFP4_KV)):
        for page_size in (16, 128):
            layout = PageLayout(name, page_size, HEADS, HEAD_DIM)
            scale = amax / fmt.amax(1)
            options = {"layout": layout, "k_scale": scale, "v_scale": scale}
            for order, slots in slots_of(len(k), page_size).items():
                slots = slots.cuda()
                caches, expected = (new_cache(layout, len(k) // page_size, "cuda") for _ in "12")
                few = (k[:CHECKED], v[:CHECKED])
                pack.append_kv(*few, *caches, slots[:CHECKED], **options)
                reference.append_kv(*few, *expected, slots[:CHECKED], **options)
                pairs = zip(caches, expected, strict=True)
                assert all(torch.equal(a, b) for a, b in pairs), name
                given = (k[: len(slots)], v[: len(slots)])
                time = median(lambda g=given, c=caches, s=slots, o=options: pack.append_kv(
                    *g, *c, s, **o))  # fmt: skip
                row = 2 * HEADS * HEAD_DIM * k.element_size() + layout.bytes_per_token
                case = f"pack {name} page {page_size} {order} {k.dtype}"
                show(case, time, len(slots) * row, copy)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=262144)
    args = parser.parse_args()
    shape = (args.tokens, HEADS, HEAD_DIM)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {shape}")
    for dtype in DTYPES:
        x = torch.randn(shape, device="cuda").to(dtype)
        out = torch.empty_like(x)
        size = 2 * x.numel() * x.element_size()
        copy = size / median(lambda x=x, out=out: out.copy_(x)) / 1e9
        print(f"copy {dtype} | {copy:.2f} TB/s")
        per_head = x.float().abs().amax((0, 2))[:, None]
        for fmt in (FP8_E4M3, INT8, NVFP4, MXFP8, MXFP4):
            scales = {"": None}
            if fmt.scale_divisor is not None:
                scales = {"per head": per_head / fmt.scale_divisor,
                          "per tensor": per_head.max() / fmt.scale_divisor}  # fmt: skip
            for name, scale in scales.items():
                qdq.quantize_dequantize(x, fmt, scale=scale, out=out)
                part = reference.quantize_dequantize(
                    x[:CHECKED].cpu(), fmt, scale=None if scale is None else scale.cpu()
                )
                assert torch.equal(out[:CHECKED].cpu(), part), fmt.name
                time = median(lambda x=x, f=fmt, s=scale, out=out: qdq.quantize_dequantize(
                    x, f, scale=s, out=out))  # fmt: skip
                show(f"qdq {fmt.name} {name} {dtype}", time, size, copy)
        if dtype == torch.float32:
            continue
        pack_table(x, torch.randn_like(x), per_head[:, 0], copy)


if __name__ == "__main__":
    main()
