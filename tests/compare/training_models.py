"""The models that training.py trains, each written as it usually is, and small enough for a CPU."""

import math

import torch
from torch import nn
from torch.nn import functional as F

# ---- plain ----


def linear():
    return nn.Linear(10, 1)


def mlp():
    return nn.Sequential(nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


def cnn():
    """For the 8 x 8 digits."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 2 * 2, 10)),
    )


class ResidualMLP(nn.Module):
    def __init__(self, blocks=16, width=256):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        for block in self.blocks:
            x = x + F.relu(block(x))
        return self.head(x)


# ---- images ----


def conv_norm(inputs, outputs, kernel=3, stride=1, groups=1, act=nn.ReLU):
    layers = [nn.Conv2d(inputs, outputs, kernel, stride, (kernel - 1) // 2, groups=groups, bias=False), nn.BatchNorm2d(outputs)]
    return layers if act is None else [*layers, act(inplace=True)]


class Residual(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(*conv_norm(inputs, outputs, stride=stride), *conv_norm(outputs, outputs, act=None))
        self.skip = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.skip = nn.Sequential(*conv_norm(inputs, outputs, 1, stride, act=None))

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x), inplace=True)


def resnet18(classes=10):
    stages = [(64, 64, 1), (64, 64, 1), (64, 128, 2), (128, 128, 1), (128, 256, 2), (256, 256, 1), (256, 512, 2), (512, 512, 1)]
    return nn.Sequential(
        *(*conv_norm(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)),
        *(Residual(*stage) for stage in stages),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, classes)),
    )


class Inverted(nn.Module):
    def __init__(self, inputs, outputs, stride, expand):
        super().__init__()
        wide = inputs * expand
        first = conv_norm(inputs, wide, 1, act=nn.ReLU6) if expand > 1 else []
        rest = [*conv_norm(wide, wide, 3, stride, groups=wide, act=nn.ReLU6), *conv_norm(wide, outputs, 1, act=None)]
        self.body = nn.Sequential(*first, *rest)
        self.adds = stride == 1 and inputs == outputs

    def forward(self, x):
        return x + self.body(x) if self.adds else self.body(x)


def mobilenet_v2(classes=10):
    layers, inputs = conv_norm(3, 32, stride=2, act=nn.ReLU6), 32
    stages = [(1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1)]
    for expand, outputs, count, stride in stages:
        for i in range(count):
            layers.append(Inverted(inputs, outputs, 1 if i else stride, expand))
            inputs = outputs
    layers += conv_norm(320, 1280, 1, act=nn.ReLU6)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, classes))


class UNet(nn.Module):
    """Upsampled by repetition, and merged with the features of the same size."""

    def __init__(self, width=32, levels=3, classes=10):
        super().__init__()
        double = lambda i, o: nn.Sequential(*conv_norm(i, o), *conv_norm(o, o))
        widths = [width * 2**i for i in range(levels)]
        self.down = nn.ModuleList(double(i, o) for i, o in zip([3, *widths], widths))
        self.merge = nn.ModuleList(double(3 * w, w) for w in widths[-2::-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x):
        skips = []
        for i, block in enumerate(self.down):
            x = block(F.max_pool2d(x, 2) if i else x)
            skips.append(x)
        skips.pop()
        for merge in self.merge:
            x = merge(torch.cat([F.interpolate(x, scale_factor=2.0, mode="nearest"), skips.pop()], 1))
        return self.head(x)


# ---- sequences ----


class Attention(nn.Module):
    """`fused`: PyTorch's scaled_dot_product_attention, which does not keep the scores for the backward pass."""

    fused = False

    def __init__(self, width, heads, causal=False, length=128):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.register_buffer("hidden", ~torch.ones(length, length, dtype=torch.bool).tril() if causal else None, persistent=False)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            scores = q @ k.transpose(-1, -2) / math.sqrt(width // self.heads)
            if self.causal:
                scores = scores.masked_fill(self.hidden, -1e9)
            y = scores.softmax(-1) @ v
        return self.out(y.transpose(1, 2).reshape(batch, length, width))


def wide(width, approximate="none"):
    return nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate), nn.Linear(4 * width, width))


class Block(nn.Module):
    def __init__(self, width, heads, approximate="none", causal=False):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.mlp = Attention(width, heads, causal), wide(width, approximate)

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, width=192, layers=6, heads=3, size=64, patch=8, classes=10):
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.cls = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (size // patch) ** 2 + 1, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(x.shape[0], -1, -1), x], 1) + self.position
        return self.head(self.norm(self.blocks(x))[:, 0])


class GPT2(nn.Module):
    """The embedding is the head's weight, too."""

    def __init__(self, width=256, layers=4, heads=2, vocabulary=1000, length=128):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads, "tanh", causal=True) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.wte.weight, std=0.02)
        nn.init.normal_(self.wpe.weight, std=0.02)
        self.head.weight = self.wte.weight

    def forward(self, ids):
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.norm(self.blocks(x)))


class BERT(nn.Module):
    """BERT-tiny's layers, norms last, with a pooler and a head of two classes."""

    def __init__(self, width=128, layers=2, heads=2, vocabulary=1000, length=128):
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.attentions = nn.ModuleList(Attention(width, heads) for _ in range(layers))
        self.wides = nn.ModuleList(wide(width) for _ in range(layers))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.pooler, self.head = nn.Linear(width, width), nn.Linear(width, 2)

    def forward(self, ids):
        x = self.norm(self.words(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for i, (attention, mlp) in enumerate(zip(self.attentions, self.wides)):
            x = self.norms[2 * i](x + attention(x))
            x = self.norms[2 * i + 1](x + mlp(x))
        return self.head(torch.tanh(self.pooler(x[:, 0])))
