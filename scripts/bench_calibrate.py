"""Time kvq's calibration loop against the plain forward passes it needs.

Usage: python scripts/bench_calibrate.py MODEL [--pairs 5] [--sequences 32] [--seq-len 512]

Both sides run in processes of their own, alternating: same tokens, same batches, same attention
implementation, threads and dtype; imports, loading and tokenization are not timed. The plain side
is the base model's forward without language head. Correctness comes first: kvq's maxima must equal
those of a plain recorder bit for bit.
"""

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path


def setup(args: argparse.Namespace):
    import numpy as np

    from kvq.calibration.amax import Observer
    from kvq.calibration.batches import Sequence
    from kvq.calibration.model import load_model
    from kvq.calibration.modules import attention_modules
    from kvq.checkpoint import open_checkpoint
    from kvq.geometry import read_geometry

    view = open_checkpoint(args.model)
    loaded = load_model(
        args.model, dict(view.config), device="cpu", dtype="auto", trust_remote_code=False
    )
    vocab = view.config["vocab_size"]
    generator = np.random.default_rng(0)
    sequences = [
        Sequence(generator.integers(0, vocab, args.seq_len)) for _ in range(args.sequences)
    ]
    layers = read_geometry(view.config, view.tensors).layers
    modules = attention_modules(loaded.body, [layer.attention for layer in layers])
    observer = Observer(layers, queries=False)
    plan = [range(i, min(i + args.batch_size, args.sequences))
            for i in range(0, args.sequences, args.batch_size)]  # fmt: skip
    return loaded, modules, observer, sequences, plan


def timed(args: argparse.Namespace) -> None:
    import torch

    from kvq.calibration.run import fixed_threads, run_batches

    loaded, modules, observer, sequences, plan = setup(args)
    ids = [torch.from_numpy(sequence.token_ids.copy())[None] for sequence in sequences]
    with fixed_threads(), torch.inference_mode():
        loaded.body(input_ids=ids[0], use_cache=False)  # warm
        start = time.perf_counter()
        if args.side == "kvq":
            run_batches(loaded, modules, observer, sequences, plan)
            observer.results()
        else:
            for batch in plan:
                for i in batch:  # as kvq runs them on the CPU
                    loaded.body(input_ids=ids[i], use_cache=False)
        print(time.perf_counter() - start)


def check(args: argparse.Namespace) -> None:
    """Two sequences against a plain recorder around the attention function of a full forward."""
    import numpy as np
    import torch

    from kvq.calibration.run import fixed_threads, run_batches

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from tests.recorder import record

    loaded, modules, observer, sequences, _ = setup(args)
    with fixed_threads():
        run_batches(loaded, modules, observer, sequences[:2], [[0], [1]])
        rows = [sequence.token_ids.tolist() for sequence in sequences[:2]]
        dtype = getattr(torch, loaded.dtype)
        expected = record(args.model, rows, dtype, loaded.attention)
    results = observer.results()
    for path, layer in observer.layers.items():
        for side in "kv":
            found = results[path, f"{side}_bmm_quantizer"].numpy()
            if not np.array_equal(found, expected[layer.layer_idx, side]):
                sys.exit(f"{path} {side}: kvq differs from the plain recorder; not timing")
    print(f"correct: {len(results)} maxima equal a plain recorder's bit for bit", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--seq-len", type=int, default=512)
    parser.add_argument("--batch-size", type=int, default=1)
    parser.add_argument("--side", choices=["kvq", "plain"])
    args = parser.parse_args()
    if args.side:
        timed(args)
        return
    check(args)
    ratios = []
    for pair in range(args.pairs):
        sides = ("plain", "kvq") if pair % 2 else ("kvq", "plain")
        seconds = {side: float(subprocess.run([sys.executable, *sys.argv, "--side", side],
                                              stdout=subprocess.PIPE, check=True).stdout)
                   for side in sides}  # fmt: skip
        ratios.append(seconds["kvq"] / seconds["plain"])
        print(f"kvq {seconds['kvq']:.2f} s, plain {seconds['plain']:.2f} s, "
              f"ratio {ratios[-1]:.3f}", flush=True)  # fmt: skip
    middle = statistics.median(ratios)
    print(
        f"ratio: median {middle:.3f}, {min(ratios):.3f} to {max(ratios):.3f}, {len(ratios)} pairs"
    )


if __name__ == "__main__":
    main()
