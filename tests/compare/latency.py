#!/usr/bin/env python3
"""Times plimsoll beside onnxruntime on the CPU: the same models, inputs and number of threads.

    python tests/compare/latency.py [FOLDER] [--batch 1] [--threads 2] [--rounds 5] [--only WORD]... [--plimsoll PATH]

The two take turns, --rounds times per model, so that a slow spell of the machine hits both; who goes first
alternates. A turn warms up, then runs for about --seconds. The figure of an engine is the median over its turns of
each turn's median; the ratio is plimsoll's over onnxruntime's. Idle threads of onnxruntime sleep
(session.intra_op.allow_spinning=0). Prints a markdown table and the geometric mean of the ratios. Exit code 3 when a
model does not run, or when plimsoll allocates other than what it planned.
"""

import json
import statistics
import sys
import time

import zoo


def bench_plimsoll(program, case, threads, warmup, iterations):
    """The JSON line of `plimsoll bench`."""
    flags = ["--backend", "cpu", "--threads", threads, "--warmup", warmup, "--iters", iterations, "--json"]
    result = json.loads(zoo.plimsoll(program, "bench", case, *zoo.input_flags(case), *flags))
    if result["planned_bytes"] != result["allocated_bytes"]:
        raise zoo.Failed(f"planned {result['planned_bytes']} bytes, allocated {result['allocated_bytes']}")
    return result


def time_runs(session, feed, count):
    """Milliseconds of each of `count` runs."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        session.run(None, feed)
        times.append((time.perf_counter() - start) * 1e3)
    return times


def measure(args, case):
    """Medians in milliseconds (plimsoll, onnxruntime), and the bytes that plimsoll planned."""
    session, feed = zoo.session(case.model, args.threads), case.inputs()
    pace = min(time_runs(session, feed, 3))
    iterations = max(5, min(500, round(args.seconds * 1e3 / pace)))
    warmup = max(2, iterations // 10)
    ours, theirs, planned = [], [], 0
    for turn in range(args.rounds):
        for engine in ("plimsoll", "onnxruntime")[:: 1 if turn % 2 else -1]:
            if engine == "plimsoll":
                result = bench_plimsoll(args.plimsoll, case, args.threads, warmup, iterations)
                ours.append(result["median_ms"])
                planned = result["planned_bytes"]
            else:
                time_runs(session, feed, warmup)
                theirs.append(statistics.median(time_runs(session, feed, iterations)))
    return statistics.median(ours), statistics.median(theirs), planned


def main():
    parser = zoo.arguments(__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="about how long a turn takes, for onnxruntime")
    args = parser.parse_args()
    args.batch = args.batch or [1]
    rows, ratios, notes = [], [], []
    for case in zoo.cases_or_exit(args):
        zoo.progress(case.label)
        try:
            ours, theirs, planned = measure(args, case)
        except zoo.Failed as error:
            notes.append(f"{case.label}: {error}")
            continue
        ratios.append(ours / theirs)
        rows.append([case.label, f"{ours:.2f}", f"{theirs:.2f}", f"{ours / theirs:.2f}", f"{planned / 1e6:.1f}"])
    zoo.progress("")
    print(zoo.table(["model", "plimsoll ms", "onnxruntime ms", "ratio", "planned MB"], rows, right=(1, 2, 3, 4)))
    if ratios:
        mean = statistics.geometric_mean(ratios)
        print(f"\ngeometric mean of {len(ratios)} ratios at {args.threads} threads: {mean:.2f}")
    if notes:
        print("failed:", *notes, sep="\n")
        sys.exit(3)


if __name__ == "__main__":
    main()
