#!/usr/bin/env python3
"""Compares the training steps of `plimsoll train` with PyTorch's, run in f64 on the same data in the same order.

    python tests/compare/trajectories.py [--only GLOB]... [--backend cpu] [--precision] [--plimsoll PATH]
    python tests/compare/trajectories.py --export-only FOLDER
    python tests/compare/trajectories.py --from FOLDER [--only GLOB]...

A case is a small model, exported for inference by one of PyTorch's exporters, with data and the flags of `plimsoll train`. Its folder:

    model.onnx       what is trained
    x.npy y.npy      the data, in order
    flags.txt        the words behind `plimsoll`, quoted for a shell; run them in the folder
    reference.json   per step PyTorch's loss, rate and norm of the gradients, before clipping; what is expected of an f32 run
    weights.npz      the weights behind the last step, by the names in model.onnx, in f64

A case passes if every loss is within 1e-4 of PyTorch's, relative, and if the difference of the final weights is at most 2e-3 of their
movement: over the whole model, in the worst tensor, and in the running statistics. Frozen tensors must not change by a bit. The columns
"f32" have what PyTorch itself gets in f32. --precision adds the cases in bf16 and f16, whose limits are wider; `limits` has them all.

Where an element is on the edge of a ReLU or is one of two largest in a pool, rounding decides on which side, and the steps behind it go
another way. So PyTorch's f64 run is repeated with first weights that are off by a few roundings of f32 (`nudge`): a case whose limits this
widens says so.

The conventions, each in one place: the loss of an update is the mean over its batch, before the update (`loss_sum`, `counted`); the rate
(`rate`); clipping (`clip`); the order of the rows (`batches`); what decays (`optimizer`); the moving average of the weights, which begins
with the first ones and is what is written (`run_reference`). With accumulation, batch normalisation sees each piece by itself.

Not compared: an element whose gradient is zero but for rounding, such as the bias of an attention's keys. Adam makes steps of the noise.

Before a file counts, onnxruntime must find PyTorch's outputs with the initial weights and again with the final ones put into the file,
and the first loss where the model has no batch normalisation. Exit code 1 if a case fails.
"""

import argparse
import contextlib
import fnmatch
import io
import json
import logging
import math
import shlex
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

import zoo

SEED = 19
NUDGES = 8
ARRAYS = ("x.npy", "y.npy")


# ---- cases ----


@dataclass
class Case:
    """`build` and `data` come from trajectory_models; the fields below them are the flags of `plimsoll train`."""

    name: str
    build: object
    data: object
    exporter: str = "ts"
    rows: int = 128
    loss: str = "cross_entropy"
    optimizer: str = "sgd"
    lr: float = 0.05
    batch: int = 32
    steps: int = 30
    momentum: float = 0.0
    nesterov: bool = False
    betas: tuple = ()
    eps: float = 0.0
    decay: float = 0.0
    decay_dims: int = 0
    schedule: str = ""
    warmup: int = 0
    accumulate: int = 1
    clip: float = 0.0
    smoothing: float = 0.0
    ema: float = 0.0
    freeze: tuple = ()
    precision: str = ""
    # How the file is made: batch normalisations stay nodes; constants are folded; a newer opset. `vary`: no parameter starts constant,
    # since torch.export's optimizer writes equal tensors once, for life.
    norms: bool = False
    fold: bool = True
    opset: int = 0
    vary: bool = False
    # A Dropout node of ratio 0 before the last node; exporters leave such nodes out of an inference file.
    dropout: bool = False

    def flags(self):
        """Only what differs from the defaults, after what every case has."""
        words = [f"--loss {self.loss} --optimizer {self.optimizer} --lr {self.lr:g} --batch {self.batch} --steps {self.steps}"]
        words += [f"--momentum {self.momentum:g}"] * bool(self.momentum) + ["--nesterov"] * self.nesterov
        words += [f"--beta1 {self.betas[0]:g} --beta2 {self.betas[1]:g}"] if self.betas else []
        words += [f"--eps {self.eps:g}"] * bool(self.eps) + [f"--weight-decay {self.decay:g}"] * bool(self.decay)
        words += [f"--decay-dims {self.decay_dims}"] * bool(self.decay_dims)
        words += [f"--schedule {self.schedule}"] * bool(self.schedule) + [f"--warmup {self.warmup}"] * bool(self.warmup)
        words += [f"--accumulate {self.accumulate}"] * (self.accumulate > 1) + [f"--clip-norm {self.clip:g}"] * bool(self.clip)
        words += [f"--label-smoothing {self.smoothing:g}"] * bool(self.smoothing) + [f"--ema {self.ema:g}"] * bool(self.ema)
        words += [f"--precision {self.precision}"] * bool(self.precision)
        freeze = [word for glob in self.freeze for word in ("--freeze", glob)]
        return [*" ".join(words).split(), *freeze, "--no-shuffle"]


