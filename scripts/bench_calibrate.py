"""Time kvq's calibration loop against the plain forward passes it needs.

Usage: python scripts/bench_calibrate.py MODEL [--pairs 21] [--sequences 8] [--seq-len 512]
       python scripts/bench_calibrate.py --shape llama-8b --device cuda [--compile] [--ranks 2]

Each side is a process of its own that waits, idle, for its turn; the sides alternate: same tokens,
same batches, same attention implementation, threads and dtype; imports, loading and tokenization
are not timed. The plain side is the base model's forward without language head. Correctness comes
first: kvq's maxima must equal those of a plain recorder bit for bit.

With MODEL, turns are short and many, so that what else the machine does meets both sides. ModelOpt
and llm-compressor are timed beside kvq where they are installed, in a fresh process each time,
since they change the model. With --shape, weights are random and batches are whole (8 x 2048 tokens
by default). --compile adds kvq with compiled layers, --ranks kvq in several processes, one a
device, against kvq in one.
"""

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHAPES = {
    "llama-8b": {
        "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
        "max_position_embeddings": 131072,
    },
    "tiny": {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 512,
        "max_position_embeddings": 4096,
    },
}  # fmt: skip
READY = "ready"
PEERS = {"modelopt": "modelopt", "llm-compressor": "llmcompressor"}


def load(args: argparse.Namespace, device):
    """Return the model as kvq loads it, and the layers of its geometry."""
    import torch

    from kvq.calibration.model import LoadedModel, load_model
    from kvq.checkpoint import open_checkpoint
    from kvq.geometry import read_geometry
    from kvq.pipeline.live import live_geometry

    if args.model:
        view = open_checkpoint(args.model)
        config = dict(view.config)
        loaded = load_model(
            args.model, config, device=str(device), dtype="auto", trust_remote_code=False
        )
        return loaded, read_geometry(view.config, view.tensors).layers
    import transformers

    torch.manual_seed(0)
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(
            transformers.LlamaConfig(**SHAPES[args.shape]), dtype=torch.bfloat16
        ).eval()
    loaded = LoadedModel(model, model.base_model, False, device, "bfloat16", "sdpa")
    return loaded, live_geometry(model).layers


