"""A plain recorder: the attention function of a model, with its inputs kept as they are."""

from collections import defaultdict
from collections.abc import Iterable

import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def record(
    path, rows: Iterable[list[int]], dtype: torch.dtype, implementation: str, device: str = "cpu"
):
    """Return {(layer, side): amax [heads]} of full forward passes, one row at a time.

    Independent of kvq: transformers' own registration of an attention function, whole model with
    head, attention inputs q, k, v [1, heads, seq_len, head_dim].
    """
    model = (
        AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation=implementation)
        .eval()
        .to(device)
    )
    found: dict = defaultdict(list)

    def wrap(original):
        def attention(module, query, key, value, *args, **kwargs):
            for side, states in zip("qkv", (query, key, value), strict=True):
                found[module.layer_idx, side].append(states.float().abs().amax(dim=(0, 2, 3)))
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
            for row in rows:
                model(torch.tensor([row], device=device), use_cache=False)
    finally:
        if implementation == "eager":
            code.eager_attention_forward = before
        else:
            del ALL_ATTENTION_FUNCTIONS[implementation]
    return {key: torch.stack(values).amax(0).cpu().numpy() for key, values in found.items()}
