"""`kvq export`."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvq import console
from kvq.commands.options import Json, KvCfg, Out, Overwrite, Platform, TensorParallel
from kvq.errors import InputError

if TYPE_CHECKING:
    from kvq.pipeline.plan import ExportPlan

EXAMPLES = """\
Examples:

  kvq export ./model --scales calibration -o checkpoint

  kvq export ./model --scales calibration --granularity head --dry-run -o checkpoint

  kvq export ./old-checkpoint --scales ./old-checkpoint -o repaired

  kvq export ./checkpoint --strip -o bare
"""


def export(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or hub id to add scales to.")],
    out: Out,
    scales: Annotated[
        Path | None,
        typer.Option(help="Calibration, checkpoint with scales, or a scales JSON file."),
    ] = None,
    kv_cfg: KvCfg = None,
    granularity: Annotated[str | None, typer.Option(help="tensor or head.")] = None,
    dialect: Annotated[
        str, typer.Option(help="auto, compressed-tensors, modelopt, fp8 or sglang-json.")
    ] = "auto",
    strip: Annotated[
        bool, typer.Option("--strip", help="Remove scales and their declarations instead.")
    ] = False,
    for_other_weights: Annotated[
        bool,
        typer.Option("--for-other-weights", help="Write scales of other weights, and record it."),
    ] = False,
    link: Annotated[str, typer.Option(help="auto, hard, copy or symbolic.")] = "auto",
    engine: Annotated[
        list[str] | None,
        typer.Option(
            "--for",
            help="Who must read the result: vllm by default, sglang for sglang-json. Repeatable.",
        ),
    ] = None,
    platform: Platform = "sm90",
    tp: TensorParallel = 1,
    allow_unread: Annotated[
        bool, typer.Option("--allow-unread", help="Write even what such an engine would not read.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan only.")] = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write a checkpoint with KV scales, or without them; no byte of a weight changes."""
    from kvq.checkpoint import open_checkpoint
    from kvq.engines import get_engine
    from kvq.engines.base import EngineOptions
    from kvq.pipeline.convert import Wanted
    from kvq.pipeline.export import ExportOptions, plan_export, plan_strip, record_unread
    from kvq.pipeline.judge import judge
    from kvq.pipeline.locate import locate
    from kvq.pipeline.verify import EngineQuestion
    from kvq.pipeline.write import check_output, write_export

    own = "sglang" if dialect == "sglang-json" else "vllm"
    engines = engine or ([] if strip else [own])
    for name in engines:
        get_engine(name)
    if strip == (scales is not None):
        raise InputError(
            "give either --scales or --strip" if scales else "--scales is missing",
            code="option.scales",
            hint="--scales CALIBRATION writes scales, --strip removes them",
        )
    if strip and (kv_cfg or granularity or dialect != "auto" or for_other_weights or engine):
        raise InputError(
            "--strip takes no --kv-cfg, --granularity, --dialect, --for-other-weights or --for",
            code="option.strip",
        )
    wanted = EngineOptions(platform=platform, tp=tp)
    root = locate(model)
    check_output(out, overwrite=overwrite, link=link, inputs=[root, *([scales] if scales else [])])
    if scales is None:
        plan = plan_strip(root)
    else:
        options = ExportOptions(
            Wanted(kv_cfg, granularity), dialect, tuple(engines), tp, for_other_weights
        )
        plan = plan_export(root, scales, options)
    verdicts = judge(plan, open_checkpoint(root), engines, wanted, allow_unread=allow_unread)
    plan = record_unread(plan, {v.engine: v.unread for v in verdicts if v.unread})
    notices = plan.notices + tuple(notice for verdict in verdicts for notice in verdict.notices)
    if "vllm" in engines and plan.scales is not None and plan.scales.granularity == "head":
        notices += ("vLLM runs scales per head only with FlashAttention 3 on Hopper GPUs",)
    if not dry_run:
        question = EngineQuestion(engines, wanted)
        notices += write_export(plan, root, out, overwrite=overwrite, link=link, ask=question)
    commands = {verdict.engine: verdict.command(out) for verdict in verdicts}
    if json:
        written = {"schema": 1, "command": "export", "ok": True, "dry_run": dry_run}
        shown = {"notices": list(notices), "out": str(out), "serve": commands}
        console.document(written | plan.to_json() | shown)
        return
    for notice in notices:
        console.warning(notice)
    _answer(plan, f"{'would write' if dry_run else 'wrote'} {out}")
    for command in commands.values():
        console.answer(f"serve it with: {command}")


def _answer(plan: "ExportPlan", wrote: str) -> None:
    for shard in plan.shards:
        change = f"without {len(shard.drop)} old scales" if shard.drop else "unchanged"
        console.answer(f"  {shard.source} -> {shard.target} ({change})")
    if plan.scales is None:
        console.answer(f"{wrote}: no scales, no declared cache")
        return
    place = plan.scale_shard or ", ".join(sorted(plan.documents))
    count = sum(len(layer.scales) for layer in plan.scales.layers)
    console.answer(
        f"{wrote}: {count} {plan.scales.format} scales per {plan.scales.granularity} in {place}, "
        f"dialect {plan.dialect}"
    )
