"""An exported model as a function of jax.numpy arrays, for `jax.jit`: one row per ONNX operator.

    function, weights = xla.load("bert-base.dy.onnx")
    outputs = jax.jit(function)(weights, {"input_ids": ids, "attention_mask": mask})

It knows the operators of the models that gpu_compare.py times, and says so where a model has others. What depends on
shapes alone is NumPy's while XLA traces, so that no shape is computed on the device.
"""

import jax
import jax.numpy as jnp
import numpy as np
import onnx
from onnx import numpy_helper

# Larger ones, and all of several elements, are arguments of the compiled function, not literals in it.
LITERAL = 16


def library(*values):
    """NumPy where all is known while tracing."""
    return np if all(value is None or isinstance(value, np.ndarray | np.generic) for value in values) else jnp


def each(name):
    return lambda attrs, *x: getattr(library(*x), name)(*x)


def batch_norm(attrs, x, scale, bias, mean, variance):
    factor = scale / jnp.sqrt(variance + attrs.get("epsilon", 1e-5))
    return (x * factor[:, None, None] + (bias - mean * factor)[:, None, None]).astype(x.dtype)


def batch_norm_in_training(attrs, x, scale, bias, mean, variance):
    wide = x.astype(jnp.float32)
    mean, variance = wide.mean((0, 2, 3)), wide.var((0, 2, 3))
    return batch_norm(attrs, wide, scale, bias, mean, variance).astype(x.dtype)


def cast(attrs, x):
    return x.astype(onnx.helper.tensor_dtype_to_np_dtype(attrs["to"]))


def layer_norm(attrs, x, scale, bias=None):
    wide = x.astype(jnp.float32)
    wide = wide - wide.mean(-1, keepdims=True)
    wide = wide * jax.lax.rsqrt((wide * wide).mean(-1, keepdims=True) + attrs.get("epsilon", 1e-5))
    found = wide.astype(x.dtype) * scale
    return found if bias is None else found + bias


def gemm(attrs, a, b, c=None):
    a = a.T if attrs.get("transA") else a
    b = b.T if attrs.get("transB") else b
    found = a @ b
    return found if c is None else found + c


def constant(value):
    """A tensor, an integer, a float, or a list of either."""
    if isinstance(value, onnx.TensorProto):
        return numpy_helper.to_array(value)
    found = np.array(value)
    return found.astype(np.float32 if found.dtype.kind == "f" else np.int64)


def pairs(pads):
    half = len(pads) // 2
    return list(zip(pads[:half], pads[half:]))


def conv(attrs, x, w, bias=None):
    found = jax.lax.conv_general_dilated(
        x,
        w,
        attrs["strides"],
        pairs(attrs["pads"]),
        rhs_dilation=attrs["dilations"],
        feature_group_count=attrs.get("group", 1),
    )
    return found if bias is None else found + bias[:, None, None]


def max_pool(attrs, x):
    window, strides = (1, 1, *attrs["kernel_shape"]), (1, 1, *attrs["strides"])
    lowest = np.array(-np.inf, x.dtype)
    return jax.lax.reduce_window(x, lowest, jax.lax.max, window, strides, [(0, 0)] * 2 + pairs(attrs["pads"]))


def reduce_mean(attrs, x, axes=None):
    return x.mean(tuple(int(axis) for axis in axes), keepdims=bool(attrs.get("keepdims", 1)))


def reshape(attrs, x, shape):
    known = [int(n) or x.shape[i] for i, n in enumerate(shape)]
    return x.reshape(known)


def expand(attrs, x, shape):
    shape = np.broadcast_shapes(x.shape, tuple(int(n) for n in shape))
    return library(x).broadcast_to(x, shape)


def slices(attrs, x, starts, ends, axes=None, steps=None):
    cut = [slice(None)] * x.ndim
    axes = range(len(starts)) if axes is None else axes
    for start, end, axis, step in zip(starts, ends, axes, [1] * len(starts) if steps is None else steps):
        cut[int(axis)] = slice(int(start), int(end), int(step))
    return x[tuple(cut)]


def split(attrs, x, sizes=None):
    axis = attrs.get("axis", 0)
    if sizes is None:
        return library(x).split(x, attrs["num_outputs"], axis)
    return library(x).split(x, np.cumsum(sizes)[:-1].tolist(), axis)


def gather_nd(attrs, x, at):
    if attrs.get("batch_dims", 0):
        raise NotImplementedError("GatherND with batch_dims")
    return x[tuple(library(at).moveaxis(at, -1, 0))]


def elements(attrs, x, at):
    return library(x, at).take_along_axis(x, at, attrs.get("axis", 0))


def squeeze(attrs, x, axes=None):
    return x.squeeze(None if axes is None else tuple(int(axis) for axis in axes))


