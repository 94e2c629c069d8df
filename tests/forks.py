"""Command lines in processes of their own that start at once: forked after all imports.

As a script it reads one JSON line per run, {"argv": […], "output": path}, and answers with the
process id; another line is answered with the exit status once it has ended.
"""

import json
import os
import subprocess
import sys
from pathlib import Path


class Forks:
    """Starts `kvq` command lines, one at a time."""

    def __init__(self, folder: Path):
        root = Path(__file__).parents[1]
        self.output = folder / "output.txt"
        self.process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=root, env={**os.environ, "PYTHONPATH": str(root)},
        )  # fmt: skip

    def start(self, *argv: object) -> int:
        """Start a command line; returns its process id."""
        line = {"argv": [str(argument) for argument in argv], "output": str(self.output)}
        self.output.write_text("")
        self.process.stdin.write(json.dumps(line) + "\n")
        self.process.stdin.flush()
        return int(self.process.stdout.readline())

    def seen(self, text: str) -> int:
        """Return how many times the command line has printed a text so far."""
        return self.output.read_text().count(text)

    def wait(self) -> tuple[int, str]:
        """Wait for the end; returns exit status, negative for a signal, and what was printed.

        Until then the process id stays taken, and may be sent a signal.
        """
        self.process.stdin.write("wait\n")
        self.process.stdin.flush()
        status = int(self.process.stdout.readline())
        return status, self.output.read_text()

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()
        self.process.stdout.close()


def main() -> None:
    import transformers.models.llama.modeling_llama  # noqa: F401

    import kvq.calibration.run
    import kvq.calibration.streaming.loop
    import kvq.commands.calibrate
    import kvq.pipeline.calibrate  # noqa: F401
    from kvq.cli import run

    while line := sys.stdin.readline():
        wanted = json.loads(line)
        pid = os.fork()
        if pid == 0:
            output = os.open(wanted["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(output, 1)
            os.dup2(output, 2)
            code = run(wanted["argv"])
            sys.stdout.flush()
            os._exit(code)
        sys.stdout.write(f"{pid}\n")
        sys.stdout.flush()
        sys.stdin.readline()
        sys.stdout.write(f"{os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
