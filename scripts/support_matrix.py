"""Go through every text-generation architecture of transformers and write docs/support.md.

Usage: python scripts/support_matrix.py [--only TYPE,...] [--kind KIND] [--check] [-v]

For each entry of the causal, image-text and sequence-to-sequence mappings: a tiny random model is
saved, calibrated, exported, inspected and verified through the command line, and every amax is
compared with that of a plain recorder. Exit 1 if any amax differs, any layer that caches has no
scale, or a share of working entries falls under the promised one.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import torch
import transformers

import kvq
from kvq.cli import run
from kvq.errors import KvqError
from kvq.state import read_calibration
from tests import zoo
from tests.recorder import record_cache
from tests.zoo.inputs import INPUTS

KINDS = {
    "causal": "causal language models",
    "image-text": "vision-language models",
    "seq2seq": "sequence-to-sequence and audio-language models",
}
WORKS, NO_CACHE, REFUSED, UNBUILT, WRONG = (
    "works",
    "no KV cache",
    "refused",
    "cannot be built",
    "WRONG",
)
OUT = ROOT / "docs" / "support.md"
PROMISED = 0.9  # of all entries work
LENGTHS = (5, 17, 40)


@dataclass
class Outcome:
    """What happened to one architecture."""

    kind: str
    model_type: str
    status: str
    note: str = ""
    layers: int = 0


def command(*argv: object) -> tuple[int, dict]:
    """Run one kvq command with --json and return its exit code and document."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run([*map(str, argv), "--json"])
    return code, json.loads(out.getvalue())


def rows(vocab: int, pairs: bool) -> list[dict[str, list[int]]]:
    generator = np.random.default_rng(0)
    found = []
    for length in LENGTHS:
        row = {"input_ids": generator.integers(3, vocab, length).tolist()}
        if pairs:
            row["labels"] = generator.integers(3, vocab, length + 2).tolist()
        found.append(row)
    return found


def model_inputs(data: list[dict[str, list[int]]], start: int | None) -> list[dict]:
    inputs = []
    for row in data:
        one = {"input_ids": torch.tensor([row["input_ids"]])}
        if start is not None:
            one["decoder_input_ids"] = torch.tensor([[start, *row["labels"][:-1]]])
        inputs.append(one)
    return inputs


def examine(kind: str, model_type: str, folder: Path) -> Outcome:
    """Calibrate, export, inspect and verify one architecture."""
    try:
        model = zoo.tiny_model(kind, model_type)
        model.save_pretrained(folder / "model", **zoo.SAVE.get(model_type, {}))
    except Exception as error:  # any library's error is the answer here
        reason = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:150]}"
        return Outcome(kind, model_type, UNBUILT, reason)
    own = model.config.model_type  # the causal mapping names some text decoders after the whole
    if own in INPUTS and (kind, model_type) not in TEXT_ALONE:
        return examine_in_python(kind, model_type, INPUTS[own], folder)
    config = json.loads((folder / "model" / "config.json").read_text())
    pairs = bool(config.get("is_encoder_decoder"))
    vocab = getattr(model.config.get_text_config(decoder=True), "vocab_size", 100)
    data = rows(min(vocab, 100), pairs)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data))
    argv = ["calibrate", folder / "model", "--dataset", folder / "rows.jsonl", "--seq-len", 48,
            "--min-tokens", 1, "-o", folder / "calibration"]  # fmt: skip
    code, document = command(*argv, *(["--target-column", "labels"] if pairs else []))
    inputs = model_inputs(data, start_token(config, model) if pairs else None)
    if code:
        return refused(kind, model_type, model, inputs, document["error"]["message"])
    calibration = read_calibration(folder / "calibration")
    model = reload(calibration, folder)
    try:
        recorded = record_cache(model, inputs)
    except Exception:  # the whole needs images
        recorded = record_cache(model.get_decoder(), inputs)
    return compare(kind, model_type, calibration, recorded) or export(
        kind, model_type, folder, calibration
    )


# Text decoders of the causal mapping that need no images, though the whole does.
TEXT_ALONE = {("causal", "whisper")}


