#!/usr/bin/env python3
"""Times training steps on an NVIDIA GPU beside PyTorch's eager and compiled ones, with their peak memory.

    python tests/compare/training_cuda.py [--only GLOB]... [--precision f32|bf16]... [--compile] [--jax] [--trace FOLDER] [--plimsoll PATH]

ResNet-50 (224 px), ViT-B/16, BERT-base (12 layers of 768, 128 tokens) and GPT-2 (12 layers of 768, 128 tokens), random weights and data.
Times are medians of whole updates, data on the device. PyTorch's f32 has no TF32; its bf16 is autocast with f32 weights. Its peak is that
of torch.cuda.max_memory_allocated over a step; plimsoll's is what its plan allocates. JAX runs the exported file (xla.py) with its weights
in place; in bf16 they are cast in each step, as plimsoll's are; its peak is what XLA says that the program takes. --trace FOLDER writes the time of each step of
plimsoll's update, NAME.PRECISION.json, for Perfetto.
"""

import argparse
import fnmatch
import json
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import training_models as m
import zoo
from torch import nn
from torch.nn import functional as F
from training import export_model

SEED = 19


class Bottleneck(nn.Module):
    def __init__(self, inputs, width, stride):
        super().__init__()
        outputs = 4 * width
        self.body = nn.Sequential(
            *m.conv_norm(inputs, width, 1), *m.conv_norm(width, width, 3, stride), *m.conv_norm(width, outputs, 1, act=None)
        )
        same = stride == 1 and inputs == outputs
        self.skip = nn.Identity() if same else nn.Sequential(*m.conv_norm(inputs, outputs, 1, stride, act=None))

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x), inplace=True)


def resnet50(classes=1000):
    layers, inputs = [*m.conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)], 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(count):
            layers.append(Bottleneck(inputs, width, stride if i == 0 else 1))
            inputs = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, classes))


def image(batch):
    return torch.randn(batch, 3, 224, 224), torch.randint(1000, (batch,))


# name: build, data, batch, optimizer
CASES = {
    "resnet50": (resnet50, image, 32, "sgd"),
    "vit-b16": (lambda: m.ViT(768, 12, 12, 224, 16, 1000), image, 32, "adamw"),
    "bert-base": (
        lambda: m.BERT(768, 12, 12, 30522, 128),
        lambda batch: (torch.randint(30522, (batch, 128)), torch.randint(2, (batch,))),
        32,
        "adamw",
    ),
    "gpt2": (
        lambda: m.GPT2(768, 12, 12, 50257, 128),
        lambda batch: (torch.randint(50257, (batch, 128)), torch.randint(50257, (batch, 128))),
        16,
        "adamw",
    ),
}


def flags(batch, optimizer, precision):
    words = f"--loss cross_entropy --optimizer {optimizer} --lr 0.0001 --batch {batch} --precision {precision}"
    return words.split() + (["--momentum", "0.9"] if optimizer == "sgd" else [])


def run(words):
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise zoo.Failed(f"exit {done.returncode}: {done.stderr.strip()[-400:]}")
    return done.stdout


def ours(args, path, words, name):
    """Milliseconds of an update, and the bytes allocated."""
    common = ["--backend", "cuda", "--no-tuned"]
    found = json.loads(run([args.plimsoll, "bench", "--train", path, *words, *common, "--warmup", 5, "--iters", 30, "--json"]))
    if args.trace:
        step = path.with_name("step.onnx")
        run([args.plimsoll, "emit", "--train", path, "onnx", *words, "-o", step])
        run([args.plimsoll, "run", step, "--training", *common, "--trace", args.trace / f"{name}.json"])
    return found


def theirs(build, batch, optimizer, precision, compiled):
    """Milliseconds of an update of PyTorch, and its peak in bytes."""
    m.Attention.fused = True
    torch.manual_seed(SEED)
    model = build().cuda().train()
    x, y = (tensor.cuda() for tensor in batch)
    weights = model.parameters()
    if optimizer == "sgd":
        updater = torch.optim.SGD(weights, lr=1e-4, momentum=0.9)
    else:
        updater = torch.optim.AdamW(weights, lr=1e-4, fused=True)

    def loss(x, y):
        with torch.autocast("cuda", torch.bfloat16, enabled=precision == "bf16"):
            output = model(x)
            return F.cross_entropy(output.flatten(0, -2) if output.ndim == 3 else output, y.flatten())

    if compiled:
        loss = torch.compile(loss)

    def step():
        loss(x, y).backward()
        updater.step()
        updater.zero_grad(set_to_none=True)

    for _ in range(5):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(20):
        start = time.perf_counter()
        step()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    peak = torch.cuda.max_memory_allocated()
    del model, updater, x, y
    torch.cuda.empty_cache()
    return statistics.median(times), peak