def table():
    """All cases. Names begin with the model's."""
    import trajectory_models as m
    from torch import nn

    digits = m.classes((784,), 10, noise=6.0)
    small = m.classes((1, 16, 16), 10, noise=4.0)
    images = m.classes((3, 16, 16), 10, noise=4.0)
    series = m.classes((12, 8), 5, noise=3.0)

    def mlp(name, build=m.mlp, data=digits, **rest):
        return Case(f"mlp-{name}", build, data, **{"rows": 144, "lr": 0.01, **rest})

    def net(name, build, data=images, **rest):
        """With batch normalisation, small batches."""
        return Case(name, build, data, **{"norms": True, "batch": 16, "rows": 80, "momentum": 0.9, "lr": 0.005, **rest})

    def text(name, build, data, **rest):
        return Case(name, build, data, **{"optimizer": "adamw", "lr": 2e-3, "decay": 0.01, "batch": 8, "rows": 64, **rest})

    slow, adam = {"optimizer": "adam", "lr": 3e-4}, {"optimizer": "adam", "lr": 3e-3}
    adamw = {"optimizer": "adamw", "lr": 2e-3, "decay": 0.05}
    return [
        mlp("sgd"),
        mlp("sgd-dy", exporter="dy"),
        mlp("momentum", momentum=0.9, lr=0.003, decay=1e-2),
        mlp("nesterov", momentum=0.9, nesterov=True, lr=0.003, exporter="dy", build=lambda: m.mlp(nn.GELU)),
        mlp("adam", **slow),
        mlp("adam-decay", **slow, decay=1e-2, betas=(0.8, 0.95), eps=1e-6, build=m.deep_mlp),
        mlp("adamw-cosine", **adamw, schedule="cosine", warmup=5, exporter="dy", build=m.deep_mlp),
        mlp("adamw-dims", **adamw, decay_dims=2, build=m.deep_mlp),
        mlp("linear-schedule", momentum=0.9, lr=0.003, schedule="linear", warmup=3),
        mlp("accumulate", accumulate=4),
        mlp("clip", clip=0.5, momentum=0.9),
        mlp("clip-accumulate", **slow, clip=0.5, accumulate=2),
        mlp("ema", **slow, ema=0.9),
        mlp("freeze", **slow, freeze=("0.*",)),
        mlp("dropout", dropout=True),
        mlp("smoothing", smoothing=0.1, momentum=0.9, lr=0.003),
        mlp("ignore", data=m.ignoring(digits, 0.3)),
        mlp("ignore-accumulate", data=m.ignoring(digits, 0.3), smoothing=0.1, accumulate=4),
        Case("linear-mse", m.linear, m.regression(10, 1), loss="mse", accumulate=4, lr=0.1, steps=50),
        mlp("l1", build=lambda: m.mlp(nn.Tanh, 20, 32, 3), data=m.regression(20, 3), loss="l1", momentum=0.9),
        mlp("huber", build=lambda: m.mlp(nn.Tanh, 20, 32, 3), data=m.regression(20, 3), loss="huber", **adam),
        mlp("bce", build=lambda: m.mlp(nn.SiLU, 20, 32, 4), data=m.tags(20, 4), loss="bce_logits", **adam, exporter="dy"),
        Case("cnn-sgd", m.cnn, small, momentum=0.9, lr=0.02),
        Case("cnn-adam-dy", m.cnn, small, exporter="dy", **slow),
        net("cnn-norm", m.cnn_norm, small),
        net("cnn-norm-accumulate", m.cnn_norm, small, accumulate=2),
        net("resnet", m.resnet, decay=1e-2),
        net("resnet-dy", m.resnet, exporter="dy", **{**adamw, "momentum": 0.0, "lr": 1e-3}, schedule="cosine", warmup=5),
        net("resnet-folded", lambda: m.fold_norms(m.resnet().eval()), norms=False),
        net("mobilenet", m.mobilenet, nesterov=True, lr=0.01, vary=True),
        net("mobilenet-dy", m.mobilenet, exporter="dy", vary=True),
        Case("squeeze", m.Squeeze, m.masks((3, 16, 16), 2), loss="bce_logits", batch=16, vary=True, **adam),
        Case("convnext", m.ConvNext, images, **adamw),
        Case("autoencoder", m.autoencoder, m.itself((1, 16, 16)), loss="mse", batch=16, **adam),
        Case("vit", m.ViT, images, batch=16, **adamw),
        Case("vit-dy", m.ViT, images, batch=16, exporter="dy", vary=True, **adamw, schedule="cosine", warmup=5, clip=1.0),
        # What a fresh model becomes by torch.export: its norms share their parameters.
        Case("vit-dy-shared", lambda: m.share_norms(m.ViT()), images, batch=16, exporter="dy", **adamw),
        Case("vit-opset23", m.ViT, images, batch=16, exporter="dy", opset=23, vary=True, **adamw),
        text("gpt2", lambda: m.GPT(fused=False), m.next_token(), fold=False, clip=1.0, schedule="cosine", warmup=5),
        text("gpt2-dy", m.GPT, m.next_token(), exporter="dy", decay_dims=2, accumulate=2, fold=False),
        text("gpt2-untied", lambda: m.GPT(tied=False), m.next_token()),
        text("gpt2-mask", lambda: m.GPT(tied=False, fused=False, mask="float"), m.next_token(), freeze=("*mask",)),
        text("gpt2-opset23", lambda: m.GPT(tied=False), m.next_token(), exporter="dy", opset=23, vary=True),
        text("bert", m.BERT, m.masked_tokens(), smoothing=0.1),
        text("bert-dy", lambda: m.BERT(native=True), m.masked_tokens(), exporter="dy", schedule="linear", warmup=5, vary=True),
        text("llama", m.Llama, m.next_token(), exporter="dy", ema=0.95, vary=True, freeze=("cos", "sin")),
        Case("lstm", lambda: m.Recurrent(nn.LSTM), series, **adam),
        Case("lstm-both", lambda: m.Recurrent(nn.LSTM, 2, both=True), series, momentum=0.9, clip=0.1),
        Case("lstm-dy", lambda: m.Recurrent(nn.LSTM), series, exporter="dy", **adam),
        Case("gru", lambda: m.Recurrent(nn.GRU, vocabulary=30), m.sentences(), **adam),
        Case("rnn", lambda: m.Recurrent(nn.RNN), series, momentum=0.9, lr=0.003),
        net("unet", m.UNet, m.pixels((3, 16, 16), 3), **{**slow, "lr": 1e-3, "momentum": 0.0}, batch=8, rows=40),
        net("unet-bce-dy", lambda: m.UNet(2), m.masks((3, 16, 16), 2), loss="bce_logits", batch=8, rows=40, exporter="dy", lr=0.05),
        mlp("bf16", **slow, precision="bf16"),
        mlp("f16", momentum=0.9, lr=0.003, precision="f16"),
        Case("cnn-f16", m.cnn, small, precision="f16", momentum=0.9, lr=0.005),
        net("resnet-bf16", m.resnet, precision="bf16", lr=0.002),
        text("gpt2-bf16", lambda: m.GPT(fused=False), m.next_token(), fold=False, precision="bf16"),
    ]


