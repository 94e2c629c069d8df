"""When each maximum was raised last, how far it stands out, and --stop-when-stable."""

import json
import random
import re

import numpy as np
import pytest
import torch

from kvq.calibration.amax import Observer
from kvq.calibration.batches import Sequence, plan_batches
from kvq.calibration.distributed import Ranks
from kvq.calibration.stability import boundaries, stable
from kvq.geometry import LayerGeometry
from kvq.state import read_calibration
from tests.recorder import record_each, sampled_magnitudes, sampled_percentile

SIDES = {"q": "q_bmm_quantizer", "k": "k_bmm_quantizer", "v": "v_bmm_quantizer"}


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def config(folder):
    return json.loads((folder / "config.json").read_text())


def write(path, rows):
    path.write_text("".join(json.dumps({"input_ids": row}) + "\n" for row in rows))
    return path


def row(seed, length):
    return np.random.default_rng(seed).integers(0, 128, length).tolist()


# after two batches there is nothing new; every row is new
CONVERGING = [row(0, 20)] * 60 + [row(1, 30)]
RISING = [row(seed, 20) for seed in range(61)]


@pytest.fixture
def calibrate(kvq, checkpoints, tmp_path):
    def call(name, rows, *options, model="llama", ok=True):
        data = write(tmp_path / f"{name}.jsonl", rows)
        path = checkpoints(model) if isinstance(model, str) else model
        result = kvq("calibrate", path, "--dataset", data, "--seq-len", 64, "-o", tmp_path / name,
                     "--stop-when-stable", *options)  # fmt: skip
        assert result.code == 0 or not ok, result.err
        return result

    return call


def expected_end(path, rows, batch_size):
    """Return after how many batches a run has to end, from maxima recorded row by row."""
    alone = record_each(path, rows, torch.bfloat16, "sdpa")
    plan = plan_batches([Sequence(np.array(row)) for row in rows], batch_size)
    shown = [
        np.stack([np.max([values[i].numpy() for i in batch], axis=0) for batch in plan])
        for (_, side), values in alone.items()
        if side != "q"
    ]  # each [batches, heads]
    for part in range(4, 16):
        count = len(plan) * part // 16
        if count >= 8 and all(s[:count].argmax(0).max() < count / 2 for s in shown):
            return count, len(plan)
    return None, len(plan)


@pytest.mark.parametrize("batch_size", [1, 3])
@pytest.mark.parametrize("rows", [CONVERGING, RISING], ids=["converging", "rising"])
def test_a_run_ends_at_the_first_boundary_whose_second_half_raised_nothing(
    calibrate, kvq, checkpoints, tmp_path, rows, batch_size
):
    end, planned = expected_end(checkpoints("llama"), rows, batch_size)
    assert (end is not None) is (rows is CONVERGING)
    result = calibrate("c", rows, "--batch-size", batch_size)
    found = config(tmp_path / "c")
    assert found["run"]["stop_when_stable"] is True
    assert found["run"]["ended_after"] == end
    assert found["run"]["batch_plan"]["batches"] == planned
    said = f"stopped after {end} of {planned} batches: the second half raised no maximum"
    if end is None:
        said = f"not stopped early: all {planned} batches were run"
    plan = plan_batches([Sequence(np.array(row)) for row in rows], batch_size)[:end]
    tokens = sum(len(rows[i]) for batch in plan for i in batch)
    assert {layer["tokens"] for layer in found["layers"]} == {tokens}
    assert (found["data"]["tokens"], found["data"]["sequences"]) == (
        tokens, sum(len(batch) for batch in plan),
    )  # fmt: skip
    given = {"tokens": sum(map(len, rows)), "sequences": len(rows)}
    assert found["data"].get("given") == (given if end else None)
    shown = kvq("inspect", tmp_path / "c")
    assert f"\n{said}\n" in result.out
    assert f"\n{said}\n" in shown.out
    assert f" sequences, {tokens} tokens of c.jsonl" in shown.out
    document = kvq("inspect", tmp_path / "c", "--json").json
    assert (document["batches"], document["batches_run"]) == (planned, end or planned)
    assert document["convergence"][-1] == said


def test_an_early_end_does_not_depend_on_the_order_of_the_rows(calibrate, tmp_path):
    calibrate("c", CONVERGING)
    first = contents(tmp_path / "c")
    shuffled = list(CONVERGING)
    random.Random(0).shuffle(shuffled)
    calibrate("c", shuffled, "--overwrite")
    other = config(tmp_path / "c")
    before = json.loads(first["config.json"])
    assert other["layers"] == before["layers"]
    assert other["run"] == before["run"]
    assert contents(tmp_path / "c")["calibration.safetensors"] == first["calibration.safetensors"]


