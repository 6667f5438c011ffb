"""Measures what an edit costs: the CPU time from a statement added to a file to a linked program of tests, and to a release build.

python3 tests/compare/edits.py [--release]

Each file gets one more function, which a test could call, and is then as before. Run it on an idle machine, after a build.
"""

import argparse
import resource
import subprocess
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = {
    "core": "src/core/shape.rs",
    "place": "src/place/greedy.rs",
    "graph": "src/graph/pass/fuse.rs",
    "onnx": "src/graph/onnx/mod.rs",
    "cpu": "src/cpu/row.rs",
    "gpu": "src/gpu/cuda.rs",
    "plan": "src/plan/make/arrange.rs",
    "run": "src/run/exec.rs",
    "cli": "src/cli/run.rs",
}


def cost(command):
    """Seconds of CPU time, and seconds, of a command."""
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return cpu, time.monotonic() - start


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--release", action="store_true", help="measure release builds, too")
    arguments = parser.parse_args()
    kinds = {"tests": ["cargo", "test", "--no-run", "--test", "it"]}
    if arguments.release:
        kinds["release"] = ["cargo", "build", "--release"]
    print("| edit in | " + " | ".join(f"{kind}: CPU s | s" for kind in kinds) + " |")
    print("|---|" + "--:|--:|" * len(kinds))
    for command in kinds.values():
        cost(command)
    for name, file in FILES.items():
        path = ROOT / file
        text = path.read_text()
        cells = []
        try:
            for number, command in enumerate(kinds.values()):
                own = f"\n/// Added to measure a build.\n#[allow(dead_code)]\npub fn added_{number}(x: usize) -> usize {{\n    x.wrapping_mul({number} + 3)\n}}\n"
                head, tests, rest = text.partition("\n#[cfg(test)]")
                path.write_text(head + own + tests + rest)
                cpu, wall = cost(command)
                cells += [f"{cpu:.0f}", f"{wall:.0f}"]
        finally:
            path.write_text(text)
        # The next edit is not to pay for taking this one back.
        for command in kinds.values():
            cost(command)
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
