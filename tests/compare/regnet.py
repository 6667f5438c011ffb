#!/usr/bin/env python3
"""Writes RegNetY-3.2GF as an ONNX file: a network of grouped convolutions, with random weights.

    python tests/compare/regnet.py FILE [--dtype f32|f16|bf16] [--batch 1]

The layers are those of torchvision's regnet_y_3_2gf, with its batch normalisations folded into the convolutions. Times
of such a file say as much as those of the trained network; its results mean nothing.
"""

import argparse

import ml_dtypes
import numpy as np
import onnx
from onnx import TensorProto, helper

TYPES = {
    "f32": (np.float32, TensorProto.FLOAT),
    "f16": (np.float16, TensorProto.FLOAT16),
    "bf16": (ml_dtypes.bfloat16, TensorProto.BFLOAT16),
}
# Blocks and channels of each stage.
STAGES = [(2, 72), (5, 216), (13, 576), (1, 1512)]
GROUP = 24


class Network:
    """Nodes and weights in the order in which they are added."""

    def __init__(self, dtype):
        self.numpy, self.onnx = TYPES[dtype]
        self.random = np.random.default_rng(0)
        self.nodes, self.weights = [], []

    def weight(self, shape, scale):
        values = (self.random.standard_normal(shape) * scale).astype(self.numpy)
        name = f"w{len(self.weights)}"
        self.weights.append(helper.make_tensor(name, self.onnx, shape, values.tobytes(), raw=True))
        return name

    def node(self, op, *inputs, **attributes):
        name = f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=name, **attributes))
        return name

    def conv(self, x, inputs, outputs, size, stride=1, groups=1, relu=True):
        depth = inputs // groups * size * size
        weight = self.weight((outputs, inputs // groups, size, size), (2 / depth) ** 0.5)
        bias = self.weight((outputs,), 0.1)
        window = {"kernel_shape": [size] * 2, "strides": [stride] * 2, "pads": [size // 2] * 4}
        y = self.node("Conv", x, weight, bias, group=groups, **window)
        return self.node("Relu", y) if relu else y

    def block(self, x, inputs, outputs, stride):
        """A bottleneck with squeeze and excitation."""
        y = self.conv(x, inputs, outputs, 1)
        y = self.conv(y, outputs, outputs, 3, stride, outputs // GROUP)
        squeezed = round(inputs / 4)
        scale = self.conv(self.node("GlobalAveragePool", y), outputs, squeezed, 1)
        scale = self.node("Sigmoid", self.conv(scale, squeezed, outputs, 1, relu=False))
        y = self.conv(self.node("Mul", y, scale), outputs, outputs, 1, relu=False)
        if stride > 1 or inputs != outputs:
            x = self.conv(x, inputs, outputs, 1, stride, relu=False)
        return self.node("Relu", self.node("Add", y, x))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--dtype", choices=TYPES, default="f32")
    parser.add_argument("--batch", type=int, default=1)
    args = parser.parse_args()
    network = Network(args.dtype)
    y, channels = network.conv("image", 3, 32, 3, 2), 32
    for blocks, width in STAGES:
        for block in range(blocks):
            y = network.block(y, channels, width, 2 if block == 0 else 1)
            channels = width
    y = network.node("Flatten", network.node("GlobalAveragePool", y))
    y = network.node("Gemm", y, network.weight((channels, 1000), 0.02), network.weight((1000,), 0.0))
    value = helper.make_tensor_value_info
    ends = [value("image", network.onnx, [args.batch, 3, 224, 224])], [value(y, network.onnx, [args.batch, 1000])]
    graph = helper.make_graph(network.nodes, "regnet_y_3_2gf", *ends, network.weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 22)], ir_version=10), args.file)


if __name__ == "__main__":
    main()
