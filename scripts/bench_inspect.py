"""Time `kvq inspect` and `kvq verify` on a checkpoint of DeepSeek-V3's size, and their memory.

Usage: python scripts/bench_inspect.py [--runs 5]

The checkpoint has the headers, index and config of the real one: 61 layers of 256 experts with
block scales, one draft layer, some 90 000 tensors in 160 files; the data are holes in the files.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from kvq.tensorfile import header_bytes, write_float32

SHARDS, LAYERS, DENSE, EXPERTS = 160, 61, 3, 256
HIDDEN, MLP, EXPERT, HEADS, LATENT, ROPE, NOPE, QUERY = 7168, 18432, 2048, 128, 512, 64, 128, 1536
SECONDS, MEGABYTES = 2.0, 300
BYTES = {"BF16": 2, "F8_E4M3": 1, "F32": 4}
SCHEME = {"dynamic": False, "group_size": None, "num_bits": 8, "strategy": "tensor",
          "symmetric": True, "type": "float"}  # fmt: skip
CONFIG = {
    "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "torch_dtype": "bfloat16", "vocab_size": 129280, "hidden_size": HIDDEN,
    "intermediate_size": MLP, "moe_intermediate_size": EXPERT, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "num_key_value_heads": HEADS, "kv_lora_rank": LATENT,
    "q_lora_rank": QUERY, "qk_rope_head_dim": ROPE, "qk_nope_head_dim": NOPE, "v_head_dim": NOPE,
    "n_routed_experts": EXPERTS, "num_experts_per_tok": 8, "num_nextn_predict_layers": 1,
    "first_k_dense_replace": DENSE, "max_position_embeddings": 163840,
    "quantization_config": {
        "quant_method": "compressed-tensors", "format": "float-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}},
        "kv_cache_scheme": SCHEME,
    },
}  # fmt: skip

Tensor = tuple[str, str, tuple[int, ...]]


def linear(name: str, rows: int, columns: int) -> Iterator[Tensor]:
    """Yield an FP8 matrix and its scales per block of 128 x 128."""
    yield f"{name}.weight", "F8_E4M3", (rows, columns)
    yield f"{name}.weight_scale_inv", "F32", (math.ceil(rows / 128), math.ceil(columns / 128))


def mlp(path: str, width: int) -> Iterator[Tensor]:
    """Yield a gated MLP."""
    for name, rows, columns in (("gate", width, HIDDEN), ("up", width, HIDDEN),
                                ("down", HIDDEN, width)):  # fmt: skip
        yield from linear(f"{path}.{name}_proj", rows, columns)


def layer(number: int) -> Iterator[Tensor]:
    """Yield one layer."""
    path = f"model.layers.{number}"
    attention = f"{path}.self_attn"
    for name in ("input_layernorm", "post_attention_layernorm"):
        yield f"{path}.{name}.weight", "BF16", (HIDDEN,)
    yield f"{attention}.q_a_layernorm.weight", "BF16", (QUERY,)
    yield f"{attention}.kv_a_layernorm.weight", "BF16", (LATENT,)
    yield from linear(f"{attention}.q_a_proj", QUERY, HIDDEN)
    yield from linear(f"{attention}.q_b_proj", HEADS * (NOPE + ROPE), QUERY)
    yield from linear(f"{attention}.kv_a_proj_with_mqa", LATENT + ROPE, HIDDEN)
    yield from linear(f"{attention}.kv_b_proj", HEADS * 2 * NOPE, LATENT)
    yield from linear(f"{attention}.o_proj", HIDDEN, HEADS * NOPE)
    if number < DENSE:
        yield from mlp(f"{path}.mlp", MLP)
        return
    yield f"{path}.mlp.gate.weight", "BF16", (EXPERTS, HIDDEN)
    yield f"{path}.mlp.gate.e_score_correction_bias", "F32", (EXPERTS,)
    yield from mlp(f"{path}.mlp.shared_experts", EXPERT)
    for expert in range(EXPERTS):
        yield from mlp(f"{path}.mlp.experts.{expert}", EXPERT)


def write(folder: Path) -> int:
    """Write the checkpoint with sparse data; returns the number of tensors."""
    tensors: list[Tensor] = [("model.embed_tokens.weight", "BF16", (129280, HIDDEN))]
    for number in range(LAYERS + 1):
        tensors += layer(number)
    tensors += [("model.norm.weight", "BF16", (HIDDEN,)), ("lm_head.weight", "BF16",
                                                           (129280, HIDDEN))]  # fmt: skip
    weight_map, per_shard = {}, math.ceil(len(tensors) / (SHARDS - 1))
    for i in range(SHARDS - 1):
        name = f"model-{i + 1:05}-of-{SHARDS:05}.safetensors"
        entries, position = {}, 0
        for tensor, dtype, shape in tensors[i * per_shard : (i + 1) * per_shard]:
            end = position + BYTES[dtype] * math.prod(shape)
            entries[tensor] = {"dtype": dtype, "shape": list(shape),
                               "data_offsets": [position, end]}  # fmt: skip
            position, weight_map[tensor] = end, name
        header = header_bytes(entries, {"format": "pt"})
        with (folder / name).open("wb") as file:
            file.write(header)
            file.truncate(len(header) + position)
    scales = {
        f"model.layers.{number}.self_attn.{side}_scale": np.full(1, 0.01 * (number + 1), np.float32)
        for number in range(LAYERS + 1)
        for side in "kv"
    }
    name = f"model-{SHARDS:05}-of-{SHARDS:05}.safetensors"
    write_float32(folder / name, scales, {"format": "pt"})
    weight_map |= dict.fromkeys(scales, name)
    index = {"metadata": {"total_size": 688586727753}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=2))
    return len(weight_map)


def measure(argv: list[str]) -> tuple[float, float]:
    """Return wall time in seconds and peak memory in megabytes of one process."""
    start = time.perf_counter()
    child = os.posix_spawn(
        sys.executable, [sys.executable, *argv], os.environ,
        file_actions=[(os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)],
    )  # fmt: skip
    _, status, usage = os.wait4(child, 0)
    seconds = time.perf_counter() - start
    code = os.waitstatus_to_exitcode(status)
    if code not in (0, 1):  # verify may have findings
        sys.exit(f"`{' '.join(argv)}` ended with {code}")
    return seconds, usage.ru_maxrss / 1000  # Linux counts in kilobytes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--runs", type=int, default=5)
    args = parser.parse_args()
    root = str(Path(__file__).parents[1])
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        print(f"{write(folder)} tensors in {SHARDS} files; target {SECONDS:g} s, {MEGABYTES} MB")
        for command in (["inspect"], ["verify"], ["verify", "--engine", "vllm"]):
            argv = ["-m", "kvq", command[0], name, *command[1:]]
            measure(argv)
            found = [measure(argv) for _ in range(args.runs)]
            seconds, megabytes = (statistics.median(values) for values in zip(*found, strict=True))
            met = seconds <= SECONDS and megabytes <= MEGABYTES
            print(f"kvq {' '.join(command)}: median {seconds:.2f} s, {megabytes:.0f} MB "
                  f"({'met' if met else 'missed'})")  # fmt: skip


if __name__ == "__main__":
    main()
