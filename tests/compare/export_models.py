#!/usr/bin/env python3
"""Exports models the way people do, with seeded random weights, by both of PyTorch's exporters.

    python tests/compare/export_models.py [--output-dir tests/models] [--small] [--dtype bf16|f16] [--only WORD]...

For each model: NAME.ts.onnx (TorchScript-based exporter), NAME.dy.onnx (torch.export-based), inputs, and what
onnxruntime makes of them at batch 1 and 8; zoo.py has the layout. Every file is compared with PyTorch before it
counts. The batch is the named dim `batch`, and some models name `sequence` or `past` too.

With --dtype bf16 or f16 the weights and all arithmetic are of that type. NumPy has no bfloat16, so the graph takes f32
inputs and casts them first; its outputs stay as they are, and are f32 in the files. The file is NAME-bf16.dy.onnx; what
it is held against is PyTorch, since onnxruntime has no bfloat16 on the CPU.

No weights are downloaded. So that random ones exercise what trained ones would, every parameter that starts constant
(biases, scales, zeroed heads) is made random, and batch normalisation gets the statistics of a random batch.
"""

import argparse
import contextlib
import io
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
import torchvision.models as vision
import transformers
from torch import nn

import zoo

SEED = 7
BATCHES = (1, 8)
EXPORTERS = ("ts", "dy")


# ---- models that no package has ----


class UNet(nn.Module):
    """Ronneberger et al., 2015, with padding, batch normalisation and transposed convolutions."""

    def __init__(self, width, depth=4, classes=2):
        super().__init__()
        widths = [width << level for level in range(depth + 1)]
        self.down = nn.ModuleList(self.block(i, o) for i, o in zip([3, *widths], widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in reversed(widths[:-1]))
        self.merge = nn.ModuleList(self.block(2 * w, w) for w in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    @staticmethod
    def block(inputs, outputs):
        layers = []
        for channels in (inputs, outputs):
            layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU()]
        return nn.Sequential(*layers)

    def forward(self, image):
        x, skips = self.down[0](image), []
        for block in self.down[1:]:
            skips.append(x)
            x = block(nn.functional.max_pool2d(x, 2))
        for up, merge in zip(self.up, self.merge):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


class Tokens(nn.Module):
    """A transformers model with plain tensors in and out: its first `outputs` ones."""

    def __init__(self, model, outputs=1):
        super().__init__()
        self.model, self.outputs = model, outputs

    def forward(self, input_ids, attention_mask):
        options = {} if self.outputs > 1 else {"use_cache": False}
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, return_dict=False, **options)
        return outputs[: self.outputs]


HALVES = {"bf16": torch.bfloat16, "f16": torch.float16}


class Half(nn.Module):
    """A model in a type of two bytes that takes f32 where it takes floats."""

    def __init__(self, model, dtype):
        super().__init__()
        self.model = model.to(dtype)
        self.dtype = dtype

    def forward(self, *inputs):
        return self.model(*(tensor.to(self.dtype) if tensor.is_floating_point() else tensor for tensor in inputs))


