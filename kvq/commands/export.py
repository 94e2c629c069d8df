"""`kvq export`."""

from pathlib import Path
from typing import Annotated

import typer

from kvq import console
from kvq.commands.options import Json, KvCfg, Out, Overwrite

EXAMPLES = """\
Examples:

  kvq export ./model --scales calibration -o checkpoint

  kvq export ./model --scales calibration --granularity head --dry-run -o checkpoint
"""


def export(
    model: Annotated[str, typer.Argument(help="Checkpoint folder or hub id to add scales to.")],
    scales: Annotated[Path, typer.Option(help="Calibration folder.")],
    out: Out,
    kv_cfg: KvCfg = None,
    granularity: Annotated[str | None, typer.Option(help="tensor or head.")] = None,
    dialect: Annotated[str, typer.Option(help="auto or compressed-tensors.")] = "auto",
    link: Annotated[str, typer.Option(help="auto, hard, copy or symbolic.")] = "auto",
    engine: Annotated[
        list[str] | None,
        typer.Option("--for", help="Who must read the result: vllm by default. Repeatable."),
    ] = None,
    allow_unread: Annotated[
        bool, typer.Option("--allow-unread", help="Write even what such an engine would not read.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the plan only.")] = False,
    overwrite: Overwrite = False,
    json: Json = False,
) -> None:
    """Write a checkpoint with KV scales; no byte of a weight changes."""
    from kvq.engines import get_engine
    from kvq.pipeline.export import plan_export
    from kvq.pipeline.locate import locate
    from kvq.pipeline.write import check_output, write_export

    engines = engine or ["vllm"]
    for name in engines:
        get_engine(name)
    root = locate(model)
    check_output(out, overwrite=overwrite, link=link, inputs=[root, scales])
    plan = plan_export(
        root, scales, kv_cfg=kv_cfg, granularity=granularity, dialect=dialect,
        allow_unread=allow_unread, engines=engines,
    )  # fmt: skip
    notices = plan.notices
    if not dry_run:
        notices += write_export(
            plan, root, out, overwrite=overwrite, link=link, engines=engines,
            allow_unread=allow_unread,
        )  # fmt: skip
    if json:
        written = {"schema": 1, "command": "export", "ok": True, "dry_run": dry_run}
        serve = {name: plan.serve_command(out, name) for name in engines}
        shown = {"notices": list(notices), "out": str(out), "serve": serve}
        console.document(written | plan.to_json() | shown)
        return
    for notice in notices:
        console.warning(notice)
    verb = "would write" if dry_run else "wrote"
    for shard in plan.shards:
        change = f"without {len(shard.drop)} old scales" if shard.drop else "unchanged"
        console.answer(f"  {shard.source} -> {shard.target} ({change})")
    per = "head" if plan.scales.granularity == "head" else "tensor"
    console.answer(
        f"{verb} {out}: {len(plan.tensors)} {plan.scales.format} scales per {per} in "
        f"{plan.scale_shard}"
    )
    for name in engines:
        console.answer(f"serve it with: {plan.serve_command(out, name)}")
    if plan.scales.granularity == "head":
        console.warning("vLLM runs per-head scales only with FlashAttention 3 on Hopper GPUs")
