"""Tiny random models of every architecture in transformers' text-generation mappings."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from tests.zoo.shrink import shrink

# kind -> (Auto class, transformers mapping, module with the tables of exceptions)
KINDS = {
    "causal": ("AutoModelForCausalLM", "CAUSAL_LM", "causal"),
    "image-text": ("AutoModelForImageTextToText", "IMAGE_TEXT_TO_TEXT", "image_text"),
    "seq2seq": ("AutoModelForSeq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM", "seq2seq"),
}


def entries(kind: str) -> list[str]:
    """Model types of the transformers mapping of `kind`."""
    return list(_mapping(kind))


def exceptions(kind: str, model_type: str) -> dict[str, Any]:
    """What `model_type` needs otherwise than the general shrink."""
    return dict(_table(kind, "EXCEPTIONS").get(model_type, {}))


def tiny_config(kind: str, model_type: str) -> transformers.PreTrainedConfig:
    """Tiny configuration of `model_type`."""
    name = _table(kind, "CONFIGS").get(model_type)
    config_class = getattr(transformers, name) if name else CONFIG_MAPPING[model_type]
    return shrink(config_class, **exceptions(kind, model_type))


def tiny_model(
    kind: str, model_type: str, dtype: torch.dtype = torch.bfloat16
) -> transformers.PreTrainedModel:
    """Tiny model of `model_type` in eval mode, the same weights on every call.

    Architectures that transformers cannot run in bfloat16 come in float32.
    """
    if model_type in _table(kind, "FLOAT32"):
        dtype = torch.float32
    config = tiny_config(kind, model_type)
    auto = getattr(transformers, KINDS[kind][0])
    torch.manual_seed(0)
    with _poisoned_memory():
        try:
            model = auto.from_config(config, dtype=dtype)
        except ValueError as error:
            if "Unrecognized configuration class" not in str(error):
                raise
            model = getattr(transformers, _mapping(kind)[model_type])._from_config(
                config, dtype=dtype
            )
    _randomize(model)
    _keep_float32(model)
    return model.eval()


def _table(kind: str, name: str) -> Any:
    return getattr(import_module(f"tests.zoo.{KINDS[kind][2]}"), name, {})


def _mapping(kind: str) -> dict[str, str]:
    return getattr(modeling_auto, f"MODEL_FOR_{KINDS[kind][1]}_MAPPING_NAMES")


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """Fill new tensors with NaN, so that a weight that no initializer covers is found."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)


@torch.no_grad()
def _randomize(model: torch.nn.Module) -> None:
    """Make weights large enough that heads differ, and replace zeros and uninitialized ones."""
    for parameter in model.parameters():
        if not parameter.isfinite().all() or not parameter.any():
            parameter.normal_(std=0.1)
        elif parameter.ndim >= 2 and 0 < (std := parameter.float().std().item()) < 0.1:
            parameter.mul_(max(8, 0.1 / std))


def _keep_float32(model: transformers.PreTrainedModel) -> None:
    """Give the weights that `from_pretrained` never rounds the dtype that they have after it."""
    kept = model._keep_in_fp32_modules_strict or ()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if any(f".{part}." in f".{name}." for part in kept):
            tensor.data = tensor.data.float()


# What `save_pretrained` needs so that `from_pretrained` reads the result.
SAVE = {"shieldgemma2": {"save_original_format": False}}
