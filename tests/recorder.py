"""A plain recorder: the attention function of a model, with its inputs kept as they are."""

from collections import defaultdict
from collections.abc import Iterable

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def head_amax(states: torch.Tensor) -> torch.Tensor:
    return states.abs().amax(dim=(0, 2, 3))


def stacked_amax(values: list) -> np.ndarray:
    return torch.stack(values).amax(0).cpu().numpy()


def sampled_percentile(values: list) -> np.ndarray:
    """The 99.9th percentile of `sampled_magnitudes`."""
    return np.percentile(np.concatenate(values), 99.9, method="inverted_cdf")


def sampled_magnitudes(states: torch.Tensor) -> np.ndarray:
    """The magnitudes of [batch, heads, seq_len, head_size] that kvq.calibration.magnitudes counts.

    All positions of a short sequence; of one of 64 or more every n-th from the middle of the first
    n on, with the n that leaves 32 to 63.
    """
    length = states.shape[2]
    stride = max(1, length // 32)
    positions = [p for p in range(length) if p % stride == stride // 2]
    return states[:, :, positions].abs().flatten().cpu().numpy()


def record(
    path, rows: Iterable[list[int]], dtype: torch.dtype, implementation: str, device: str = "cpu"
):
    """Return {(layer, side): amax [heads]} of full forward passes, one row at a time."""
    found = record_each(path, rows, dtype, implementation, device)
    return {key: stacked_amax(values) for key, values in found.items()}


def record_each(
    path, rows: Iterable[list[int]], dtype: torch.dtype, implementation: str, device: str = "cpu",
    keep=head_amax,
):  # fmt: skip
    """Return {(layer, side): what is kept of each row's states, in their order}."""
    model = (
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=implementation)
        .eval()
        .to(device)
    )
    batches = [torch.tensor([row], device=device) for row in rows]
    return record_model(model, batches, implementation, keep)


def record_model(model, batches: Iterable[torch.Tensor], implementation: str, keep=head_amax):
    """Return {(layer, side): what is kept of each batch's states} of passes over token ids.

    Independent of kvq: transformers' own registration of an attention function, whole model with
    head, attention inputs q, k, v [batch, heads, seq_len, head_dim].
    """
    found: dict = defaultdict(list)

    def wrap(original):
        def attention(module, query, key, value, *args, **kwargs):
            for side, states in zip("qkv", (query, key, value), strict=True):
                found[module.layer_idx, side].append(keep(states.float()))
            return original(module, query, key, value, *args, **kwargs)

        return attention

    if implementation == "eager":
        import sys

        code = sys.modules[type(model.get_decoder().layers[0].self_attn).__module__]
        before = code.eager_attention_forward
        code.eager_attention_forward = wrap(before)
    else:
        before = ALL_ATTENTION_FUNCTIONS[implementation]
        ALL_ATTENTION_FUNCTIONS[implementation] = wrap(before)
    try:
        with torch.no_grad():
            for ids in batches:
                model(ids, use_cache=False)
    finally:
        if implementation == "eager":
            code.eager_attention_forward = before
        else:
            del ALL_ATTENTION_FUNCTIONS[implementation]
    return found


def record_cache(
    model, inputs: Iterable[dict], keep=head_amax, join=stacked_amax
) -> dict[str, tuple]:
    """Return {module: (K amax [heads], V amax [heads])} of what any transformers cache is handed.

    With `keep` and `join`, what they make of each state and of all of them.

    Independent of kvq: the whole model with the cache it makes itself, `Cache.update` recorded,
    the module found as the `self` of the calling frame. Nothing is stored, so that states keep
    their memory layout. An MLA model that caches expanded heads is recorded as (latent, rotary
    part): the norm's output, and the end of K.
    """
    import sys

    from transformers.cache_utils import Cache

    modules = {id(module): (name, module) for name, module in model.named_modules()}
    found: dict = defaultdict(list)
    latents: dict = {}
    hooks = [
        module.register_forward_hook(lambda m, _, out, n=name: latents.__setitem__(n, out))
        for name, module in modules.values()
        if name.endswith("kv_a_layernorm")
    ]
    before = Cache.update

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        frame = sys._getframe(1)
        while frame.f_locals.get("self") is not modules.get(
            id(frame.f_locals.get("self")), ("", object)
        )[1]:  # fmt: skip
            frame = frame.f_back
        module = frame.f_locals["self"]
        name = modules[id(module)][0]
        first, second = key_states, value_states
        latent = latents.get(f"{name}.kv_a_layernorm")
        if latent is not None and key_states.shape[1] > 1:
            first, rope = latent.unsqueeze(1), module.qk_rope_head_dim
            second = key_states[:, :1, :, -rope:] if rope else first
        found[name].append([keep(states.float()) for states in (first, second)])
        if layer_idx < len(self.layers):  # some models look at the layer that they updated
            self.layers[layer_idx].keys = key_states
        return key_states, value_states

    Cache.update = update
    try:
        way = None
        for one in inputs:
            way = way or _way_of_caching(model, one, found)
            with torch.no_grad():
                model(**one, **way())
    finally:
        Cache.update = before
        for hook in hooks:
            hook.remove()
    return {
        name: tuple(join([pair[i] for pair in pairs]) for i in (0, 1))
        for name, pairs in found.items()
    }


def _way_of_caching(model, one: dict, found: dict):
    """Return the arguments with which a model fills a cache; some do so only when given one."""
    from transformers.cache_utils import DynamicCache

    error = None
    ways = (
        lambda: {"use_cache": True},
        lambda: {},
        lambda: {"use_cache": True, "past_key_values": DynamicCache(config=model.config)},
    )
    for way in ways:
        found.clear()
        try:
            with torch.no_grad():
                model(**one, **way())
        except Exception as failed:  # any library's
            error = failed
            continue
        if found:
            found.clear()
            return way
    if error is not None:
        raise error
    return ways[0]
