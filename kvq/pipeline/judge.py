"""Ask the models of engines about a checkpoint that is planned, before anything is written."""

import shlex
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from kvq.checkpoint import CONFIG_NAME, INDEX_NAME, CheckpointView
from kvq.checks.engines import engine_findings
from kvq.checks.platform import platform_findings
from kvq.dialects.documents import LEGACY_NAME
from kvq.dialects.sglang_json import FILE_NAME
from kvq.engines import get_engine
from kvq.engines.base import EngineOptions
from kvq.errors import DialectError
from kvq.files import write_json
from kvq.geometry import read_geometry
from kvq.outliers import skip_flag
from kvq.pipeline.plan import ExportPlan
from kvq.tensorfile import TensorFile, read_header, write_float32

_COMMANDS = {
    "vllm": "vllm serve",
    "sglang": "python -m sglang.launch_server --model-path",
    "tensorrt-llm": "trtllm-serve",
    "transformers": "transformers serve",
}
OUT = "{out}"  # in a flag: the folder
# What the engine's option for the cache's dtype is called, and its word for each format.
_DTYPE_FLAGS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "vllm": ("--kv-cache-dtype", {"fp8_e4m3": "fp8", "nvfp4": "nvfp4"}),
    "sglang": ("--kv-cache-dtype", {"fp8_e4m3": "fp8_e4m3", "nvfp4": "nvfp4"}),
    "tensorrt-llm": ("--kv_cache_dtype", {"fp8_e4m3": "fp8", "nvfp4": "nvfp4"}),
}


@dataclass(frozen=True)
class Verdict:
    """How an engine is to be started so that it uses the scales, and what it still would not.

    `unknown` says why it is not known what the engine does; `unskipped` that nothing
    tells it to leave layers unquantized.
    """

    engine: str
    flags: tuple[str, ...] = ()
    unread: str | None = None
    unknown: str | None = None
    unskipped: str | None = None

    @property
    def notices(self) -> tuple[str, ...]:
        """What the user has to know."""
        return tuple(filter(None, (self.unread or self.unknown, self.unskipped)))

    def command(self, out: Path) -> str:
        """Return the command that serves the result, with what a checkpoint cannot carry."""
        flags = [flag.replace(OUT, shlex.quote(str(out))) for flag in self.flags]
        return " ".join([_COMMANDS[self.engine], shlex.quote(str(out)), *flags])


def judge(
    plan: ExportPlan, view: CheckpointView, engines: Sequence[str], options: EngineOptions,
    *, allow_unread: bool,
) -> tuple[Verdict, ...]:  # fmt: skip
    """Predict what engines would make of the result of a plan.

    Raises:
        DialectError: one of them would not use the scales as written, under any of its options.
    """
    with planned(plan, view) as result:
        verdicts = tuple(_ask(name, plan, result, options) for name in engines)
    for verdict in verdicts:
        if verdict.unread and not allow_unread:
            raise DialectError(
                verdict.unread,
                code="export.unread",
                hint=_hint(plan, verdict.engine),
            )
    return verdicts


def _hint(plan: ExportPlan, engine: str) -> str:
    others = []
    if plan.dialect == "modelopt" and engine in ("vllm", "sglang", "transformers"):
        config = plan.config.get("quantization_config") or {}
        fp8 = "--kv-cfg FP8_KV_CFG"
        alone = not config.get("quant_algo") and "quantization" not in config
        others.append(f"{fp8} with --dialect compressed-tensors" if alone else f"{fp8} may be read")
    if plan.scales is not None and plan.scales.granularity == "head":
        others.append("--granularity tensor may be read")
    return "; ".join(
        [*others, "--allow-unread writes the scales nevertheless; --for names another engine"]
    )


def _ask(name: str, plan: ExportPlan, view: CheckpointView, options: EngineOptions) -> Verdict:
    return replace(_start(name, plan, view, options), unskipped=_unskipped(name, plan))