def gelu(attrs, x):
    return jax.nn.gelu(x, approximate=attrs.get("approximate", b"none") == b"tanh")


OPS = {
    "Add": each("add"),
    "And": each("logical_and"),
    "BatchNormalization": batch_norm,
    "Cast": cast,
    "CastLike": lambda attrs, x, like: x.astype(like.dtype),
    "Concat": lambda attrs, *x: library(*x).concatenate(x, attrs["axis"]),
    "ConstantOfShape": lambda attrs, shape: np.full(shape, constant(attrs["value"]) if "value" in attrs else np.float32(0)),
    "Conv": conv,
    "Cos": each("cos"),
    "Div": lambda attrs, a, b: a // b if np.issubdtype(a.dtype, np.integer) else a / b,
    "Equal": each("equal"),
    "Erf": lambda attrs, x: jax.lax.erf(x),
    "Expand": expand,
    "Flatten": lambda attrs, x: x.reshape(int(np.prod(x.shape[: attrs.get("axis", 1)])), -1),
    "Gather": lambda attrs, x, at: library(x, at).take(x, at, attrs.get("axis", 0)),
    "GatherElements": elements,
    "GatherND": gather_nd,
    "Gelu": gelu,
    "Gemm": gemm,
    "GlobalAveragePool": lambda attrs, x: x.mean(tuple(range(2, x.ndim)), keepdims=True),
    "GreaterOrEqual": each("greater_equal"),
    "Identity": lambda attrs, x: x,
    "LayerNormalization": layer_norm,
    "LessOrEqual": each("less_equal"),
    "MatMul": each("matmul"),
    "Max": each("maximum"),
    "MaxPool": max_pool,
    "Mul": each("multiply"),
    "Neg": each("negative"),
    "Pow": lambda attrs, a, b: library(a, b).power(a, b).astype(a.dtype),
    "Range": lambda attrs, start, end, step: np.arange(start, end, step),
    "Reciprocal": lambda attrs, x: 1 / x,
    "ReduceMean": reduce_mean,
    "Relu": lambda attrs, x: jnp.maximum(x, 0),
    "Reshape": reshape,
    "Shape": lambda attrs, x: np.array(x.shape[attrs.get("start", 0) : attrs.get("end", x.ndim)], np.int64),
    "Sigmoid": lambda attrs, x: jax.nn.sigmoid(x),
    "Sin": each("sin"),
    "Slice": slices,
    "Softmax": lambda attrs, x: jax.nn.softmax(x, attrs.get("axis", -1)),
    "Split": split,
    "Sqrt": each("sqrt"),
    "Squeeze": squeeze,
    "Sub": each("subtract"),
    "Tanh": each("tanh"),
    "Transpose": lambda attrs, x: x.transpose(attrs["perm"]),
    "Unsqueeze": lambda attrs, x, axes: library(x).expand_dims(x, tuple(int(axis) for axis in axes)),
    "Where": each("where"),
}


def load(path, training=False):
    """The model's function of weights and inputs by name, which returns its outputs in order; and its weights.

    In training, batch normalisation takes the statistics of the batch, and constants have the type that the weights are given in.
    """
    # Indices stay 64-bit integers.
    jax.config.update("jax_enable_x64", True)
    graph = onnx.load(path).graph
    unknown = {node.op_type for node in graph.node} - OPS.keys() - {"Constant"}
    if unknown:
        raise NotImplementedError(f"{path}: no row for {', '.join(sorted(unknown))}")
    values = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    weights = {name: value for name, value in values.items() if value.size > LITERAL}
    # What is left of integers, shapes and axes above all, has to be known while tracing.
    weights = {name: value for name, value in weights.items() if jnp.issubdtype(value.dtype, jnp.floating)}
    rows = OPS
    if training:
        rows = OPS | {"BatchNormalization": batch_norm_in_training}
        running = {name for node in graph.node if node.op_type == "BatchNormalization" for name in node.input[3:]}
        weights = {name: value for name, value in weights.items() if name not in running}
    literals = {name: value for name, value in values.items() if name not in weights}

    def function(weights, inputs):
        kind = next(iter(weights.values())).dtype

        def typed(value):
            return value.astype(kind) if training and value.dtype == np.float32 else value

        known = {name: typed(value) for name, value in literals.items()} | weights | inputs
        for node in graph.node:
            attrs = {attr.name: onnx.helper.get_attribute_value(attr) for attr in node.attribute}
            if node.op_type == "Constant":
                found = typed(constant(*attrs.values()))
            else:
                found = rows[node.op_type](attrs, *(known[name] if name else None for name in node.input))
            known |= zip(node.output, found if isinstance(found, list | tuple) else [found])
        return [known[value.name] for value in graph.output]

    return function, weights
