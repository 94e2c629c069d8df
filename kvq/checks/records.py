"""Rules about what kvq recorded beside the scales, and what stands beside the checkpoint."""

from collections.abc import Iterator

from kvq.checks.context import Context, rule
from kvq.checks.findings import Finding
from kvq.dialects.sglang_json import FILE_NAME, is_sglang_json, read_sglang_json
from kvq.errors import KvqError
from kvq.files import read_json


@rule()
def recorded_scales_are_there(context: Context) -> Iterator[Finding]:
    """A scale of the query that was written is still there: without one, engines use 1.0."""
    provenance = context.provenance
    layers = {layer.attention: layer.layer_idx for layer in context.geometry.layers}
    for attention, sides in sorted((provenance.status if provenance else {}).items()):
        if "q" in sides and (attention, "q") not in context.by_side and attention in layers:
            yield Finding(
                "provenance.lost", "error",
                f"layer {layers[attention]} had a q scale when it was exported: attention that "
                "quantizes queries uses 1.0 now",
                layers[attention], context.name(attention, "q"), expected="a scale tensor",
                found="none", fix="`kvq export` again, from the calibration",
            )  # fmt: skip


@rule()
def scales_json_is_valid(context: Context) -> Iterator[Finding]:
    """A file for SGLang's option that SGLang refuses leaves every scale at 1.0, and it serves on.

    Source: SGLang 0.5.23 `model_executor/model_runner.py`, load_kv_cache_scales.
    """
    path = context.view.root / FILE_NAME
    if not path.is_file():
        return
    try:
        if not is_sglang_json(read_json(path)):
            words = f"`{FILE_NAME}` has no `kv_cache.scaling_factor`"
        else:
            read_sglang_json(path, context.view.config, context.geometry)
            return
    except KvqError as error:
        words = str(error)
    yield Finding(
        "files.scales_json", "error", f"{words}: SGLang says so and uses 1.0 everywhere",
        file=FILE_NAME, expected="every layer, this model's type", found="another",
        fix="`kvq export --dialect sglang-json` writes it anew",
    )  # fmt: skip
