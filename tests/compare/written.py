#!/usr/bin/env python3
"""What onnxruntime's quantizers and optimizers write, read by plimsoll.

    python tests/compare/written.py [--plimsoll PROGRAM] [--keep FOLDER] [--only MODEL]

Small models are exported from PyTorch. Every quantizer and every level of optimization of onnxruntime writes each of them anew. plimsoll and
onnxruntime run each file with one input. A file is read if both agree, refused if plimsoll says that it does not take it, and wrong if they
differ by more than a share of the output's peak: of a file whose activations are quantized a few steps of 8 bits, since one that rounds to
another side moves those behind it. Files that onnxruntime laid out for one processor are refused by design, and counted apart. It is asked not
to round the other operand of products by weights of few bits. A table counts all; the reasons are below it.
"""

import argparse
import contextlib
import io
import itertools
import logging
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from onnxruntime import quantization
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType
from onnxruntime.quantization.matmul_nbits_quantizer import (
    DefaultWeightOnlyQuantConfig,
    HQQWeightOnlyQuantConfig,
    KQuantWeightOnlyQuantConfig,
    MatMulNBitsQuantizer,
    RTNWeightOnlyQuantConfig,
)
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
EXACT, COARSE = 2e-4, 5e-2
FOR_ONE = "it is laid out for one processor"


class Lstm(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm, self.out = nn.LSTM(16, 32, bidirectional=True, batch_first=True), nn.Linear(64, 8)

    def forward(self, x):
        return self.out(self.lstm(x)[0])


class Attention(nn.Module):
    """Heads as exporters of BERT write them."""

    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.size = heads, width // heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def split(self, x):
        return x.view(x.shape[0], x.shape[1], self.heads, self.size).permute(0, 2, 1, 3)

    def forward(self, x, mask, past=None):
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        if past is not None:
            k, v = torch.cat([past[0], k], 2), torch.cat([past[1], v], 2)
        scores = q @ k.transpose(-1, -2) / self.size**0.5 + mask
        y = (scores.softmax(-1) @ v).permute(0, 2, 1, 3).contiguous()
        return self.out(y.view(x.shape[0], x.shape[1], -1)), k, v


class Bert(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.words, self.places = nn.Embedding(100, width), nn.Embedding(32, width)
        self.kinds, self.norm = nn.Embedding(2, width), nn.LayerNorm(width)
        self.attention, self.after = Attention(width, 4), nn.LayerNorm(width)
        self.up, self.down, self.last = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, ids, kinds, mask):
        places = torch.arange(ids.shape[1]).unsqueeze(0)
        x = self.norm(self.words(ids) + self.kinds(kinds) + self.places(places))
        hidden = (1.0 - mask[:, None, None, :].float()) * -10000.0
        x = self.after(x + self.attention(x, hidden)[0])
        return self.last(x + self.down(nn.functional.gelu(self.up(x))))


class Gpt(nn.Module):
    """A layer with caches that grow by Concat."""

    def __init__(self, width=64):
        super().__init__()
        self.words, self.first, self.last = nn.Embedding(100, width), nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, 4)
        self.up, self.down, self.head = nn.Linear(width, 4 * width), nn.Linear(4 * width, width), nn.Linear(width, 100, bias=False)

    def forward(self, ids, past_key, past_value):
        x = self.words(ids)
        total = past_key.shape[2] + ids.shape[1]
        seen = torch.ones(ids.shape[1], total).tril(past_key.shape[2])
        y, key, value = self.attention(self.first(x), (1.0 - seen) * -10000.0, (past_key, past_value))
        x = x + y
        x = x + self.down(nn.functional.gelu(self.up(self.last(x)), approximate="tanh"))
        return self.head(x), key, value


def models():
    """Name, module, inputs, their names, and the names of outputs."""
    floats = torch.randn
    ids = lambda *shape: torch.randint(0, 100, shape)
    mlp = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 10), nn.Softmax(-1))
    conv = lambda i, o, **k: [nn.Conv2d(i, o, 3, padding=1, **k), nn.BatchNorm2d(o), nn.ReLU()]
    cnn = nn.Sequential(
        *conv(3, 16), nn.MaxPool2d(2), *conv(16, 16, groups=16), nn.Conv2d(16, 24, 1), nn.Hardswish(), nn.AvgPool2d(2),
        nn.ConvTranspose2d(24, 8, 2, stride=2), nn.LeakyReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10),
    )  # fmt: skip
    yield "mlp", mlp, (floats(4, 32),), ["x"], ["y"]
    yield "cnn", cnn, (floats(2, 3, 16, 16),), ["x"], ["y"]
    yield "lstm", Lstm(), (floats(2, 7, 16),), ["x"], ["y"]
    mask = torch.ones(2, 8, dtype=torch.int64)
    mask[1, 5:] = 0
    yield "bert", Bert(), (ids(2, 8), ids(2, 8) % 2, mask), ["ids", "kinds", "mask"], ["y"]
    past = floats(1, 4, 5, 16), floats(1, 4, 5, 16)
    yield "gpt", Gpt(), (ids(1, 3), *past), ["ids", "past_key", "past_value"], ["y", "key", "value"]