def test_an_early_end_leaves_what_a_run_over_those_batches_alone_observes(
    calibrate, kvq, checkpoints, tmp_path
):
    calibrate("c", CONVERGING)
    plan = plan_batches([Sequence(np.array(row)) for row in CONVERGING], 1)
    seen = [CONVERGING[i] for (i,) in plan[: config(tmp_path / "c")["run"]["ended_after"]]]
    data = write(tmp_path / "seen.jsonl", seen)
    argv = ["--dataset", data, "--seq-len", 64, "-o", tmp_path / "alone"]
    assert kvq("calibrate", checkpoints("llama"), *argv).code == 0
    name = "calibration.safetensors"
    assert contents(tmp_path / "c")[name] == contents(tmp_path / "alone")[name]
    alone, early = (config(tmp_path / folder)["layers"] for folder in ("alone", "c"))
    assert alone == early


@pytest.mark.parametrize(
    ("batches", "min_tokens", "expected"),
    [
        (1, 0, ()),
        (8, 0, ()),
        (10, 0, (8, 9)),
        (32, 0, tuple(range(8, 32, 2))),
        (64, 0, tuple(range(16, 64, 4))),
        (64, 400, (40, 44, 48, 52, 56, 60)),
        (64, 10**6, ()),
    ],
)
def test_boundaries_are_sixteenths_of_the_plan(batches, min_tokens, expected):
    assert boundaries([10] * batches, min_tokens) == expected


@pytest.mark.parametrize(("batches", "expected"), [(8, False), (9, True), (10, True)])
def test_batch_4_of_9_is_in_the_first_half_and_of_8_in_the_second(batches, expected):
    layers = [LayerGeometry(0, "full_attention", "layers.0", 4, 2, 8, 8)]
    observer = Observer(layers, queries=False)
    for number in range(batches):
        observer.batch = number
        height = 5.0 if number == 4 else 1.0  # counted from 0: the fifth
        for side in "kv":
            states = torch.full((1, 2, 3, 8), height if side == "k" else 1.0)
            observer.see(("layers.0", SIDES[side]), states)
    assert stable(Ranks(), observer, batches) is expected
    del observer.raised["layers.0", SIDES["v"]]  # not seen: it might be anything
    assert not stable(Ranks(), observer, batches)


def test_too_few_batches_to_end_early_are_said_so(calibrate):
    result = calibrate("c", RISING[:8], "--min-tokens", 1)
    assert "--stop-when-stable changes nothing: 8 batches are too few." in result.err
    assert "not stopped early: all 8 batches were run" in result.out


def test_a_streamed_run_cannot_end_early(calibrate, tmp_path, monkeypatch):
    for options in (["--streaming"], []):  # asked for, or since the model does not fit
        result = calibrate("c", CONVERGING, *options, "--json", ok=False)
        assert (result.code, result.json["error"]["code"]) == (2, "option.stop_when_stable")
        monkeypatch.setattr("kvq.calibration.memory.available_bytes", lambda device: 4096)
        assert [path.name for path in tmp_path.iterdir()] == ["c.jsonl"]
    assert "the weights take" in result.json["error"]["message"]


def test_amax_over_the_percentile_is_that_of_plainly_recorded_states(kvq, checkpoints, tmp_path):
    model = checkpoints("llama", max_position_embeddings=256)
    rows = [row(seed, length) for seed, length in enumerate([5, 40, 63, 64, 150, 256] * 3)]
    data = write(tmp_path / "rows.jsonl", rows)
    argv = ["--dataset", data, "--seq-len", 256, "--kv-cfg", "FP8_ATTN_CFG", "--json"]
    shown = kvq("calibrate", model, *argv, "-o", tmp_path / "c").json
    expected = record_each(model, rows, torch.bfloat16, "sdpa", keep=sampled_magnitudes)
    layers = config(tmp_path / "c")["layers"]
    for (layer, side), magnitudes in expected.items():
        true = sampled_percentile(magnitudes)
        found = layers[layer]["percentile_99_9"][SIDES[side]]
        assert abs(found / true - 1) < 1 / 31
        entry = shown["layers"][layer]
        assert entry["percentile_99_9"][side] == found
        assert entry["amax_over_percentile_99_9"][side] == entry["amax"][side] / found >= 1
        assert entry["raised_in_batch"][side] == layers[layer]["raised"][SIDES[side]] + 1
    assert len(expected) == 6


