"""onnx's own backend tests, each by `plimsoll run`: how many pass, and why the others do not.

    pip install onnx==1.22.*
    python tests/compare/onnx_backend.py target/release/plimsoll [--backend wgpu] [--only PATTERN] [--list FILE]

In scope: the folders node, simple, pytorch-converted, pytorch-operator and light, where all inputs and outputs are tensors of numbers,
and no input is declared to be empty: 1,629 tests of onnx 1.22. Those with an empty input, 60
of them, run as well and are counted apart. A test passes if all its data sets do, by onnx's own tolerance (rtol 1e-3, atol 1e-7; where a
test's model is a network, `light`, 1e-3 of both) and with the types and the shapes that onnx expects. The values are compared here, not by
the command.

Every failure is explained in EXPLAINED, or by a reason in LACKS of the backend. The script ends with 1 if one is not, or if a test that is
explained passes.
"""

import argparse
import collections
import concurrent.futures
import fnmatch
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, numpy_helper

FOLDERS = ["node", "simple", "pytorch-converted", "pytorch-operator", "light"]
NUMBERS = {
    TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16, TensorProto.BOOL,
    TensorProto.INT8, TensorProto.INT16, TensorProto.INT32, TensorProto.INT64,
    TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, TensorProto.UINT64,
    TensorProto.INT4, TensorProto.UINT4, TensorProto.INT2, TensorProto.UINT2,
    TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2, TensorProto.FLOAT8E5M2FNUZ,
    TensorProto.FLOAT8E8M0, TensorProto.FLOAT4E2M1,
}
# What an .npy file has instead of types that NumPy lacks.
SHOWN = {
    **dict.fromkeys([TensorProto.INT4, TensorProto.INT2], np.int8),
    **dict.fromkeys([TensorProto.UINT4, TensorProto.UINT2], np.uint8),
    **dict.fromkeys([TensorProto.BFLOAT16, TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E4M3FNUZ, TensorProto.FLOAT8E5M2,
                     TensorProto.FLOAT8E5M2FNUZ, TensorProto.FLOAT8E8M0, TensorProto.FLOAT4E2M1], np.float32),
}


# Tests that fail on every backend, by the start of their names.
EXPLAINED = {
    "test_bernoulli": "its numbers are those of NumPy's generator",
    "test_training_dropout": "what it drops follows NumPy's generator; with a ratio of 0 it passes",
    "test_dft_inverse": "imaginary parts that are 0 to f64 come out as 1e-6 of the peak from sums of f32; the tolerance is 1e-7",
    "test_image_decoder": "an image file has no shape before it is decoded: a model begins after that",
    "test_gradient_of": "a graph is differentiated before it is planned, by `plimsoll train`, not by a node",
    "test_ai_onnx_ml_tree_ensemble": "trees of decisions are no kernels",
}
# Tests that pass although the start of their names is explained.
PASSES = {
    "test_training_dropout_zero_ratio",
    "test_training_dropout_zero_ratio_mask",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal_expanded",
    "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal_expanded",
}
# Tests that fail on one backend, by the start of their names.
FAILS_ON = {
    "wgpu": {
        "test_attention_4d_with_past_and_present_qk_matmul_bias_3d_mask_causal": "WGSL has no infinities: hidden scores show f32's least number",
        "test_attention_4d_with_past_and_present_qk_matmul_bias_4d_mask_causal": "WGSL has no infinities: hidden scores show f32's least number",
        "test_reduce_max_empty_set": "WGSL has no infinities: the largest of nothing is f32's least number",
        "test_reduce_min_empty_set": "WGSL has no infinities: the least of nothing is f32's largest number",
    },
}
# What a backend lacks, as it says it.
LACKS = {
    "wgpu": [
        "has no type for f64 values",
        "has no type for f16 values",
        "has no type for bf16 values",
        "does not fit into i32, which this device computes in",
    ],
}


def explained(case, why, backend):
    """The reason in sight for a test that fails, or an empty text."""
    if case.name not in PASSES:
        for start, reason in [*EXPLAINED.items(), *FAILS_ON.get(backend, {}).items()]:
            if case.name.startswith(start):
                return reason
    return next((lack for lack in LACKS.get(backend, []) if why and lack in why), "")


def file_name(tensor):
    """The file that holds a tensor; the same rule as `plimsoll run --output-dir`."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", tensor) + ".npy"


def in_scope(model):
    values = [*model.graph.input, *model.graph.output]
    return all(v.type.WhichOneof("value") == "tensor_type" and v.type.tensor_type.elem_type in NUMBERS for v in values)


def has_empty_input(model):
    """True if an input is declared with an axis of no elements."""
    shapes = [v.type.tensor_type.shape.dim for v in model.graph.input]
    return any(dim.WhichOneof("value") == "dim_value" and dim.dim_value == 0 for dims in shapes for dim in dims)


def model_of(case):
    """The file of a test's model: in a folder of its own, or, in `light`, the test itself."""
    return case if case.suffix == ".onnx" else case / "model.onnx"