def examine_in_python(
    kind: str, model_type: str, make: Callable[[Any, int], dict], folder: Path
) -> Outcome:
    """The same through the Python API, with the images or sounds that the model needs."""
    config = json.loads((folder / "model" / "config.json").read_text())
    model = getattr(transformers, config["architectures"][0]).from_pretrained(folder / "model")
    inputs = [make(model.config, n) for n in LENGTHS]
    try:
        calibration = kvq.calibrate(model, inputs, checkpoint=folder / "model")
    except KvqError as error:
        return refused(kind, model_type, model, inputs, str(error))
    kvq.write_calibration(calibration, folder / "calibration", overwrite=False)
    outcome = compare(kind, model_type, calibration, record_cache(model.eval(), inputs))
    outcome = outcome or export(kind, model_type, folder, calibration)
    if outcome.status == WORKS:
        outcome.note = "Python API, with the inputs that it needs"
    return outcome


def reload(calibration, folder: Path):
    eager = calibration.run["attention"] == "eager"
    return (
        getattr(transformers, calibration.model["architecture"])
        .from_pretrained(
            folder / "model", dtype="auto", attn_implementation="eager" if eager else None
        )
        .eval()
    )


def start_token(config: dict, model) -> int:
    """Return the token with which transformers' generate() begins a decoder."""
    places = (
        config,
        vars(model.generation_config),
        model.config.get_text_config(decoder=True).to_dict(),
    )
    for place in places:
        if isinstance(place.get("decoder_start_token_id"), int):
            return place["decoder_start_token_id"]
    if "relative_attention_num_buckets" in config:  # T5 and its kin
        return config["pad_token_id"]
    return next(p["bos_token_id"] for p in places if isinstance(p.get("bos_token_id"), int))


def from_layer(path: str) -> str:
    """Return a module path from its layer number on: prefixes differ between file and model."""
    parts = path.split(".")
    return ".".join(parts[next(i for i, part in enumerate(parts) if part.isdigit()) :])


def refused(kind: str, model_type: str, model, inputs: list[dict], reason: str) -> Outcome:
    """Tell a model that caches nothing from one that kvq refuses, by running it."""
    try:
        recorded = record_cache(model, inputs)
    except Exception:  # it needs other inputs
        return Outcome(kind, model_type, REFUSED, reason)
    return Outcome(kind, model_type, REFUSED if recorded else NO_CACHE, reason)


