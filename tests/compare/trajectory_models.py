"""The small models and the data that trajectories.py trains: one way of writing each of the common architectures.

Biases and scales keep PyTorch's initial values (zeros and ones), since a file fresh from an exporter has them, too: exporters write equal
tensors once.
"""

import itertools
import math

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

# ---- plain ----


def mlp(activation=nn.ReLU, inputs=784, hidden=100, outputs=10):
    return nn.Sequential(nn.Linear(inputs, hidden), activation(), nn.Linear(hidden, outputs))


def deep_mlp():
    return nn.Sequential(nn.Linear(784, 64), nn.Tanh(), nn.Linear(64, 64), nn.SiLU(), nn.LayerNorm(64), nn.Linear(64, 10))


def linear():
    return nn.Linear(10, 1)


# ---- images ----


def cnn():
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(16 * 4 * 4, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


def conv_norm(inputs, outputs, kernel=3, stride=1, groups=1, act=nn.ReLU):
    padding = (kernel - 1) // 2
    layers = [nn.Conv2d(inputs, outputs, kernel, stride, padding, groups=groups, bias=False), nn.BatchNorm2d(outputs)]
    return layers if act is None else [*layers, act()]


def cnn_norm():
    return nn.Sequential(*conv_norm(1, 8), nn.AvgPool2d(2), *conv_norm(8, 16, stride=2), nn.Flatten(), nn.Dropout(0.0), nn.Linear(256, 10))


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(*conv_norm(inputs, outputs, stride=stride), *conv_norm(outputs, outputs, act=None))
        self.skip = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(*conv_norm(inputs, outputs, 1, stride, act=None))

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x))


def resnet():
    """ResNet-18's plan, an eighth as wide and with one block of each width."""
    return nn.Sequential(
        *(*conv_norm(3, 8), nn.MaxPool2d(3, 2, 1)),
        *(Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 32, 2)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


def fold_norms(model):
    """The model without its batch normalisations, as exporters write it unless they are told not to."""
    for parent in list(model.modules()):
        if isinstance(parent, nn.Sequential):
            for i, (first, second) in enumerate(itertools.pairwise(parent)):
                if isinstance(first, nn.Conv2d) and isinstance(second, nn.BatchNorm2d):
                    parent[i], parent[i + 1] = nn.utils.fuse_conv_bn_eval(first, second).requires_grad_(), nn.Identity()
    return model


class Inverted(nn.Module):
    def __init__(self, inputs, outputs, stride, expand):
        super().__init__()
        wide = inputs * expand
        self.body = nn.Sequential(
            *conv_norm(inputs, wide, 1, act=nn.ReLU6),
            *conv_norm(wide, wide, 3, stride, groups=wide, act=nn.ReLU6),
            *conv_norm(wide, outputs, 1, act=None),
        )
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x):
        return x + self.body(x) if self.adds else self.body(x)


