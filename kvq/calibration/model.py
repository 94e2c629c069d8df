"""Load a checkpoint for calibration, with nothing made up on the way."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kvq.calibration.modules import live_names
from kvq.errors import (
    CalibrationError,
    CheckpointError,
    InputError,
    KvqError,
    MissingDependencyError,
    UnsupportedModelError,
    first_line,
)
from kvq.geometry import is_text_path, text_config


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
    memory: Mapping[int | str, int] | None = None,
) -> LoadedModel:
    """Load a generative language model; every tensor of it must come from the checkpoint.

    Of the attention modules named by `attentions`, every tensor of the checkpoint must be used.
    With `memory`, accelerate places its modules on the devices named there, which may be used up to
    so many bytes; inputs go where the embedding is.

    Raises:
        InputError: the device is not there.
        UnsupportedModelError: it needs code from the checkpoint, or transformers has no class.
        CheckpointError: tensors are missing or have another shape than the config says.
    """
    check_code(root, config, trust_remote_code=trust_remote_code)
    check_quantization(root, config)
    target = find_device(device)
    place: dict[str, Any] = {}
    if memory is not None:
        place = {"device_map": "auto", "max_memory": dict(memory)}
    elif quantization(config):
        place = {"device_map": {"": target}}  # some methods refuse to be moved later
    try:
        with loading(root):
            model, info = model_class(config, trust_remote_code=trust_remote_code).from_pretrained(
                root,
                dtype=dtype if dtype == "auto" else getattr(torch, dtype),
                attn_implementation=attention_implementation(config),
                trust_remote_code=trust_remote_code,
                output_loading_info=True,
                **place,
            )
            if not place:
                model.to(target)
    except torch.OutOfMemoryError as error:
        ways = [] if quantization(config) else ["--streaming reads one layer at a time"]
        if memory is None:
            ways.append("--device-map auto uses all devices")
        raise CalibrationError(
            f"the weights of `{root}` do not fit on {target if memory is None else 'the devices'}",
            code="calibrate.memory",
            hint="; ".join(ways) or "end what else uses the devices",
        ) from error
    check_tensors(info, root, {*attentions, *live_names(model, attentions).values()})
    model.requires_grad_(False)
    if memory is not None:
        first = model.get_input_embeddings().weight.device
        target = target if first.type == "meta" else first  # accelerate moves what it offloads
    _unpack(model)
    body, alone = _body(model)
    name = str(model.dtype).removeprefix("torch.")
    return LoadedModel(model, body, alone, target, name, implementation_of(model))


@contextmanager
def loading(root: Path) -> Iterator[None]:
    """Turn what transformers raises while it builds or loads a model into kvq's errors."""
    try:
        with no_progress_bars():
            yield
    except (KvqError, torch.OutOfMemoryError):
        raise
    except ImportError as error:
        raise MissingDependencyError(
            f"transformers needs another package: {first_line(error)}",
            code="dependency.model",
        ) from error
    except Exception as error:  # configs are checked by every class in its own way
        raise UnsupportedModelError(
            f"transformers cannot load `{root}`: {first_line(error)}", code="model.load"
        ) from error