def test_an_outlier_is_seen_in_the_table_and_the_table_fits_100_columns(kvq, tmp_path, rows):
    from tests.models import build

    model = build("qwen2", num_hidden_layers=4)
    model.model.layers[2].self_attn.v_proj.bias.data[3] = 40
    model.save_pretrained(tmp_path / "model")
    argv = ["--dataset", rows, "--seq-len", 64, "-o", tmp_path / "c"]
    out = kvq("calibrate", tmp_path / "model", *argv).out
    start = re.search("^layer +k amax", out, re.MULTILINE).start()
    header, *lines = [re.split(r"  +", line.strip()) for line in out[start:].splitlines()[:5]]
    assert header == ["layer", "k amax", "v amax", "k scale", "v scale", "k raised", "v raised",
                      "k/p99.9", "v/p99.9", "tokens", "flags"]  # fmt: skip
    document = kvq("inspect", tmp_path / "c", "--json").json
    assert document["batches"] == document["batches_run"] == 24
    for cells, entry in zip(lines, document["layers"], strict=True):
        at = dict(zip(header, cells, strict=False))
        for side in "kv":
            part = entry["raised_in_batch"][side] / document["batches"]
            assert at[f"{side} raised"] == f"{100 * part:.0f}%"
            assert at[f"{side}/p99.9"] == f"{entry['amax_over_percentile_99_9'][side]:.2f}"
    assert max(len(line) for line in out[start:].splitlines()[:3]) <= 100
    assert kvq("inspect", tmp_path / "c", "--scales").out.startswith(out[start:].split("wrote")[0])


def test_a_calibration_of_an_earlier_version_is_read_and_shows_what_is_unknown(calibrated, kvq):
    _, path = calibrated()
    found = config(path)
    for layer in found["layers"]:
        del layer["raised"], layer["percentile_99_9"]
    del found["run"]["stop_when_stable"], found["run"]["ended_after"]
    (path / "config.json").write_text(json.dumps(found))
    out = kvq("inspect", path, "--scales").out
    assert out.splitlines()[1].split()[5:9] == ["-"] * 4
    assert "\nconvergence: not recorded by the version of kvq that calibrated\n" in out
    entry = kvq("inspect", path, "--json").json["layers"][0]
    assert entry["raised_in_batch"] == entry["percentile_99_9"] == {}


def test_a_merged_calibration_shows_that_its_convergence_is_unknown(calibrate, kvq, tmp_path):
    for name, rows in (("a", RISING[:30]), ("b", RISING[30:])):
        calibrate(name, rows)
    merged = kvq("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "m").out
    said = "\nconvergence: unknown, merged calibrations have no order of batches in common\n"
    shown = kvq("inspect", tmp_path / "m", "--scales").out
    assert said in merged
    assert said in shown
    assert shown.splitlines()[1].split()[5:9] == ["-"] * 4


def test_merging_calibrations_that_ended_early_counts_what_they_saw(calibrate, kvq, tmp_path):
    calibrate("a", CONVERGING)
    calibrate("b", RISING)
    assert kvq("merge", tmp_path / "a", tmp_path / "b", "-o", tmp_path / "m").code == 0
    merged = read_calibration(tmp_path / "m")
    assert {layer.tokens for layer in merged.layers} == {merged.data["tokens"]}


@pytest.mark.parametrize(
    "edit",
    [
        lambda c: c["layers"][0].update(raised={"k_bmm_quantizer": -1}),
        lambda c: c["layers"][0].update(raised={"k_bmm_quantizer": 24}),
        lambda c: c["layers"][0].update(raised={"elsewhere": 1}),
        lambda c: c["layers"][0].update(raised=[1]),
        lambda c: c["layers"][1].update(percentile_99_9={"k_bmm_quantizer": "1"}),
        lambda c: c["run"].update(ended_after=99),
        lambda c: c["run"].update(ended_after="all"),
        lambda c: c["run"]["batch_plan"].update(batches=0),
    ],
)
def test_damaged_numbers_are_one_clear_error(calibrated, kvq, edit):
    _, path = calibrated()
    found = config(path)
    edit(found)
    (path / "config.json").write_text(json.dumps(found))
    result = kvq("inspect", path, "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "calibration.damaged")
