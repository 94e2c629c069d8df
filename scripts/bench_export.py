"""Time `kvq export` onto a checkpoint of 100 GB, its memory, and the bytes that it writes.

Usage: python scripts/bench_export.py [--runs 5] [--folder PLACE]

The checkpoint has the headers, index and config of a Llama of 68 layers in 31 shards; the data
are holes in the files. First no shard holds a scale, so that all are linked; then two of them hold
old scales, and only these are written anew. What comes out is checked before anything is timed.
"""

import argparse
import json
import math
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from kvq.tensorfile import header_bytes, read_header, read_tensor
from scripts.bench_inspect import measure

SHARDS, LAYERS = 31, 68
HIDDEN, MLP, HEADS, KV_HEADS, HEAD, VOCAB = 8192, 22528, 64, 8, 128, 128256
SECONDS, MEGABYTES, WRITTEN = 2.0, 300, 10
BYTES = {"BF16": 2, "F32": 4}
PREFIX = "model.layers.{}.self_attn"
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": MLP, "head_dim": HEAD,
    "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 131072, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
OLD_SHARDS = (3, 17)

Shapes = dict[str, tuple[str, tuple[int, ...]]]


def shapes() -> Shapes:
    """Return dtype and shape of every weight, in the order of the layers."""
    found: Shapes = {"model.embed_tokens.weight": ("BF16", (VOCAB, HIDDEN))}
    for number in range(LAYERS):
        path, query, key = f"model.layers.{number}", HEADS * HEAD, KV_HEADS * HEAD
        for name, shape in {
            "input_layernorm": (HIDDEN,), "self_attn.q_proj": (query, HIDDEN),
            "self_attn.k_proj": (key, HIDDEN), "self_attn.v_proj": (key, HIDDEN),
            "self_attn.o_proj": (HIDDEN, query), "post_attention_layernorm": (HIDDEN,),
            "mlp.gate_proj": (MLP, HIDDEN), "mlp.up_proj": (MLP, HIDDEN),
            "mlp.down_proj": (HIDDEN, MLP),
        }.items():  # fmt: skip
            found[f"{path}.{name}.weight"] = ("BF16", shape)
    return found | {"model.norm.weight": ("BF16", (HIDDEN,)),
                    "lm_head.weight": ("BF16", (VOCAB, HIDDEN))}  # fmt: skip


def write(folder: Path, old: Mapping[int, Shapes]) -> tuple[int, dict[str, str]]:
    """Write the checkpoint; `old` are scales of 2.0 by shard. Returns bytes and the weight map."""
    folder.mkdir()
    weights = list(shapes().items())
    per_shard = math.ceil(len(weights) / SHARDS)
    weight_map, total = {}, 0
    for i in range(SHARDS):
        name = f"model-{i + 1:05}-of-{SHARDS:05}.safetensors"
        part = dict(weights[i * per_shard : (i + 1) * per_shard]) | old.get(i, {})
        entries, position = {}, 0
        for tensor, (dtype, shape) in part.items():
            end = position + BYTES[dtype] * math.prod(shape)
            entries[tensor] = {"dtype": dtype, "shape": list(shape),
                               "data_offsets": [position, end]}  # fmt: skip
            position, weight_map[tensor] = end, name
        header = header_bytes(entries, {"format": "pt"})
        with (folder / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + position)
            for tensor in old.get(i, {}):
                file.seek(len(header) + entries[tensor]["data_offsets"][0])
                file.write(np.full(1, 2.0, "<f4").tobytes())
        total += position
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    return total, weight_map


def scales() -> dict[str, float]:
    """Return a value for every scale, all of them different."""
    return {
        f"{PREFIX.format(layer)}.{side}_scale": 0.01 + layer / 1024 + (side == "v") / 4096
        for layer in range(LAYERS) for side in "kv"
    }  # fmt: skip


def new_bytes(folder: Path) -> int:
    """Return how much of a folder is new: the blocks of files that no other folder shares."""
    stats = [path.stat() for path in folder.iterdir()]
    return sum(min(stat.st_size, stat.st_blocks * 512) for stat in stats if stat.st_nlink == 1)


def check(source: Path, out: Path, old: Mapping[int, Shapes]) -> list[str]:
    """Exit unless scales are those given and only shards with old scales are new."""
    rewritten = []
    for i in range(SHARDS):
        name = f"model-{i + 1:05}-of-{{:05}}.safetensors"
        before, after = source / name.format(SHARDS), out / name.format(SHARDS + 1)
        if not os.path.samefile(before, after):
            rewritten.append(after.name)
        kept = read_header(before).tensors.keys() - old.get(i, {}).keys()
        assert read_header(after).tensors.keys() == kept, after
    assert len(rewritten) == len(old), rewritten
    added = read_header(out / f"model-{SHARDS + 1:05}-of-{SHARDS + 1:05}.safetensors").tensors
    found = {name: float(read_tensor(info)[0]) for name, info in added.items()}
    assert found == {name: float(np.float32(value)) for name, value in scales().items()}
    return rewritten


def bench(source: Path, place: Path, runs: int, old: Mapping[int, Shapes]) -> None:
    out = place / "out"
    argv = ["-m", "kvq", "export", str(source), "--scales", str(place / "scales.json"),
            "--link", "hard", "--json", "-o", str(out)]  # fmt: skip
    found = []
    for run in range(runs + 1):  # the first one warms up
        shutil.rmtree(out, ignore_errors=True)
        measured = measure(argv)
        rewritten = check(source, out, old)
        if run:
            found.append((*measured, new_bytes(out) / 1e6))
    seconds, memory, written = (statistics.median(values) for values in zip(*found, strict=True))
    size = sum((source / name.replace(f"{SHARDS + 1:05}.s", f"{SHARDS:05}.s")).stat().st_size
               for name in rewritten) / 1e6  # fmt: skip
    met = memory <= MEGABYTES and (bool(old) or (seconds <= SECONDS and written <= WRITTEN))
    print(
        f"{len(old)} shards with old scales ({size:.0f} MB): median {seconds:.2f} s, "
        f"{memory:.0f} MB of memory, {written:.2f} MB written ({'met' if met else 'missed'})"
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    args = parser.parse_args()
    root = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        place = Path(name)
        document = {"schema": 1, "scales": scales()}
        (place / "scales.json").write_text(json.dumps(document))
        total, weight_map = write(place / "bare", {})
        print(
            f"{total / 1e9:.1f} GB in {SHARDS} shards, {len(weight_map)} tensors; target without "
            f"old scales {SECONDS:g} s and {WRITTEN} MB written, always {MEGABYTES} MB of memory"
        )
        bench(place / "bare", place, args.runs, {})
        held = [f"{PREFIX.format(i)}.k_scale" for i in range(len(OLD_SHARDS))]
        old: dict[int, Shapes] = {
            i: {name: ("F32", (1,))} for i, name in zip(OLD_SHARDS, held, strict=True)
        }
        write(place / "old", old)
        bench(place / "old", place, 1, old)


if __name__ == "__main__":
    main()
