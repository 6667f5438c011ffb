#!/usr/bin/env python3
"""Several graphs in one process: plimsoll plans them together, onnxruntime has a session for each.

    python tests/compare/programs.py [--plimsoll PROGRAM] [--folder DIR]

Three cases, of transformer blocks with seeded random weights in f32: an encoder and a decoder, a prompt of 256 tokens and single tokens of
the same weights, three graphs in a row. For plimsoll it prints the bytes planned together and apart, and checks that allocated equals
planned. For onnxruntime it prints the anonymous memory that the process gains by making the sessions and running each once. Each runs in
a process of its own, on the CPU with 2 threads.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

WIDTH, THREADS = 512, 2


def blocks(name, tokens, layers, seed, path):
    """A stack of transformer blocks over [1, tokens, WIDTH]."""
    random = np.random.default_rng(seed)
    nodes, weights = [], []

    def weight(kind, rows, columns):
        label = f"{kind}.{seed}.{len(weights)}"
        values = random.standard_normal((rows, columns)).astype(np.float32) / np.float32(np.sqrt(rows))
        weights.append(numpy_helper.from_array(values, label))
        return label

    def node(operator, inputs, **attributes):
        nodes.append(helper.make_node(operator, inputs, [f"v{len(nodes)}"], **attributes))
        return nodes[-1].output[0]

    value = "x"
    for _ in range(layers):
        query, key, mixed = (node("MatMul", [value, weight("attention", WIDTH, WIDTH)]) for _ in range(3))
        scores = node("MatMul", [query, node("Transpose", [key], perm=[0, 2, 1])])
        value = node("Add", [value, node("MatMul", [node("Softmax", [scores], axis=-1), mixed])])
        wide = node("Relu", [node("MatMul", [value, weight("wide", WIDTH, 4 * WIDTH)])])
        value = node("Add", [value, node("MatMul", [wide, weight("narrow", 4 * WIDTH, WIDTH)])])
    nodes.append(helper.make_node("Identity", [value], ["y"]))
    port = lambda name: helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, tokens, WIDTH])
    graph = helper.make_graph(nodes, name, [port("x")], [port("y")], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)


# Per case, its graphs: name, tokens, layers, seed of the weights.
CASES = {
    "encoder, decoder": [("encode", 384, 6, 1), ("decode", 64, 6, 2)],
    "prompt, tokens": [("prompt", 256, 8, 3), ("token", 1, 8, 3)],
    "three in a row": [("first", 64, 3, 4), ("second", 512, 2, 5), ("third", 16, 4, 6)],
}


def anonymous():
    """Anonymous memory of this process, in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


def sessions(paths):
    """The child process: onnxruntime's sessions, each run once."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = THREADS
    before = anonymous()
    kept = [onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]) for path in paths]
    for session in kept:
        session.run(None, {"x": np.zeros(session.get_inputs()[0].shape, np.float32)})
    print(anonymous() - before)


def plimsoll(program, *arguments):
    done = subprocess.run([program, *arguments, "--json"], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(arguments)}: {done.stderr}")
    return json.loads(done.stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", default="target/release/plimsoll")
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--sessions", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.sessions:
        return sessions(arguments.sessions)
    folder = arguments.folder or Path(tempfile.mkdtemp())
    total = lambda plan: sum(segment["bytes"] for segment in plan["segments"])
    part = lambda plan, kind: sum(s["bytes"] for s in plan["segments"] if s["class"] == kind)
    mib = lambda count: f"{count / 2**20:.1f}"
    print(f"{'MiB':20}{'together':>10}{'arena':>8}{'largest':>9}{'apart':>8}{'onnxruntime':>13}")
    for case, graphs in CASES.items():
        paths = []
        for name, tokens, layers, seed in graphs:
            paths.append(str(folder / f"{name}.onnx"))
            blocks(name, tokens, layers, seed, paths[-1])
        threads = ["--threads", str(THREADS)]
        alone = [plimsoll(arguments.plimsoll, "plan", path, *threads) for path in paths]
        plan = plimsoll(arguments.plimsoll, "plan", *paths, *threads)["programs"][0]
        names = [flag for name, *_ in graphs for flag in ("--program", name)]
        run = plimsoll(arguments.plimsoll, "run", *paths, *threads, "--backend", "cpu", *names)["memory"]
        if run["planned_bytes"] != run["allocated_bytes"] or run["planned_bytes"] != total(plan):
            sys.exit(f"{case}: planned {total(plan)} bytes, {run['planned_bytes']} to run, allocated {run['allocated_bytes']}")
        child = subprocess.run([sys.executable, __file__, "--sessions", *paths], capture_output=True, text=True, check=True)
        arena, largest = part(plan, "activation"), max(part(one, "activation") for one in alone)
        if arena != largest:
            sys.exit(f"{case}: the arena takes {arena} bytes, the largest program's {largest}")
        apart = sum(total(one) for one in alone)
        figures = [mib(total(plan)), mib(arena), mib(largest), mib(apart), mib(int(child.stdout))]
        print(f"{case:20}" + "".join(text.rjust(width) for text, width in zip(figures, (10, 8, 9, 8, 13))))


if __name__ == "__main__":
    main()