def compare(kind: str, model_type: str, calibration, recorded: dict) -> Outcome | None:
    """Return what is wrong with a calibration, None if it is what was recorded."""
    own = [layer for layer in calibration.layers if layer.shared_from is None]
    if len(recorded) != len(own):
        note = f"{len(own)} layers calibrated, {len(recorded)} cached: {sorted(recorded)}"
        return Outcome(kind, model_type, WRONG, note)
    for layer in own:
        tail = from_layer(layer.attention)
        matches = [name for name in recorded if f"{tail}.".startswith(f"{from_layer(name)}.")]
        if len(matches) != 1:
            return Outcome(kind, model_type, WRONG, f"{layer.attention} not in {sorted(recorded)}")
        for quantizer, expected in zip(layer.quantizers[1:], recorded[matches[0]], strict=False):
            found = layer.amax[quantizer]
            repeated = np.repeat(found, expected.size // found.size)
            if not np.array_equal(repeated, expected):
                worst = np.max(np.abs(repeated / expected - 1))
                return Outcome(kind, model_type, WRONG,
                               f"{layer.attention}.{quantizer} differs by {worst:.2%}")  # fmt: skip
    return None


def export(kind: str, model_type: str, folder: Path, calibration) -> Outcome:
    mla = any(layer.is_mla for layer in calibration.layers)
    argv = ["export", folder / "model", "--scales", folder / "calibration", "--link", "copy",
            "-o", folder / "checkpoint", "--allow-unread"]  # fmt: skip
    verify = ["verify", folder / "checkpoint", "--against", folder / "calibration"]
    for step in (argv, ["inspect", folder / "checkpoint"], verify):
        code, document = command(*step)
        if code:
            reason = document.get("error", document)
            return Outcome(kind, model_type, WRONG, f"{step[0]}: {json.dumps(reason)[:300]}")
        if step[0] == "inspect" and len(document["layers"]) != len(calibration.layers):
            return Outcome(kind, model_type, WRONG, "inspect shows another number of layers")
    notes = []
    if mla:
        notes.append("MLA")
    shared = sum(layer.shared_from is not None for layer in calibration.layers)
    if shared:
        notes.append(f"{shared} layers share")
    return Outcome(kind, model_type, WORKS, ", ".join(notes), len(calibration.layers))


def document(outcomes: list[Outcome]) -> str:
    """Return docs/support.md."""
    count = Counter(outcome.status for outcome in outcomes)
    built = len(outcomes) - count[UNBUILT]
    caching = built - count[NO_CACHE]
    lines = [
        "# Architectures",
        "",
        f"Written by `scripts/support_matrix.py` with transformers {transformers.__version__} and "
        f"torch {torch.__version__.partition('+')[0]}; run it to see yours.",
        "",
        "For every entry of transformers' causal, image-text and sequence-to-sequence mappings a",
        "tiny random model is built, saved, calibrated, exported, inspected and verified through",
        "the command line, and every amax must equal that of a plain recorder to the last bit.",
        "",
        f"- works: {count[WORKS]} of {len(outcomes)} entries ({count[WORKS] / len(outcomes):.1%}), "
        f"{count[WORKS] / caching:.1%} of the {caching} that could be built and keep a KV cache",
        f"- no KV cache, nothing to calibrate, refused: {count[NO_CACHE]}",
        f"- refused with the reason: {count[REFUSED]}",
        f"- could not be built here: {count[UNBUILT]}",
        f"- wrong, or layers missed in silence: {count[WRONG]}",
        "",
    ]
    for kind, title in KINDS.items():
        own = [outcome for outcome in outcomes if outcome.kind == kind]
        works = [outcome for outcome in own if outcome.status == WORKS]
        if not own:
            continue
        lines += [f"## {title.capitalize()}: {len(works)} of {len(own)}", ""]
        plain = [outcome.model_type for outcome in works if not outcome.note]
        lines += [f"Works: {', '.join(f'`{name}`' for name in plain)}.", ""]
        lines += ["| model type | outcome | |", "|---|---|---|"]
        for outcome in own:
            if outcome.status != WORKS or outcome.note:
                note = outcome.note.replace("|", "/")
                lines.append(f"| `{outcome.model_type}` | {outcome.status} | {note} |")
        lines.append("")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="", help="model types, separated by commas")
    parser.add_argument("--kind", default="", help=", ".join(KINDS))
    parser.add_argument("--check", action="store_true", help="fail if docs/support.md differs")
    parser.add_argument("-v", action="store_true", help="print tracebacks")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    outcomes = []
    for kind in KINDS:
        for model_type in zoo.entries(kind):
            if args.kind in ("", kind) and (not args.only or model_type in args.only.split(",")):
                outcomes.append(outcome := attempt(kind, model_type, verbose=args.v))
                print(f"{kind:10} {model_type:28} {outcome.status:15} {outcome.layers:3}  "
                      f"{outcome.note[:300]}", flush=True)  # fmt: skip
    text = document(outcomes)
    print("\n".join(text.splitlines()[9:15]))
    if any(outcome.status == WRONG for outcome in outcomes):
        return 1
    if args.only or args.kind:
        return 0
    if args.check and OUT.read_text() != text:
        print(f"{OUT.name} is out of date: run scripts/support_matrix.py")
        return 1
    OUT.write_text(text)
    return int(sum(outcome.status == WORKS for outcome in outcomes) < PROMISED * len(outcomes))


def attempt(kind: str, model_type: str, *, verbose: bool) -> Outcome:
    with tempfile.TemporaryDirectory(prefix="kvq-zoo-") as folder:
        try:
            return examine(kind, model_type, Path(folder))
        except Exception as error:
            if verbose:
                traceback.print_exc()
            return Outcome(kind, model_type, WRONG, f"{type(error).__name__}: {error}"[:300])


if __name__ == "__main__":
    sys.exit(main())
