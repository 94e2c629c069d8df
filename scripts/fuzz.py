"""Mutate small valid checkpoints and run inspect, verify and dry exports on each: no crash, ever.

Usage: python scripts/fuzz.py [--count 10000] [--seed 0] [--only NUMBER]

Everything runs in one process under a memory limit. Exit codes other than 0, 1 and 2, internal
errors, tracebacks, warnings, damaged JSON and runs of more than 5 s are failures; each is printed
with the way to see it again. Exits 1 if there are any.
"""

import argparse
import contextlib
import io
import json
import random
import resource
import shutil
import signal
import struct
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np
import typer.main

from kvq import cli
from kvq.checkpoint import open_checkpoint, weight_fingerprint
from kvq.engines.vllm_classes import CLASSES
from kvq.engines.vllm_config import METHODS
from kvq.tensorfile import header_bytes

SECONDS = 5
MEMORY = 3 << 30  # of address space
HERE = "{}"  # stands for the checkpoint
OUT = str(Path(tempfile.gettempdir()) / "kvq-fuzz-never-written")
ENGINES = [f"--engine={name}" for name in ("vllm", "sglang", "transformers", "tensorrt-llm")]
COMMANDS = (
    ("inspect", HERE),
    ("verify", HERE),
    ("verify", HERE, "--engine", "vllm"),
    ("inspect", HERE, *ENGINES),
    ("export", HERE, "--scales", HERE, "-o", OUT, "--dry-run", "--allow-unread"),
    ("export", HERE, "--strip", "-o", OUT, "--dry-run"),
)

Files = dict[str, bytes]

# --- valid checkpoints --------------------------------------------------------------------------

LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "dtype": "bfloat16",
    "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 2, "vocab_size": 16, "max_position_embeddings": 64, "sliding_window": None,
}  # fmt: skip
MLA = {
    **LLAMA, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3",
    "kv_lora_rank": 4, "qk_rope_head_dim": 2, "qk_nope_head_dim": 2, "v_head_dim": 2,
    "num_nextn_predict_layers": 1,
}  # fmt: skip
GEMMA = {
    "architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4",
    "text_config": {
        **LLAMA, "model_type": "gemma4_text", "num_hidden_layers": 3, "num_kv_shared_layers": 1,
        "layer_types": ["sliding_attention", "full_attention", "full_attention"],
        "per_layer_config": {"1": {"head_dim": 4}},
    },
    "vision_config": {"hidden_size": 8},
}  # fmt: skip
SCHEME = {"dynamic": False, "group_size": None, "num_bits": 8, "strategy": "tensor",
          "symmetric": True, "type": "float"}  # fmt: skip


