"""The model folder: what export_models.py writes and the other scripts read.

    FOLDER/NAME.ts.onnx                  by PyTorch's TorchScript-based exporter, weights inside
    FOLDER/NAME.dy.onnx  (+ .onnx.data)  by the torch.export-based one (dynamo), weights beside it
    FOLDER/NAME.ts.b1/in/INPUT.npy       inputs at batch 1
    FOLDER/NAME.ts.b1/out/OUTPUT.npy     onnxruntime's outputs for them
    FOLDER/NAME.ts.b8/...                the same at batch 8, where the batch is a named dim
    FOLDER/INDEX.txt                     one line per model file, for people
"""

import argparse
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import onnx
import onnxruntime

ROOT = Path(__file__).resolve().parents[2]


def file_name(tensor):
    """The file that holds a tensor; the same rule as `plimsoll run --output-dir`."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", tensor) + ".npy"


@cache
def header(model):
    """The model without its external weights."""
    return onnx.load(model, load_external_data=False)


@dataclass(frozen=True)
class Case:
    """A model file with one set of inputs."""

    model: Path
    batch: int

    @property
    def folder(self):
        return self.model.with_suffix(f".b{self.batch}")

    @property
    def label(self):
        return self.folder.name

    def input_values(self):
        """Tensor name -> ValueInfo, of the inputs that are not initializers."""
        graph = header(self.model).graph
        weights = {tensor.name for tensor in graph.initializer}
        return {value.name: value for value in graph.input if value.name not in weights}

    def input_files(self):
        return {name: self.folder / "in" / file_name(name) for name in self.input_values()}

    def output_files(self):
        return {value.name: self.folder / "out" / file_name(value.name) for value in header(self.model).graph.output}

    def inputs(self):
        return {name: np.load(path) for name, path in self.input_files().items()}

    def dims(self):
        """Named dim -> size, read off the input files."""
        found = {}
        for name, value in self.input_values().items():
            shape = np.load(self.input_files()[name], mmap_mode="r").shape
            for dim, size in zip(value.type.tensor_type.shape.dim, shape, strict=True):
                if dim.HasField("dim_param") and found.setdefault(dim.dim_param, size) != size:
                    raise ValueError(f"{self.label}: dim {dim.dim_param} is both {found[dim.dim_param]} and {size}")
        return found


def cases(folder, only=(), batches=()):
    """Every case under `folder`; `only` are substrings of the file's name, `batches` the batch sizes."""
    found = []
    for path in sorted(Path(folder).glob("*.b[0-9]*")):
        model, batch = path.with_suffix(".onnx"), int(path.suffix[2:])
        wanted = not only or any(word in model.name for word in only)
        if path.is_dir() and model.is_file() and wanted and (not batches or batch in batches):
            found.append(Case(model, batch))
    found.sort(key=lambda case: (case.batch, case.model.name))
    return found


def session(model, threads):
    """onnxruntime on the CPU, with idle threads asleep so that it does not slow down whoever runs beside it."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


class Failed(Exception):
    """What plimsoll said when it did not do what was asked."""


def plimsoll(program, command, case, *flags):
    """Runs `plimsoll COMMAND MODEL FLAGS...`; returns its stdout."""
    if not program.is_file():
        sys.exit(f"no {program}: build it with `cargo build --release`, or say where it is with --plimsoll PATH")
    done = subprocess.run([program.resolve(), command, case.model, *map(str, flags)], capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"exit {done.returncode}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return done.stdout


def input_flags(case):
    return [flag for name, path in case.input_files().items() for flag in ("--input", f"{name}={path}")]


def arguments(doc, plimsoll=True):
    """The flags that all scripts share."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path, nargs="?", default=ROOT / "tests/models", help="model folder")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="only files with WORD in the name")
    parser.add_argument("--batch", action="append", default=[], type=int, help="only this batch size")
    if plimsoll:
        parser.add_argument("--plimsoll", type=Path, default=ROOT / "target/release/plimsoll", metavar="PATH")
    return parser


def cases_or_exit(args):
    found = cases(args.models, args.only, args.batch)
    if not found:
        sys.exit(f"no matching models under {args.models}; write some with tests/compare/export_models.py")
    return found


def progress(text):
    """One line on a terminal that the next replaces; nothing in a pipe."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def table(header, rows, right=()):
    """A markdown table, its columns aligned; those numbered in `right` to the right."""
    rows = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row):
        cells = (c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths)))
        return "| " + " | ".join(cells) + " |"

    rule = "|" + "|".join("-" * (w + 1) + (":" if i in right else "-") for i, w in enumerate(widths)) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])
