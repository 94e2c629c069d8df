"""Load a checkpoint for calibration, with nothing made up on the way."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvq.errors import (
    CheckpointError,
    InputError,
    MissingDependencyError,
    UnsupportedModelError,
)
from kvq.geometry import text_config
from kvq.state import Module


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to observe: the decoder runs without the language head."""

    model: Any
    decoder: nn.Module
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
    """Load a causal language model; every tensor of its decoder must come from the checkpoint.

    Of the attention modules named by `attentions`, every tensor of the checkpoint must be used.

    Raises:
        InputError: the device is not there.
        UnsupportedModelError: it needs code from the checkpoint, or transformers has no class.
        CheckpointError: tensors are missing or have another shape than the config says.
    """
    from transformers import AutoModelForCausalLM

    if config.get("auto_map") and not trust_remote_code:
        raise UnsupportedModelError(
            f"`{root}` brings its own model code (`auto_map`), which kvq does not run by itself",
            code="model.remote_code",
            hint="read that code, then pass --trust-remote-code",
        )
    target = _device(device)
    attention = _attention_implementation(config)
    try:
        with _no_progress_bars():
            model, info = AutoModelForCausalLM.from_pretrained(
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
    model.requires_grad_(False).to(target)
    name = str(model.dtype).removeprefix("torch.")
    decoder = model.get_decoder()
    return LoadedModel(model, decoder, target, name, model.config._attn_implementation)


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


def module_list(loaded: LoadedModel, attentions: Sequence[str]) -> tuple[Module, ...]:
    """Return the module tree as plain data, under the paths of the checkpoint's tensor names.

    A checkpoint of the bare decoder (`layers.0…`) is shown from its decoder on.

    Raises:
        UnsupportedModelError: an attention path of the checkpoint is no module of the model.
    """
    for root in (loaded.model, loaded.decoder):
        paths = {path for path, _ in root.named_modules()}
        if paths.issuperset(attentions):
            return tuple(
                Module(path, type(module).__name__, module.extra_repr())
                for path, module in root.named_modules()
            )
    missing = next(path for path in attentions if path not in paths)
    raise UnsupportedModelError(
        f"`{missing}` is no module of `{type(loaded.model).__name__}` as transformers builds it",
        code="model.paths",
    )
