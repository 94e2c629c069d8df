"""Time and memory of a streamed calibration beside a whole one.

Usage: python scripts/bench_streaming.py [--layers 16] [--hidden 1024] [--experts 0] [--runs 5]
                                         [--sequences 8] [--seq-len 256] [--device cpu]
       python scripts/bench_streaming.py --shape llama-8b --sequences 4 --seq-len 128
       python scripts/bench_streaming.py --shape llama-8b --device cuda --gpu-memory 4
       python scripts/bench_streaming.py --growth     # memory at 64, 512 and 4096 sequences

A checkpoint of random bfloat16 weights is made in a temporary folder (`--folder`: there, unless it
holds one of these sizes). Each run is a process of its own, the sides alternating, the checkpoint
dropped from the page cache before:

  read      the layers' bytes, in order, with nothing else to do
  compute   the whole model in memory: its forward passes alone, after a first one
  streamed  all that streaming does from the first weight on: reading and forward passes

Correctness comes first: streamed and whole maxima must be the same bytes. Memory is the largest
anonymous memory of the process, Python and torch included, and CUDA's own count; the bound is two
layers, what the budget keeps of hidden states, and 1 GiB.
"""

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

MIB, GIB = 1 << 20, 1 << 30
LLAMA_8B = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256,
    "max_position_embeddings": 131072,
}  # fmt: skip


