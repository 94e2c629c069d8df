"""What serving engines make of a checkpoint; loaded late, by name."""

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


def get_engine(name: str) -> Engine:
    """Return the model of an engine by name.

    Raises:
        InputError: unknown name; the message lists all names.
    """
    if name not in ENGINES:
        near = get_close_matches(name, ENGINES, n=1)
        raise InputError(
            f"unknown engine `{name}`; known: {', '.join(ENGINES)}",
            code="engine.unknown",
            hint=f"did you mean `{near[0]}`?" if near else None,
        )
    module, attribute = ENGINES[name].split(":")
    engine: Engine = getattr(import_module(module), attribute)()
    return engine
