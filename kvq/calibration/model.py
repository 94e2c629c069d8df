"""Load a checkpoint for calibration, with nothing made up on the way."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvq.errors import (
    CheckpointError,
    InputError,
    MissingDependencyError,
    UnsupportedModelError,
)
from kvq.geometry import text_config


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to observe; `body` is the model without its language head.

    With `text_alone`, it is the text decoder: the whole does not run without images.
    """

    model: Any
    body: Any
    text_alone: bool
    device: torch.device
    dtype: str
    attention: str


def load_model(
    root: Path,
    config: dict[str, Any],
    *,
    device: str,
    dtype: str,
    trust_remote_code: bool,
    attentions: Sequence[str] = (),
) -> LoadedModel:
    """Load a generative language model; every tensor of it must come from the checkpoint.

    Of the attention modules named by `attentions`, every tensor of the checkpoint must be used.

    Raises:
        InputError: the device is not there.
        UnsupportedModelError: it needs code from the checkpoint, or transformers has no class.
        CheckpointError: tensors are missing or have another shape than the config says.
    """
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    # where transformers has the architecture itself, it runs its own code, not the checkpoint's
    foreign = config.get("auto_map") and config.get("model_type") not in CONFIG_MAPPING
    if foreign and not trust_remote_code:
        raise UnsupportedModelError(
            f"`{root}` brings its own model code (`auto_map`), which kvq does not run by itself",
            code="model.remote_code",
            hint="read that code, then pass --trust-remote-code",
        )
    target = _device(device)
    attention = _attention_implementation(config)
    try:
        with _no_progress_bars():
            model, info = _model_class(config, trust_remote_code=trust_remote_code).from_pretrained(
                root,
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                attn_implementation=attention,
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
            )
    except ImportError as error:
        raise MissingDependencyError(
            f"transformers needs another package: {str(error).strip().splitlines()[0]}",
            code="dependency.model",
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RuntimeError) as error:
        raise UnsupportedModelError(
            f"transformers cannot load `{root}`: {str(error).splitlines()[0]}", code="model.load"
        ) from error
    _check_tensors(info, root, attentions)
    model.requires_grad_(False).to(target)
    body, alone = _body(model)
    name = str(model.dtype).removeprefix("torch.")
    return LoadedModel(model, body, alone, target, name, _implementation(model))


def _check_tensors(info: dict[str, Any], root: Path, attentions: Sequence[str]) -> None:
    """Refuse a model that is not the checkpoint: tensors made up, or left out of attention."""
    missing = sorted(info["missing_keys"]) + sorted(str(k) for k in info["mismatched_keys"])
    if missing:
        raise CheckpointError(
            f"{len(missing)} tensors of the model are missing or misshapen in `{root}`, "
            f"first `{missing[0]}`; transformers would have filled them with random numbers",
            code="model.missing_tensors",
        )
    unused = [
        name
        for name in sorted(info["unexpected_keys"])
        if any(name.startswith(f"{attention}.") for attention in attentions)
    ]
    if unused:
        raise CheckpointError(
            f"transformers ignores {len(unused)} attention tensors of `{root}`, first "
            f"`{unused[0]}`; the maxima would be those of another model",
            code="model.unused_tensors",
            hint="config.json and the tensors disagree; compare them with the original model",
        )


@torch.inference_mode()
def _body(model: Any) -> tuple[Any, bool]:
    """Return what to run, and whether it is only the text decoder, the whole needing images."""
    decoder = None if model.config.is_encoder_decoder else model.get_decoder()
    if decoder is None or decoder is model.base_model:
        return model.base_model, False
    try:
        model.eval().base_model(input_ids=torch.tensor([[3, 4]], device=model.device))
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError):
        return decoder, True
    return model.base_model, False


def _model_class(config: dict[str, Any], *, trust_remote_code: bool) -> Any:
    """Return the class that the checkpoint was saved from, else the one for its model type."""
    import transformers

    names = config.get("architectures") or [""]
    named = getattr(transformers, str(names[0]), None)
    if named is not None and not (trust_remote_code and config.get("auto_map")):
        return named
    if config.get("is_encoder_decoder"):
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def _implementation(model: Any) -> str:
    return str(text_config_of(model)._attn_implementation)


def text_config_of(model: Any) -> Any:
    """Return the live configuration of the text decoder."""
    return model.config.get_text_config(decoder=True)


@contextmanager
def _no_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise InputError(f"unknown device `{name}`", code="option.device") from error
    if device.type not in ("cpu", "cuda"):
        raise InputError(f"`{name}` is not supported; known: auto, cpu, cuda, cuda:N",
                         code="option.device")  # fmt: skip
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError(
            "no CUDA device is available to this torch", code="option.device", hint="--device cpu"
        )
    return device


def _attention_implementation(config: dict[str, Any]) -> str | None:
    # transformers' sdpa drops `softcap` without a word; only eager applies it on every device
    return "eager" if text_config(config).get("attn_logit_softcapping") else None