class Bench:
    """A model, its data, and what each side does with them."""

    def __init__(self, args: argparse.Namespace, device, ranks) -> None:
        import numpy as np

        from kvq.calibration.batches import Sequence
        from kvq.calibration.modules import attention_modules

        self.args, self.device, self.ranks = args, device, ranks
        self.loaded, self.layers = load(args, device)
        self.modules = attention_modules(
            self.loaded.body, [layer.attention for layer in self.layers]
        )
        vocab = self.loaded.model.config.vocab_size
        generator = np.random.default_rng(0)
        self.sequences = [
            Sequence(generator.integers(0, vocab, args.seq_len)) for _ in range(args.sequences)
        ]
        starts = range(0, args.sequences, args.batch_size)
        self.plan = [range(i, min(i + args.batch_size, args.sequences)) for i in starts]

    def inputs(self, plan) -> list:
        """Return token ids on the device, as kvq runs them: on the CPU one by one."""
        from kvq.calibration.run import batch_inputs, runs

        return [batch_inputs([self.sequences[i] for i in run], self.device)["input_ids"]
                for _, run in runs(plan, self.device)]  # fmt: skip

    def kvq(self, plan, *, compiled: bool = False) -> dict:
        """Return the maxima that kvq finds."""
        from kvq.calibration.amax import Observer
        from kvq.calibration.distributed import merge
        from kvq.calibration.run import run_batches

        observer = Observer(self.layers, queries=False)
        run_batches(
            self.loaded, self.modules, observer, self.sequences, self.ranks.own(plan),
            numbers=self.ranks.own(range(len(plan))), compile_layers=compiled,
        )  # fmt: skip
        merge(self.ranks, observer, self.device)
        return observer.results()

    def plain(self, inputs) -> None:
        """Run the base model's forward."""
        import torch

        with torch.inference_mode():
            for ids in inputs:
                self.loaded.body(input_ids=ids, use_cache=False)

    def modelopt(self, inputs) -> None:
        """Calibrate with ModelOpt."""
        import modelopt.torch.quantization as mtq

        def loop(model) -> None:
            for ids in inputs:
                model(ids)

        only_cache = [{"quantizer_name": "*", "enable": False}, *mtq.FP8_KV_CFG["quant_cfg"]]
        config = {"quant_cfg": only_cache, "algorithm": "max"}
        mtq.quantize(self.loaded.model, config, forward_loop=loop)

    def llm_compressor(self, inputs) -> None:
        """Calibrate with llm-compressor."""
        import datasets
        from llmcompressor import oneshot
        from llmcompressor.modifiers.quantization import QuantizationModifier

        rows = [{"input_ids": row.tolist()} for ids in inputs for row in ids]
        scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False,
                  "symmetric": True}  # fmt: skip
        oneshot(
            model=self.loaded.model, dataset=datasets.Dataset.from_list(rows),
            recipe=QuantizationModifier(kv_cache_scheme=scheme),
            num_calibration_samples=len(rows), max_seq_length=self.args.seq_len,
        )  # fmt: skip

    def check(self, *, compiled: bool) -> str:
        """Compare kvq with a plain recorder around the attention function of a full forward."""
        import numpy as np

        sys.path.insert(0, str(ROOT))
        from tests.recorder import record_model, stacked_amax

        plan = self.plan[:1] if self.args.shape else [[0], [1]]
        recorded = record_model(self.loaded.model, self.inputs(plan), self.loaded.attention)
        expected = {key: stacked_amax(values) for key, values in recorded.items()}

        def off(plan, **how) -> float:
            found = self.kvq(plan, **how)
            return max(
                float(np.abs(found[layer.attention, f"{side}_bmm_quantizer"].numpy()
                             / expected[layer.layer_idx, side] - 1).max())
                for layer in self.layers for side in "kv"
            )  # fmt: skip

        if not compiled:
            if off(plan):
                sys.exit("kvq's maxima differ from a plain recorder's")
            return f"maxima of {len(self.layers)} layers equal a plain recorder's bit for bit"
        start = time.perf_counter()
        bound = off(plan, compiled=True)
        seconds, rounding = time.perf_counter() - start, off([[i] for i in plan[0]])
        if bound > 0.05:
            sys.exit(f"compiled maxima differ from a plain recorder's by up to {bound:.2%}")
        return (
            f"maxima within {bound:.2%} of a plain recorder's, those of uncompiled batches of one "
            f"within {rounding:.2%}; the first batch took {seconds:.1f} s"
        )

    def run(self, side: str) -> float:
        """Return the seconds that a side takes."""
        import torch

        inputs = None if side in ("kvq", "compiled", "ranks") else self.inputs(self.plan)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        if self.ranks.world > 1:
            torch.distributed.all_reduce(torch.zeros(1))  # on the CPU: all begin together
        start = time.perf_counter()
        if inputs is None:
            self.kvq(self.plan, compiled=side == "compiled")
        else:
            getattr(self, side.replace("-", "_"))(inputs)
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start