def _unskipped(name: str, plan: ExportPlan) -> str | None:
    if not plan.skip_layers or name == "vllm":
        return None
    listed = ", ".join(str(layer) for layer in plan.skip_layers)
    return f"layers {listed} are to stay unquantized, and kvq knows no option of {name} for that"


def _start(name: str, plan: ExportPlan, view: CheckpointView, options: EngineOptions) -> Verdict:
    skip = (skip_flag(plan.skip_layers),) if plan.skip_layers and name == "vllm" else ()
    if plan.unread is not None:
        flags = ("--quantization-param-path", f"{OUT}/{FILE_NAME}", "--kv-cache-dtype", "fp8_e4m3")
        return Verdict(name, flags if name == "sglang" else (), plan.unread)
    unread, unknown = _read(name, plan, view, options)
    if unread is None:
        return Verdict(name, skip, unknown=unknown)
    flag, words = _DTYPE_FLAGS.get(name, ("", {}))
    word = words.get(plan.scales.format) if plan.scales else None
    if word and options.kv_cache_dtype == "auto":
        told = replace(options, kv_cache_dtype=word)
        still_unread, unknown = _read(name, plan, view, told)
        if still_unread is None:
            return Verdict(name, (f"{flag} {word}", *skip), unknown=unknown)
    return Verdict(name, skip, unread)


def _read(
    name: str, plan: ExportPlan, view: CheckpointView, options: EngineOptions
) -> tuple[str | None, str | None]:
    """Return what an engine would do otherwise than written, and what of it is not known."""
    geometry = read_geometry(view.config, view.tensors)
    reading = get_engine(name).read(view, geometry, options)
    layers = plan.scales.layers if plan.scales else ()
    constant = {s for layer in layers for s in layer.provenance.values()} == {"constant"}
    found = [
        *engine_findings(reading, view, constant=constant),
        *platform_findings(reading, geometry),
    ]
    wrong = [finding for finding in found if finding.severity == "error"]
    if wrong:
        layer = "" if wrong[0].layer_idx is None else f"layer {wrong[0].layer_idx}: "
        return f"{layer}{wrong[0].message} ({len(wrong)} findings in all)", None
    sides = [side for layer in reading.layers for side in (layer.k, layer.v)]
    reason = next((side.reason for side in sides if side.value is None), None)
    if reason is None:
        return None, None
    return None, f"whether {name} {reading.version} uses the scales is not known: {reason}"


@contextmanager
def planned(plan: ExportPlan, view: CheckpointView) -> Iterator[CheckpointView]:
    """Yield the view that the result will have; tensors of weights stay where they are."""
    with TemporaryDirectory(prefix="kvq-") as name:
        root = Path(name)
        for file in (CONFIG_NAME, LEGACY_NAME):
            if file in plan.side_files:
                shutil.copyfile(view.root / file, root / file)
        write_documents(plan, root)
        files = {
            shard.target: _without(view.files[shard.source], shard.drop) for shard in plan.shards
        }
        if plan.scale_shard is not None:
            write_float32(root / plan.scale_shard, plan.tensors, plan.metadata)
            files[plan.scale_shard] = read_header(root / plan.scale_shard)
        yield CheckpointView(root, plan.config, files, plan.weight_map)


def _without(file: TensorFile, drop: Sequence[str]) -> TensorFile:
    if not drop:
        return file
    gone = frozenset(drop)
    kept = {name: info for name, info in file.tensors.items() if name not in gone}
    return TensorFile(file.path, kept, file.metadata)


def write_documents(plan: ExportPlan, folder: Path) -> None:
    """Write a plan's JSON files, its index among them.

    Those of the source keep their order: the first group of compressed-tensors that matches wins.
    """
    for name, document in plan.documents.items():
        write_json(folder / name, document, sort=False)
    if plan.weight_map is not None:
        index = {"metadata": dict(plan.index_metadata), "weight_map": dict(plan.weight_map)}
        write_json(folder / INDEX_NAME, index)
