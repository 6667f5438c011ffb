#!/usr/bin/env python3
"""Times training steps on an NVIDIA GPU beside PyTorch's eager and compiled ones, with their peak memory.

    python tests/compare/training_cuda.py [--only GLOB]... [--precision f32|bf16]... [--mode MODE]... [--jax] [--trace FOLDER] [--plimsoll PATH]

ResNet-50 (224 px), ViT-B/16, BERT-base (12 layers of 768, 128 tokens) and GPT-2 (12 layers of 768, 128 tokens), random weights and data; and
torchvision's MobileNetV2, EfficientNet-B0, ConvNeXt-T and Swin-T, a decoder as Llama's (12 layers of 768, 512 tokens), the encoder of T5
(12 layers of 768, 256 tokens) and a U-Net (256 px). A mode is one of torch.compile's; reduce-overhead captures CUDA graphs, as plimsoll does.
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


def vision(name):
    """A model of torchvision, without dropout: all sides compute the same."""

    def build():
        import torchvision

        model = getattr(torchvision.models, name)()
        for part in model.modules():
            if isinstance(part, nn.Dropout):
                part.p = 0.0
            if type(part).__name__ == "StochasticDepth":
                part.p = 0.0
        return model

    return build


class RMSNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class LlamaBlock(nn.Module):
    def __init__(self, width, heads, inner):
        super().__init__()
        self.heads = heads
        self.before, self.after = RMSNorm(width), RMSNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, inner, bias=False), nn.Linear(width, inner, bias=False)
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x, cos, sin):
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1)
        )

        def turned(t):
            a, b = t.chunk(2, -1)
            return t * cos + torch.cat((-b, a), -1) * sin

        q, k = turned(q), turned(k)
        if m.Attention.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5
            mask = torch.full((tokens, tokens), float("-inf"), device=x.device).triu(1)
            y = (scores + mask).softmax(-1) @ v
        x = x + self.out(y.transpose(1, 2).reshape(batch, tokens, width))
        y = self.after(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    def __init__(self, width=768, layers=12, heads=12, inner=2048, vocabulary=32000, tokens=512):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(LlamaBlock(width, heads, inner) for _ in range(layers))
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        half = width // heads // 2
        angles = torch.arange(tokens)[:, None] / 10000 ** (torch.arange(half)[None] / half)
        self.register_buffer("cos", torch.cat((angles.cos(),) * 2, -1))
        self.register_buffer("sin", torch.cat((angles.sin(),) * 2, -1))

    def forward(self, x):
        y = self.embed(x)
        for block in self.blocks:
            y = block(y, self.cos, self.sin)
        return self.head(self.norm(y))


class T5(nn.Module):
    """The encoder of transformers, and classes of its mean."""

    def __init__(self):
        super().__init__()
        import transformers

        config = transformers.T5Config(
            vocab_size=32128, d_model=768, d_kv=64, d_ff=3072, num_layers=12, num_heads=12, dropout_rate=0.0, use_cache=False
        )
        config._attn_implementation = "eager"
        self.body, self.head = transformers.T5EncoderModel(config), nn.Linear(768, 2)

    def forward(self, x):
        return self.head(self.body(input_ids=x).last_hidden_state.mean(1))


class UNet(nn.Module):
    """Classes of the mean of its last picture."""

    def __init__(self, widths=(32, 64, 128, 256), classes=10):
        super().__init__()
        self.down, self.up, inputs = nn.ModuleList(), nn.ModuleList(), 3
        for width in widths:
            self.down.append(nn.Sequential(*m.conv_norm(inputs, width), *m.conv_norm(width, width)))
            inputs = width
        for width in reversed(widths[:-1]):
            both = nn.Sequential(*m.conv_norm(2 * width, width), *m.conv_norm(width, width))
            self.up.append(nn.ModuleList((nn.ConvTranspose2d(inputs, width, 2, 2), both)))
            inputs = width
        self.head = nn.Conv2d(inputs, classes, 1)

    def forward(self, x):
        kept = []
        for part in self.down:
            x = part(F.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        kept.pop()
        for wide, both in self.up:
            x = both(torch.cat((wide(x), kept.pop()), 1))
        return self.head(x).mean((2, 3))


def words(count, tokens, classes):
    """Numbers of words, and a class for each row, or for each word where there are as many classes."""
    each = lambda batch: (batch, tokens) if classes == count else (batch,)
    return lambda batch: (torch.randint(count, (batch, tokens)), torch.randint(classes, each(batch)))


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
    "mobilenet_v2": (vision("mobilenet_v2"), image, 32, "adamw"),
    "efficientnet_b0": (vision("efficientnet_b0"), image, 32, "adamw"),
    "convnext_tiny": (vision("convnext_tiny"), image, 32, "adamw"),
    "swin_t": (vision("swin_t"), image, 32, "adamw"),
    "llama": (Llama, words(32000, 512, 32000), 16, "adamw"),
    "t5": (T5, words(32128, 256, 2), 32, "adamw"),
    "unet": (UNet, lambda batch: (torch.randn(batch, 3, 256, 256), torch.randint(10, (batch,))), 16, "adamw"),
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


def theirs(build, batch, optimizer, precision, mode):
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

    if mode:
        torch._dynamo.reset()
        loss = torch.compile(loss, mode=mode)

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
    parser.add_argument("--mode", action="append", default=[], help="torch.compile, too: default, reduce-overhead, max-autotune")
    parser.add_argument("--alone", action="store_true", help="plimsoll alone")
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
                if not args.alone:
                    line["eager"] = theirs(build, rows, optimizer, precision, None)
                for mode in args.mode:
                    line[mode] = theirs(build, rows, optimizer, precision, mode)
                if args.jax:
                    line["jax"] = jitted(path, rows, optimizer, precision)
                print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
