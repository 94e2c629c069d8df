"""Rules about ModelOpt's declarations, in config.json and in hf_quant_config.json.

Readers: vLLM 0.32 `utils/torch_utils.py` (resolve_kv_cache_dtype_string), `model_executor/layers/
quantization/modelopt.py`; SGLang 0.5.23 `layers/quantization/modelopt_quant.py`; TensorRT-LLM
`quantization/modelopt_config.py`, which follows the second file where both are there.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from kvq.checks.context import Context, rule
from kvq.checks.findings import Finding
from kvq.dialects.documents import LEGACY_NAME
from kvq.errors import KvqError
from kvq.files import read_json

ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "W4A16_NVFP4", "MXFP8",
              "MIXED_PRECISION")  # fmt: skip
LEGACY_ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4")
# The keys that vLLM demands of hf_quant_config.json, by part of its `quant_algo`.
_REQUIRED = {"NVFP4": ("group_size", "kv_cache_quant_algo", "exclude_modules"),
             "MXFP8": ("kv_cache_quant_algo", "exclude_modules")}  # fmt: skip
_KINDS = {("float", 8): "FP8", ("float", 4): "NVFP4", ("int", 8): "INT8"}
_FP8 = '{"dynamic": false, "num_bits": 8, "type": "float"}'

Config = Mapping[str, Any]


def legacy_of(context: Context) -> Config | None:
    """Return hf_quant_config.json, None if there is none or it cannot be read."""
    path = context.view.root / LEGACY_NAME
    try:
        return read_json(path) if path.is_file() else None
    except KvqError:
        return None


def _inner(config: Config) -> Config:
    inner = config.get("quantization")
    return inner if isinstance(inner, dict) else config


def _declared(config: Config) -> Any:
    """Return what a document declares for the cache, as it stands there; None for nothing."""
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        for place in (_inner(config), config):
            if place.get(key):
                return place[key]
    return None


def _algorithm(declared: Any) -> str | None:
    """Return the algorithm's name; None for nothing, or what has no name."""
    if isinstance(declared, dict):
        kind, bits = declared.get("type"), declared.get("num_bits")
        return _KINDS.get((kind, bits)) if isinstance(kind, str) and type(bits) is int else None
    return declared.upper() if isinstance(declared, str) else None


def _documents(context: Context) -> list[tuple[str, Config]]:
    """Return the documents that declare quantization, the one that vLLM follows first."""
    config, legacy = context.view.quantization_config, legacy_of(context)
    found = [("config.json", config), (LEGACY_NAME, legacy)]
    return [(name, document) for name, document in found if document is not None]


@rule(dialect="modelopt", spelling=True)
def modelopt_declares_scales(context: Context) -> Iterator[Finding]:
    """A cache algorithm is declared exactly when scales exist, where vLLM looks for it."""
    documents = _documents(context)
    if not documents:
        if context.scales:
            yield Finding(
                "config.missing", "error",
                "scales exist, but no quantization is declared: vLLM fails to load",
                file="config.json", expected="quantization_config", found="none",
                fix="`kvq export` again: a checkpoint of unquantized weights takes the dialect "
                "compressed-tensors",
            )  # fmt: skip
        return
    name, config = documents[0]
    declared = _declared(config)
    if context.scales and not declared:
        yield Finding(
            "config.no_scheme", "error",
            f"scales exist, but {name} declares no cache algorithm: the cache stays unquantized",
            file=name, expected="kv_cache_scheme", found="none",
            fix=f"add `kv_cache_scheme`: {_FP8}",
        )  # fmt: skip
    if declared and not context.scales:
        yield Finding(
            "config.no_scales", "error",
            f"{name} declares a quantized cache, but no scale exists: all layers use 1.0",
            file=name, expected="scale tensors", found="none",
            fix="`kvq export` with the model's calibration",
        )  # fmt: skip
    place = context.view.quantization_config_place
    if name == "config.json" and place == "text_config.quantization_config":
        yield Finding(
            "config.place", "error",
            "vLLM looks for ModelOpt's cache algorithm at the top of config.json only: below "
            "`text_config` the cache stays unquantized",
            file=name, expected="quantization_config", found=place,
            fix="move it to the top, or serve with --kv-cache-dtype fp8",
        )  # fmt: skip


@rule(dialect="modelopt", spelling=True)
def modelopt_algorithm_is_known(context: Context) -> Iterator[Finding]:
    """`quant_algo` is one that vLLM and SGLang load."""
    for position, (name, config) in enumerate(_documents(context)):
        algorithm = _inner(config).get("quant_algo")
        known = LEGACY_ALGORITHMS if name == LEGACY_NAME and position == 0 else ALGORITHMS
        if not algorithm:
            yield Finding(
                "config.quant_algo", "warning",
                f"{name} has no `quant_algo`: TensorRT-LLM takes that, vLLM and SGLang do not",
                file=name, expected=", ".join(known), found=repr(algorithm),
                fix="for vLLM and SGLang: `kvq export --dialect compressed-tensors`",
            )  # fmt: skip
        elif str(algorithm).upper() not in known:
            yield Finding(
                "config.quant_algo", "error",
                f"vLLM does not load the `quant_algo` {algorithm!r} of {name}",
                file=name, expected=", ".join(known), found=repr(algorithm),
                fix="ModelOpt's name for what the weights are; move it to config.json if it is "
                "MIXED_PRECISION",
            )  # fmt: skip


