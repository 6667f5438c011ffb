"""Decoders in folders, as onnxruntime-genai's exporter writes them, with random weights: tokens beside onnxruntime's, and bytes of known shapes.

    pip install onnx onnxruntime numpy
    python tests/compare/folders.py target/release/plimsoll [--backend cuda] [--tokens 480]

A small decoder is written in f32 and f16, with floats, 4 and 8 bits, with and without positions as an input. Its greedy tokens are held against
those of onnxruntime without its optimizations. Then the plans of decoders of 1 and 7 billion parameters, whose weights are not there: planning
needs none. The script ends with 1 if tokens of f32 differ, or if a run allocates other bytes than planned.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

RUNTIME = "com.microsoft"
SMALL = dict(vocab=512, hidden=64, layers=2, heads=4, shared=2, width=16, inner=128, context=512)
SHAPES = {
    "1B": dict(vocab=32000, hidden=2048, layers=22, heads=32, shared=4, width=64, inner=5632, context=4096),
    "7B": dict(vocab=32000, hidden=4096, layers=32, heads=32, shared=32, width=128, inner=11008, context=4096),
}


class Writer:
    """A decoder's graph. Its weights are random, or only described if `rng` is None."""

    def __init__(self, shape, bits, dtype, positions, rng):
        self.shape, self.bits, self.positions, self.rng = shape, bits, positions, rng
        self.dtype = dtype
        self.element = TensorProto.FLOAT16 if dtype == np.float16 else TensorProto.FLOAT
        self.nodes, self.weights, self.end = [], [], 0

    def weight(self, name, dims, dtype, make):
        if self.rng is None:
            size = int(np.prod(dims)) * np.dtype(dtype).itemsize
            kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
            tensor = TensorProto(name=name, data_type=kind, dims=dims, data_location=TensorProto.EXTERNAL)
            for key, value in [("location", "model.onnx.data"), ("offset", self.end), ("length", size)]:
                tensor.external_data.add(key=key, value=str(value))
            self.end += size
        else:
            tensor = numpy_helper.from_array(make().astype(dtype), name)
        self.weights.append(tensor)
        return name

    def floats(self, name, *dims, around=0.0, by=1.0):
        return self.weight(name, dims, self.dtype, lambda: around + by * self.rng.standard_normal(dims))

    def node(self, op, inputs, outputs, domain="", **attributes):
        self.nodes.append(helper.make_node(op, inputs, outputs, name=outputs[0], domain=domain, **attributes))
        return outputs[0]

    def product(self, x, k, n, name):
        if not self.bits:
            return self.node("MatMul", [x, self.floats(f"{name}.w", k, n, by=k**-0.5)], [name])
        blocks, block = k // 32, 32 * self.bits // 8
        words = self.weight(f"{name}.w", (n, blocks, block), np.uint8, lambda: self.rng.integers(0, 256, (n, blocks, block)))
        step = 3.4 * k**-0.5 / 2**self.bits
        scales = self.weight(f"{name}.s", (n, blocks), self.dtype, lambda: step * self.rng.uniform(0.8, 1.2, (n, blocks)))
        return self.node("MatMulNBits", [x, words, scales], [name], RUNTIME, K=k, N=n, bits=self.bits, block_size=32)

    def norm(self, x, skip, name):
        scale = self.floats(f"{name}.scale", self.shape["hidden"], around=1.0, by=0.1)
        if skip is None:
            return self.node("SimplifiedLayerNormalization", [x, scale], [name], axis=-1, epsilon=1e-5), x
        outputs = [name, "", "", f"{name}.sum"]
        self.node("SkipSimplifiedLayerNormalization", [x, skip, scale], outputs, RUNTIME, epsilon=1e-5)
        return outputs[0], outputs[3]

    def model(self):
        s, integers = self.shape, TensorProto.INT64
        number = lambda name, value: self.weights.append(numpy_helper.from_array(np.array(value, np.int64), name)) or name
        self.node("ReduceSum", ["attention_mask", number("axis", [1])], ["counted"], keepdims=0)
        self.node("Sub", ["counted", number("one", [1])], ["last"])
        self.node("Cast", ["last"], ["lengths"], to=TensorProto.INT32)
        self.node("Shape", ["attention_mask"], ["mask_shape"])
        self.node("Gather", ["mask_shape", number("second", 1)], ["all"])
        self.node("Cast", ["all"], ["total"], to=TensorProto.INT32)
        inputs = [("input_ids", integers, ["batch_size", "sequence_length"])]
        inputs.append(("attention_mask", integers, ["batch_size", "total_sequence_length"]))
        if self.positions:
            inputs.append(("position_ids", integers, ["batch_size", "sequence_length"]))
        outputs = [("logits", self.element, ["batch_size", "sequence_length", s["vocab"]])]
        angles = lambda: np.arange(s["context"])[:, None] * 10000.0 ** (-np.arange(0, s["width"], 2) / s["width"])
        turns = [self.weight(f.__name__, (s["context"], s["width"] // 2), self.dtype, lambda: f(angles())) for f in (np.cos, np.sin)]
        x = self.node("Gather", [self.floats("table", s["vocab"], s["hidden"]), "input_ids"], ["embedded"])
        normed, rest = self.norm(x, None, "norm")
        for layer in range(s["layers"]):
            name = f"layer{layer}."
            sizes = {"q": s["heads"] * s["width"], "k": s["shared"] * s["width"], "v": s["shared"] * s["width"]}
            heads = [self.product(normed, s["hidden"], size, name + of) for of, size in sizes.items()]
            caches = [f"past_key_values.{layer}.{kind}" for kind in ("key", "value")]
            after = [f"present.{layer}.{kind}" for kind in ("key", "value")]
            inputs += [(cache, self.element, ["batch_size", s["shared"], "past_sequence_length", s["width"]]) for cache in caches]
            outputs += [(cache, self.element, ["batch_size", s["shared"], "total_sequence_length", s["width"]]) for cache in after]
            given = [*heads, *caches, "lengths", "total", *turns] + (["position_ids"] if self.positions else [])
            counts = dict(num_heads=s["heads"], kv_num_heads=s["shared"], do_rotary=1)
            attended = self.node("GroupQueryAttention", given, [name + "attended", *after], RUNTIME, **counts)
            out = self.product(attended, s["heads"] * s["width"], s["hidden"], name + "o")
            normed, rest = self.norm(rest, out, name + "between")
            gate, up = (self.product(normed, s["hidden"], s["inner"], name + of) for of in ("gate", "up"))
            self.node("Sigmoid", [gate], [name + "sigmoid"])
            self.node("Mul", [gate, name + "sigmoid"], [name + "silu"])
            self.node("Mul", [name + "silu", up], [name + "gated"])
            down = self.product(name + "gated", s["inner"], s["hidden"], name + "down")
            normed, rest = self.norm(rest, down, name + "behind")
        self.product(normed, s["hidden"], s["vocab"], "logits")
        ports = [[helper.make_tensor_value_info(*port) for port in ports] for ports in (inputs, outputs)]
        graph = helper.make_graph(self.nodes, "decoder", *ports, self.weights)
        versions = [helper.make_opsetid("", 21), helper.make_opsetid(RUNTIME, 1)]
        return helper.make_model(graph, opset_imports=versions, ir_version=10)


def write(folder, shape, bits, dtype=np.float32, positions=False, rng=None):
    writer = Writer(shape, bits, dtype, positions, rng)
    (folder / "model.onnx").write_bytes(writer.model().SerializeToString())
    roles = {"past_key_names": "past_key_values.%d.key", "past_value_names": "past_key_values.%d.value"}
    present = {"present_key_names": "present.%d.key", "present_value_names": "present.%d.value"}
    decoder = {"filename": "model.onnx", "head_size": shape["width"], "inputs": roles, "outputs": present}
    model = {"context_length": shape["context"], "vocab_size": shape["vocab"], "decoder": decoder}
    (folder / "genai_config.json").write_text(json.dumps({"model": model}))
    return writer.end


def expected(folder, prompt, count):
    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    session = ort.InferenceSession(folder / "model.onnx", options, providers=["CPUExecutionProvider"])
    kinds = {"tensor(float)": np.float32, "tensor(float16)": np.float16}
    caches = {i.name: np.zeros((1, i.shape[1], 0, i.shape[3]), kinds[i.type]) for i in session.get_inputs() if "past" in i.name}
    names = [output.name for output in session.get_outputs()]
    text, new = list(prompt), list(prompt)
    while len(text) < len(prompt) + count:
        given = {"input_ids": np.array([new]), "attention_mask": np.ones((1, len(text)), np.int64), **caches}
        if "position_ids" in [i.name for i in session.get_inputs()]:
            given["position_ids"] = np.arange(len(text) - len(new), len(text))[None]
        found = dict(zip(names, session.run(None, given)))
        caches = {name.replace("present", "past_key_values"): v for name, v in found.items() if name != "logits"}
        new = [int(found["logits"][0, -1].astype(np.float32).argmax())]
        text += new
    return text[len(prompt):]


def printed(*args):
    return json.loads(subprocess.run(args, check=True, stdout=subprocess.PIPE, text=True).stdout)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--tokens", type=int, default=480)
    args = parser.parse_args()
    binary, prompt, wrong = args.binary.absolute(), [1, 5, 9, 33, 7, 99], False
    for bits in (0, 4, 8):
        for dtype in (np.float32, np.float16):
            for positions in (False, True):
                with tempfile.TemporaryDirectory() as path:
                    folder = Path(path)
                    write(folder, SMALL, bits, dtype, positions, np.random.default_rng(bits))
                    tokens = expected(folder, prompt, args.tokens)
                    ids = ",".join(map(str, prompt))
                    flags = ["--ids", ids, "--tokens", str(args.tokens), "--backend", args.backend, "--json", "-q"]
                    run = printed(binary, "run", folder, *flags)
                same = next((i for i, (a, b) in enumerate(zip(tokens, run["tokens"])) if a != b), len(run["tokens"]))
                bytes_of = [run[name] for name in ("planned_bytes", "allocated_bytes_first", "allocated_bytes_last")]
                wrong |= len(set(bytes_of)) > 1 or dtype == np.float32 and same < args.tokens
                print(f"{bits} bits, {np.dtype(dtype)}, positions {positions}: {same} of {args.tokens} tokens, {bytes_of[0]} bytes")
    for name, shape in SHAPES.items():
        with tempfile.TemporaryDirectory() as path:
            size = write(Path(path), shape, 4, np.float16)
            for target in ("cpu", "cuda", "wgpu"):
                programs = printed(binary, "plan", path, "--context", "2048", "--target", target, "--json", "-q")["programs"]
                summary = programs[0]["summary"]
                parts = ("planned", "constant", "state", "arena")
                found = ", ".join(f"{summary[part + '_bytes']} {part}" for part in parts)
                print(f"{name} on {target}: {size} bytes in the file; {found}")
    return int(wrong)


if __name__ == "__main__":
    sys.exit(main())