class Reader(CalibrationDataReader):
    def __init__(self, feed):
        random = np.random.default_rng(2)
        moved = lambda x: x + 0.1 * random.standard_normal(x.shape).astype(x.dtype) if x.dtype == np.float32 else x
        self.feeds = iter([feed] + [{name: moved(x) for name, x in feed.items()} for _ in range(3)])

    def get_next(self):
        return next(self.feeds, None)


def quantizers(path, feed):
    """Name and a function that writes a file."""
    types = {"u8": QuantType.QUInt8, "i8": QuantType.QInt8, "i4": QuantType.QInt4, "u4": QuantType.QUInt4, "i16": QuantType.QInt16, "u16": QuantType.QUInt16}
    for weights, channels, reduced in [("u8", False, False), ("i8", False, False), ("i8", True, False), ("i8", True, True), ("u8", True, False)]:
        name = f"dynamic {weights}{' channels' * channels}{' reduced' * reduced}"
        options = dict(weight_type=types[weights], per_channel=channels, reduce_range=reduced)
        yield name, lambda to, o=options: quantization.quantize_dynamic(path, to, **o)
    for form, (inputs, weights), channels in itertools.product(
        [QuantFormat.QDQ, QuantFormat.QOperator],
        [("u8", "u8"), ("u8", "i8"), ("i8", "i8"), ("u8", "i4"), ("u8", "u4"), ("u16", "i8"), ("i16", "i16"), ("u16", "u16")],
        [False, True],
    ):
        if form == QuantFormat.QOperator and {inputs, weights} & {"i4", "u4", "i16", "u16"}:
            continue
        options = dict(quant_format=form, activation_type=types[inputs], weight_type=types[weights], per_channel=channels)
        name = f"{form.name} {inputs} {weights}{' channels' * channels}"
        yield name, lambda to, o=options: quantization.quantize_static(path, to, Reader(feed), **o)
    extra = [dict(ActivationSymmetric=True, WeightSymmetric=True), dict(AddQDQPairToWeight=True), dict(QuantizeBias=False), dict(DedicatedQDQPair=True), dict(UseQDQContribOps=True)]
    for options in extra:
        write = lambda to, o=options: quantization.quantize_static(path, to, Reader(feed), quant_format=QuantFormat.QDQ, weight_type=QuantType.QInt8, activation_type=QuantType.QInt8, extra_options=o)
        yield f"QDQ {' '.join(options)}", write

    def nbits(to, **options):
        made = MatMulNBitsQuantizer(onnx.load(path), **options)
        made.process()
        made.model.save_model_to_file(to, False)

    for bits, block, symmetric, form in itertools.product((2, 4, 8), (16, 32, 128), (True, False), (QuantFormat.QOperator, QuantFormat.QDQ)):
        if form == QuantFormat.QDQ and bits != 4:
            continue
        options = dict(bits=bits, block_size=block, is_symmetric=symmetric, quant_format=form)
        yield f"nbits {form.name} {bits}:{block}{' symmetric' * symmetric}", lambda to, o=options: nbits(to, **o)
    gathers = DefaultWeightOnlyQuantConfig(block_size=32, op_types_to_quantize=("MatMul", "Gather"))
    for name, config in [("gather", gathers), ("hqq", HQQWeightOnlyQuantConfig(block_size=32)), ("rtn", RTNWeightOnlyQuantConfig()), ("k", KQuantWeightOnlyQuantConfig())]:
        yield f"nbits {name}", lambda to, c=config: nbits(to, block_size=32, algo_config=c)


LEVELS = {
    "basic": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC,
    "extended": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    "all": onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL,
}


def session_options():
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.qdq_matmulnbits_accuracy_level", "1")
    return options


def optimized(path, level):
    def write(to):
        options = session_options()
        options.graph_optimization_level, options.optimized_model_filepath = LEVELS[level], str(to)
        onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    return write


def optimizers(path):
    from onnxruntime.transformers import optimizer
    from onnxruntime.transformers.fusion_options import FusionOptions

    for level in LEVELS:
        yield f"optimized {level}", optimized(path, level)
    for half, gpu in itertools.product((False, True), (False, True)):

        def write(to, half=half, gpu=gpu):
            options = FusionOptions("bert")
            options.use_multi_head_attention = gpu
            made = optimizer.optimize_model(path, "bert", num_heads=4, hidden_size=64, optimization_options=options, use_gpu=False)
            if half:
                made.convert_float_to_float16(keep_io_types=True)
            made.save_model_to_file(str(to))

        yield f"transformers bert{' f16' * half}{' multi-head' * gpu}", write


