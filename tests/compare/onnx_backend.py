"""onnx's own backend tests, each by `plimsoll run`: how many pass, and why the others do not.

    pip install onnx==1.22.*
    python tests/compare/onnx_backend.py target/release/plimsoll [--backend wgpu] [--only PATTERN] [--list FILE]

In scope: the folders node, simple, pytorch-converted, pytorch-operator and light, where all inputs and outputs are tensors of numbers of at
least 8 bits that numpy or an .npy file can hold. A test passes if all its data sets do, by onnx's own tolerance (rtol 1e-3, atol 1e-7;
where a test's model is a network, `light`, 1e-3 of both) and with the types and the shapes that onnx expects. The values are compared
here, not by the command.
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
}


def file_name(tensor):
    """The file that holds a tensor; the same rule as `plimsoll run --output-dir`."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", tensor) + ".npy"


def in_scope(model):
    values = [*model.graph.input, *model.graph.output]
    return all(v.type.WhichOneof("value") == "tensor_type" and v.type.tensor_type.elem_type in NUMBERS for v in values)


def array(path):
    tensor = onnx.load_tensor(path)
    found = numpy_helper.to_array(tensor)
    # An .npy file has no bf16: plimsoll writes these as f4.
    return found.astype(np.float32) if tensor.data_type == TensorProto.BFLOAT16 else found


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
    for pattern in (r"(no such operator: [\w.]+)", r"(input '[^']*' must be known)",
                    r"(element type \w+ is not supported)", r"(elements of type \S+ are not supported)"):
        if found := re.search(pattern, message):
            return found[1]
    return message[:150]


def run(case, binary, flags):
    """None, or why the test fails."""
    model = onnx.load(case / "model.onnx", load_external_data=False)
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [v.name for v in model.graph.input if v.name not in weights] if weights else [v.name for v in model.graph.input]
    outputs = [v.name for v in model.graph.output]
    tolerance = {"rtol": 1e-3, "atol": 1e-3 if case.parent.name == "light" else 1e-7}
    sets = sorted(case.glob("test_data_set_*"))
    if not sets:
        return "no data"
    for folder in sets:
        given, expected = data(folder, "input"), data(folder, "output")
        if case.parent.name != "node" and len(given) > len(inputs):
            inputs = [v.name for v in model.graph.input]
        with tempfile.TemporaryDirectory() as work:
            args = [binary, "run", case / "model.onnx", "--output-dir", work, *flags]
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
    cases = [p.parent for f in FOLDERS for p in sorted((root / f).glob("*/model.onnx")) if fnmatch.fnmatch(p.parent.name, args.only)]
    cases = [case for case in cases if in_scope(onnx.load(case / "model.onnx", load_external_data=False))]
    flags = ["--backend", args.backend] + (["--threads", "1"] if args.backend == "cpu" else [])
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda case: run(case, args.binary.absolute(), flags), cases))
    failed = [(case, why) for case, why in zip(cases, results) if why]
    by_reason = collections.Counter(why for _, why in failed)
    for why, count in by_reason.most_common():
        names = [case.name.removeprefix("test_") for case, found in failed if found == why]
        print(f"{count:5}  {why}  ({', '.join(names[:2])}{' ...' if count > 2 else ''})")
    if args.list:
        args.list.write_text("".join(f"{case.parent.name}/{case.name}\t{why}\n" for case, why in failed))
    print(f"onnx {onnx.__version__}: {len(cases) - len(failed)} of {len(cases)} pass on {args.backend}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