class Decode(nn.Module):
    """One step of a decoder: the next token beside keys and values [batch, head, past, width] of those before it."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, *past):
        past = transformers.DynamicCache(list(zip(past[0::2], past[1::2])))
        outputs = self.model(input_ids=input_ids, past_key_values=past, use_cache=True, return_dict=True)
        present = [(layer.keys, layer.values) for layer in outputs.past_key_values.layers]
        return (outputs.logits, *(tensor for pair in present for tensor in pair))


def bert(hidden, layers, vocab):
    config = transformers.BertConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        intermediate_size=4 * hidden,
        initializer_range=hidden**-0.5,
        attn_implementation="eager",
    )
    return Tokens(transformers.BertModel(config), outputs=2)


def gpt2(hidden, layers, vocab):
    config = transformers.GPT2Config(
        vocab_size=vocab,
        n_positions=1024,
        n_embd=hidden,
        n_layer=layers,
        n_head=hidden // 64,
        initializer_range=hidden**-0.5,
        attn_implementation="eager",
    )
    return Tokens(transformers.GPT2LMHeadModel(config))


def llama(hidden, layers, vocab):
    config = transformers.LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        intermediate_size=hidden * 11 // 4,
        initializer_range=hidden**-0.5,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config)


# ---- the table ----


@dataclass
class Input:
    """Dims are sizes or names. `kind`: normal, ids (below `vocab`) or mask (ones, then zeros)."""

    name: str
    dims: tuple
    kind: str = "normal"
    vocab: int = 0

    def shape(self, sizes):
        return [sizes.get(dim, dim) for dim in self.dims]

    def draw(self, sizes, generator):
        shape = self.shape(sizes)
        if self.kind == "ids":
            return torch.randint(self.vocab, shape, generator=generator)
        if self.kind == "mask":
            lengths = torch.randint(shape[1] // 2, shape[1] + 1, (shape[0], 1), generator=generator)
            return (torch.arange(shape[1]) < lengths).to(torch.int64)
        return torch.randn(shape, generator=generator)


@dataclass
class Model:
    name: str
    build: Callable[[], nn.Module]
    inputs: list
    outputs: list
    # Sizes of the named dims beside `batch`.
    sizes: dict = field(default_factory=dict)
    small: bool = False


def image(name, build, size=224, output="logits", small=False):
    return Model(name, build, [Input("image", ("batch", 3, size, size))], [output], small=small)


def text(name, build, vocab, length, outputs=("logits",), small=False):
    """Small ones take any length."""
    dims = ("batch", "sequence" if small else length)
    inputs = [Input("input_ids", dims, "ids", vocab), Input("attention_mask", dims, "mask")]
    return Model(name, build, inputs, list(outputs), {"sequence": length} if small else {}, small)


def decode(name, hidden, layers, vocab, past, small=False):
    pairs = [f"{part}.{layer}" for layer in range(layers) for part in ("key", "value")]
    cache = ("batch", hidden // 64, "past", 32)
    inputs = [Input("input_ids", ("batch", 1), "ids", vocab), *(Input(f"past.{pair}", cache) for pair in pairs)]
    outputs = ["logits", *(f"present.{pair}" for pair in pairs)]
    return Model(name, lambda: Decode(llama(hidden, layers, vocab)), inputs, outputs, {"past": past}, small)


def vit(hidden, layers, size=224):
    return vision.VisionTransformer(size, 16, layers, hidden // 64, hidden, 4 * hidden)


def convnext_small():
    setting = vision.convnext.CNBlockConfig
    return vision.ConvNeXt([setting(32, 64, 1), setting(64, 128, 2), setting(128, None, 1)], num_classes=100)


BERT_OUTPUTS = ("last_hidden_state", "pooler_output")

MODELS = [
    image("resnet18-64px", lambda: vision.resnet18(num_classes=100), 64, small=True),
    image("mobilenetv2-64px", lambda: vision.mobilenet_v2(num_classes=100), 64, small=True),
    image("mobilenetv3-64px", lambda: vision.mobilenet_v3_small(num_classes=100), 64, small=True),
    text("bert-small", lambda: bert(256, 4, 1000), 1000, 32, BERT_OUTPUTS, small=True),
    text("gpt2-small", lambda: gpt2(128, 4, 500), 500, 32, small=True),
    text("llama-small", lambda: Tokens(llama(128, 4, 500)), 500, 32, small=True),
    decode("llama-small-decode", 128, 4, 500, past=31, small=True),
    image("vit-64px", lambda: vit(192, 4, 64), 64, small=True),
    image("convnext-64px", convnext_small, 64, small=True),
    image("unet-64px", lambda: UNet(16, depth=3), 64, "mask", small=True),
    image("resnet18", vision.resnet18),
    image("mobilenetv2", vision.mobilenet_v2),
    image("resnet50", vision.resnet50),
    image("mobilenetv3-small", vision.mobilenet_v3_small),
    image("mobilenetv3-large", vision.mobilenet_v3_large),
    text("bert-base", lambda: bert(768, 12, 30522), 30522, 128, BERT_OUTPUTS),
    image("efficientnet-b0", vision.efficientnet_b0),
    image("vit-small", lambda: vit(384, 12)),
    text("gpt2", lambda: gpt2(768, 12, 50257), 50257, 64),
    text("llama", lambda: Tokens(llama(512, 8, 8000)), 8000, 64),
    decode("llama-decode", 512, 8, 8000, past=127),
    image("unet", lambda: UNet(32), 256, "mask"),
    image("convnext-tiny", vision.convnext_tiny),
    image("vit-b16", vision.vit_b_16),
]


# ---- weights, export, reference ----


def randomise(model, inputs):
    generator = torch.Generator().manual_seed(SEED)
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() > 1 and bool((parameter == parameter.flatten()[0]).all()):
                spread = torch.rand(parameter.shape, generator=generator) + 0.5
                parameter.mul_(spread).add_(0.05 * torch.randn(parameter.shape, generator=generator))
        model.eval()
        for norm in norms:
            norm.train()
            norm.momentum = 1.0
        if norms:
            model(*inputs)
        for norm in norms:
            norm.eval()
            norm.momentum = 0.1


def export(row, model, inputs, exporter, path):
    names = [value.name for value in row.inputs]
    axes = {value.name: {i: d for i, d in enumerate(value.dims) if isinstance(d, str)} for value in row.inputs}
    common = dict(input_names=names, output_names=row.outputs)
    if exporter == "ts":
        axes |= {name: {0: "batch"} for name in row.outputs}
        torch.onnx.export(model, inputs, path, dynamo=False, opset_version=17, dynamic_axes=axes, **common)
        return
    shapes = [{i: torch.export.Dim.DYNAMIC for i in axes[name]} for name in names]
    if isinstance(model, Half):
        # They arrive as *inputs.
        shapes = [tuple(shapes)]
    elif isinstance(model, Decode):
        # Its cache arrives as *past.
        shapes = [shapes[0], tuple(shapes[1:])]
    # What its optimizer folds a batch normalisation of halves into are weights of f32, which Conv does not take.
    normalised = any(isinstance(part, nn.BatchNorm2d) for part in model.modules())
    common |= dict(dynamo=True, verbose=False, optimize=not (isinstance(model, Half) and normalised))
    program = torch.onnx.export(model, inputs, dynamic_shapes=tuple(shapes), **common)
    # The exporter numbers its dims; give them the names that were asked for.
    program.rename_axes({str(v.shape[i]): name for v in program.model.graph.inputs for i, name in axes[v.name].items()})
    program.save(path, external_data=True)


def peak_error(found, expected):
    """Largest difference, relative to the largest expected magnitude."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def write_case(row, model, case):
    """Inputs and onnxruntime's outputs; returns its distance from PyTorch."""
    sizes = {"batch": case.batch, **row.sizes}
    generator = torch.Generator().manual_seed(SEED + case.batch)
    inputs = [value.draw(sizes, generator) for value in row.inputs]
    with torch.no_grad():
        expected = model(*inputs)
    expected = expected if isinstance(expected, (tuple, list)) else [expected]

    for part in ("in", "out"):
        (case.folder / part).mkdir(parents=True, exist_ok=True)
    feed = {value.name: tensor.numpy() for value, tensor in zip(row.inputs, inputs)}
    files = case.input_files()
    if set(files) != set(feed):
        raise RuntimeError(f"inputs {sorted(files)}, not {sorted(feed)}")
    for name, path in files.items():
        np.save(path, feed[name])
    if isinstance(model, Half):
        found = [(tensor if tensor.dtype == torch.float16 else tensor.float()).numpy() for tensor in expected]
    else:
        found = zoo.session(case.model, torch.get_num_threads()).run(None, feed)
    for path, tensor in zip(case.output_files().values(), found, strict=True):
        np.save(path, tensor)
    return max(peak_error(f, e.float().numpy()) for f, e in zip(found, expected, strict=True))


