"""Rules about head sizes: what a block format can cut into blocks."""

from collections.abc import Iterator

from kvq.checks.context import Context, rule
from kvq.checks.findings import Finding
from kvq.formats import get_format


@rule()
def heads_are_whole_blocks(context: Context) -> Iterator[Finding]:
    """A format with a scale for each block of a head needs heads of whole blocks."""
    declared = context.dialect.declared(context.view).format
    block = get_format(declared).block_size if declared else None
    if not block:
        return
    layers = [layer for layer in context.geometry.layers if layer.kv_lora_rank is None]
    sizes = {size for layer in layers for _, size in layer.cached}
    for size in sorted(sizes):
        if size % block:
            yield Finding(
                "format.head_size", "error",
                f"heads of {size} cannot be cut into blocks of {block}, as `{declared}` needs",
                file="config.json", expected=f"a multiple of {block}", found=str(size),
                fix="--kv-cfg FP8_KV_CFG, which has no blocks",
            )  # fmt: skip