def jitted(path, batch, optimizer, precision):
    """Milliseconds of an update of XLA's program, and its peak in bytes."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax
    import jax.numpy as jnp

    import xla

    jax.config.update("jax_default_matmul_precision", "highest")
    function, weights = xla.load(path, training=True)
    kind = jnp.bfloat16 if precision == "bf16" else jnp.float32
    x, y = (jax.device_put(tensor.numpy()) for tensor in batch)

    def loss(weights, x, y):
        (output,) = function({name: w.astype(kind) for name, w in weights.items()}, {"x": x if x.dtype == np.int64 else x.astype(kind)})
        scores = jax.nn.log_softmax(output.reshape(-1, output.shape[-1]).astype(jnp.float32))
        return -jnp.take_along_axis(scores, y.reshape(-1, 1), 1).mean()

    def sgd(w, g, m):
        m = 0.9 * m + g
        return w - 1e-4 * m, m

    def adamw(w, g, m, v, t):
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        step = (m / (1 - 0.9**t)) / (jnp.sqrt(v / (1 - 0.999**t)) + 1e-8)
        return w - 1e-4 * (step + 0.01 * w), m, v

    def step(weights, states, t, x, y):
        value, grads = jax.value_and_grad(loss)(weights, x, y)
        each = {
            name: sgd(w, grads[name], *states[name]) if optimizer == "sgd" else adamw(w, grads[name], *states[name], t)
            for name, w in weights.items()
        }
        return {name: new[0] for name, new in each.items()}, {name: new[1:] for name, new in each.items()}, t + 1, value

    count = 1 if optimizer == "sgd" else 2
    states = {name: tuple(jnp.zeros(w.shape, jnp.float32) for _ in range(count)) for name, w in weights.items()}
    weights, t = jax.device_put(weights), jnp.float32(1)
    program = jax.jit(step, donate_argnums=(0, 1, 2)).lower(weights, states, t, x, y).compile()
    sizes = program.memory_analysis()
    peak = sizes.argument_size_in_bytes + sizes.output_size_in_bytes - sizes.alias_size_in_bytes + sizes.temp_size_in_bytes
    times = []
    for _ in range(25):
        start = time.perf_counter()
        weights, states, t, value = jax.block_until_ready(program(weights, states, t, x, y))
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times[5:]), peak, float(value)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", default=[], metavar="GLOB")
    parser.add_argument("--precision", action="append", choices=("f32", "bf16"))
    parser.add_argument("--compile", action="store_true", help="torch.compile, too")
    parser.add_argument("--jax", action="store_true", help="JAX, too")
    parser.add_argument("--trace", type=Path, metavar="FOLDER")
    parser.add_argument("--plimsoll", type=Path, default=zoo.ROOT / "target/release/plimsoll", metavar="PATH")
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    print(torch.cuda.get_device_name(), "PyTorch", torch.__version__, flush=True)
    for name, (build, data, batch, optimizer) in CASES.items():
        if args.only and not any(fnmatch.fnmatch(name, glob) for glob in args.only):
            continue
        torch.manual_seed(SEED)
        rows = data(batch)
        with tempfile.TemporaryDirectory() as place:
            path = Path(place) / "model.onnx"
            torch.manual_seed(SEED)
            m.Attention.fused = False
            export_model(build(), rows[0][:2], path)
            for precision in args.precision or ("f32", "bf16"):
                label = f"{name}.{precision}"
                line = {"case": label, "batch": batch}
                try:
                    line["plimsoll"] = ours(args, path, flags(batch, optimizer, precision), label)
                except zoo.Failed as error:
                    line["plimsoll"] = str(error)
                line["eager"] = theirs(build, rows, optimizer, precision, False)
                if args.compile:
                    line["compiled"] = theirs(build, rows, optimizer, precision, True)
                if args.jax:
                    line["jax"] = jitted(path, rows, optimizer, precision)
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