def compressed_tensors(strategy: str = "tensor") -> dict[str, Any]:
    """Return a quantization config whose weights are quantized, too."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int"}}
    attention = {"targets": ["LlamaAttention"], "weights": None}
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"],
        "config_groups": {"group_0": group, "group_1": attention},
        "kv_cache_scheme": {**SCHEME, "strategy": strategy},
    }  # fmt: skip


MODELOPT = {
    "producer": {"name": "modelopt", "version": "0.30"},
    "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8",
                     "exclude_modules": ["lm_head"]},
}  # fmt: skip
KVQ = {
    "schema": 1, "format": "fp8_e4m3", "granularity": "tensor", "margin": 1.0, "skip_layers": [],
    "attention_class": "LlamaAttention",
}  # fmt: skip


def shard(tensors: dict[str, np.ndarray], metadata: dict[str, str]) -> bytes:
    """Return a safetensors file of float32 tensors."""
    entries, data = {}, b""
    for name, values in tensors.items():
        raw = values.astype("<f4").tobytes()
        entries[name] = {"dtype": "F32", "shape": list(values.shape),
                         "data_offsets": [len(data), len(data) + len(raw)]}  # fmt: skip
        data += raw
    return header_bytes(entries, metadata) + data


def checkpoint(config: dict[str, Any], paths: list[str], *, values: int = 1) -> Files:
    """Return a sharded checkpoint: K/V projections in one file, scales in the other."""
    ones = np.ones((4, 8))
    leaves = ("kv_a_proj_with_mqa",) if "kv_lora_rank" in config else ("k_proj", "v_proj")
    weights = {f"{path}.{leaf}.weight": ones for path in paths for leaf in leaves}
    weights |= {f"{path}.k_proj.bias": np.arange(4) for path in paths}
    weights |= {"model.embed_tokens.weight": ones, "lm_head.weight": ones}
    shape = (values, 1, 1) if values > 1 else (1,)
    scales = {
        f"{path}.{side}_scale": np.full(shape, 0.25 * (i + 1), np.float32)
        for i, path in enumerate(paths)
        for side in "kv"
    }
    files = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    weight_map = dict.fromkeys(weights, files[0]) | dict.fromkeys(scales, files[1])
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    is_mla, text = "kv_lora_rank" in config, config.get("text_config") or config
    heads = 1 if is_mla else text.get("num_key_value_heads", 1)
    amax = {
        f"{path}.{quantizer}_bmm_quantizer": [0.25 * (i + 1) * 448] * heads
        for i, path in enumerate(paths)
        for quantizer in (("kv_c", "k_pe") if is_mla else "kv")
    }
    found = {
        "config.json": json.dumps(config).encode(),
        "model.safetensors.index.json": json.dumps(index).encode(),
        files[0]: shard(weights, {"format": "pt"}),
        files[1]: shard(scales, {}),
    }
    record = {
        **KVQ, "amax": amax, "tokens": dict.fromkeys(paths, 100),
        "granularity": "head" if values > 1 else "tensor",
        "status": {path: {"k": "calibrated", "v": "calibrated"} for path in paths},
        "weight_fingerprint": fingerprint_of(found),
    }  # fmt: skip
    return {**found, files[1]: shard(scales, {"format": "pt", "kvq": json.dumps(record)})}


def fingerprint_of(files: Files) -> str:
    """Return the fingerprint of a checkpoint that is not on disk yet."""
    with tempfile.TemporaryDirectory() as folder:
        write(files, Path(folder))
        return weight_fingerprint(open_checkpoint(Path(folder)))


def bases() -> list[Files]:
    """Return the checkpoints to mutate."""
    layers = [f"model.layers.{i}.self_attn" for i in range(3)]
    modelopt = checkpoint(LLAMA, layers[:2])
    return [
        checkpoint({**LLAMA, "quantization_config": compressed_tensors()}, layers[:2]),
        checkpoint({**LLAMA, "quantization_config": compressed_tensors("attn_head")}, layers[:2],
                   values=2),
        checkpoint({**MLA, "quantization_config": compressed_tensors()}, layers),
        checkpoint({**GEMMA, "quantization_config": compressed_tensors()},
                   [path.replace("model.", "model.language_model.") for path in layers]),
        {**modelopt, "hf_quant_config.json": json.dumps(MODELOPT).encode()},
        checkpoint({**LLAMA, "quantization_config": {
            "quant_method": "fp8", "activation_scheme": "static"}}, layers[:2]),
    ]  # fmt: skip


def write(files: Files, folder: Path) -> None:
    """Write a checkpoint."""
    for name, data in files.items():
        (folder / name).write_bytes(data)


# --- mutations ----------------------------------------------------------------------------------

KEYS = (
    "text_config", "layer_types", "num_kv_shared_layers", "hybrid_override_pattern", "block_types",
    "layers_block_type", "attn_type_list", "attn_layer_indices", "attn_layer_period",
    "full_attention_interval", "sliding_window_pattern", "per_layer_config", "kv_lora_rank",
    "attn_config", "cross_attention_layers", "is_encoder_decoder", "use_cla", "multi_query",
    "multi_query_attention", "new_decoder_architecture", "num_nextn_predict_layers", "model_type",
    "num_hidden_layers", "num_attention_heads", "head_dim", "compression_config", "v_head_dim",
    "quantization_config", "quant_method", "quantization", "producer", "quant_algo", "dtype",
    "config_groups", "kv_cache_scheme", "ignore", "exclude_modules", "quantized_layers",
    "torch_dtype", "modules_to_not_convert", "linear_attn_config", "hybrid_layer_pattern",
    "architectures", "weight_map", "__metadata__", "shape", "num_global_key_value_heads",
    "vision_config", "attn_layer_offset", "activation_scheme", "modelopt_quant_config", "strategy",
    "kv_cache_quant_algo", "symmetric", "type", "num_bits", "targets", "weights",
)  # fmt: skip
WORDS = (
    "", "0", "-1", "\x00", "\n\x1b[31m", "é" * 50, "\ud800", "x" * 5000, "../../etc/passwd", "/",
    "a/b", ".", "..", "re:(", "re:[", "re:.*", "[", "*", "float", "channel", "attn_head", "FP8",
    "NVFP4", "MIXED_PRECISION", "modelopt", "modelopt_mixed", "compressed-tensors", "fp8", "awq",
    "full_attention", "mamba", "M*-E", "Linear", "LlamaAttention", "float16", "head", "constant",
    "fp8_e4m3", "int8", "nvfp4", "F32", "F4", "I64", "BOOL", "F8_E4M3", "gemma4", "NaN", "1e999",
    "model.layers.0.self_attn.k_scale", "model.layers.99999999999.self_attn.k_proj.weight",
    "model.layers.0.self_attn.k_zero_point", "model.layers.0.self_attn.kv_scale",
    "model-00001-of-00002.safetensors", "model-00003-of-00002.safetensors", "²", "1" * 5000,
)  # fmt: skip
NUMBERS = (
    0, 1, -1, 2, 3, 7, 8, 0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, 448.0, 1e39, 10**6, 10**9,
    2**31, 2**32, 2**53, 2**63, 2**64, 10**30, 10**400, -(2**63),
)  # fmt: skip
TOKENS = (b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400", b"9" * 5000, b"[" * 9999, b"null",
          b'"\\ud800"', b'"\\u0000"', b"{}", b"[]", b"[[]]", b"tru", b"", b"\xff", b"\xef\xbb\xbf",
          b",", b"}", b'"a":1,"a":1')  # fmt: skip


def value(rng: random.Random, depth: int = 0) -> Any:
    """Return any JSON value, odd ones preferred."""
    choice = rng.randrange(8 if depth < 3 else 5)
    if choice == 0:
        return rng.choice((None, True, False))
    if choice <= 2:
        return rng.choice(NUMBERS)
    if choice == 3:
        return rng.choice(WORDS)
    if choice == 4:
        return rng.choice(sorted(CLASSES) if rng.random() < 0.5 else METHODS)
    if choice == 5:
        return [value(rng, depth + 1) for _ in range(rng.randrange(4))]
    names = KEYS if rng.random() < 0.7 else WORDS
    return {rng.choice(names): value(rng, depth + 1) for _ in range(rng.randrange(4))}


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every (container, key) below a value."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree)
    for key, inner in list(pairs):
        yield tree, key
        if isinstance(inner, dict | list):
            yield from places(inner)


def mutate_tree(tree: Any, rng: random.Random) -> Any:
    """Change one or a few places of a JSON value."""
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        found = list(places(tree)) if isinstance(tree, dict | list) else []
        if not found or rng.random() < 0.01:
            return value(rng)
        container, key = rng.choice(found)
        choice = rng.randrange(9)
        if choice <= 2:
            container[key] = value(rng)
        elif choice == 3:
            del container[key]
        elif choice == 4:
            container[key] = [container[key]]
        elif choice == 5:
            other, place = rng.choice(found)
            container[key] = json.loads(json.dumps(other[place]))
        elif choice == 6 and isinstance(container, dict):
            container[rng.choice(KEYS + WORDS)] = container.pop(key)
        elif choice == 7 and type(container[key]) in (int, float):
            container[key] = rng.choice(NUMBERS)
        elif isinstance(container, dict):
            container[rng.choice(KEYS)] = value(rng)
    return tree


def mutate_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, splice or replace bytes."""
    choice, at = rng.randrange(6), rng.randrange(len(data) or 1)
    end = min(len(data), at + rng.choice((1, 2, 4, 8, 64, 512)))
    if choice == 0:
        changed = bytearray(data)
        for _ in range(rng.choice((1, 1, 2, 8))):
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
        return bytes(changed)
    if choice == 1:
        return data[:at]
    if choice == 2:
        return data[:at] + data[end:]
    if choice == 3:
        there = rng.randrange(len(data))
        return data[:there] + data[at:end] + data[there:]
    if choice == 4:
        return data[:at] + rng.choice(TOKENS) + data[end:]
    return data[:at] + rng.randbytes(end - at) + data[end:]


