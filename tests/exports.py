"""Exports onto every kind of base, what is expected of each, and independent readings of them."""

import hashlib
import io
import json
import struct
from contextlib import redirect_stdout

import numpy as np
from safetensors.numpy import load_file

from kvq.checkpoint import open_checkpoint
from kvq.cli import run
from kvq.dialects import read_scales
from kvq.geometry import read_geometry
from tests import bases, models

ENGINES = ("vllm", "sglang", "tensorrt-llm", "transformers")

PLATFORM = {"nvfp4": "sm100"}  # where a GPU has such a cache; sm90 else
FORMATS = {  # (format, granularity) → options of export
    "fp8": ("--kv-cfg", "FP8_KV_CFG"),
    "fp8-head": ("--kv-cfg", "FP8_PER_HEAD_KV_CFG"),
    "nvfp4": ("--kv-cfg", "NVFP4_KV_CFG"),
    "int8": ("--kv-cfg", "INT8_KV_CFG"),
}
DIVISOR = {"fp8": 448, "fp8-head": 448, "nvfp4": 448, "int8": 127}  # of the specifications
GROUPS = {
    "none": bases.UNQUANTIZED, "ct": bases.COMPRESSED, "modelopt": bases.MODELOPT,
    "fp8": bases.FP8, "other": bases.WITHOUT_SCALES,
}  # fmt: skip
MIXED = [name for name in bases.MODELOPT if "mixed" in name]
FLAGS = {  # the option that an engine needs where the checkpoint cannot declare the cache
    "vllm": ("--kv-cache-dtype", "fp8"), "sglang": ("--kv-cache-dtype", "fp8_e4m3"),
}  # fmt: skip


def expected(group, base, dialect, form, engine):
    """Return the dialect that is written, or the code of the refusal."""
    if dialect == "auto":
        own = {"none": "compressed-tensors", "ct": "compressed-tensors"}.get(group, group)
        dialect = "modelopt" if (group, engine) == ("none", "tensorrt-llm") else own
        if dialect == "other":
            return "dialect.no_kv_method"
    if dialect == "fp8":
        if group == "other":
            return "dialect.no_kv_method"
        if group != "fp8":
            return "dialect.base"
        found = "export.unread" if engine == "transformers" else "fp8"
        return found if form == "fp8" else "dialect.format"
    return _EXPECTED[dialect](group, base, form, engine)


def _compressed(group, base, form, engine):
    if form == "nvfp4" or (form == "int8" and engine != "transformers"):
        return "dialect.format"
    if group not in ("none", "ct"):
        return "dialect.no_kv_method" if group == "other" else "dialect.base"
    if engine == "tensorrt-llm" or (engine == "sglang" and form == "fp8-head"):
        return "export.unread"
    return "compressed-tensors"


def _modelopt(group, base, form, engine):
    if form == "int8":
        return "dialect.format"
    if form == "fp8-head":
        return "dialect.granularity"
    if group not in ("none", "modelopt"):
        return "dialect.no_kv_method" if group == "other" else "dialect.base"
    if engine == "tensorrt-llm":  # it reads the scales of NVFP4 caches only
        return "modelopt" if form == "nvfp4" else "export.unread"
    if engine == "transformers" or group == "none" or (engine == "sglang" and form == "nvfp4"):
        return "export.unread"
    if engine == "sglang" and ("channels" in base or "dense-mlp" in base):  # it reads none there
        return "export.unread"
    return "export.unread" if form == "nvfp4" and base in MIXED else "modelopt"


def _sglang_json(group, base, form, engine):
    if form != "fp8":
        return "dialect.format"
    return "dialect.base" if group == "modelopt" else "export.unread"


_EXPECTED = {
    "compressed-tensors": _compressed, "modelopt": _modelopt, "sglang-json": _sglang_json,
}  # fmt: skip


def kvq(*argv, code=0):
    assert run([str(argument) for argument in argv]) == code


