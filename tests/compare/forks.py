#!/usr/bin/env python3
"""Two forks on the CPU with one thread each, beside what the machine gives two processes.

    python tests/compare/forks.py MODEL [FLAG ...] [--rounds N] [--plimsoll PROGRAM]

By turns: runs per second of two forks at once against one (`bench --forks 2`); then a process on each of two cores, alone and at the same
time. Cores may share memory bandwidth, caches and clock: two processes are the limit of two forks, or nearly so, as forks share constants.
It prints the medians of both ratios. Where others use the machine, run it by `chrt -f 10`.
"""

import argparse
import json
import statistics
import subprocess
import sys


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--iters", type=int, default=100)
    parser.add_argument("--plimsoll", default="target/release/plimsoll")
    arguments, flags = parser.parse_known_args()

    def start(forks, iters, *before):
        words = [arguments.plimsoll, "bench", arguments.model, *flags, "--backend", "cpu", "--threads", 1, "--json"]
        words += ["--forks", forks, "--iters", iters]
        return subprocess.Popen([*before, *map(str, words)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def end(process):
        output, error = process.communicate()
        if process.returncode:
            sys.exit(error)
        return json.loads(output)

    forks, processes = [], []
    for _ in range(arguments.rounds):
        found = end(start(2, arguments.iters))
        forks.append(found["all_per_second"] / found["one_per_second"])
        pinned = lambda core: start(1, 6 * arguments.iters, "taskset", "-c", str(core))
        alone = [end(pinned(core))["median_ms"] for core in (0, 1)]
        beside = [end(one)["median_ms"] for one in [pinned(core) for core in (0, 1)]]
        processes.append(sum(a / b for a, b in zip(alone, beside)))
    for name, ratios in [("two forks", forks), ("two processes", processes)]:
        print(f"{name:14} {statistics.median(ratios):.2f} x one ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