LEAST = {"f32": (1e-4, 2e-3, 2e-3, 2e-3), "f16": (5e-3, 2e-2, 5e-2, 5e-3), "bf16": (2e-2, 1e-1, 2e-1, 3e-2)}


def limits(precision, own):
    """Of the losses; of the final weights, as a part of their movement, over all and in the worst tensor; of the statistics.

    Three times `own`, or these. `own` is what PyTorch's autocast is off by, or in f32, its f64 run with first weights after `nudge`."""
    return tuple(max(limit, 3 * error) for limit, error in zip(LEAST[precision], own, strict=True))


# ---- the step in PyTorch ----


def rate(case, step):
    """The rate of update `step`, counted from 0: linear up to the full rate over the warmup, then by the schedule to 0 at `steps`."""
    if step < case.warmup:
        return case.lr * (step + 1) / case.warmup
    part = (step - case.warmup) / max(1, case.steps - case.warmup)
    return case.lr * {"": 1.0, "constant": 1.0, "cosine": 0.5 * (1 + math.cos(math.pi * part)), "linear": 1 - part}[case.schedule]


def batches(case):
    """The rows of each update: in order, the last partial batch of an epoch dropped."""
    per_epoch = case.rows // case.batch
    for step in range(case.steps):
        first = step % per_epoch * case.batch
        yield slice(first, first + case.batch)


def counted(case, labels):
    """What the sum of an update's losses is divided by: the labels that are not -100, or the elements."""
    return int((labels != -100).sum()) if case.loss == "cross_entropy" else labels.numel()


def loss_sum(case, output, labels):
    """The classes are axis 1, as in PyTorch, unless the labels have the output's shape without its last axis."""
    from torch.nn import functional as F

    if case.loss == "cross_entropy":
        if output.ndim > 2 and output.shape[:-1] == labels.shape:
            output = output.movedim(-1, 1)
        return F.cross_entropy(output, labels, reduction="sum", ignore_index=-100, label_smoothing=case.smoothing)
    assert output.shape == labels.shape, f"output {tuple(output.shape)}, labels {tuple(labels.shape)}"
    functions = {"mse": F.mse_loss, "l1": F.l1_loss, "huber": F.huber_loss, "bce_logits": F.binary_cross_entropy_with_logits}
    return functions[case.loss](output, labels, reduction="sum")