def prepare(row, dtype="f32"):
    """The model with its weights, the same at every call, and inputs to export it with."""
    torch.manual_seed(SEED)
    model = row.build()
    # Batch 3 and odd lengths: sizes that no model uses elsewhere, and not 1, which exporters take for a constant.
    sizes = {"batch": 3, **{name: size + 2 for name, size in row.sizes.items()}}
    generator = torch.Generator().manual_seed(SEED)
    inputs = tuple(value.draw(sizes, generator) for value in row.inputs)
    randomise(model, inputs)
    return (Half(model, HALVES[dtype]) if dtype in HALVES else model), inputs


def export_one(row, folder, exporter, dtype="f32", batches=BATCHES):
    model, inputs = prepare(row, dtype)
    path = folder / f"{row.name}{'' if dtype == 'f32' else '-' + dtype}.{exporter}.onnx"
    # Both exporters chat, and one prints the whole graph before it raises.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        export(row, model, inputs, exporter, path)
    zoo.header.cache_clear()
    error = max(write_case(row, model, zoo.Case(path, batch)) for batch in batches)
    if not error < 1e-3:
        raise RuntimeError(f"onnxruntime and PyTorch differ by {error:.1e} of the peak")
    return describe(path, error)


def describe(path, error):
    model = zoo.header(path)
    weights = path.stat().st_size + sum(f.stat().st_size for f in path.parent.glob(path.name + ".data"))
    opset = max(entry.version for entry in model.opset_import if entry.domain == "")
    shapes = {
        name: ",".join(dim.dim_param or str(dim.dim_value) for dim in value.type.tensor_type.shape.dim)
        for name, value in zoo.Case(path, 1).input_values().items()
    }
    values = " ".join(f"{name}[{shape}]" for name, shape in shapes.items())
    nodes = len(model.graph.node)
    return f"{path.name:28} {weights / 1e6:6.1f} MB  opset {opset}  {nodes:5} nodes  error {error:.0e}  {values}"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output-dir", type=Path, default=zoo.ROOT / "tests/models")
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="only models with WORD in the name")
    parser.add_argument("--small", action="store_true", help="only the small ones: a minute or two")
    parser.add_argument("--exporter", choices=EXPORTERS, help="only this exporter")
    parser.add_argument("--dtype", choices=("f32", *HALVES), default="f32", help="halves: by torch.export alone")
    args = parser.parse_args()
    if args.dtype in HALVES:
        args.exporter = "dy"
    logging.disable(logging.WARNING)

    rows = [m for m in MODELS if (m.small or not args.small) and (not args.only or any(w in m.name for w in args.only))]
    if not rows:
        sys.exit("no such model; there are: " + " ".join(m.name for m in MODELS))
    args.output_dir.mkdir(parents=True, exist_ok=True)
    index = args.output_dir / "INDEX.txt"
    known = index.read_text().splitlines() if index.exists() else []
    lines = {line.split()[0]: line for line in known}

    failed = []
    for number, row in enumerate(rows, 1):
        for exporter in [args.exporter] if args.exporter else EXPORTERS:
            start = time.monotonic()
            try:
                line = export_one(row, args.output_dir, exporter, args.dtype)
                print(f"[{number}/{len(rows)}] {line}  {time.monotonic() - start:.0f} s", flush=True)
                lines[line.split()[0]] = line
                index.write_text("\n".join(lines.values()) + "\n")
            except Exception as error:  # One model that an exporter refuses must not cost the others.
                failed.append(f"{row.name}.{exporter}")
                print(f"[{number}/{len(rows)}] {failed[-1]} failed: {type(error).__name__}: {error}", flush=True)
    if failed:
        sys.exit("failed: " + " ".join(failed))


if __name__ == "__main__":
    main()