def mobilenet():
    return nn.Sequential(
        *conv_norm(3, 8, stride=2, act=nn.ReLU6),
        *(Inverted(8, 8, 1, 2), Inverted(8, 12, 2, 4), Inverted(12, 12, 1, 4)),
        *conv_norm(12, 32, 1, act=nn.ReLU6),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


class Squeeze(nn.Module):
    """Squeeze and excitation, with group normalisation, bilinear upsampling and hard swish around it."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 8)
        self.down, self.up = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.prelu = nn.PReLU(8)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        x = F.hardswish(self.norm(self.stem(x)))
        gate = F.relu(self.down(x.mean((2, 3), keepdim=True)))
        x = self.prelu(x * F.hardsigmoid(self.up(gate)))
        return self.head(F.interpolate(x, scale_factor=2, mode="bilinear", align_corners=False))


def autoencoder():
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, 2, 1), nn.LeakyReLU(0.1), nn.Conv2d(8, 4, 3, 2, 1), nn.InstanceNorm2d(4, affine=True)),
        *(nn.ELU(), nn.ConvTranspose2d(4, 8, 2, 2), nn.Softplus(), nn.ConvTranspose2d(8, 1, 4, 2, 1)),
    )


class UNet(nn.Module):
    def __init__(self, classes=3, width=4):
        super().__init__()
        double = lambda i, o: nn.Sequential(*conv_norm(i, o), *conv_norm(o, o))
        self.down = nn.ModuleList([double(3, width), double(width, 2 * width), double(2 * width, 4 * width)])
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * w, w, 2, stride=2) for w in (2 * width, width))
        self.merge = nn.ModuleList(double(2 * w, w) for w in (2 * width, width))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        skips = []
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            skips.append(x)
        skips.pop()
        for up, merge in zip(self.up, self.merge):
            x = merge(torch.cat([skips.pop(), up(x)], 1))
        return self.head(x)


class ConvNext(nn.Module):
    """Depthwise convolution, layer normalisation of the last axis, and a learned scale of each branch."""

    def __init__(self, width=12):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 2, 2)
        self.deep = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm, self.wide, self.narrow = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(torch.full((width,), 0.5))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        x = self.stem(x)
        y = self.norm(self.deep(x).permute(0, 2, 3, 1))
        x = x + (self.scale * self.narrow(F.gelu(self.wide(y)))).permute(0, 3, 1, 2)
        return self.head(x.mean((2, 3)))


# ---- sequences ----


class Attention(nn.Module):
    """`fused`: scaled_dot_product_attention. Otherwise by hand, with `mask`: none, bool (a buffer) or float (a buffer with -inf)."""

    def __init__(self, width, heads, causal=False, fused=True, mask="bool", length=16):
        super().__init__()
        self.heads, self.causal, self.fused, self.kind = heads, causal, fused, mask
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        if causal and not fused:
            keep = torch.ones(length, length, dtype=torch.bool).tril()
            floats = torch.zeros(length, length).masked_fill(~keep, -math.inf)
            self.register_buffer("mask", keep if mask == "bool" else floats)

    def forward(self, x, keep=None):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=keep, is_causal=self.causal)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)
            if self.causal and self.kind == "bool":
                scores = scores.masked_fill(~self.mask[:length, :length], -1e9)
            elif self.causal:
                scores = scores + self.mask[:length, :length]
            y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    def __init__(self, width, heads, approximate="none", **attention):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, **attention)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, width=24, layers=2, heads=3, fused=True):
        super().__init__()
        self.patch = nn.Conv2d(3, width, 4, 4)
        self.cls = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, 17, width))
        self.blocks = nn.Sequential(*(Block(width, heads, fused=fused) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 10)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


def share_norms(model):
    """All layer normalisations of a width share scale and bias."""
    first = {}
    for module in model.modules():
        if isinstance(module, nn.LayerNorm):
            kept = first.setdefault(module.normalized_shape, module)
            module.weight, module.bias = kept.weight, kept.bias
    return model


class GPT(nn.Module):
    """GPT-2's plan: learned positions, norms first, a causal mask, and the embedding as the head's weight if `tied`."""

    def __init__(self, tied=True, width=24, layers=2, heads=3, vocabulary=40, length=16, **attention):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, "tanh", causal=True, length=length, **attention) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        for table in (self.wte, self.wpe, self.head):
            nn.init.normal_(table.weight, std=0.1)
        if tied:
            self.head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


class BERT(nn.Module):
    """BERT's plan: norms last, padding (token 0) masked, a head over the vocabulary. With PyTorch's own encoder layer if `native`."""

    def __init__(self, native=False, width=24, layers=2, heads=3, vocabulary=40, length=16):
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.native = native
        if native:
            layer = lambda: nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True)
            self.layers = nn.ModuleList(layer() for _ in range(layers))
        else:
            self.attentions = nn.ModuleList(Attention(width, heads) for _ in range(layers))
            self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
            wide = lambda: nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            self.mlps = nn.ModuleList(wide() for _ in range(layers))
        self.transform, self.transform_norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.decoder = nn.Linear(width, vocabulary)

    def forward(self, ids):
        x = self.norm(self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        keep = (ids != 0)[:, None, None, :]
        if self.native:
            # The mask as floats: what the layer makes of one of bools has as many forms as there are versions.
            mask = torch.where(keep[:, 0, 0], 0.0, -1e9).to(x.dtype)
            for layer in self.layers:
                x = layer(x, src_key_padding_mask=mask)
        else:
            for i, (attention, wide) in enumerate(zip(self.attentions, self.mlps)):
                x = self.norms[2 * i](x + attention(x, keep))
                x = self.norms[2 * i + 1](x + wide(x))
        return self.decoder(self.transform_norm(F.gelu(self.transform(x))))


class Llama(nn.Module):
    """One block with RMS normalisation, rotary positions, and a gated MLP."""

    def __init__(self, width=24, heads=3, vocabulary=40, length=16):
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm1, self.norm2, self.norm3 = (nn.RMSNorm(width, eps=1e-5) for _ in range(3))
        self.q, self.k, self.v, self.o = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(width, 2 * width, bias=False) for _ in range(2))
        self.down, self.head = nn.Linear(2 * width, width, bias=False), nn.Linear(width, vocabulary, bias=False)
        angles = torch.outer(torch.arange(length).float(), 100.0 ** -(torch.arange(0, width // heads, 2) / (width // heads)))
        self.register_buffer("cos", angles.cos())
        self.register_buffer("sin", angles.sin())
        nn.init.normal_(self.embedding.weight, std=0.1)

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def turn(self, x):
        a, b = x.chunk(2, -1)
        return torch.cat([a * self.cos - b * self.sin, b * self.cos + a * self.sin], -1)

    def forward(self, ids):
        x = self.embedding(ids)
        y = self.norm1(x)
        q, k, v = self.turn(self.split(self.q(y))), self.turn(self.split(self.k(y))), self.split(self.v(y))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o(y.transpose(1, 2).flatten(2))
        y = self.norm2(x)
        x = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return self.head(self.norm3(x))


class Recurrent(nn.Module):
    """LSTM, GRU or RNN over floats, or over ids if there is a `vocabulary`; the last step's output decides."""

    def __init__(self, kind, layers=1, both=False, vocabulary=0, width=16):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, 8) if vocabulary else nn.Identity()
        self.rnn = kind(8, width, layers, batch_first=True, bidirectional=both)
        self.head = nn.Linear(width * (2 if both else 1), 5)

    def forward(self, x):
        return self.head(self.rnn(self.embedding(x))[0][:, -1])