def work(args: argparse.Namespace) -> None:
    """Be one side: warm up, then print a time for every line that comes in."""
    import torch

    from kvq.calibration.distributed import connected, ranks
    from kvq.calibration.model import find_device
    from kvq.calibration.run import fixed_threads

    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever else prints does so to stderr
    ours, side = ranks(), args.side
    device = find_device(ours.device(args.device))
    threads = fixed_threads() if device.type == "cpu" else nullcontext()
    with connected(ours, device), threads:
        bench = Bench(args, device, ours)
        if side in ("kvq", "compiled"):
            print(f"{side}: {bench.check(compiled=side == 'compiled')}", file=sys.stderr)
        if side not in PEERS:
            start = time.perf_counter()
            bench.run(side)  # warm
            if ours.first:
                print(f"{side}: {time.perf_counter() - start:.1f} s for the first run",
                      file=sys.stderr)  # fmt: skip
        else:
            bench.plain(bench.inputs([[0]]))
        if ours.first:
            print(READY, file=answers)
        while True:
            line = sys.stdin.readline() if ours.first else "go"
            if ours.world > 1:
                more = torch.tensor(bool(line))
                torch.distributed.broadcast(more, 0)
                line = "go" if more else ""
            if not line:
                return
            seconds = bench.run(side)
            if ours.first:
                print(seconds, file=answers)


class Side:
    """A process that is one side."""

    def __init__(self, side: str, args: argparse.Namespace) -> None:
        start = [sys.executable]
        if side == "ranks":
            start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                      str(args.ranks)]  # fmt: skip
        command = [*start, *sys.argv, "--side", side]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def wait(self) -> None:
        """Wait until it is warm."""
        while self._line() != READY:
            pass

    def time(self) -> float:
        """Return the seconds of one run."""
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        return float(self._line())

    def _line(self) -> str:
        line = self.process.stdout.readline()
        if not line:
            sys.exit(f"a side failed: {' '.join(self.process.args)}")
        return line.strip()

    def close(self) -> None:
        """Let it end."""
        self.process.stdin.close()
        if self.process.wait():
            sys.exit(f"a side failed: {' '.join(self.process.args)}")


def compare(args: argparse.Namespace) -> None:
    """Print times and ratios of all sides."""
    sides = ["plain", "kvq", *["compiled"] * args.compile, *["ranks"] * bool(args.ranks)]
    if args.model:
        for name, package in PEERS.items():
            if importlib.util.find_spec(package):
                sides.append(name)
            else:
                print(f"{name} is not installed: not timed", flush=True)
    live = {side: Side(side, args) for side in sides if side not in PEERS}
    for one in live.values():
        one.wait()  # for all of them: what warms up disturbs what is timed
    ratios: dict[str, list[float]] = {side: [] for side in sides[1:]}
    tokens = args.sequences * args.seq_len
    for pair in range(args.pairs):
        seconds = {}
        for side in sides if pair % 2 else sides[::-1]:
            if side in live:
                seconds[side] = live[side].time()
                continue
            one = Side(side, args)
            one.wait()
            seconds[side] = one.time()
            one.close()
        for side, found in ratios.items():
            found.append(seconds[side] / seconds[base_of(side)])
        print(", ".join(f"{side} {seconds[side]:.2f} s" for side in sides), flush=True)
    for one in live.values():
        one.close()
    print(f"plain: {tokens / seconds['plain']:.0f} tokens/s in the last round")
    for side, found in ratios.items():
        print(f"{side}/{base_of(side)}: median {statistics.median(found):.3f}, {min(found):.3f} to "
              f"{max(found):.3f}, {len(found)} pairs")  # fmt: skip


def base_of(side: str) -> str:
    """Return what a side is compared with: several processes with one, all else with plain."""
    return "kvq" if side == "ranks" else "plain"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path, nargs="?")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pairs", type=int)
    parser.add_argument("--sequences", type=int)
    parser.add_argument("--seq-len", type=int)
    parser.add_argument("--batch-size", type=int)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--side")
    args = parser.parse_args()
    if (args.model is None) == (args.shape is None):
        parser.error("give either MODEL or --shape")
    if args.model and (args.compile or args.ranks):
        parser.error("--compile and --ranks need --shape")
    defaults = (5, 48, 2048, 8) if args.shape else (21, 8, 512, 1)
    for name, value in zip(("pairs", "sequences", "seq_len", "batch_size"), defaults, strict=True):
        if getattr(args, name) is None:
            setattr(args, name, value)
    (work if args.side else compare)(args)


if __name__ == "__main__":
    main()
