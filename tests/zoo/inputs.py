"""Inputs for models that do not run on token ids alone: pixels, boxes, audio, codebooks."""

from collections.abc import Callable
from typing import Any

import torch

PAIR = 7  # decoder tokens of an encoder-decoder model


def _ids(n: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(5, 90, (batch, n), generator=torch.Generator().manual_seed(n))


def _normal(*shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(len(shape))
    return torch.randn(shape, generator=generator).to(torch.bfloat16)


def _mllama(config: Any, n: int) -> dict[str, Any]:
    tiles, size = config.vision_config.max_num_tiles, config.vision_config.image_size
    return {
        "input_ids": _ids(n),
        "pixel_values": _normal(1, 1, tiles, 3, size, size),
        "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
        "aspect_ratio_mask": torch.ones(1, 1, tiles, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, n, 1, tiles, dtype=torch.long),
    }


def _mllama_text(config: Any, n: int) -> dict[str, Any]:
    return {
        "input_ids": _ids(n),
        "cross_attention_states": _normal(1, 12, config.hidden_size),
        "cross_attention_mask": torch.zeros(1, 1, n, 12).to(torch.bfloat16),
        "full_text_row_masked_out_mask": torch.ones(1, 1, n, 1).to(torch.bfloat16),
    }


def _assistant(config: Any, n: int) -> dict[str, Any]:
    text = config.text_config
    layers = dict(zip(text.layer_types, text.per_layer_config, strict=True))
    states = {
        kind: tuple(_normal(1, layer.num_key_value_heads, n, layer.head_dim) for _ in "kv")
        for kind, layer in layers.items()
    }
    return {
        "inputs_embeds": _normal(1, n, 2 * config.backbone_hidden_size),
        "shared_kv_states": states,
    }


# model type → inputs for n tokens, from its config
INPUTS: dict[str, Callable[[Any, int], dict[str, Any]]] = {
    "idefics": lambda c, n: {
        "input_ids": _ids(n), "pixel_values": _normal(1, 1, 3, 32, 32),
        "image_attention_mask": torch.ones(1, n, 1, dtype=torch.long),
    },
    "gemma4_assistant": _assistant,
    "gemma4_unified_assistant": _assistant,
    "mllama": _mllama,
    "mllama_text_model": _mllama_text,
    "musicgen_decoder": lambda c, n: {"input_ids": _ids(n, c.num_codebooks)},
    "musicgen_melody_decoder": lambda c, n: {"input_ids": _ids(n, c.num_codebooks)},
    "pix2struct": lambda c, n: {
        "flattened_patches": _normal(1, n, 2 + c.vision_config.patch_embed_hidden_size).abs(),
        "decoder_input_ids": _ids(PAIR),
    },
    "pp_formulanet": lambda c, n: {
        "pixel_values": _normal(1, 3, 32, 32), "decoder_input_ids": _ids(n),
    },
    "udop": lambda c, n: {
        "input_ids": _ids(n), "bbox": torch.rand(1, n, 4).to(torch.bfloat16),
        "decoder_input_ids": _ids(PAIR),
    },
    "vision-encoder-decoder": lambda c, n: {
        "pixel_values": _normal(1, 3, 32, 32), "decoder_input_ids": _ids(n),
    },
    "whisper": lambda c, n: {
        "input_features": _normal(1, c.num_mel_bins, 2 * c.max_source_positions),
        "decoder_input_ids": _ids(n),
    },
}  # fmt: skip
