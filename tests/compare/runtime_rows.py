#!/usr/bin/env python3
"""Operators of onnxruntime's domain, over their attributes, beside onnxruntime.

    python tests/compare/runtime_rows.py [--plimsoll PROGRAM]

Each case is a model of one node. plimsoll and onnxruntime run it on the CPU, with one input, and agree. onnxruntime has no BiasSoftmax on the
CPU: it is compared with the sum and the softmax that it stands for.
"""

import argparse
import itertools
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
from onnx import helper, numpy_helper

ROOT = Path(__file__).resolve().parents[2]
DOMAIN = "com.microsoft"
RANDOM = np.random.default_rng(1)


def floats(*shape):
    return RANDOM.standard_normal(shape).astype(np.float32)


def codes(dtype, *shape):
    return RANDOM.integers(0, 100, shape).astype(dtype)


def products():
    """FusedMatMul, and TransposeMatMul as it was called before."""
    for op, left, right in itertools.product(["TransposeMatMul", "FusedMatMul"], (0, 1), (0, 1)):
        a = floats(2, 4, 3) if left else floats(2, 3, 4)
        b = floats(2, 5, 4) if right else floats(2, 4, 5)
        yield op, [a, b], dict(transA=left, transB=right, alpha=0.5)
        yield op, [a[:1], b], dict(transA=left, transB=right)
        yield op, [a, b[0]], dict(transA=left, transB=right)
    for op in ["TransposeMatMul", "FusedMatMul"]:
        yield op, [floats(4), floats(4, 5)], dict(transA=1)
        yield op, [floats(3, 4), floats(4)], dict(transB=1)
    yield "FusedMatMul", [floats(3, 2, 4), floats(2, 4, 5)], dict(transBatchA=1)
    yield "FusedMatMul", [floats(2, 3, 4), floats(4, 2, 5)], dict(transBatchB=1)


def pools():
    """NhwcMaxPool."""
    cases = [
        dict(),
        dict(strides=[2, 2]),
        dict(pads=[1, 1, 1, 1]),
        dict(auto_pad="SAME_UPPER", strides=[2, 2]),
        dict(auto_pad="SAME_LOWER", strides=[2, 2]),
        dict(auto_pad="VALID"),
        dict(dilations=[2, 2]),
        dict(ceil_mode=1, strides=[2, 2]),
    ]
    for dtype in (np.int8, np.uint8):
        for attributes in cases:
            yield "NhwcMaxPool", [codes(dtype, 1, 7, 9, 3)], dict(kernel_shape=[3, 3], **attributes)
        yield "NhwcMaxPool", [codes(dtype, 2, 9, 3)], dict(kernel_shape=[3])
        yield "NhwcMaxPool", [codes(dtype, 1, 4, 5, 6, 3)], dict(kernel_shape=[1, 2, 2])


def embeddings():
    """QEmbedLayerNormalization."""
    ids, segments = codes(np.int32, 2, 4) % 10, codes(np.int32, 2, 4) % 2
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], np.int32)
    scale = lambda value: np.array(value, np.float32)
    for dtype, segmented, masked in itertools.product((np.uint8, np.int8), (True, False), (True, False)):
        zero = lambda value: np.array(value, dtype)
        parts = [codes(dtype, 10, 8), codes(dtype, 6, 8), codes(dtype, 2, 8), codes(dtype, 8), codes(dtype, 8)]
        scales = [scale(value) for value in (0.02, 0.03, 0.04, 0.05, 0.01)]
        zeros = [zero(value) for value in (3, 4, 5, 6, 7)]
        if not segmented:
            parts[2] = scales[2] = zeros[2] = None
        inputs = [ids, segments if segmented else None, *parts, mask if masked else None, *scales, *zeros]
        yield "QEmbedLayerNormalization", inputs, dict(epsilon=1e-5, outputs=2)


def softmaxes():
    """BiasSoftmax. The bias has extents of 1 inside or outside, as `is_inner_broadcast` says."""
    for axis, shape, inner in [
        (3, (2, 1, 1, 5), 1),
        (3, (1, 1, 4, 5), 0),
        (3, (2, 3, 4, 5), 0),
        (2, (2, 1, 4, 5), 1),
        (2, (1, 3, 4, 5), 0),
        (1, (1, 3, 4, 5), 0),
        (-1, (2, 1, 1, 5), 1),
    ]:
        yield "BiasSoftmax", [floats(2, 3, 4, 5), floats(*shape)], dict(axis=axis, is_inner_broadcast=inner)


def sum_softmax(x, bias, axis, **_):
    """The softmax over all axes from `axis` on."""
    total = x + bias
    axes = tuple(range(axis % x.ndim, x.ndim))
    powers = np.exp(total - total.max(axes, keepdims=True))
    return [powers / powers.sum(axes, keepdims=True)]


def model(op, inputs, outputs=1, **attributes):
    names = [f"i{k}" if x is not None else "" for k, x in enumerate(inputs)]
    node = helper.make_node(op, names, [f"o{k}" for k in range(outputs)], domain=DOMAIN, **attributes)
    given = {name: x for name, x in zip(names, inputs) if name}
    value = lambda name, x: helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
    # Parts of embeddings are weights.
    fed = [name for name in given if not name.startswith("i") or len(given) < 5 or name in ("i0", "i1", "i7")]
    graph = helper.make_graph(
        [node],
        "row",
        [value(name, given[name]) for name in fed],
        [onnx.ValueInfoProto(name=name) for name in node.output],
        [numpy_helper.from_array(x, name) for name, x in given.items() if name not in fed],
    )
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=10), {name: given[name] for name in fed}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", default=str(ROOT / "target/release/plimsoll"))
    program = parser.parse_args().plimsoll
    onnxruntime.set_default_logger_severity(4)
    count, wrong = 0, 0
    for op, inputs, attributes in itertools.chain(products(), pools(), embeddings(), softmaxes()):
        made, feed = model(op, inputs, **attributes)
        if op == "BiasSoftmax":
            expected = sum_softmax(*inputs, **attributes)
        else:
            expected = onnxruntime.InferenceSession(made.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feed)
        for info, x in zip(made.graph.output, expected):
            info.CopyFrom(helper.make_tensor_value_info(info.name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape))
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            onnx.save(made, folder / "row.onnx")
            arguments = []
            for name, x in feed.items():
                np.save(folder / f"{name}.npy", x)
                arguments += ["--input", f"{name}={folder}/{name}.npy"]
            run = [program, "run", str(folder / "row.onnx"), "--backend", "cpu", "--output-dir", str(folder), *arguments]
            done = subprocess.run(run, capture_output=True, text=True)
            what = ""
            if done.returncode:
                what = done.stderr.strip().splitlines()[-1]
            for k, x in enumerate(expected if not what else []):
                found = np.load(folder / f"o{k}.npy").astype(np.float64)
                if found.shape != x.shape or np.abs(found - x).max() > 1e-5 * max(np.abs(x).max(), 1):
                    what = f"output {k} differs"
        count += 1
        if what:
            wrong += 1
            print(f"{op} {[x.shape for x in inputs if x is not None]} {attributes}: {what}")
    print(f"{count} cases, {wrong} of them wrong or refused")
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
