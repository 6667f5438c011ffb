#!/usr/bin/env python3
"""Files that `plimsoll emit onnx --quantize` writes, beside onnxruntime.

    python tests/compare/quantized.py [--plimsoll PROGRAM]

A perceptron is made in each type of floats, with products, a Gemm whose weights are transposed, and weights that are shared. onnxruntime runs
each emitted file, and agrees with `plimsoll run MODEL --quantize` to a share of the output's peak that is a rounding error of the type. It is
asked to compute in floats: by default it rounds the other operand of such products to 8 bits, too, and what that changes is shown. plimsoll
plans the emitted file and the model with the flag: their constants take as many bytes.
"""

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

ROOT = Path(__file__).resolve().parents[2]
TOLERANCE = {np.float32: 1e-5, np.float16: 4e-3}
KIND = {np.float32: TensorProto.FLOAT, np.float16: TensorProto.FLOAT16}
TYPES = ["int8", "int4", "int4:16", "int4:64", "int8:128"]


def model(path, dtype, random):
    """Four products behind one another, of which the third one reads the weights of the first."""
    def weights(name, *shape):
        return numpy_helper.from_array((random.standard_normal(shape) / np.sqrt(shape[0])).astype(dtype), name)

    value = lambda name: helper.make_tensor_value_info(name, KIND[dtype], ["batch", 256])
    graph = helper.make_graph(
        [
            helper.make_node("MatMul", ["x", "first"], ["a"]),
            helper.make_node("Relu", ["a"], ["b"]),
            helper.make_node("Gemm", ["b", "second", "bias"], ["c"], transB=1, alpha=0.5),
            helper.make_node("MatMul", ["c", "first"], ["d"]),
            helper.make_node("MatMul", ["d", "third"], ["y"]),
        ],
        "perceptron",
        [value("x")],
        [value("y")],
        [weights("first", 256, 256), weights("second", 256, 256), weights("third", 256, 256), weights("bias", 256)],
    )
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.checker.check_model(made)
    onnx.save(made, path)


def outputs(path, x, accuracy):
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", accuracy)
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return session.run(None, {"x": x})[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", default=str(ROOT / "target/release/plimsoll"))
    program = parser.parse_args().plimsoll

    def run(*args):
        return subprocess.run([program, *args], check=True, capture_output=True, text=True).stdout

    def constants(*args):
        return json.loads(run("plan", *args, "--json"))["programs"][0]["summary"]["constant_bytes"]

    random = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        path, emitted = str(folder / "model.onnx"), str(folder / "emitted.onnx")
        for dtype, tolerance in TOLERANCE.items():
            model(path, dtype, random)
            x = random.standard_normal((5, 256)).astype(dtype)
            np.save(folder / "x.npy", x)
            for kind in TYPES:
                flags = ["--quantize", kind, "--set", "batch=5"]
                run("emit", path, "onnx", *flags, "-o", emitted)
                onnx.checker.check_model(emitted, full_check=True)
                run("run", path, *flags, "--backend", "cpu", "--input", f"x={folder}/x.npy", "--output-dir", str(folder))
                expected = np.load(folder / "y.npy").astype(np.float64)
                difference = lambda accuracy: np.abs(outputs(emitted, x, accuracy) - expected).max() / np.abs(expected).max()
                # 1: f32, 4: 8 bits, which is the default.
                off, default = difference("1"), difference("4")
                ours, theirs = constants(path, *flags), constants(emitted)
                print(
                    f"{np.dtype(dtype).name} {kind}: {off:.1e} off, {default:.1e} by default; "
                    f"{ours} bytes of constants, {theirs} of the emitted file"
                )
                assert off <= tolerance, (dtype, kind, off)
                assert ours == theirs, (ours, theirs)


if __name__ == "__main__":
    main()