def mutate_json(data: bytes, rng: random.Random) -> bytes:
    """Change a JSON document, mostly so that it still is one."""
    if rng.random() < 0.25:
        return mutate_bytes(data, rng)
    return json.dumps(mutate_tree(json.loads(data), rng)).encode()


def mutate_shard(data: bytes, rng: random.Random) -> bytes:
    """Change a safetensors file: bytes anywhere, its header, the record in it, or its numbers."""
    (length,) = struct.unpack("<Q", data[:8])
    head, body = data[8 : 8 + length], data[8 + length :]
    choice = rng.randrange(6)
    if choice == 0:
        return mutate_bytes(data, rng)
    if choice == 1:
        return struct.pack("<Q", rng.choice((0, 1, 2, length - 1, length + 1, 2**63, 10**8))) + head
    if choice == 2:
        numbers = bytearray(body)
        word = rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\1\0\0\0",
                           b"\0\0\0\0", b"\0\0\x80\xbf", rng.randbytes(4)))  # fmt: skip
        at = 4 * rng.randrange(len(body) // 4)
        numbers[at : at + 4] = word
        return data[: 8 + length] + bytes(numbers)
    header = json.loads(head)
    if choice == 3 and "kvq" in header.get("__metadata__", {}):
        record = mutate_json(header["__metadata__"]["kvq"].encode(), rng)
        header["__metadata__"]["kvq"] = record.decode("utf-8", "surrogateescape")
    elif choice == 4:  # an entry that stays consistent with its bytes
        name = rng.choice([name for name in header if name != "__metadata__"])
        entry = header.pop(name) if rng.random() < 0.5 else header[name]
        dtype, size = rng.choice((("F32", 4), ("I32", 4), ("U8", 1), ("F4", 0.5), ("BOOL", 1),
                                  ("F8_E4M3", 1), ("C64", 8), ("F6_E2M3", 0.75)))  # fmt: skip
        start, end = entry["data_offsets"]
        entry |= {"dtype": dtype, "shape": [int((end - start) / size)]}
        header[name if name in header else rng.choice(WORDS)] = entry
    else:
        mutate_tree(header, rng)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


def mutate(files: Files, rng: random.Random) -> Files:
    """Return a checkpoint with one or two of its files changed."""
    files = dict(files)
    for _ in range(rng.choice((1, 1, 1, 2))):
        name = rng.choice([*sorted(files), "config.json"])
        change: Callable[[bytes, random.Random], bytes]
        change = mutate_shard if name.endswith(".safetensors") else mutate_json
        with contextlib.suppress(Exception):  # of a file that is broken already
            files[name] = change(files[name], rng)
    return files


# --- runs ---------------------------------------------------------------------------------------


def attempt(argv: list[str]) -> tuple[int, str | None]:
    """Run one command line; returns its exit code, and what is wrong with the run if anything."""
    out, err = io.StringIO(), io.StringIO()
    start = time.perf_counter()
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.run(argv)
    except BaseException as error:  # run never raises
        return -1, f"raised {error!r}"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = time.perf_counter() - start
    said = err.getvalue()
    if code not in (0, 1, 2):
        return code, f"exit code {code}"
    if "internal error" in said or "Traceback" in said:
        return code, said.strip()
    if (code == 2) != said.startswith("error: "):
        return code, f"exit code {code}, stderr {said[:200]!r}"
    if seconds > SECONDS:
        return code, f"took {seconds:.1f} s"
    if "--json" in argv:
        try:
            json.loads(out.getvalue())
        except ValueError as error:
            return code, f"stdout is not JSON: {error}"
    return code, None


def _late(*_: object) -> None:
    raise TimeoutError(f"more than {SECONDS} s")


def limit() -> None:
    """Bound memory and time, and make a warning a failure."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, hard))
    signal.signal(signal.SIGALRM, _late)
    warnings.simplefilter("error")


@contextlib.contextmanager
def built_once() -> Iterator[None]:
    """Keep Typer's command, which takes longer to build than most checkpoints to read."""
    before = cli.app
    cli.app = typer.main.get_command(before)
    try:
        yield
    finally:
        cli.app = before


@built_once()
def fuzz(count: int, seed: int, only: int | None = None) -> tuple[Counter[str], list[str]]:
    """Run all mutations; returns counts of exit codes, and the failures in words."""
    made, counts, failures = bases(), Counter[str](), list[str]()
    for number in range(count) if only is None else [only]:
        if number and number % 1000 == 0:
            print(f"{number} mutations, {len(failures)} failures", file=sys.stderr, flush=True)
        rng = random.Random(f"{seed} {number}")
        files = mutate(rng.choice(made), rng)
        as_json = ["--json"] * (rng.random() < 0.5)
        folder = Path(tempfile.mkdtemp(prefix="kvq-fuzz-"))
        write(files, folder)
        for command in COMMANDS:
            verbose = ["-v"] * (only is not None)
            argv = [str(folder) if part == HERE else part for part in command]
            code, problem = attempt([*verbose, *argv, *as_json])
            counts[f"{' '.join(command)}: exit {code}"] += 1
            if problem is not None:
                again = f"python scripts/fuzz.py --seed {seed} --only {number}"
                failures.append(f"`{' '.join(command)}`: {problem}\n  again: {again}")
        if only is None:
            shutil.rmtree(folder)
        else:
            print(f"the checkpoint is in {folder}")
    return counts, failures


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this mutation alone, and keep its files")
    args = parser.parse_args()
    limit()
    start = time.perf_counter()
    for files in bases():  # unchanged, they must be read
        with tempfile.TemporaryDirectory() as folder:
            write(files, Path(folder))
            for command in COMMANDS:
                code, problem = attempt([folder if x == HERE else x for x in command])
                if problem is not None or (command == ("inspect", HERE) and code != 0):
                    sys.exit(f"`{' '.join(command)}` of a valid checkpoint: {code}, {problem}")
    counts, failures = fuzz(args.count, args.seed, args.only)
    for failure in failures:
        print(failure)
    for name, number in sorted(counts.items()):
        print(f"{name}: {number}")
    number = args.count if args.only is None else 1
    print(f"{number} mutations, {sum(counts.values())} runs, {len(failures)} failures, "
          f"{time.perf_counter() - start:.0f} s")  # fmt: skip
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