def check_code(root: Path, config: dict[str, Any], *, trust_remote_code: bool) -> None:
    """Refuse a class that transformers lacks: another one in its place is another model."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    names = config.get("architectures")
    name = names[0] if isinstance(names, list) and names else None
    known = name is not None and hasattr(transformers, str(name))
    if config.get("auto_map") and config.get("model_type") not in CONFIG_MAPPING:
        known = False
    if trust_remote_code or known:
        return
    if config.get("auto_map"):
        raise UnsupportedModelError(
            f"`{root}` brings its own model code (`auto_map`), which kvq does not run by itself",
            code="model.remote_code",
            hint="read that code, then pass --trust-remote-code",
        )
    if name is not None:
        raise UnsupportedModelError(
            f"transformers has no class `{name}`, which config.json names in `architectures`",
            code="model.architecture",
            hint="upgrade transformers, or name the class of it that runs this model",
        )


def quantization(config: dict[str, Any]) -> Any:
    """Return what a config declares as the quantization of its weights."""
    return config.get("quantization_config") or text_config(config).get("quantization_config")


def check_quantization(root: Path, config: dict[str, Any]) -> None:
    """Refuse quantized weights that transformers would take for plain numbers."""
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    declared = quantization(config)
    method = declared.get("quant_method") if isinstance(declared, dict) else None
    if isinstance(declared, dict) and (
        declared.get("load_in_4bit") or declared.get("load_in_8bit")
    ):
        method = "bitsandbytes"  # which older ones do not name
    # `bitsandbytes` stands for `bitsandbytes_4bit` and `bitsandbytes_8bit`
    names = {name.removesuffix("_4bit").removesuffix("_8bit")
             for name in AUTO_QUANTIZATION_CONFIG_MAPPING}  # fmt: skip
    if declared and method not in names:
        found = f"`quant_method` {method!r}"
    elif not declared and (root / "hf_quant_config.json").exists():
        found = "`hf_quant_config.json`"
    else:
        return
    raise UnsupportedModelError(
        f"`{root}` is quantized by {found}, which transformers does not know: it would run the "
        "quantized numbers as weights",
        code="model.quantization",
        hint="calibrate the checkpoint it was made from",
    )


# Leaves that quantized weights have beside them.
_QUANTIZED = re.compile(
    r"\.(\w*weight_(scale|zero_point|packed|shape|global_scale)\w*|\w*scale_inv|input_scale"
    r"|qweight|qzeros|scales|g_idx|pre_quant_scale)$"
)


def check_tensors(info: dict[str, Any], root: Path, attentions: Iterable[str]) -> None:
    """Refuse a model that is not the checkpoint: tensors made up, or left out where they matter."""
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
        or (_QUANTIZED.search(name) and is_text_path(name))
    ]
    if unused:
        raise CheckpointError(
            f"transformers ignores {len(unused)} tensors of `{root}` that matter, first "
            f"`{unused[0]}`; the maxima would be those of another model",
            code="model.unused_tensors",
            hint="config.json and the tensors disagree; compare them with the original model",
        )


def _unpack(model: Any) -> None:
    """Unpack weights that compressed-tensors leaves packed until the whole model runs.

    kvq runs it without its head, which would meet them packed.
    """
    if hasattr(model, "ct_decompress_hook"):
        model.hf_quantizer.compressor.decompress_model(model)


@torch.inference_mode()
def _body(model: Any) -> tuple[Any, bool]:
    """Return what to run, and whether it is only the text decoder, the whole needing images."""
    decoder = None if model.config.is_encoder_decoder else model.get_decoder()
    if decoder is None or decoder is model.base_model:
        return model.base_model, False
    try:
        model.eval().base_model(input_ids=torch.tensor([[3, 4]], device=model.device))
    except Exception:  # of model code; its text decoder is tried, and an error there is shown
        return decoder, True
    return model.base_model, False


def model_class(config: dict[str, Any], *, trust_remote_code: bool) -> Any:
    """Return the class that the checkpoint was saved from, else the one for its model type."""
    import transformers

    names = config.get("architectures") or [""]
    named = getattr(transformers, str(names[0]), None)
    if named is not None and not (trust_remote_code and config.get("auto_map")):
        return named
    if config.get("is_encoder_decoder"):
        return transformers.AutoModelForSeq2SeqLM
    return transformers.AutoModelForCausalLM


def implementation_of(model: Any) -> str:
    """Return the name of the attention implementation that the text decoder runs."""
    return str(text_config_of(model)._attn_implementation)


def text_config_of(model: Any) -> Any:
    """Return the live configuration of the text decoder."""
    return model.config.get_text_config(decoder=True)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Keep transformers from drawing bars inside the block."""
    from transformers.utils import logging

    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def find_device(name: str) -> torch.device:
    """Return the device that `--device` names.

    Raises:
        InputError: it is unknown, unsupported or not there.
    """
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
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise InputError(
            f"there is no `{device}`: this machine has {torch.cuda.device_count()} CUDA devices",
            code="option.device",
            hint="name one of them, or start fewer processes",
        )
    return device


def attention_implementation(config: dict[str, Any]) -> str | None:
    """Return the attention implementation to ask for; None leaves the choice to transformers."""
    # transformers' sdpa drops `softcap` without a word; only eager applies it on every device
    return "eager" if text_config(config).get("attn_logit_softcapping") else None
