"""kill -9 at every write of an export: afterwards the target is the old one or the new one."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest

from kvq.cli import run
from tests.engines.architectures import ARCHITECTURES
from tests.engines.layouts import save, write_index
from tests.engines.tensors import scales as old_scales
from tests.engines.tensors import weights_of

pytestmark = pytest.mark.slow

# Runs in a process without threads, which forks once for each write: imports are paid once.
KILLER = """
import hashlib, io, json, os, shutil, signal, sys
from pathlib import Path
from kvq import files
from kvq.cli import run

place, target, mode = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
old, argv = place / "old", sys.argv[4:]
count = left = 0

def strike():
    global count
    count += 1
    return count == left

def die():
    os.kill(os.getpid(), signal.SIGKILL)

def wrap(module, name):
    function = getattr(module, name)
    def call(*args, **kwargs):
        if strike():
            die()
        return function(*args, **kwargs)
    setattr(module, name, call)

class Half:  # a file of which only half a write arrives
    def __init__(self, file):
        self.file = file
    def write(self, data):
        if strike():
            self.file.write(data[: len(data) // 2])
            self.file.flush()
            die()
        return self.file.write(data)
    def __getattr__(self, name):
        return getattr(self.file, name)
    def __enter__(self):
        self.file.__enter__()
        return self
    def __exit__(self, *error):
        return self.file.__exit__(*error)

def arm():
    for name in ("link", "symlink", "rename", "replace", "mkdir", "unlink", "rmdir", "fsync"):
        wrap(os, name)
    if mode == "renames":
        files._exchange = lambda first, second: False
    else:
        wrap(files, "_exchange")
    plain, create = io.open, os.open
    def opened(file, how="r", *args, **kwargs):
        if not set(how) & set("wax+"):
            return plain(file, how, *args, **kwargs)
        if strike():
            die()
        found = Half(plain(file, how, *args, **kwargs))
        if strike():  # it is there, and empty
            die()
        return found
    def created(path, flags, *args, **kwargs):
        if flags & os.O_CREAT and strike():
            die()
        return create(path, flags, *args, **kwargs)
    def copied(source, target, **kwargs):
        data = Path(source).read_bytes()
        with io.open(target, "wb") as file:
            file.write(data)
        return target
    io.open, os.open, shutil.copyfile = opened, created, copied

def fork(work):
    child = os.fork()
    if child == 0:
        os._exit(work())
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

def state():
    if not target.exists():
        return None
    digest = hashlib.sha256()
    for path in sorted(target.iterdir()):
        digest.update(repr((path.name, path.read_bytes())).encode())
    return digest.hexdigest()

def killed():
    arm()
    return run(argv)

run([*argv, "--dry-run"])  # imports everything, before the forks

while True:
    left += 1
    shutil.rmtree(target, ignore_errors=True)
    if mode != "new":
        shutil.copytree(old, target)
    code = fork(killed)
    at_once = state()
    refused = fork(lambda: run([word for word in argv if word != "--overwrite"]))
    recovered = state()
    again = refused and run([*argv, *([] if "--overwrite" in argv else ["--overwrite"])])
    beside = sorted(p.name for p in target.parent.iterdir())
    report = {"code": code, "at_once": at_once, "refused": refused, "recovered": recovered,
              "again": again, "end": state(), "beside": beside}
    print("REPORT " + json.dumps(report), flush=True)
    if code != -signal.SIGKILL:
        break
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """Two shards, the second one with old scales, and two side files."""
    folder = tmp_path_factory.mktemp("kill") / "source"
    folder.mkdir()
    architecture = ARCHITECTURES["llama"]
    config = {"architectures": [architecture.name], "dtype": "bfloat16", **architecture.config}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").write_text("{}")
    weights = weights_of(architecture, "bf16")
    small = {name: array for name, array in weights.items() if array.ndim == 1}
    large = {name: array for name, array in weights.items() if array.ndim == 2}
    files = {"model-00001-of-00002.safetensors": large,
             "model-00002-of-00002.safetensors": small | old_scales()}  # fmt: skip
    for name, tensors in files.items():
        save(folder / name, tensors)
    write_index(folder, files)
    return folder


@pytest.mark.parametrize("mode", ["new", "exchange", "renames"])
def test_after_kill_9_the_target_is_the_old_one_or_the_new_one(source, tmp_path, mode):
    place, target = tmp_path / "place", tmp_path / "target" / "out"
    place.mkdir()
    target.parent.mkdir()
    argv = ["export", source, "--scales", source, "-o", target]
    names = [f"model.layers.{i}.self_attn.{s}_scale" for i in (0, 1) for s in "kv"]
    values = dict(zip(names, np.linspace(0.25, 0.5, 4).tolist(), strict=True))
    (place / "scales.json").write_text(json.dumps({"schema": 1, "scales": values}))
    old = ["export", source, "--scales", place / "scales.json", "-o", place / "old"]
    assert run([str(word) for word in old]) == 0
    argv += ["--overwrite"] if mode != "new" else []
    done = subprocess.run(
        [sys.executable, "-c", KILLER, place, target, mode, *map(str, argv)],
        capture_output=True, text=True, check=False, env={**os.environ, "TMPDIR": str(place)},
    )  # fmt: skip
    reports = [
        json.loads(line.removeprefix("REPORT "))
        for line in done.stdout.splitlines() if line.startswith("REPORT ")
    ]  # fmt: skip
    assert reports, done.stderr[-2000:]
    *killed, last = reports
    assert last["code"] == 0, done.stderr[-2000:]
    assert len(killed) > 30
    assert {report["code"] for report in killed} == {-9}
    new = last["end"]
    before = {"new": None}.get(mode, killed[0]["at_once"])
    assert before != new
    for number, report in enumerate(killed, 1):
        place = "recovered" if mode == "renames" else "at_once"
        if mode == "new" and report["refused"] == 0:  # nothing was there: the next run wrote it
            assert report["at_once"] is None, number
            assert report["recovered"] == new, number
        else:
            assert report[place] in (before, new), number
            assert report["refused"] == 2, number
        assert report["again"] == 0, number
        assert report["end"] == new, number
        assert report["beside"] == ["out"], number
    seen = [report["at_once"] for report in killed]
    assert seen[0] == before
    assert seen == sorted(seen, key=lambda one: one == new)  # old, then new, never back
