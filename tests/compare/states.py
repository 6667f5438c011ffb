#!/usr/bin/env python3
"""States in files, beside Python's packages: onnx reads the training steps that plimsoll writes, and safetensors its states.

    python tests/compare/states.py [--plimsoll PROGRAM]

plimsoll reads what these packages write, too: a linear layer and its gradient descent are made here, and its weights after 50 steps agree
with NumPy's to 1e-4 of their peak.
"""

import argparse
import subprocess
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

ROOT = Path(__file__).resolve().parents[2]
RATE, STEPS = 0.1, 50


def model(path, weights):
    """y = x w, and a step that moves w against the gradient of the mean square error. The step begins with w as its initialization says."""
    value = lambda name, shape: helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "linear",
        [value("x", [8, 3])],
        [value("y", [8, 1])],
        [numpy_helper.from_array(np.zeros((3, 1), np.float32), "w")],
    )
    algorithm = helper.make_graph(
        [
            helper.make_node("Sub", ["y", "target"], ["error"]),
            helper.make_node("Transpose", ["x"], ["columns"]),
            helper.make_node("MatMul", ["columns", "error"], ["gradient"]),
            helper.make_node("Mul", ["gradient", "rate"], ["change"]),
            helper.make_node("Sub", ["w", "change"], ["next_w"]),
        ],
        "step",
        [value("target", [8, 1])],
        [value("next_w", [3, 1])],
        [numpy_helper.from_array(np.float32(RATE / 4), "rate")],
    )
    first = numpy_helper.from_array(weights, "first")
    initialization = helper.make_graph([helper.make_node("Identity", ["first"], ["begin"])], "first", [], [], [first])
    made = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    info = made.training_info.add()
    info.algorithm.CopyFrom(algorithm)
    info.initialization.CopyFrom(initialization)
    info.update_binding.add(key="w", value="next_w")
    info.initialization_binding.add(key="w", value="begin")
    onnx.checker.check_model(made)
    onnx.save(made, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", default=str(ROOT / "target/release/plimsoll"))
    program = parser.parse_args().plimsoll
    run = lambda *words: subprocess.run([program, *map(str, words)], check=True, capture_output=True, cwd=ROOT)
    random = np.random.default_rng(1)
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        x, weights, wanted = (random.standard_normal(shape).astype(np.float32) for shape in [(8, 3), (3, 1), (3, 1)])
        np.save(folder / "x.npy", x)
        np.save(folder / "target.npy", x @ wanted)
        model(folder / "linear.onnx", weights)
        inputs = ["--input", f"x={folder}/x.npy", "--input", f"target={folder}/target.npy", "--backend", "cpu"]
        saved = folder / "states.safetensors"
        run("run", folder / "linear.onnx", "--training", *inputs, "--iters", STEPS, "--save-states", saved)
        expected = weights.copy()
        for _ in range(STEPS):
            expected -= RATE / 4 * (x.T @ (x @ expected - x @ wanted))
        found = load_file(saved)
        assert list(found) == ["w"] and safe_open(saved, "np").metadata() == {"graph": "linear", "producer": "plimsoll"}
        assert np.abs(found["w"] - expected).max() < 1e-4 * np.abs(expected).max(), (found["w"], expected)
        print(f"{STEPS} steps from onnx's file: as NumPy's; safetensors reads the weights")

        save_file({"w": weights}, folder / "python.safetensors", {"format": "np"})
        run("run", folder / "linear.onnx", "--training", *inputs, "--load-states", folder / "python.safetensors",
            "--iters", STEPS, "--save-states", saved)
        assert (load_file(saved)["w"] == found["w"]).all()
        print("the weights that safetensors writes are begun with")

        decoder = folder / "decoder.onnx"
        states = ["--state", "token=next_token", "--state", "position=next_position", "--state", "past_*=present_*"]
        sizes = ["--set", "batch=2", "--set", "capacity=1000000"]
        run("emit", "graphs/generate.onnxtxt", "onnx", "--save", decoder, *sizes, *states)
        written = onnx.load(decoder)
        onnx.checker.check_model(written)
        bound = [(binding.key, binding.value) for binding in written.training_info[0].update_binding]
        assert ("past_keys", "present_keys") in bound, bound
        print(f"onnx reads a decoder with its states in {decoder.stat().st_size} bytes; its caches have 512,000,000")


if __name__ == "__main__":
    main()