def up_to_bf16(value):
    """Return the smallest bfloat16 that is not below a positive float32, by its bits."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    (found,) = struct.unpack("<f", struct.pack("<I", -(-bits >> 16) << 16))
    return found


def read(folder):
    view = open_checkpoint(folder)
    return read_scales(view, read_geometry(view.config, view.tensors))


def by_side(scales):
    return {
        (layer.attention, s): list(x) for layer in scales.layers for s, x in layer.scales.items()
    }


def tensors(folder):
    """Return dtype, shape and digest of every tensor that a loader sees, by our own reading."""
    index = folder / "model.safetensors.index.json"
    files = (
        set(json.loads(index.read_text())["weight_map"].values())
        if index.exists() else {"model.safetensors"}
    )  # fmt: skip
    found = {}
    for file in files:
        data = (folder / file).read_bytes()
        start = 8 + struct.unpack("<Q", data[:8])[0]
        header = json.loads(data[8:start])
        header.pop("__metadata__", None)
        for name, entry in header.items():
            first, last = (start + offset for offset in entry["data_offsets"])
            digest = hashlib.sha256(data[first:last]).hexdigest()
            found[name] = (entry["dtype"], tuple(entry["shape"]), digest)
    return found


def json_of(folder, name="config.json"):
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else None


def without_null(config):
    """Drop a cache's null entry, which says the same as none."""
    own = config.get("quantization_config")
    if own is None:
        return config
    kept = {k: v for k, v in own.items() if not (k == "kv_cache_scheme" and v is None)}
    return {**config, "quantization_config": kept}


CELLS = [
    (group, name, dialect, form)
    for group, members in GROUPS.items() for name in members
    for dialect in ("compressed-tensors", "modelopt", "fp8") for form in FORMATS
    if any(expected(group, name, dialect, form, engine) == dialect for engine in ENGINES)
]  # fmt: skip


class Exports:
    """A dense model, its calibration, bases made from it, and exports onto them; each made once."""

    def __init__(self, root):
        self.root, self.made = root, {}
        self.calibration = root / "calibration"
        models.save("llama", root / "dense", **bases.SIZES)
        generator = np.random.default_rng(0)
        rows = [json.dumps({"input_ids": generator.integers(0, 128, n).tolist()}) for n in (17, 40)]
        (root / "rows.jsonl").write_text("\n".join(rows) + "\n")
        argv = ["--dataset", root / "rows.jsonl", "--seq-len", 64, "--min-tokens", 1]
        kvq("calibrate", root / "dense", *argv, "-o", self.calibration)

    def base(self, name):
        folder = self.root / name
        if not folder.exists():
            bases.write(bases.BASES[name], self.root / "dense", folder)
        return folder

    @property
    def amax(self):
        """What was observed, by attention and side, one number per head."""
        statistics = load_file(self.calibration / "calibration.safetensors")
        return {
            (path, side): statistics[f"{path}.{side}_bmm_quantizer._amax"]
            for path in bases.ATTENTION for side in "kv"
        }  # fmt: skip

    def scales(self, dialect, form):
        """Return what the specification of a format makes of it, as a dialect stores it."""
        found = {}
        for key, heads in self.amax.items():
            kept = heads if form == "fp8-head" else heads.max(keepdims=True)
            exact = [float(np.float32(x) / np.float32(DIVISOR[form])) for x in kept]
            found[key] = [up_to_bf16(x) for x in exact] if dialect in ("modelopt", "fp8") else exact
        return found

    def written(self, group, name, dialect, form):
        """Export for every engine that reads it; returns the folder, and commands by engine."""
        cell = (name, dialect, form)
        if cell not in self.made:
            readers = [e for e in ENGINES if expected(group, name, dialect, form, e) == dialect]
            target = self.root / "-".join(cell)
            argv = ["--scales", self.calibration, *FORMATS[form], "--dialect", dialect,
                    "-o", target, "--for-other-weights", "--json",
                    "--platform", PLATFORM.get(form, "sm90"),
                    *(word for engine in readers for word in ("--for", engine))]  # fmt: skip
            with redirect_stdout(io.StringIO()) as out:
                kvq("export", self.base(name), *argv)
            self.made[cell] = target, json.loads(out.getvalue())["serve"]
        return self.made[cell]
