"""What serving engines make of a checkpoint; loaded late, by name."""

from collections.abc import Sequence
from difflib import get_close_matches
from importlib import import_module

from kvq.engines.base import Engine
from kvq.errors import InputError

ENGINES = {
    "vllm": "kvq.engines.vllm:VLLM",
    "sglang": "kvq.engines.sglang:SGLang",
    "transformers": "kvq.engines.transformers:Transformers",
    "tensorrt-llm": "kvq.engines.tensorrt_llm:TensorRTLLM",
}
LIVE = ("vllm", "transformers")  # those that `verify --live` can ask


def get_engine(name: str, version: str | None = None) -> Engine:
    """Return the model of an engine by name.

    Args:
        name: one of `ENGINES`.
        version: the version that is meant, or how it begins; None for the latest modelled.

    Raises:
        InputError: unknown name, or a version of which there is no model; it lists what there is.
    """
    if name not in ENGINES:
        near = get_close_matches(name, ENGINES, n=1)
        raise InputError(
            f"unknown engine `{name}`; known: {', '.join(ENGINES)}",
            code="engine.unknown",
            hint=f"did you mean `{near[0]}`?" if near else None,
        )
    module, attribute = ENGINES[name].split(":")
    kind: type[Engine] = getattr(import_module(module), attribute)
    versions = kind.versions
    chosen = [one for one in versions if version is None or _means(version, one)]
    if not chosen:
        raise InputError(
            f"no model of {name} {version}: kvq models {', '.join(versions)}",
            code="engine.version",
            hint="--live asks the installed engine itself, of any version"
            if name in LIVE
            else f"leave --engine-version out to take {versions[-1]}",
        )
    return kind(chosen[-1])


def get_engines(names: Sequence[str], version: str | None = None) -> dict[str, Engine]:
    """Return models by name; a version can be asked of one engine only."""
    if version is not None and len(names) != 1:
        raise InputError(
            f"--engine-version goes with one --engine, not {len(names)}", code="engine.version"
        )
    return {name: get_engine(name, version) for name in names}


def _means(given: str, version: str) -> bool:
    """Whether a version is meant, by its begin up to a dot or to words: `0.31` for 0.31.0."""
    return version == given or version.startswith((f"{given}.", f"{given} "))
