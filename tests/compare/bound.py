#!/usr/bin/env python3
"""Computes how little memory a model's unfused graph needs, on its own, and compares plimsoll's plan with it.

    python tests/compare/bound.py [FOLDER] [--batch 1] [--only WORD]... [--plimsoll PATH | --no-plimsoll]

The in-place lower bound is the largest sum of live bytes over the nodes in the file's order, where

  - a tensor lives from the node that makes it to the last node that reads it; both count in full;
  - an elementwise or row-wise node writes over an input that dies there and has as many bytes as the output;
  - a view (VIEWS below) costs nothing and keeps the tensor that it looks into alive;
  - weights, graph inputs and graph outputs do not count, nor does anything that follows from weights and shapes alone,
    such as the arithmetic that feeds a Reshape.

No fusion, no reordering, no alignment. The last column is the bound with Transpose as a view too.
Plimsoll's arena holds inputs and outputs, too: it is held against the bound and all of those.
Shapes come from a run in onnxruntime that returns every intermediate tensor. MB are 10^6 bytes. Exit code 3 when an
arena is larger than the bound.
"""

import json
import sys

import numpy as np
import onnx
import onnxruntime

import zoo

VIEWS = set("Dropout Expand Flatten Identity Reshape Slice Split Squeeze Unsqueeze".split())

ELEMENTWISE = set(
    """Abs Acos Acosh Add And Asin Asinh Atan Atanh BatchNormalization BitShift BitwiseAnd BitwiseNot BitwiseOr
    BitwiseXor Cast CastLike Ceil Celu Clip Cos Cosh Div Elu Equal Erf Exp Floor Gelu Greater GreaterOrEqual HardSigmoid
    HardSwish IsInf IsNaN LeakyRelu Less LessOrEqual Log Max Mean Min Mish Mod Mul Neg Not Or PRelu Pow Reciprocal Relu
    Round Selu Shrink Sigmoid Sign Sin Sinh Softplus Softsign Sqrt Sub Sum Swish Tan Tanh ThresholdedRelu Trilu Where
    Xor""".split()
)

ROWWISE = set(
    """GroupNormalization Hardmax InstanceNormalization LayerNormalization LogSoftmax LpNormalization
    MeanVarianceNormalization RMSNormalization Softmax""".split()
)


def reads(node):
    """The names a node reads, those captured by its subgraphs included."""
    names = [name for name in node.input if name]
    for attribute in node.attribute:
        for graph in [attribute.g, *attribute.graphs]:
            names += [name for inner in graph.node for name in reads(inner)]
    return names


def writes(node):
    return [name for name in node.output if name]


def tensor_bytes(model, folder, feed):
    """Tensor name -> bytes, for every tensor that a node makes."""
    names = [name for node in model.graph.node for name in writes(node)]
    probe = onnx.ModelProto()
    probe.CopyFrom(model)
    outputs = {value.name for value in probe.graph.output}
    probe.graph.output.extend(onnx.helper.make_empty_tensor_value_info(n) for n in names if n not in outputs)

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(folder.resolve()))
    session = onnxruntime.InferenceSession(probe.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return {name: np.asarray(value).nbytes for name, value in zip(names, session.run(names, feed))}


def lower_bound(graph, size, views):
    """Largest sum of live bytes over the nodes in file order, and the node where it occurs."""
    static = {tensor.name for tensor in graph.initializer}
    steps = []
    for node in graph.node:
        if node.op_type in ("Shape", "Size") or all(name in static for name in reads(node)):
            static.update(writes(node))
        else:
            steps.append(node)

    # The tensor whose bytes each name stands for.
    base = {}
    for node in steps:
        for name in writes(node):
            source = node.input[0] if node.op_type in views else name
            base[name] = base.get(source, source)
    free = static | {value.name for value in graph.input}
    free |= {base.get(value.name, value.name) for value in graph.output}

    last = {}
    for step, node in enumerate(steps):
        for name in [*reads(node), *writes(node)]:
            last[base.get(name, name)] = step

    live, peak, where = {}, 0, ""
    for step, node in enumerate(steps):
        dying = {t for t in (base.get(name, name) for name in reads(node)) if t in live and last[t] == step}
        kept = dict(live)
        for name in writes(node):
            if base[name] != name or name in free:
                continue
            if node.op_type in ELEMENTWISE | ROWWISE:
                # Written over, so gone from the sum; at most one dying input per output.
                over = next((t for t in sorted(dying) if t in kept and kept[t] == size[name]), None)
                kept.pop(over, None)
            kept[name] = size[name]
        total = sum(kept.values())
        if total > peak:
            peak, where = total, node.name or node.op_type
        live = {tensor: bytes for tensor, bytes in kept.items() if last[tensor] > step}
    return peak, where


def bounds(case):
    model = zoo.header(case.model)
    if model.functions:
        model = onnx.inliner.inline_local_functions(model)
    size = tensor_bytes(model, case.model.parent, case.inputs())
    peak, where = lower_bound(model.graph, size, VIEWS)
    strict, _ = lower_bound(model.graph, size, VIEWS | {"Transpose"})
    return peak, where, strict


def arena_bytes(program, case):
    """What plimsoll plans for all but the weights, and how much of that inputs and outputs would take by themselves."""
    binds = [flag for dim, size in sorted(case.dims().items()) for flag in ("--set", f"{dim}={size}")]
    plan = json.loads(zoo.plimsoll(program, "plan", case, *binds, "--target", "cpu", "--format", "json"))
    figures = plan["programs"][0]["summary"]
    return figures["arena_bytes"], figures["input_bytes"] + figures["output_bytes"]


def main():
    parser = zoo.arguments(__doc__)
    parser.add_argument("--no-plimsoll", action="store_true", help="only the bounds")
    args = parser.parse_args()
    rows, notes, over = [], [], 0
    found = zoo.cases_or_exit(args)
    for case in found:
        zoo.progress(case.label)
        peak, where, strict = bounds(case)
        row = [case.label, f"{peak / 1e6:.3f}", f"{strict / 1e6:.3f}", where]
        if not args.no_plimsoll:
            try:
                arena, outside = arena_bytes(args.plimsoll, case)
                row[1:1] = [f"{arena / 1e6:.3f}", f"{(peak + outside) / 1e6:.3f}", f"{arena / (peak + outside):.2f}"]
                row.append("ok" if arena <= peak + outside else "OVER")
            except zoo.Failed as problem:
                row[1:1] = ["-", "-", "-"]
                row.append("FAILED")
                notes.append(f"{case.label}: {problem}")
            over += row[-1] != "ok"
        rows.append(row)

    zoo.progress("")
    header = ["model", "bound MB", "transposes free", "peak at"]
    if not args.no_plimsoll:
        header = ["model", "arena MB", "with in, out", "of it", *header[1:], ""]
    print(zoo.table(header, rows, right=range(1, len(header) - (1 if args.no_plimsoll else 2))))
    print(*notes, sep="\n", end="\n" if notes else "")
    if not args.no_plimsoll:
        print(f"{len(found) - over} of {len(found)} within the bound")
    sys.exit(3 if over else 0)


if __name__ == "__main__":
    main()
