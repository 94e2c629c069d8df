import subprocess
import sys

import kvq as package


def test_version_prints_only_the_version(kvq):
    result = kvq("--version")
    assert (result.code, result.out) == (0, f"{package.__version__}\n")


def test_unknown_options_and_no_arguments_exit_with_2(kvq):
    assert kvq("inspect", "--nope").code == 2
    assert kvq().code == 2
    assert kvq("inspekt").code == 2


def test_an_internal_error_is_2_not_1(kvq, monkeypatch, tmp_path):
    def broken(_):
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("kvq.pipeline.inspect.inspect", broken)
    result = kvq("inspect", tmp_path, "--json")
    assert (result.code, result.json["error"]["code"]) == (2, "internal")
    assert "ZeroDivisionError: boom" in result.err


def test_an_interrupt_is_130(kvq, monkeypatch, tmp_path):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr("kvq.pipeline.inspect.inspect", interrupted)
    assert kvq("inspect", tmp_path).code == 130


def test_a_closed_pipe_is_141(exported):
    checkpoint = exported()
    program = [sys.executable, "-m", "kvq", "inspect", str(checkpoint)]
    process = subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    process.stdout.close()  # the reader is gone before the first byte
    assert process.wait() == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_a_failure_is_one_json_document_on_stdout(kvq, tmp_path):
    for command in ("inspect", "verify"):
        result = kvq(command, tmp_path / "missing", "--json")
        assert (result.code, result.json["ok"]) == (2, None)
        assert set(result.json["error"]) == {"code", "message", "hint"}
    for report in (["--report", "json"], ["--report=json"]):
        assert kvq("verify", tmp_path / "missing", *report).json["ok"] is None
    assert kvq("verify", tmp_path, "--json", "--report", "junit").code == 2


def test_importing_kvq_has_no_side_effect():
    program = (
        "import os, sys; before = dict(os.environ), set(sys.modules); import kvq; "
        "assert os.environ == before[0]; assert set(sys.modules) - before[1] == {'kvq'}"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_verbose_shows_the_traceback_of_an_internal_error(kvq, monkeypatch, tmp_path):
    def broken(_):
        raise ZeroDivisionError("boom")

    monkeypatch.setattr("kvq.pipeline.inspect.inspect", broken)
    assert "Traceback" in kvq("-v", "inspect", tmp_path).err
    assert "Traceback" not in kvq("inspect", tmp_path).err