def model_config(args: argparse.Namespace):
    import transformers

    sizes = LLAMA_8B if args.shape == "llama-8b" else {
        "hidden_size": args.hidden, "intermediate_size": 4 * args.hidden,
        "num_hidden_layers": args.layers, "num_attention_heads": max(1, args.hidden // 64),
        "num_key_value_heads": max(1, args.hidden // 256), "vocab_size": 32000,
        "max_position_embeddings": 8192,
    }  # fmt: skip
    if args.experts:
        sizes = {**sizes, "num_local_experts": args.experts, "intermediate_size": args.hidden}
    name = "MixtralConfig" if args.experts else "LlamaConfig"
    return getattr(transformers, name)(**sizes, dtype="bfloat16")


def make(folder: Path, args: argparse.Namespace) -> None:
    """Write a checkpoint, one layer in memory at a time."""
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers.core_model_loading import revert_weight_conversion

    config = model_config(args)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    shapes = {n: t.shape for n, t in revert_weight_conversion(model, model.state_dict()).items()}
    random = torch.randn((1 << 24) + 1, generator=torch.Generator().manual_seed(0)).bfloat16() / 50
    files: dict[str, list[str]] = {}
    for name in shapes:
        layer = re.search(r"layers\.(\d+)\.", name)
        file = f"layer-{layer[1]}.safetensors" if layer else f"{name}.safetensors"
        files.setdefault(file, []).append(name)
    number = 0
    for file, names in files.items():
        tensors = {}
        for name in names:
            number += 1  # of the same random numbers, each tensor takes others first
            count = shapes[name].numel()
            values = random.roll(number * 7919).repeat(-(-count // len(random)))[:count]
            tensors[name] = (values + 1 if "norm" in name else values).reshape(shapes[name])
        save_file(tensors, folder / file, {"format": "pt"})
    index = {name: file for file, names in files.items() for name in names}
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": index})
    )


def check(folder: Path, args: argparse.Namespace) -> None:
    """Exit unless a folder holds the checkpoint that `make` writes, and all of it."""
    if not (folder / "model.safetensors.index.json").exists():
        sys.exit(f"{folder} has a config.json, but no index: remove it")
    from transformers import AutoConfig

    found, wanted = AutoConfig.from_pretrained(folder).to_dict(), model_config(args).to_dict()
    saved = {"architectures", "transformers_version", "_name_or_path"}  # what saving adds
    for key, value in wanted.items():
        if key not in saved and found.get(key) != value:
            sys.exit(
                f"{folder} holds another model: {key} is {found.get(key)}, not {value}; give "
                "another --folder, or its sizes"
            )


def drop_from_cache(folder: Path) -> None:
    os.sync()
    for path in folder.glob("*.safetensors"):
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Peak(threading.Thread):
    """Watches the anonymous memory of this process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.before = self.most = self.now()
        self.start()

    @staticmethod
    def now() -> int:
        """Return the anonymous memory of this process in bytes."""
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

    def run(self) -> None:
        """Keep the largest."""
        while True:
            self.most = max(self.most, self.now())
            time.sleep(0.002)


def setup(args: argparse.Namespace):
    import numpy as np
    import torch

    from kvq.calibration.amax import Observer
    from kvq.calibration.batches import Sequence, plan_batches
    from kvq.checkpoint import open_checkpoint
    from kvq.geometry import read_geometry

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    view = open_checkpoint(args.model)
    if args.gpu_memory:
        total = torch.cuda.get_device_properties(args.device).total_memory
        fraction = args.gpu_memory * GIB / total if args.side == "streamed" else 1.0
        index = torch.device(args.device).index or 0
        torch.cuda.set_per_process_memory_fraction(fraction, index)
    generator = np.random.default_rng(0)
    vocab = 128 if args.growth else view.config["vocab_size"]
    sequences = [
        Sequence(generator.integers(0, vocab, args.seq_len)) for _ in range(args.sequences)
    ]
    layers = read_geometry(view.config, view.tensors).layers
    paths = [layer.attention for layer in layers]
    observer = Observer(layers, queries=False)
    return view, sequences, plan_batches(sequences, args.batch_size), paths, observer


def digest(observer) -> str:
    import hashlib

    values = b"".join(amax.numpy().tobytes() for _, amax in sorted(observer.results().items()))
    return hashlib.sha256(values).hexdigest()


def streamed(args: argparse.Namespace) -> dict:
    from kvq.calibration.streaming.hollow import load_hollow
    from kvq.calibration.streaming.loop import Position, Stream

    view, sequences, plan, paths, observer = setup(args)
    peak = Peak()
    hollow = load_hollow(
        view, device=args.device, dtype="auto", attentions=paths, trust_remote_code=False
    )
    stream = Stream(hollow, paths, observer, sequences, plan)
    in_files = stream.activation_bytes > args.budget
    activations = stream.activations(Path(args.work), in_files=in_files)
    start = time.perf_counter()
    stream.run(activations, Position())
    found = digest(observer)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "memory": peak.most, "before": peak.before, "digest": found,
            "layer": stream.largest_layer_bytes, "in_files": in_files,
            "activations": stream.activation_bytes, "cuda": cuda_peak(args)}  # fmt: skip


def compute(args: argparse.Namespace) -> dict:
    from kvq.calibration.model import load_model
    from kvq.calibration.modules import attention_modules
    from kvq.calibration.run import run_batches

    view, sequences, plan, paths, observer = setup(args)
    peak = Peak()
    loaded = load_model(
        args.model, dict(view.config), device=args.device, dtype="auto", trust_remote_code=False
    )
    modules = attention_modules(loaded.body, paths)
    run_batches(loaded, modules, type(observer)(list(observer.layers.values()), queries=False),
                sequences, plan[:1])  # fmt: skip
    start = time.perf_counter()
    run_batches(loaded, modules, observer, sequences, plan)
    found = digest(observer)
    return {"seconds": time.perf_counter() - start, "memory": peak.most, "digest": found,
            "cuda": cuda_peak(args)}  # fmt: skip


def read(args: argparse.Namespace) -> dict:
    import torch

    from kvq.calibration.streaming.files import PAGE
    from kvq.calibration.streaming.stored import Memory, Reader
    from kvq.checkpoint import open_checkpoint

    view = open_checkpoint(args.model)
    infos = [info for name, info in sorted(view.tensors.items()) if ".layers." in name]
    room = Memory().take(max(info.end - info.start for info in infos) + PAGE).zero_()
    reader = Reader(torch.device("cpu"))
    start = time.perf_counter()
    for info in infos:
        place = room[info.start % PAGE :][: info.end - info.start]
        reader.read([(info, place.view(torch.bfloat16))])
    return {"seconds": time.perf_counter() - start}


def cuda_peak(args: argparse.Namespace) -> int:
    import torch

    return torch.cuda.max_memory_allocated() if args.device.startswith("cuda") else 0


def side(name: str, folder: Path, args: argparse.Namespace, **changes: object) -> dict:
    drop_from_cache(folder)
    options = {**vars(args), **changes, "side": name, "model": str(folder)}
    with tempfile.TemporaryDirectory(dir=folder.parent) as work:
        options["work"] = work
        command = [sys.executable, __file__, "--as-json", json.dumps(options)]
        return json.loads(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def compare(folder: Path, args: argparse.Namespace) -> None:
    ratios = []
    for run in range(args.runs):
        names = ["read", "compute", "streamed"]
        found = {name: side(name, folder, args) for name in (names if run % 2 else names[::-1])}
        if found["compute"]["digest"] != found["streamed"]["digest"]:
            sys.exit("streamed maxima differ from whole ones; not timing")
        seconds = {name: found[name]["seconds"] for name in names}
        ratios.append(seconds["streamed"] / max(seconds["read"], seconds["compute"]))
        one = found["streamed"]
        bound = 2 * one["layer"] + (0 if one["in_files"] else one["activations"]) + GIB
        print(
            f"read {seconds['read']:.2f} s, compute {seconds['compute']:.2f} s, streamed "
            f"{seconds['streamed']:.2f} s: {ratios[-1]:.2f} x the larger; memory "
            f"{one['memory'] / MIB:.0f} of {bound / MIB:.0f} MiB ({one['before'] / MIB:.0f} before "
            f"the model, {one['layer'] / MIB:.0f} a layer)",
            flush=True,
        )
        if one["cuda"]:
            whole = found["compute"]["cuda"]
            print(f"  CUDA {one['cuda'] / MIB:.0f} MiB, the whole model {whole / MIB:.0f} MiB")
    print(f"time: median {statistics.median(ratios):.2f} x, {min(ratios):.2f} to "
          f"{max(ratios):.2f}, {len(ratios)} runs")  # fmt: skip


def growth(folder: Path, args: argparse.Namespace) -> None:
    for count in (64, 512, 4096):
        for budget in (args.budget, 1 << 40):
            one = side("streamed", folder, args, sequences=count, budget=budget)
            place = "files" if one["in_files"] else "memory"
            print(
                f"{count} sequences, hidden states of {one['activations'] / MIB:.1f} MiB in "
                f"{place}: {(one['memory'] - one['before']) / MIB:.1f} MiB", flush=True,
            )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=["llama-8b"])
    parser.add_argument("--folder", type=Path, help="keep the checkpoint here")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--experts", type=int, default=0)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=256)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--budget", type=int, default=MIB)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gpu-memory", type=float, help="GiB that streaming may use")
    parser.add_argument("--growth", action="store_true")
    parser.add_argument("--as-json")
    args = parser.parse_args()
    if args.as_json:
        args = argparse.Namespace(**json.loads(args.as_json))
        args.model = Path(args.model)
        sides = {"read": read, "compute": compute, "streamed": streamed}
        print(json.dumps(sides[args.side](args)))
        return
    if args.growth:
        args.hidden, args.layers, args.seq_len = 64, 2, 64
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = args.folder or Path(folder) / "model"
        args.folder = None
        if (checkpoint / "config.json").exists():
            check(checkpoint, args)
        else:
            make(checkpoint, args)
        (growth if args.growth else compare)(checkpoint, args)


if __name__ == "__main__":
    main()
