import pytest

from kvq.configs import CONFIGS, KV, Q, QuantizerEntry, get_config, resolve
from kvq.errors import InputError
from kvq.quantizers import QuantizerConfig

LLAMA = [f"model.layers.{i}.self_attn.{s}_bmm_quantizer" for i in (0, 1) for s in "qkv"]
MLA = [f"model.layers.0.self_attn.{name}_bmm_quantizer" for name in ("q", "kv_c", "k_pe")]
FP8, INT8 = QuantizerConfig("fp8_e4m3"), QuantizerConfig("int8")


def test_later_entries_win():
    last_layer_off = QuantizerEntry(("*layers.1.*",), None)
    found = resolve((QuantizerEntry(KV, FP8), QuantizerEntry(KV, INT8), last_layer_off), LLAMA)
    assert found == {name: INT8 if "layers.0" in name and "q_bmm" not in name else None
                     for name in LLAMA}  # fmt: skip


def test_an_entry_that_matches_nothing_is_an_error():
    with pytest.raises(InputError, match="matches none of the model's 6 quantizers") as caught:
        resolve((QuantizerEntry(("*p_bmm_quantizer",), FP8),), LLAMA)
    assert caught.value.code == "config.no_match"


@pytest.mark.parametrize("name", CONFIGS)
def test_every_configuration_covers_keys_and_values_of_plain_and_latent_caches(name):
    plain, latent = resolve(get_config(name), LLAMA), resolve(get_config(name), MLA)
    with_query = "ATTN" in name
    for quantizer, config in {**plain, **latent}.items():
        assert (config is not None) == (with_query or not quantizer.endswith(".q_bmm_quantizer"))


def test_names_mean_what_they_say():
    for name, (entry,) in CONFIGS.items():
        config = entry.config
        assert config.format == {"F": "fp8_e4m3", "N": "nvfp4", "I": "int8"}[name[0]]
        assert config.granularity == ("head" if "PER_HEAD" in name else "tensor")
        assert config.constant_amax == (448.0 if "CAST" in name else None)
        assert entry.patterns == (KV + Q if "ATTN" in name else KV)
