"""Decode attention over packed pages against cuDNN's bfloat16 attention, on one CUDA device.

Usage: python scripts/bench_decode.py [--splits | --ragged | --accuracy | --pages] [--formats F ...]
                                       [--json F]

Correctness first: every variant is compared with float64 attention over the same dequantized cache
before it is timed. Times are medians of `triton.testing.do_bench` in milliseconds. `graph` replays
a CUDA graph of several calls, each on other inputs, so that together they are several times the L2
cache, and divides; `call` is one call from Python after do_bench has overwritten the cache. Ratios
are to cuDNN, timed in the same way in the same run, by `graph` unless marked. `split` is `graph`
with a number of splits given, which suits requests of equal length as these are.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.nn.functional as F  # noqa: N812
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench

from kvq.kernels import reference
from kvq.kernels.checks import new_cache
from kvq.kernels.decode import decode_attention
from kvq.kernels.launch import multiprocessors
from kvq.kernels.pack import append_kv
from kvq.kernels.pages import PageLayout
from kvq.kernels.plans import plan
from kvq.kernels.splits import choose_splits

SHAPES = {  # batch, query heads, KV heads, tokens; head_dim 128
    "A": (32, 32, 8, 8192),
    "B": (8, 64, 8, 32768),
    "C": (1, 32, 8, 32768),
}
HEAD_DIM = 128
SPLITS = (1, 2, 4, 8, 16, 32)
VARIANTS = {"bfloat16": ("default",), "nvfp4": ("exact",)}  # where all are the same
L2_TIMES = 4
BOUNDS = {"fast": 4e-2, "default": 1e-2, "exact": 3e-3}


def median(call: Callable[[], object], rep: int = 100) -> float:
    return do_bench(call, warmup=25, rep=rep, return_mode="median")


class Inputs:
    """One set of queries and caches, 16-bit for cuDNN and packed."""

    def __init__(self, shape: tuple[int, int, int, int], layout: PageLayout, peak: float = 1.0):
        batch, heads, kv_heads, tokens = shape
        page = layout.page_size
        pages = -(-tokens // page)  # of a request
        k, v = torch.randn(2, batch * tokens, kv_heads, HEAD_DIM, device="cuda").bfloat16()
        self.q = (torch.randn(batch, heads, HEAD_DIM, device="cuda") * peak).bfloat16()
        order = torch.randperm(batch * pages, device="cuda")
        self.table = order.int().view(batch, pages)
        slots = order[:, None] * page + torch.arange(page, device="cuda")
        slots = slots.view(batch, -1)[:, :tokens].flatten()
        self.scales = {}
        if layout.kv_format is not None:
            k_scale, v_scale = (x.abs().amax().float() / layout.kv_format.amax(1) for x in (k, v))
            self.scales = {"k_scale": k_scale, "v_scale": v_scale}
        self.caches = new_cache(layout, batch * pages, "cuda")
        append_kv(k, v, *self.caches, slots, layout=layout, **self.scales)
        self.seq_lens = torch.full((batch,), tokens, dtype=torch.int32, device="cuda")
        self.layout, self.tokens = layout, tokens
        self.dense = tuple(
            x.view(batch, tokens, kv_heads, HEAD_DIM).transpose(1, 2).contiguous() for x in (k, v)
        )

    def cut(self, lengths: list[int]) -> None:
        """Give requests other lengths; a page that ends in one begins in the next, too."""
        page, pages = self.layout.page_size, self.table.flatten()
        starts = [sum(lengths[:i]) // page for i in range(len(lengths))]
        counts = [-(-length // page) for length in lengths]
        self.table = torch.zeros(len(lengths), max(counts), dtype=torch.int32, device="cuda")
        for row, start, count in zip(self.table, starts, counts, strict=True):
            row[:count] = pages[min(start, len(pages) - count) :][:count]
        self.seq_lens = torch.tensor(lengths, dtype=torch.int32, device="cuda")
        self.tokens = max(lengths)

    def decode(self, variant: str, splits: int | None = None) -> torch.Tensor:
        """Attend over the pages."""
        return decode_attention(
            self.q, *self.caches, self.table, self.seq_lens, layout=self.layout,
            variant=variant, num_kv_splits=splits, max_seq_len=self.tokens, **self.scales,
        )  # fmt: skip

    def cudnn(self) -> torch.Tensor:
        """Attend over the 16-bit tensors."""
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(self.q[:, :, None], *self.dense, enable_gqa=True)

    def expected(self) -> torch.Tensor:
        """Float64 attention of the first request."""
        return reference.decode_attention(
            self.q[:1], *self.caches, self.table[:1], self.seq_lens[:1], layout=self.layout,
            **self.scales,
        )[0]  # fmt: skip


def sets_of(shape: tuple[int, int, int, int], layout: PageLayout) -> list[Inputs]:
    """Enough inputs that the packed caches are several times the L2 cache."""
    size = shape[0] * shape[3] * layout.bytes_per_token
    l2 = torch.cuda.get_device_properties("cuda").L2_cache_size
    return [Inputs(shape, layout) for _ in range(max(2, -(-L2_TIMES * l2 // size)))]


def rotated(sets: list[Inputs], call: Callable[[Inputs], object]) -> float:
    """Median of one call in a graph of one on each input."""
    for inputs in sets[:2]:
        call(inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = [call(inputs) for inputs in sets]
    time = median(graph.replay) / len(sets)
    del kept
    return time


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> tuple[float, float, float, float]:
    """Relative L2, largest absolute, largest relative, and cosine."""
    actual = actual.double()
    difference = (actual - expected).abs()
    cosine = F.cosine_similarity(actual.flatten(), expected.flatten(), dim=0)
    relative = (difference / expected.abs().clamp(min=1e-12)).max()
    return (float(difference.norm() / expected.norm()), float(difference.max()), float(relative),
            float(cosine))  # fmt: skip


def variants_of(name: str) -> tuple[str, ...]:
    return VARIANTS.get(name, tuple(BOUNDS))


def equal_splits(shape: tuple[int, int, int, int], layout: PageLayout, variant: str) -> int:
    """The number of splits that is chosen for requests of equal length."""
    batch, heads, kv_heads, tokens = shape
    chosen = plan(layout, heads // kv_heads, variant)
    programs = batch * chosen.programs(heads, kv_heads)
    room = chosen.room(multiprocessors(torch.device("cuda", 0)))
    return choose_splits(programs, -(-tokens // chosen.tile), room)


def targets(names: list[str], rows: list[dict]) -> None:
    print("shape format variant | call ms ratio | graph ms ratio | splits, ms ratio | read TB/s | "
          "error rel. L2")  # fmt: skip
    for shape_name, shape in SHAPES.items():
        for name in names:
            layout = PageLayout(name, 128, shape[2], HEAD_DIM)
            sets = sets_of(shape, layout)
            dense = (median(sets[0].cudnn), rotated(sets, Inputs.cudnn))
            print(f"{shape_name} cuDNN bfloat16 | {dense[0]:.4f} | {dense[1]:.4f}")
            for variant in variants_of(name):
                error = error_of(sets[0].decode(variant)[0], sets[0].expected())[0]
                assert error <= BOUNDS[variant], (name, variant, error)
                splits = equal_splits(shape, layout, variant)
                times = (median(lambda s=sets[0], v=variant: s.decode(v)),
                         rotated(sets, lambda s, v=variant: s.decode(v)),
                         rotated(sets, lambda s, v=variant, n=splits: s.decode(v, n)))  # fmt: skip
                read = shape[0] * shape[3] * layout.bytes_per_token
                rows.append({"shape": shape_name, "format": name, "variant": variant,
                             "call": times[0], "graph": times[1], "splits": splits,
                             "split": times[2], "cudnn": dense, "bytes": read,
                             "error": error})  # fmt: skip
                print(f"{shape_name} {name} {variant} | {times[0]:.4f} {times[0] / dense[0]:.3f} | "
                      f"{times[1]:.4f} {times[1] / dense[1]:.3f} | {splits}, {times[2]:.4f} "
                      f"{times[2] / dense[1]:.3f} | {read / min(times[1:]) / 1e9:.2f} TB/s"
                      f" | {error:.2e}", flush=True)  # fmt: skip
            del sets
            torch.cuda.empty_cache()


def splits_table(names: list[str], rows: list[dict]) -> None:
    head = " ".join(f"s={s}" for s in SPLITS)
    print(f"format batch heads kv_len | {head} auto best | cuDNN/best s=1/best auto/best")
    for name in names:
        for batch, heads, tokens in ((1, 32, 2048), (1, 32, 8192), (1, 32, 32768), (8, 32, 2048),
                                     (8, 32, 32768), (32, 32, 8192), (8, 64, 32768)):  # fmt: skip
            shape = (batch, heads, 8, tokens)
            sets = sets_of(shape, PageLayout(name, 128, 8, HEAD_DIM))
            variant = variants_of(name)[-1]
            times = [rotated(sets, lambda s, n=n, v=variant: s.decode(v, n))
                     for n in (*SPLITS, None)]  # fmt: skip
            best, dense = min(times[:-1]), rotated(sets, Inputs.cudnn)
            rows.append({"format": name, "shape": shape, "times": times, "cudnn": dense})
            print(f"{name} {batch} {heads}/8 {tokens} | "
                  f"{' '.join(f'{t:.4f}' for t in times)} {best:.4f} | {dense / best:.2f} "
                  f"{times[0] / best:.2f} {times[-1] / best:.2f}", flush=True)  # fmt: skip
            del sets
            torch.cuda.empty_cache()


def lengths_of(kind: str, batch: int, tokens: int) -> list[int]:
    """Lengths of requests that have `batch * tokens` tokens together."""
    if kind == "equal":
        return [tokens] * batch
    if kind == "one long":  # half of all tokens
        rest = batch * tokens // 2 // (batch - 1)
        return [batch * tokens - rest * (batch - 1)] + [rest] * (batch - 1)
    cuts = torch.rand(batch) + 1e-3
    lengths = (cuts * (batch * tokens / cuts.sum())).int().tolist()
    return [*lengths[:-1], batch * tokens - sum(lengths[:-1])]


def ragged(names: list[str], rows: list[dict]) -> None:
    """Batches of as many tokens, whose lengths differ."""
    head = " ".join(f"s={s}" for s in SPLITS)
    print(f"format batch tokens lengths (longest) | {head} auto | best/auto auto/auto of equal")
    for name in names:
        for batch, tokens in ((32, 8192), (64, 4096), (32, 1024)):
            layout = PageLayout(name, 128, 8, HEAD_DIM)
            equal = 0.0
            for kind in ("equal", "random", "one long"):
                sets = sets_of((batch, 32, 8, tokens), layout)
                for inputs in sets:
                    inputs.cut(lengths_of(kind, batch, tokens))
                variant = variants_of(name)[-1]
                outputs = [sets[0].decode(variant, n).double() for n in (1, None)]
                error = float((outputs[1] - outputs[0]).norm() / outputs[0].norm())
                assert error <= BOUNDS[variant], (name, kind, error)
                times = [rotated(sets, lambda s, n=n, v=variant: s.decode(v, n))
                         for n in (*SPLITS, None)]  # fmt: skip
                equal = equal or times[-1]
                rows.append({"format": name, "batch": batch, "tokens": tokens, "lengths": kind,
                             "times": times})  # fmt: skip
                print(f"{name} {batch} {tokens} {kind} ({sets[0].tokens}) | "
                      f"{' '.join(f'{t:.4f}' for t in times)} | {min(times[:-1]) / times[-1]:.2f} "
                      f"{times[-1] / equal:.2f}", flush=True)  # fmt: skip
                del sets
                torch.cuda.empty_cache()


def accuracy(names: list[str], rows: list[dict]) -> None:
    print("format variant heads kv_len data | rel. L2, max abs, max rel, cosine")
    for name in names:
        for heads, kv_heads in ((32, 8), (16, 16)):
            for tokens in (1024, 8192, 32768):
                for peak in (1.0, 8.0):
                    layout = PageLayout(name, 128, kv_heads, HEAD_DIM)
                    inputs = Inputs((1, heads, kv_heads, tokens), layout, peak)
                    expected = inputs.expected()
                    for variant in variants_of(name):
                        errors = error_of(inputs.decode(variant)[0], expected)
                        rows.append({"format": name, "variant": variant, "tokens": tokens,
                                     "heads": (heads, kv_heads), "peak": peak,
                                     "errors": errors})  # fmt: skip
                        print(f"{name} {variant} {heads}/{kv_heads} {tokens} "
                              f"{'random' if peak == 1 else 'peaked'} | {errors[0]:.2e} "
                              f"{errors[1]:.2e} {errors[2]:.2e} {errors[3]:.8f}")  # fmt: skip


def pages(names: list[str], rows: list[dict]) -> None:
    print("format page_size | graph ms of shape A")
    for name in names:
        for page_size in (16, 32, 48, 64, 80, 128, 256):
            sets = sets_of(SHAPES["A"], PageLayout(name, page_size, 8, HEAD_DIM))
            variant = variants_of(name)[-1]
            error = error_of(sets[0].decode(variant)[0], sets[0].expected())[0]
            assert error <= BOUNDS[variant], (name, page_size, error)
            time = rotated(sets, lambda s, v=variant: s.decode(v))
            rows.append({"format": name, "page_size": page_size, "graph": time})
            print(f"{name} {page_size} | {time:.4f}", flush=True)
            del sets
            torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser()
    table = parser.add_mutually_exclusive_group()
    for name in ("splits", "ragged", "accuracy", "pages"):
        table.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--formats", nargs="+", default=["bfloat16", "fp8_e4m3", "nvfp4"])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.cuda.get_device_properties("cuda")
    print(f"{device.name}, {device.multi_processor_count} multiprocessors, torch "
          f"{torch.__version__}, CUDA {torch.version.cuda}")  # fmt: skip
    rows: list[dict] = []
    chosen = next((f for f in (splits_table, ragged, accuracy, pages)
                   if getattr(args, f.__name__.removesuffix("_table"))), targets)  # fmt: skip
    chosen(args.formats, rows)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
