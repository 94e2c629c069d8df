"""What differs from the general shrink in the architectures of the sequence-to-sequence mapping."""

from collections import UserDict
from typing import Any

from transformers import BertConfig, PreTrainedConfig

from tests.zoo.causal import FULL, SLIDING
from tests.zoo.shrink import shrink


class Part(UserDict[str, Any]):
    """A shrunk configuration for a class that takes nested ones as dicts and pops their type."""

    def __init__(self, config_class: type[PreTrainedConfig], **exceptions: Any) -> None:
        super().__init__(shrink(config_class, **exceptions).to_dict())
        self.model_type = self.data.pop("model_type")

    def pop(self, key: str) -> Any:
        """Give the model type and keep it, so that the part can be used again."""
        return {"model_type": self.model_type}[key]


DECODER = {"is_decoder": True, "add_cross_attention": True}
GRANITE_SPEECH = {
    "encoder_config": {"input_dim": 16, "context_size": 8, "max_pos_emb": 16, "output_dim": 8},
    "projector_config": {"num_hidden_layers": 2, "encoder_hidden_size": 32},
}
LAYER_TYPES = {"layer_types": [SLIDING, FULL, SLIDING, FULL]}
NUM_LAYERS = {"num_layers": 2}  # encoder layers as decoder layers: a plain cache counts these
QWEN3_AUDIO = {"num_mel_bins": 16, "output_dim": 32, "downsample_hidden_size": 8}
T5GEMMA2 = {
    "encoder": {"text_config": LAYER_TYPES, "mm_tokens_per_image": 4},
    "decoder": LAYER_TYPES,
}
VIBEVOICE_TOKENIZER = {"num_filters": 4, "downsampling_ratios": [2, 2], "depths": [1, 1, 1]}

EXCEPTIONS: dict[str, dict[str, Any]] = {
    "encoder-decoder": {
        "encoder": Part(BertConfig), "decoder": Part(BertConfig, **DECODER),
        "decoder_start_token_id": 1,
    },
    "fsmt": {"src_vocab_size": 128, "tgt_vocab_size": 128},
    "led": {
        "max_encoder_position_embeddings": 128, "max_decoder_position_embeddings": 128,
        "attention_window": 8,
    },
    "nllb-moe": {"encoder_sparse_step": 2, "decoder_sparse_step": 2},
    "qwen3_asr": {"audio_config": QWEN3_AUDIO, "eos_token_id": [2, 3]},
    "switch_transformers": {
        **NUM_LAYERS, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1,
    },
    "t5gemma2": T5GEMMA2,
    "vibevoice_asr": {
        "acoustic_tokenizer_encoder_config": VIBEVOICE_TOKENIZER,
        "semantic_tokenizer_encoder_config": VIBEVOICE_TOKENIZER,
    },
    **dict.fromkeys(("granite_speech", "granite_speech_plus"), GRANITE_SPEECH),
    **dict.fromkeys(("longt5", "mt5", "t5", "umt5"), NUM_LAYERS),
}  # fmt: skip

# Architectures that cannot be built or run, with the reason.
CANNOT: dict[str, str] = {}

# Architectures that take more than `input_ids` and `decoder_input_ids`, with what they need.
NEEDS: dict[str, str] = {
    "fsmt": "`decoder_input_ids` one at a time: with a cache, it reads only the last of them",
    "switch_transformers": "no `use_cache`: it hands True to its encoder, which refuses that",
    "voxtral_realtime": "`input_features` [batch, num_mel_bins, audio_length_per_tok * seq_len] "
    "and `num_delay_tokens`",
}