# ---- data: (generator, rows) -> x, y ----


def classes(shape, count, noise=1.0):
    """Each class has a random centre."""

    def draw(random, rows):
        centres = random.standard_normal((count, *shape))
        labels = random.integers(count, size=rows)
        return (centres[labels] + noise * random.standard_normal((rows, *shape))).astype(np.float32), labels.astype(np.int64)

    return draw


def ignoring(inner, part):
    """Some of the labels are -100, more of them in the first rows of every eight than in the last."""

    def draw(random, rows):
        x, y = inner(random, rows)
        odds = part * (1.75 - 1.5 * (np.arange(rows) % 8) / 7)
        y[random.random(y.shape) < odds.reshape(-1, *[1] * (y.ndim - 1))] = -100
        return x, y

    return draw


def regression(inputs, outputs):
    def draw(random, rows):
        x = random.standard_normal((rows, inputs))
        y = np.tanh(x @ random.standard_normal((inputs, outputs)) / inputs**0.5) + 0.3 * random.standard_normal((rows, outputs))
        return x.astype(np.float32), y.astype(np.float32)

    return draw


def tags(inputs, outputs):
    """Several yes or no answers a row, as floats."""

    def draw(random, rows):
        x = random.standard_normal((rows, inputs))
        return x.astype(np.float32), (x @ random.standard_normal((inputs, outputs)) > 0).astype(np.float32)

    return draw


def itself(shape):
    def draw(random, rows):
        coarse = random.standard_normal((rows, shape[0], shape[1] // 4, shape[2] // 4))
        x = coarse.repeat(4, 2).repeat(4, 3).astype(np.float32)
        return x, x.copy()

    return draw


def pixels(shape, count):
    """A class for each pixel, by its brightest channel nearby."""

    def draw(random, rows):
        coarse = random.standard_normal((rows, shape[0], shape[1] // 4, shape[2] // 4)).repeat(4, 2).repeat(4, 3)
        x = coarse + 0.5 * random.standard_normal(coarse.shape)
        return x.astype(np.float32), coarse[:, :count].argmax(1).astype(np.int64)

    return draw


def masks(shape, outputs):
    """The same with a float for each output channel."""

    def draw(random, rows):
        coarse = random.standard_normal((rows, shape[0], shape[1] // 4, shape[2] // 4)).repeat(4, 2).repeat(4, 3)
        x = coarse + 0.5 * random.standard_normal(coarse.shape)
        return x.astype(np.float32), (coarse[:, :outputs] > 0).astype(np.float32)

    return draw


def chain(random, rows, length, vocabulary):
    """Each token follows from the one before it, most of the time; no zeros."""
    follows = random.permutation(vocabulary - 1) + 1
    ids = np.empty((rows, length), np.int64)
    ids[:, 0] = random.integers(1, vocabulary, rows)
    for i in range(1, length):
        surprise = random.random(rows) < 0.2
        ids[:, i] = np.where(surprise, random.integers(1, vocabulary, rows), follows[ids[:, i - 1] - 1])
    return ids


def next_token(length=16, vocabulary=40):
    def draw(random, rows):
        ids = chain(random, rows, length + 1, vocabulary)
        return ids[:, :-1].copy(), ids[:, 1:].copy()

    return draw


def masked_tokens(length=16, vocabulary=40):
    """Rows of several lengths, 0 behind them; a quarter of the tokens is replaced by token 1 and to be found again."""

    def draw(random, rows):
        ids = chain(random, rows, length, vocabulary)
        real = np.arange(length) < random.integers(length // 2, length + 1, (rows, 1))
        hidden = (random.random(ids.shape) < 0.25) & real
        hidden[:, 0] = True
        return np.where(hidden, 1, np.where(real, ids, 0)), np.where(hidden, ids, -100)

    return draw


def sentences(length=12, vocabulary=30, count=5):
    """The class is the last token's remainder."""

    def draw(random, rows):
        ids = chain(random, rows, length, vocabulary)
        return ids, ids[:, -1] % count

    return draw