def optimizer(case, parameters):
    import torch

    decays = [p for p in parameters if p.ndim >= case.decay_dims]
    rest = [p for p in parameters if p.ndim < case.decay_dims]
    groups = [{"params": decays, "weight_decay": case.decay}, {"params": rest, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if case.optimizer == "sgd":
        return torch.optim.SGD(groups, lr=case.lr, momentum=case.momentum, nesterov=case.nesterov)
    kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[case.optimizer]
    return kind(groups, lr=case.lr, betas=case.betas or (0.9, 0.999), eps=case.eps or 1e-8)


def clip(gradients, norm, limit):
    for gradient in gradients:
        gradient.mul_(min(1.0, limit / (norm + 1e-6)))


def prepare(case):
    """The model with its weights, the same at every call."""
    import torch

    torch.manual_seed(SEED)
    model = case.build().eval()
    if case.vary:
        generator = torch.Generator().manual_seed(SEED)
        with torch.no_grad():
            for parameter in model.parameters():
                if bool((parameter == parameter.flatten()[0]).all()):
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def freezes(case, name):
    return any(fnmatch.fnmatchcase(name, glob) for glob in case.freeze)


def nudge(model, seed):
    """The model with weights that are off by a few roundings of f32; `seed` 0 leaves them."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters() if seed else ():
            parameter.mul_(1 + 3e-7 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))
    return model


def run_reference(case, x, y, dtype="f64", seed=0):
    """Losses, rates, norms, the final state, and per parameter the largest gradient of each element.

    `dtype` may also be bf16 or f16: f32 weights under autocast."""
    import torch

    wide = torch.float64 if dtype == "f64" else torch.float32
    narrow = {"bf16": torch.bfloat16, "f16": torch.float16}.get(dtype)
    model = nudge(prepare(case).to(wide), seed).train()
    cast = lambda array: torch.from_numpy(array).to(wide) if array.dtype == np.float32 else torch.from_numpy(array)
    x, y = cast(x), cast(y)
    parameters = {name: p for name, p in model.named_parameters() if not freezes(case, name)}
    average = {name: p.detach().clone() for name, p in parameters.items()}
    largest = {name: torch.zeros_like(p) for name, p in parameters.items()}
    moved = optimizer(case, list(parameters.values()))
    losses, rates, norms = [], [], []
    for step, rows in enumerate(batches(case)):
        moved.zero_grad()
        part = case.batch // case.accumulate
        pieces = [slice(first, first + part) for first in range(rows.start, rows.stop, part)]
        loss = 0.0
        for piece in pieces:
            with torch.autocast("cpu", narrow) if narrow else contextlib.nullcontext():
                output = model(x[piece])
            total = loss_sum(case, output.to(wide), y[piece]) / counted(case, y[rows])
            # Any fixed scale does here: too large a one for these small models would show as a loss that is not finite.
            scale = 1024.0 if dtype == "f16" else 1.0
            (total * scale).backward()
            loss += total.item()
        gradients = [p.grad.div_(scale) for p in parameters.values()]
        norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        for name, parameter in parameters.items():
            largest[name] = torch.maximum(largest[name], parameter.grad.abs())
        if case.clip:
            clip(gradients, norm, case.clip)
        for group in moved.param_groups:
            group["lr"] = rate(case, step)
        moved.step()
        with torch.no_grad():
            for name, parameter in parameters.items():
                average[name].mul_(case.ema).add_(parameter, alpha=1 - case.ema)
        losses.append(loss)
        rates.append(rate(case, step))
        norms.append(norm)
    state = {name: value.detach().double().numpy() for name, value in model.state_dict(keep_vars=True).items()}
    averages = {name: value.double().numpy() for name, value in average.items()} if case.ema else {}
    return losses, rates, norms, state, averages, {name: g.double().numpy() for name, g in largest.items()}


# ---- the file ----


def export(case, model, x, path):
    """By either exporter, in inference form, weights inside, the batch a named dim."""
    import torch

    example = (torch.from_numpy(x[:3]),)
    common = dict(input_names=["x"], output_names=["output"])
    # Both exporters print notes.
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        if case.exporter == "ts":
            common |= dict(dynamic_axes={"x": {0: "batch"}, "output": {0: "batch"}}, opset_version=case.opset or 17)
            common |= dict(do_constant_folding=case.fold and not case.norms)
            # EVAL folds batch normalisations into convolutions; PRESERVE leaves both as they are.
            mode = torch.onnx.TrainingMode.PRESERVE if case.norms else torch.onnx.TrainingMode.EVAL
            torch.onnx.export(model, example, path, dynamo=False, training=mode, **common)
        else:
            shapes = ({0: torch.export.Dim.DYNAMIC},)
            options = {"opset_version": case.opset} if case.opset else {}
            options |= dict(optimize=case.fold and not case.norms, dynamic_shapes=shapes)
            program = torch.onnx.export(model, example, dynamo=True, verbose=False, **options, **common)
            program.rename_axes({str(program.model.graph.inputs[0].shape[0]): "batch"})
            program.save(path, external_data=False)
    if case.dropout:
        made = onnx.load(path)
        last = made.graph.node[-1]
        made.graph.initializer.append(numpy_helper.from_array(np.float32(0), "ratio"))
        made.graph.node.insert(len(made.graph.node) - 1, onnx.helper.make_node("Dropout", [last.input[0], "ratio"], ["dropped"]))
        made.graph.node[-1].input[0] = "dropped"
        onnx.save(made, path)


def initializers(path):
    """Name -> array, with the names that Identity nodes give to initializers."""
    graph = onnx.load(path).graph
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type == "Identity" and node.input[0] in found:
            found.setdefault(node.output[0], found[node.input[0]])
    return found


RNN_GATES = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2), "rnn": (0,)}


def regate(array, count):
    """PyTorch's order of gates -> ONNX's."""
    order = RNN_GATES[{4: "lstm", 3: "gru", 1: "rnn"}[count]]
    return np.concatenate([np.split(array, count)[i] for i in order])


def candidates(model):
    """Every form in which an exporter may write parameters: what it is called, the names read, and how it follows from them."""
    from torch import nn

    for name in model.state_dict():
        yield name, (name,), lambda a: a
        yield name, (name,), lambda a: a.T
        yield name, (name,), lambda a: a.reshape(*a.shape, *[1] * 2)
    for prefix, module in model.named_modules():
        if isinstance(module, nn.RNNBase):
            gates = {"LSTM": 4, "GRU": 3}.get(module.mode, 1)
            for layer in range(module.num_layers):
                ways = [f"{prefix}.{{}}_l{layer}{way}" for way in ["", "_reverse"][: 1 + module.bidirectional]]
                for part in ("weight_ih", "weight_hh"):
                    names = tuple(way.format(part) for way in ways)
                    yield names[0], names, lambda *a, n=gates: np.stack([regate(w, n) for w in a])
                names = tuple(way.format(part) for way in ways for part in ("bias_ih", "bias_hh"))
                pair = lambda a, b, n=gates: np.concatenate([regate(a, n), regate(b, n)])
                yield names[0], names, lambda *a, pair=pair: np.stack([pair(*a[i : i + 2]) for i in range(0, len(a), 2)])


def map_tensors(model, found):
    """Initializer -> (names of parameters, function), by name where the value agrees and otherwise by value; and what is left over."""
    state = {name: value.detach().numpy() for name, value in model.state_dict().items() if value.is_floating_point()}
    forms = [form for form in candidates(model) if all(name in state for name in form[1])]
    mapped = {}
    for by_name in (True, False):
        for label, names, build in forms:
            value = build(*(state[name] for name in names))
            # A constant tensor could be any of its shape.
            if not by_name and value.size > 1 and np.all(value == value.flat[0]):
                continue
            for tensor, array in found.items():
                fits = tensor not in mapped and array.shape == value.shape and np.array_equal(array, value)
                if fits and (tensor == label or not by_name):
                    mapped[tensor] = (names, build)
    return mapped


def first_names(model):
    """Name -> the first name of the same tensor: another one where parameters are tied."""
    shared, state = {}, model.state_dict(keep_vars=True)
    return {name: shared.setdefault(id(value), name) for name, value in state.items()}


def check_mapping(case, model, mapped, found):
    """Each parameter is in the file once, and so are the statistics."""
    canonical = first_names(model)
    buffers = {name for name, _ in model.named_buffers()}
    count = {}
    for tensor, (names, _) in mapped.items():
        for name in {canonical[name] for name in names}:
            count.setdefault(name, []).append(tensor)
    wanted = {canonical[n] for n, v in model.state_dict().items() if v.is_floating_point() and (n not in buffers or "running_" in n)}
    missing = sorted(wanted - set(count))
    twice = {name: tensors for name, tensors in count.items() if len(tensors) > 1}
    if missing or twice:
        raise RuntimeError(f"{case.name}: not in the file: {missing}; there more than once: {twice}; the file has {list(found)}")


def put(path, values):
    """The file with other weights, as bytes; an Identity whose name has a value of its own goes."""
    made = onnx.load(path)
    kept = [tensor for tensor in made.graph.initializer if tensor.name not in values]
    nodes = [node for node in made.graph.node if not (node.op_type == "Identity" and node.output[0] in values)]
    new = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in values.items()]
    for target, items in ((made.graph.initializer, kept + new), (made.graph.node, nodes)):
        del target[:]
        target.extend(items)
    return made.SerializeToString()


def peak_error(found, expected):
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def verify(case, path, x, y, values, state, loss):
    """onnxruntime finds what PyTorch does, before and after; the dim `batch` takes any size."""
    import onnxruntime
    import torch

    part = case.batch // case.accumulate
    model = prepare(case)
    for weights in (None, state):
        if weights:
            model.load_state_dict({name: torch.from_numpy(np.asarray(value)) for name, value in weights.items()})
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads, options.log_severity_level = 1, 3
        source = put(path, values) if weights else path.read_bytes()
        session = onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        for rows in (part, case.batch):
            with torch.no_grad():
                expected = model(torch.from_numpy(x[:rows])).numpy()
            found = session.run(None, {session.get_inputs()[0].name: x[:rows]})[0]
            error = peak_error(found, expected)
            if not error < 1e-4:
                when = "with the final weights" if weights else "with the initial weights"
                raise RuntimeError(f"{case.name}: onnxruntime and PyTorch differ by {error:.1e} of the peak {when}")
        if not weights and not case.norms:
            labels = torch.from_numpy(y[: case.batch])
            again = loss_sum(case, torch.from_numpy(found), labels).item() / counted(case, labels)
            if not abs(again / loss - 1) < 1e-5:
                raise RuntimeError(f"{case.name}: the first loss is {loss}, and {again} by onnxruntime")


def write_case(case, folder):
    """The whole folder of a case; returns a line about it."""
    start = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    x, y = case.data(np.random.default_rng(SEED), case.rows)
    model = prepare(case)
    path = folder / "model.onnx"
    export(case, model, x, path)
    onnx.checker.check_model(onnx.load(path), full_check=True)
    found = initializers(path)
    mapped = map_tensors(model, found)
    check_mapping(case, model, mapped, found)

    losses, rates, norms, state, averages, largest = run_reference(case, x, y)
    losses32, _, norms32, state32, averages32, largest32 = run_reference(case, x, y, case.precision or "f32")
    buffers = {name for name, _ in model.named_buffers()}
    frozen = {name for name, _ in model.named_parameters(remove_duplicate=False) if freezes(case, name)}
    canonical = first_names(model)

    def noise(name, peak, peak32):
        """Elements whose gradient is there by rounding alone."""
        g, g32 = (gradient.get(canonical[name]) for gradient in (largest, largest32))
        if g is None:
            return np.zeros_like(state[name], bool)
        return (g < 1e-9 * peak) & (g32 < (1e-2 if case.precision else 1e-5) * peak32) & ((g > 0) | (g32 > 0))

    peak, peak32 = (max(float(g.max()) for g in gradients.values()) for gradients in (largest, largest32))
    made = lambda source: {tensor: build(*(source[name] for name in names)) for tensor, (names, build) in mapped.items()}
    tensors, arrays, values = {}, {}, {}
    for tensor, (names, build) in mapped.items():
        make = lambda source, names=names, build=build: build(*(source[name] for name in names))
        kind = "statistic" if set(names) <= buffers else "frozen" if set(names) <= frozen else "weight"
        # Buffers that are no statistics stay as they are, too.
        if kind == "statistic" and not all("running_" in name for name in names):
            kind = "frozen"
        arrays[f"final:{tensor}"], values[tensor] = make(state), make(state)
        arrays[f"f32:{tensor}"] = make(state32).astype(np.float32)
        ignored = make({name: noise(name, peak, peak32) for name in names})
        tensors[tensor] = {"kind": kind, "from": list(names), "shape": list(ignored.shape)}
        if kind == "weight" and ignored.any():
            arrays[f"noise:{tensor}"] = ignored
            tensors[tensor]["elements not compared"] = int(ignored.sum())
        if kind == "weight" and case.ema:
            arrays[f"average:{tensor}"] = make(averages)
            arrays[f"average32:{tensor}"] = make(averages32).astype(np.float32)
    verify(case, path, x, y, values, state, losses[0])
    weights, statistics = ([name for name, tensor in tensors.items() if tensor["kind"] == kind] for kind in ("weight", "statistic"))
    noises = {name.split(":", 1)[1]: array for name, array in arrays.items() if name.startswith("noise:")}
    expected, own = made({**state, **averages}), []
    for seed in range(1, 1 if case.precision else 1 + NUDGES):
        again, _, _, other, means, _ = run_reference(case, x, y, seed=seed)
        whole, worst, _ = distance(weights, made({**other, **means}), expected, found, noises)
        own.append((worst_ratio(again, losses), whole, worst, distance(statistics, made(other), expected, found, {}, least=1e-3)[1]))

    for name, array in zip(ARRAYS, (x, y)):
        np.save(folder / name, array)
    np.savez_compressed(folder / "weights.npz", **arrays)
    words = ["train", "model.onnx", "--data", "x.npy", "--labels", "y.npy", *case.flags()]
    words += ["--log", "log.jsonl", "--output", "trained.onnx", "--backend", "cpu"]
    (folder / "flags.txt").write_text(shlex.join(words) + "\n")
    graph = onnx.load(path).graph
    operators = sorted({node.op_type for node in graph.node})
    others = {
        name: list(array.shape)
        for name, array in found.items()
        if name not in mapped and array.dtype.kind == "f" and name in {t.name for t in graph.initializer}
    }
    record = {
        "case": case.name,
        "precision": case.precision or "f32",
        "steps": case.steps,
        "losses": losses,
        "lrs": rates,
        "grad_norms": norms,
        "losses_f32": losses32,
        "grad_norms_f32": norms32,
        "nudged": [max(errors) for errors in zip(*own)],
        "tensors": tensors,
        "float initializers that do not train": others,
        "operators": operators,
    }
    (folder / "reference.json").write_text(json.dumps(record, indent=1) + "\n")
    size = sum(file.stat().st_size for file in folder.iterdir())
    seconds = time.monotonic() - start
    moved = f"loss {losses[0]:.4f} -> {losses[-1]:.4f}"
    return f"{case.name:22} {size / 1e3:6.0f} kB  {seconds:4.1f} s  {moved}  {' '.join(operators)}"


# ---- comparison ----


def distance(tensors, found, expected, initial, noise, least=None):
    """Norms of difference over movement: of all tensors together, of the worst one, and its name.

    A tensor counts as moved by `least` per element or more. For weights that is a thousandth of what they are: a scale of 1 that hardly
    moves is where f32 rounds it to."""
    parts = []
    for tensor in tensors:
        kept = ~noise[tensor] if tensor in noise else np.ones(expected[tensor].shape, bool)
        differs = float(np.square(found[tensor].astype(float) - expected[tensor])[kept].sum())
        moves = float(np.square(expected[tensor] - initial[tensor])[kept].sum())
        floor = float(np.square(1e-3 * initial[tensor][kept]).sum() if least is None else kept.sum() * least**2)
        parts.append((tensor, differs, moves, max(moves, floor)))
    if not parts:
        return 0.0, 0.0, ""
    apart, movement = (sum(part[i] for part in parts) for i in (1, 2))
    ratios = [(math.sqrt(differs / moves) if moves else math.inf if differs else 0.0, name) for name, differs, _, moves in parts]
    # NaN first.
    worst, name = max(ratios, key=lambda pair: (math.isnan(pair[0]), pair[0]))
    return (math.sqrt(apart / movement) if movement else 0.0), worst, name


def worst_ratio(found, expected):
    return max(abs(f / e - 1) if e else abs(f) for f, e in zip(found, expected, strict=True))


def train(plimsoll, folder, backend, extra):
    """The log's lines and the trained initializers."""
    words = shlex.split((folder / "flags.txt").read_text())
    words[words.index("--backend") + 1] = backend
    for name in ("log.jsonl", "trained.onnx"):
        (folder / name).unlink(missing_ok=True)
    done = subprocess.run([plimsoll, *words, *extra], check=False, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        raise zoo.Failed(f"exit {done.returncode}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if "loss" in line], initializers(folder / "trained.onnx")


def compare(folder, lines, trained):
    """Cells of the table's row, and what is wrong."""
    record = json.loads((folder / "reference.json").read_text())
    arrays = dict(np.load(folder / "weights.npz"))
    part = lambda kind: {name.split(":", 1)[1]: array for name, array in arrays.items() if name.startswith(f"{kind}:")}
    initial, final, f32, noise = initializers(folder / "model.onnx"), part("final"), part("f32"), part("noise")
    averages, averages32 = part("average"), part("average32")
    kinds = lambda kind: [name for name, tensor in record["tensors"].items() if tensor["kind"] == kind]
    wrong = []

    if len(lines) != record["steps"]:
        raise zoo.Failed(f"{len(lines)} steps in the log, not {record['steps']}")
    missing = sorted(set(record["tensors"]) - set(trained))
    if missing:
        raise zoo.Failed(f"not in trained.onnx: {' '.join(missing)}")
    shapes = [name for name in record["tensors"] if trained[name].shape != final[name].shape]
    if shapes:
        raise zoo.Failed(f"another shape in trained.onnx: {' '.join(shapes)}")

    weights, statistics = kinds("weight"), kinds("statistic")
    expected = {name: averages.get(name, final[name]) for name in final}
    expected32 = {name: averages32.get(name, f32[name]) for name in f32}
    loss32 = worst_ratio(record["losses_f32"], record["losses"])
    whole32, worst32, _ = distance(weights, expected32, expected, initial, noise)
    # Behind a linear layer that reads what is normalised, the mean is zero but for rounding.
    _, statistics32, _ = distance(statistics, f32, final, initial, {}, least=1e-3)
    own = record["nudged"] if record["precision"] == "f32" else (loss32, whole32, worst32, statistics32)
    loss_limit, weight_limit, worst_limit, statistics_limit = limits(record["precision"], own)

    losses = [line["loss"] for line in lines]
    loss = worst_ratio(losses, record["losses"])
    if not loss <= loss_limit:
        at = next(i for i, (f, e) in enumerate(zip(losses, record["losses"])) if not abs(f / e - 1) <= loss_limit)
        wrong.append(f"loss {losses[at]:.6g}, not {record['losses'][at]:.6g}, at step {at}")
    # A step whose f16 gradients overflow has no norm and is skipped.
    norms = [(line["grad_norm"], norm) for line, norm in zip(lines, record["grad_norms"]) if line.get("grad_norm") is not None]
    norm = worst_ratio(*zip(*norms)) if norms else None
    norm32 = worst_ratio(record["grad_norms_f32"], record["grad_norms"])
    if norm is not None and not norm <= max(10 * loss_limit, 3 * norm32):
        wrong.append("norms")
    if not worst_ratio([line["lr"] for line in lines], record["lrs"]) <= 1e-5:
        wrong.append("rates")
    whole, worst, name = distance(weights, trained, expected, initial, noise)
    _, one, at = distance(statistics, trained, final, initial, {}, least=1e-3)
    if not whole <= weight_limit:
        wrong.append("weights")
        if averages and distance(weights, trained, final, initial, noise)[0] <= weight_limit:
            wrong[-1] = "weights are the last ones, not their moving average"
    if not worst <= worst_limit:
        wrong.append(f"weights of {name}")
    if not one <= statistics_limit:
        wrong.append(f"statistics {at}")
    changed = [name for name in kinds("frozen") if not np.array_equal(trained[name], initial[name])]
    # A scalar or a table that is no parameter must not train either.
    changed += [
        name
        for name in record["float initializers that do not train"]
        if name in trained and not np.array_equal(trained[name], initial[name], equal_nan=True)
    ]
    if changed:
        wrong.append(f"changed, and should not: {' '.join(changed)}")

    tiny = lambda value: "" if value is None else f"{value:.1e}"
    cells = [record["steps"], tiny(loss), tiny(loss32), tiny(whole), tiny(whole32), tiny(worst), tiny(worst32)]
    cells += [tiny(one) if statistics else "", tiny(norm)]
    strict = zip((loss, whole, worst, one), LEAST["f32"])
    edge = record["precision"] == "f32" and any(error > limit for error, limit in strict)
    return cells, wrong, "ok: PyTorch's own run moves as far" if edge else "ok"


HEADER = ["case", "steps", "loss", "f32", "weights", "f32", "worst", "f32", "statistics", "norm", "seconds", ""]


def run_case(args, case, folder):
    """A row of the table, and whether it is good."""
    start, cells, good = time.monotonic(), [""] * 9, ""
    try:
        cells, wrong, good = compare(folder, *train(args.plimsoll, folder, args.backend, args.flags))
    except zoo.Failed as problem:
        wrong = [str(problem)]
    except (OSError, KeyError, TypeError, ValueError) as problem:
        wrong = [f"{type(problem).__name__}: {problem}"]
    return [case, *cells, f"{time.monotonic() - start:.1f}", "; ".join(wrong) or good], not wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plimsoll", type=Path, default=zoo.ROOT / "target/release/plimsoll", metavar="PATH")
    parser.add_argument("--only", action="append", default=[], metavar="GLOB", help="only cases that match, such as 'mlp-*'")
    parser.add_argument("--list", action="store_true", help="print the cases and their flags")
    parser.add_argument("--precision", action="store_true", help="the cases in bf16 and f16, too")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--flags", type=shlex.split, default=[], metavar="WORDS", help="more flags for every run, such as '--threads 2'")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the cases' folders here, with logs and trained files")
    parser.add_argument("--export-only", type=Path, metavar="FOLDER", help="write the cases' folders, and train nothing")
    parser.add_argument("--from", type=Path, dest="source", metavar="FOLDER", help="use the folders of --export-only: no PyTorch needed")
    args = parser.parse_args()
    args.plimsoll = args.plimsoll.resolve()
    logging.disable(logging.WARNING)
    wanted = lambda name: not args.only or any(fnmatch.fnmatchcase(name, glob) for glob in args.only)

    if not (args.list or args.export_only or args.plimsoll.is_file()):
        sys.exit(f"no {args.plimsoll}: build it with `cargo build --release`, or say where it is with --plimsoll PATH")
    rows, failed = [], []
    if args.source:
        folders = [file.parent for file in sorted(args.source.glob("*/reference.json")) if wanted(file.parent.name)]
        precise = lambda folder: json.loads((folder / "reference.json").read_text())["precision"] == "f32"
        folders = [folder for folder in folders if args.precision or precise(folder)]
        if not folders:
            sys.exit(f"no such case under {args.source}")
        for folder in folders:
            zoo.progress(folder.name)
            row, good = run_case(args, folder.name, folder)
            rows.append(row)
            print("  ".join(str(cell) for cell in row), file=sys.stderr, flush=True)
            failed += [] if good else [folder.name]
    else:
        import torch

        torch.set_num_threads(1)
        every = args.precision or args.export_only or args.list
        chosen = [case for case in table() if wanted(case.name) and (every or not case.precision)]
        if not chosen:
            sys.exit("no such case; there are: " + " ".join(case.name for case in table()))
        if args.list:
            return print("\n".join(f"{case.name:22} {case.exporter}  {shlex.join(case.flags())}" for case in chosen))
        with tempfile.TemporaryDirectory() as temporary:
            for case in chosen:
                zoo.progress(case.name)
                folder = (args.export_only or args.keep or Path(temporary)) / case.name
                # One case that an exporter refuses must not cost the others.
                try:
                    line = write_case(case, folder)
                except Exception as problem:
                    failed.append(case.name)
                    text = str(problem).strip().splitlines() or [""]
                    print(f"{case.name:22} {type(problem).__name__}: {text[0][:600]}", file=sys.stderr, flush=True)
                    continue
                if args.export_only:
                    zoo.progress("")
                    print(line, flush=True)
                    continue
                row, good = run_case(args, case.name, folder)
                rows.append(row)
                failed += [] if good else [case.name]
    zoo.progress("")
    if rows:
        print(zoo.table(HEADER, rows, right=range(1, 11)))
        print(f"{len(rows) - len(failed)} of {len(rows)} agree with PyTorch on {args.backend}")
    if failed:
        print("failed: " + " ".join(failed), file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