def light_data(case, model):
    """The data set of a network in `light`: onnx's test feeds numbers that rise from 0 to 1."""
    weights = {tensor.name for tensor in model.graph.initializer}
    given = []
    for value in (v for v in model.graph.input if v.name not in weights):
        shape = [dim.dim_value if dim.HasField("dim_value") else 1 for dim in value.type.tensor_type.shape.dim]
        count = int(np.prod(shape))
        given.append((np.arange(count).reshape(shape) / count).astype(np.float32))
    expected = [array(case.with_name(f"{case.stem}_output_{i}.pb")) for i in range(len(model.graph.output))]
    return given, expected


def array(path):
    tensor = onnx.load_tensor(path)
    found = numpy_helper.to_array(tensor)
    return found.astype(SHOWN.get(tensor.data_type, found.dtype))


def data(folder, kind):
    """The tensors of a data set, in the order of their numbers."""
    files = sorted(folder.glob(f"{kind}_*.pb"), key=lambda p: int(p.stem.split("_")[1]))
    return [array(path) for path in files]


def reason(text):
    """The message of a failure, without what differs from test to test."""
    errors = [line for line in text.splitlines() if line.startswith("error: ")] or text.splitlines()[-1:] or ["no message"]
    message = re.sub(r"^error: (\S*\.onnx: )?", "", errors[-1])
    message = re.sub(r"^--input \S+: ", "", message)
    message = re.sub(r"node '[^']*' ", "node ", message)
    for pattern in (r"(plimsoll does not have this operator: [\w.]+)", r"(input '[^']*' must be known)",
                    r"(element type \w+ is not supported)", r"(elements of type \S+ are not supported)"):
        if found := re.search(pattern, message):
            return found[1]
    return message[:150]


def run(case, binary, flags):
    """None, or why the test fails."""
    model = onnx.load(model_of(case), load_external_data=False)
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [v.name for v in model.graph.input if v.name not in weights] if weights else [v.name for v in model.graph.input]
    outputs = [v.name for v in model.graph.output]
    tolerance = {"rtol": 1e-3, "atol": 1e-3 if case.parent.name == "light" else 1e-7}
    if case.suffix == ".onnx":
        sets = [light_data(case, model)]
    else:
        sets = [(data(folder, "input"), data(folder, "output")) for folder in sorted(case.glob("test_data_set_*"))]
    if not sets:
        return "no data"
    for given, expected in sets:
        if case.parent.name != "node" and len(given) > len(inputs):
            inputs = [v.name for v in model.graph.input]
        with tempfile.TemporaryDirectory() as work:
            args = [binary, "run", model_of(case), "--output-dir", work, *flags]
            for number, (name, value) in enumerate(zip(inputs, given)):
                np.save(f"{work}/in{number}.npy", value)
                args += ["--input", f"{name}={work}/in{number}.npy"]
            try:
                ran = subprocess.run(args, capture_output=True, text=True, timeout=120)
            except subprocess.TimeoutExpired:
                return "it takes more than two minutes"
            if ran.returncode:
                return reason(ran.stderr)
            for name, value in zip(outputs, expected):
                if not name:
                    continue
                found = np.load(f"{work}/{file_name(name)}")
                if (found.dtype, found.shape) != (value.dtype, value.shape):
                    return f"expected {value.dtype}{value.shape}, found {found.dtype}{found.shape}"
                if not np.allclose(found, value, equal_nan=True, **tolerance):
                    return "its values differ"
    return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("binary", type=Path)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--only", default="*", help="the tests whose names match")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    parser.add_argument("--list", type=Path, help="write a line per failed test: its name and the reason")
    args = parser.parse_args()
    root = Path(onnx.__file__).parent / "backend/test/data"
    cases = [p.parent for f in FOLDERS for p in sorted((root / f).glob("*/model.onnx"))] + sorted(root.glob("light/*.onnx"))
    cases = [case for case in cases if fnmatch.fnmatch(case.stem, args.only)]
    models = [onnx.load(model_of(case), load_external_data=False) for case in cases]
    empty = {case for case, model in zip(cases, models) if has_empty_input(model)}
    cases = [case for case, model in zip(cases, models) if in_scope(model)]
    flags = ["--backend", args.backend] + (["--threads", "1"] if args.backend == "cpu" else [])
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda case: run(case, args.binary.absolute(), flags), cases))
    failed = [(case, why) for case, why in zip(cases, results) if why]
    by_reason = collections.Counter(why for _, why in failed)
    for why, count in by_reason.most_common():
        names = [case.name.removeprefix("test_") for case, found in failed if found == why]
        print(f"{count:5}  {why}  ({', '.join(names[:2])}{' ...' if count > 2 else ''})")
    if args.list:
        args.list.write_text("".join(f"{case.parent.name}/{case.stem}\t{why}\n" for case, why in failed))
    unexplained = [case.name for case, why in failed if not explained(case, why, args.backend)]
    needless = [case.name for case, why in zip(cases, results) if not why and explained(case, why, args.backend)]
    for names, what in [(unexplained, "fail without an explanation"), (needless, "pass although a failure is explained")]:
        if names:
            print(f"{len(names)} {what}: {', '.join(names)}")
    for wanted, what in [(False, ""), (True, " with an empty input")]:
        some = [why for case, why in zip(cases, results) if (case in empty) == wanted]
        print(f"onnx {onnx.__version__}: {sum(not why for why in some)} of {len(some)}{what} pass on {args.backend}")
    return 1 if unexplained or needless else 0


if __name__ == "__main__":
    sys.exit(main())
