#!/usr/bin/env python3
"""Proves from plans alone that refusals of trainings are just, and sweeps limits.

    python tests/compare/training_bound.py FOLDER.. [--points 6] [--plimsoll PATH]

A folder is one that training.py or trajectories.py exports: model.onnx and flags.txt. From the plan without a limit, the script computes
what no plan of the same kernels is below, however many values of the forward computation are computed again:

  - constants, states, staging and the backend's own bytes are there throughout;
  - while a step runs, all that it reads and writes is there. It may write over an operand of its size;
  - a step that the loss does not depend on runs once: what it writes stays until its last reader has run, if that runs once, too. So a buffer
    is there while a step runs that lies between the two on every order. An input is there until its last such reader.

It then holds the refusal of a limit of one byte against that: the bound that it names is at most the script's, and no plan is below. A limit
of the bytes that it names fits, a byte less does not, and between these and the whole, more memory never means more work. Exit code 3 if not.
"""

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
HELD = ("constant", "state")
OTHERS = ("--data", "--labels", "--lr", "--steps", "--epochs", "--seed", "--backend", "--log", "--output", "--checkpoint", "--valid", "--valid-labels")


def bound(programs):
    """The bound, and the step that runs then."""
    segments = programs[0]["segments"]
    held = sum(s["bytes"] for s in segments if s["class"] != "activation")
    return max((held + peak, f"{program['program']}/{name}") for program in programs for peak, name in [arena(program)])


def arena(plan):
    buffers, steps = plan["buffers"], plan["steps"]
    inside = [b["class"] not in HELD for b in buffers]
    loss = {o["buffer"] for o in plan["outputs"] if o["name"] == "loss"} if plan["program"] != "evaluate" else set()
    # Steps that the loss depends on may run again, before or behind others.
    again, wanted = [False] * len(steps), set(loss)
    for at in reversed(range(len(steps))):
        if wanted & set(steps[at]["writes"]):
            again[at] = True
            wanted |= set(steps[at]["reads"])
    order, wrote, readers = [0] * len(steps), {}, {}
    over = {s["update"]: s["buffer"] for s in plan["state"] if "update" in s}
    for at, step in enumerate(steps):
        if again[at]:
            continue
        before = 0
        for b in step["reads"]:
            if b in wrote:
                before |= order[wrote[b]] | 1 << wrote[b]
        for b in step["writes"]:
            for reader in readers.get(over.get(b), []):
                before |= order[reader] | 1 << reader
        order[at] = before
        for b in step["reads"]:
            readers.setdefault(b, []).append(at)
        for b in step["writes"]:
            wrote[b] = at
    written_again = {b for at, step in enumerate(steps) if again[at] for b in step["writes"]}
    across = [0] * len(steps)
    inputs, outputs = {p["buffer"] for p in plan["inputs"]}, {p["buffer"] for p in plan["outputs"]}
    for b in range(len(buffers)):
        if not inside[b] or b in written_again or (b not in wrote and b not in inputs):
            continue
        users = set(readers.get(b, [])) | ({wrote[b]} if b in wrote else set())
        before = (1 << len(steps)) - 1 if b in outputs else 0
        for user in users:
            before |= order[user]
        for at in range(len(steps)):
            if not again[at] and at not in users and before >> at & 1 and (b in inputs or order[at] >> wrote[b] & 1):
                across[at] += buffers[b]["bytes"]
    best = (0, "")
    for at, step in enumerate(steps):
        touched = {b for b in step["reads"] + step["writes"] if inside[b]}
        total = sum(buffers[b]["bytes"] for b in touched) + across[at]
        first = step["writes"][0]
        if inside[first] and any(inside[b] and buffers[b]["bytes"] == buffers[first]["bytes"] for b in step["reads"]):
            total -= buffers[first]["bytes"]
        best = max(best, (total, step["name"]))
    return best


def flags(folder):
    words, found = shlex.split((folder / "flags.txt").read_text()), []
    skip = False
    for word in words[2:]:
        if skip or word == "--no-shuffle":
            skip = False
        elif word in OTHERS:
            skip = True
        else:
            found.append(word)
    return [str(folder / "model.onnx"), *found]


def plan(program, words, limit=None):
    command = [program, "plan", "--train", *words, "--json"]
    ran = subprocess.run(command + (["--memory-limit", str(limit)] if limit else []), capture_output=True, text=True)
    if ran.returncode not in (0, 2):
        sys.exit(f"{shlex.join(command)}: {ran.stderr}")
    return ran.returncode == 0, json.loads(ran.stdout)


def check(program, folder, points):
    """The figures of a case, and what is wrong with it."""
    words, wrong = flags(folder), []
    _, whole = plan(program, words)
    own, where = bound(whole["programs"])
    _, refusal = plan(program, words, 1)
    claimed, least, full = refusal["bound"]["bytes"], refusal["needed_bytes"], whole["planned_bytes"]
    if claimed > own:
        wrong.append(f"claims {claimed}, which is more than {own}")
    if least < own:
        wrong.append(f"a plan of {least} bytes is below {own}")
    if plan(program, words, least - 1)[0]:
        wrong.append(f"{least - 1} fits, though {least} was named")
    work = None
    limits = sorted({least, max(least, full - 1), full} | {least + (full - least) * i // points for i in range(points)})
    for limit in limits:
        fits, found = plan(program, words, limit)
        if not fits:
            wrong.append(f"{limit} is refused")
            continue
        now = found["recompute"]["extra_flop"]
        if found["planned_bytes"] > limit:
            wrong.append(f"{found['planned_bytes']} bytes under a limit of {limit}")
        if work is not None and now > work:
            wrong.append(f"{limit} takes {now} operations, less memory took {work}")
        work = now
    share = refusal["recompute"]["extra_flop"] / refusal["recompute"]["flop"]
    print(f"{folder.name:14} bound {claimed:>12,} (script {own:>12,}, {where})  least {least:>12,} at {share:5.1%}  whole {full:>12,}  {'; '.join(wrong) or 'ok'}", flush=True)
    return wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="+", type=Path)
    parser.add_argument("--points", type=int, default=6)
    parser.add_argument("--plimsoll", default=str(ROOT / "target/release/plimsoll"))
    args = parser.parse_args()
    found = [check(args.plimsoll, folder, args.points) for folder in args.folder]
    sys.exit(3 if any(found) else 0)


if __name__ == "__main__":
    main()