@rule(dialect="modelopt", spelling=True)
def modelopt_scheme_is_known(context: Context) -> Iterator[Finding]:
    """The cache algorithm is spelled as vLLM and SGLang read it."""
    for name, config in _documents(context):
        declared = _declared(config)
        algorithm, scheme = _algorithm(declared), _inner(config).get("kv_cache_scheme")
        if declared is None:
            continue
        if algorithm not in ("FP8", "NVFP4"):
            words = "engines know FP8 and NVFP4, and leave the cache unquantized"
        elif (
            algorithm == "FP8"
            and isinstance(declared, dict)
            and declared.get("dynamic") is not (False)
        ):
            words = "without `dynamic: false` vLLM leaves the cache unquantized"
        elif algorithm == "FP8" and isinstance(scheme, str):
            words = "SGLang does not know the word in this place, and leaves the cache unquantized"
        else:
            continue
        yield Finding(
            "config.kv_algo", "error", f"the cache algorithm of {name} is {declared!r}: {words}",
            file=name, expected=f"{_FP8}, or NVFP4", found=repr(declared),
            fix=f"`kv_cache_scheme`: {_FP8}" if algorithm == "FP8"
            else "`kvq export --kv-cfg FP8_KV_CFG` with the model's calibration",
        )  # fmt: skip


@rule(dialect="modelopt", spelling=True)
def modelopt_config_is_complete(context: Context) -> Iterator[Finding]:
    """The document that vLLM follows has the keys that its `quant_algo` demands."""
    for name, config in _documents(context)[:1]:
        inner = _inner(config)
        algorithm = str(inner.get("quant_algo")).upper()
        for part, required in _REQUIRED.items():
            missing = [key for key in required if key not in inner]
            if "quantization" in config and part in algorithm and missing:
                yield Finding(
                    "config.keys", "error",
                    f"vLLM refuses {algorithm} in {name} without {', '.join(missing)}",
                    file=name, expected=", ".join(required), found=", ".join(sorted(inner)),
                    fix=f"add {', '.join(missing)}, with null for no cache algorithm",
                )  # fmt: skip
        excluded = inner.get("exclude_modules" if "quantization" in config else "ignore", [])
        if not isinstance(excluded, list):
            yield Finding(
                "config.keys", "error", f"the excluded modules of {name} are no list",
                file=name, expected="a list", found=repr(excluded), fix="put it into a list",
            )  # fmt: skip
        if algorithm == "MIXED_PRECISION":
            yield from _mixed_findings(context, name, config)


def _mixed_findings(context: Context, name: str, config: Config) -> Iterator[Finding]:
    layers = [document.get("quantized_layers") or _inner(document).get("quantized_layers")
              for _, document in _documents(context)]  # fmt: skip
    if not any(layers):
        yield Finding(
            "config.mixed", "error", f"MIXED_PRECISION in {name} needs `quantized_layers`",
            file=name, expected="a layer and its algorithm", found="none",
            fix="`quantized_layers` as ModelOpt wrote it",
        )  # fmt: skip
    declared = config.get("kv_cache_scheme")
    is_fp8 = isinstance(declared, dict) and _algorithm(declared) == "FP8"
    if "quantization" not in config and _declared(config) and not is_fp8:
        yield Finding(
            "config.mixed", "error",
            f"of MIXED_PRECISION in {name} vLLM reads no cache algorithm but the object of FP8: "
            "the scales are dropped, and 1.0 is used",
            file=name, expected=_FP8, found=repr(_declared(config)),
            fix="`kvq export --kv-cfg FP8_KV_CFG` with the model's calibration",
        )  # fmt: skip


@rule(spelling=True)
def declarations_agree(context: Context) -> Iterator[Finding]:
    """What is declared twice is declared alike: vLLM follows config.json, TensorRT-LLM the other.

    The same goes for two keys of one document, of which vLLM and SGLang read the first.
    """
    documents = _documents(context)
    for name, config in documents:
        scheme, word = (
            _inner(config).get(key) or config.get(key)
            for key in ("kv_cache_scheme", "kv_cache_quant_algo")
        )
        if scheme and word and _algorithm(scheme) != _algorithm(word):
            yield _disagreement("`kv_cache_scheme`", scheme, "`kv_cache_quant_algo`", word, name)
    if len(documents) < 2:
        return
    (first, config), (second, legacy) = documents
    one, two = _declared(config), _declared(legacy)
    if _algorithm(one) != _algorithm(two):
        yield _disagreement(first, one, second, two, second)
    excluded = _inner(config).get("exclude_modules", config.get("ignore"))
    other = _inner(legacy).get("exclude_modules", legacy.get("ignore"))
    if isinstance(excluded, list) and isinstance(other, list) and _names(excluded) != _names(other):
        yield Finding(
            "config.excludes", "warning",
            f"{first} and {second} exclude other layers: vLLM and SGLang follow the first, "
            "TensorRT-LLM the second",
            file=second, expected=str(excluded), found=str(other), fix=f"copy those of {first}",
        )  # fmt: skip


def _names(excluded: list[Any]) -> set[str]:
    return {str(name) for name in excluded}


def _disagreement(first: str, one: Any, second: str, two: Any, file: str) -> Finding:
    return Finding(
        "config.disagree", "error",
        f"{first} declares {one!r} for the cache, {second} {two!r}: which one is followed differs "
        "from engine to engine",
        file=file, expected=repr(one), found=repr(two), fix="declare the same in both",
    )  # fmt: skip
