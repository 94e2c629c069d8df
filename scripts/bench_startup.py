"""Time `kvq --help` and `kvq inspect CHECKPOINT` as whole processes, against `python -c pass`.

Usage: python scripts/bench_startup.py CHECKPOINT [--runs 15]
"""

import argparse
import statistics
import subprocess
import sys
import time


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--runs", type=int, default=15)
    args = parser.parse_args()
    commands = {
        "python -c pass": ["-c", "pass"],
        "kvq --help": ["-m", "kvq", "--help"],
        "kvq inspect": ["-m", "kvq", "inspect", args.checkpoint],
    }
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(args.runs):
        for name, argv in commands.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, *argv], stdout=subprocess.DEVNULL, check=True)
            seconds[name].append(time.perf_counter() - start)
    for name, values in seconds.items():
        print(f"{name}: median {statistics.median(values):.3f} s, "
              f"{min(values):.3f} to {max(values):.3f} s")  # fmt: skip


if __name__ == "__main__":
    main()
