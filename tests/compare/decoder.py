#!/usr/bin/env python3
"""Writes a decoder of the shape of a Llama of 70 billion parameters as an ONNX file without its weights, and plans it.

    python tests/compare/decoder.py FILE [--layers 80] [--batch 8] [--capacity 8192] [--plimsoll PATH]

One token per row and run: the caches, the position and the token are states. The weights are named as external data that is
absent; a plan needs none of it. With --plimsoll the plan is checked: no step copies a cache, and the arena is a small part of the
caches. Exit code 3 where that is not so.
"""

import argparse
import json
import subprocess
import sys
import time

from onnx import TensorProto, helper, save

WIDTH, INNER, HEADS, SHARED, HEAD, VOCABULARY = 8192, 28672, 64, 8, 128, 128256
HALF, INT = TensorProto.BFLOAT16, TensorProto.INT64


class Decoder:
    """Nodes, weights, and pairs of a state and its update, in the order in which they are added."""

    def __init__(self, batch, capacity):
        self.batch, self.capacity, self.bytes = batch, capacity, 0
        self.nodes, self.weights, self.states = [], [], []

    def weight(self, name, *shape):
        tensor = TensorProto(name=name, data_type=HALF, dims=shape, data_location=TensorProto.EXTERNAL)
        length = 2
        for extent in shape:
            length *= extent
        for key, value in [("location", "absent.bin"), ("offset", self.bytes), ("length", length)]:
            tensor.external_data.add(key=key, value=str(value))
        self.bytes += length
        self.weights.append(tensor)
        return name

    def constant(self, name, values, shape=None):
        self.weights.append(helper.make_tensor(name, INT, [len(values)] if shape is None else shape, values))

    def node(self, op, *inputs, name=None, **attributes):
        name = name or f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def state(self, name, kind, shape):
        self.states.append([helper.make_tensor_value_info(f"{when}_{name}", kind, shape) for when in ("past", "present")])
        return f"past_{name}"

    def heads(self, x, weight, count, turn):
        y = self.node("MatMul", x, self.weight(weight, WIDTH, count * HEAD))
        y = self.node("Transpose", self.node("Reshape", y, f"split_{count}"), perm=[0, 2, 1, 3])
        return self.node("RotaryEmbedding", y, "cos", "sin", "places") if turn else y

    def layer(self, x, number):
        name = lambda what: f"layers.{number}.{what}"
        y = self.node("RMSNormalization", x, self.weight(name("before"), WIDTH), axis=-1)
        query = self.heads(y, name("query"), HEADS, True)
        caches = []
        for what in ("key", "value"):
            new = self.heads(y, name(what), SHARED, what == "key")
            past = self.state(f"{what}_{number}", HALF, [self.batch, SHARED, self.capacity, HEAD])
            present = past.replace("past", "present")
            caches.append(self.node("TensorScatter", past, new, "past_position", name=present, axis=-2))
        y = self.node("Attention", query, *caches, "", "", "", "lengths")
        y = self.node("Reshape", self.node("Transpose", y, perm=[0, 2, 1, 3]), "joined")
        x = self.node("Add", x, self.node("MatMul", y, self.weight(name("out"), WIDTH, WIDTH)))
        y = self.node("RMSNormalization", x, self.weight(name("behind"), WIDTH), axis=-1)
        gate, up = (self.node("MatMul", y, self.weight(name(what), WIDTH, INNER)) for what in ("gate", "up"))
        gate = self.node("Mul", gate, self.node("Sigmoid", gate))
        down = self.node("MatMul", self.node("Mul", gate, up), self.weight(name("down"), INNER, WIDTH))
        return self.node("Add", x, down)

    def model(self, layers):
        for count in (HEADS, SHARED):
            self.constant(f"split_{count}", [0, 0, count, HEAD])
        self.constant("joined", [0, 0, WIDTH])
        self.constant("one", [1], [])
        self.constant("last", [1])
        for angle in ("cos", "sin"):
            self.weight(angle, self.capacity, HEAD // 2)
        token, position = (self.state(name, INT, [self.batch]) for name in ("token", "position"))
        self.node("Unsqueeze", position, "last", name="places")
        self.node("Add", position, "one", name="present_position")
        self.node("Identity", "present_position", name="lengths")
        table = self.weight("table", VOCABULARY, WIDTH)
        x = self.node("Unsqueeze", self.node("Gather", table, token), "last")
        for number in range(layers):
            x = self.layer(x, number)
        x = self.node("RMSNormalization", x, self.weight("norm", WIDTH), axis=-1)
        scores = self.node("MatMul", x, self.weight("head", WIDTH, VOCABULARY))
        best = self.node("ArgMax", scores, axis=-1, keepdims=0)
        self.node("Squeeze", best, "last", name="present_token")
        inputs, outputs = zip(*self.states)
        graph = helper.make_graph(self.nodes, "decoder", inputs, outputs, self.weights)
        return helper.make_model(graph, ir_version=11, opset_imports=[helper.make_opsetid("", 24)])


def judge(plimsoll, file):
    """Plans the file, says what it takes, and returns what is wrong with it."""
    start = time.monotonic()
    command = [plimsoll, "plan", file, "--target", "cuda", "--state", "past_*=present_*", "--json"]
    plan = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    seconds = time.monotonic() - start
    summary = plan["programs"][0]["summary"]
    caches = {buffer["bytes"] for buffer in plan["programs"][0]["buffers"] if buffer["class"] == "state" and len(buffer["shape"]) == 4}
    largest = lambda step: max(plan["programs"][0]["buffers"][b]["bytes"] for b in step["writes"])
    copies = [step["name"] for step in plan["programs"][0]["steps"] if step["name"].startswith("copy of") and largest(step) in caches]
    arena, state = summary["arena_bytes"], summary["state_bytes"]
    print(f"{summary['steps']} steps, of which {len(copies)} copy a cache")
    print(f"arena {arena / 1e9:.3f} GB, state {state / 1e9:.2f} GB, constants {summary['constant_bytes'] / 1e9:.1f} GB")
    print(f"planned in {seconds:.2f} s")
    wrong = [f"{len(copies)} steps copy a cache, the first is '{copies[0]}'"] if copies else []
    return wrong + ([f"the arena is {arena} bytes beside {state} of state"] if arena * 25 > state else [])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--plimsoll", help="the program, to plan the file with")
    args = parser.parse_args()
    save(Decoder(args.batch, args.capacity).model(args.layers), args.file)
    wrong = judge(args.plimsoll, args.file) if args.plimsoll else []
    for what in wrong:
        print(what, file=sys.stderr)
    sys.exit(3 if wrong else 0)


if __name__ == "__main__":
    main()