def by_onnxruntime(path, feed):
    options = session_options()
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    asked = {value.name for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    return dict(zip(names, session.run(names, {name: x for name, x in feed.items() if name in asked})))


def by_plimsoll(program, path, feed, folder):
    arguments = []
    for name, x in feed.items():
        np.save(folder / f"{name}.in.npy", x)
        arguments += ["--input", f"{name}={folder}/{name}.in.npy"]
    done = subprocess.run(
        [program, "run", path, "--backend", "cpu", "--output-dir", str(folder), *arguments], capture_output=True, text=True
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip() and not line.strip().startswith(("INFO", "WARN"))]
        return (lines or ["no message"])[0].replace(str(path), "").strip(" :")
    return {name.name.removesuffix(".npy"): np.load(name) for name in folder.glob("*.npy") if not name.name.endswith(".in.npy")}


def outcome(program, path, feed, tolerance, folder):
    """What becomes of a file, and why; of one that is read, the largest difference as a share of the output's peak."""
    try:
        expected = by_onnxruntime(path, feed)
    except Exception as error:
        return "not run", str(error).splitlines()[0][:160]
    given = {value.name for value in onnx.load(path, load_external_data=False).graph.input}
    found = by_plimsoll(program, path, {name: x for name, x in feed.items() if name in given}, folder)
    if isinstance(found, str):
        return ("for one processor" if FOR_ONE in found else "refused"), found
    worst = 0.0
    for name, x in expected.items():
        if name not in found or found[name].shape != x.shape:
            return "wrong", f"output '{name}' has another shape"
        difference = np.abs(found[name].astype(np.float64) - x).max() / max(np.abs(x).max(), 1e-9)
        worst = max(worst, difference if np.isfinite(difference) else np.inf)
    return ("read", worst) if worst <= tolerance else ("wrong", f"{worst:.1e} off")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", default=str(ROOT / "target/release/plimsoll"))
    parser.add_argument("--keep", help="a folder for the files, which stay there")
    parser.add_argument("--only", help="the model that is written anew: mlp, cnn, lstm, bert or gpt; all unless it is given")
    arguments = parser.parse_args()
    onnxruntime.set_default_logger_severity(4)
    logging.disable(logging.ERROR)
    warnings.simplefilter("ignore")
    torch.manual_seed(3)
    counts, worst, reasons = {}, {}, []
    with contextlib.ExitStack() as stack:
        folder = Path(arguments.keep or stack.enter_context(tempfile.TemporaryDirectory())).resolve()
        folder.mkdir(exist_ok=True)
        program = Path(arguments.plimsoll).resolve()
        # Quantizers leave files where they run.
        stack.enter_context(contextlib.chdir(folder))

        def judge(model, writer, write, feed, tolerance):
            to = folder / f"{model} {writer}.onnx".replace(" ", "-").replace(":", "-")
            count = counts.setdefault(writer.split()[0], Counter())
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    write(to)
            except Exception as error:
                count["not written"] += 1
                reasons.append((model, writer, "not written", str(error).splitlines()[0][:160] if str(error) else repr(error)))
                return None
            with tempfile.TemporaryDirectory() as outputs:
                kind, why = outcome(program, str(to), feed, tolerance, Path(outputs))
            count[kind] += 1
            if kind == "read":
                worst[writer.split()[0]] = max(worst.get(writer.split()[0], (0.0, "")), (why, f"{model} {writer}"))
            if kind != "read":
                reasons.append((model, writer, kind, why))
            return to

        for name, module, inputs, names, outputs in models():
            if arguments.only not in (None, name):
                continue
            module.eval()
            feed = {key: x.numpy() for key, x in zip(names, inputs)}
            path = str(folder / f"{name}.onnx")
            with contextlib.redirect_stdout(io.StringIO()):
                axes = {"past_key": {2: "past"}, "past_value": {2: "past"}} if name == "gpt" else None
                torch.onnx.export(module, inputs, path, input_names=names, output_names=outputs, dynamo=False, opset_version=21 if name != "lstm" else 17, dynamic_axes=axes)
            judge(name, "exported", lambda to: onnx.save(onnx.load(path), to), feed, EXACT)
            for writer, write in optimizers(path):
                judge(name, writer, write, feed, 2e-2 if "f16" in writer else EXACT)
            for writer, write in quantizers(path, feed):
                tolerance = EXACT if writer.startswith("nbits") else COARSE
                made = judge(name, writer, write, feed, tolerance)
                for level in ("extended", "all") if made else ():
                    judge(name, f"then-{level} {writer}", optimized(str(made), level), feed, tolerance)
    kinds = ["read", "for one processor", "refused", "wrong", "not run", "not written"]
    print("| files | " + " | ".join(kinds) + " | farthest off |\n|---|" + "--:|" * len(kinds) + "---|")
    for writer, count in counts.items():
        off, name = worst.get(writer, (0.0, "none"))
        print(f"| {writer} | " + " | ".join(str(count[kind]) for kind in kinds) + f" | {off:.1e}: {name} |")
    for model, writer, kind, why in reasons:
        if kind != "for one processor":
            print(f"{model} {writer}: {kind}: {why}")
    sys.exit(1 if any(count["refused"] + count["wrong"] for count in counts.values()) else 0)


if __name__ == "__main__":
    main()
