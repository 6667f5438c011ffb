#!/usr/bin/env python3
"""Trains graphs/digits.onnx, a classifier of handwritten digits, and writes its held-back test set.

The data are the 1,797 real 8x8 digits that come with scikit-learn (the test part of UCI's "Optical Recognition of
Handwritten Digits"). 360 of them, drawn evenly over the classes, are set aside before anything else happens and take
no part in training or in any choice; the script reads them once, at the end, to print the accuracy.

    pip install -r tests/compare/requirements.txt && python tests/compare/train_digits.py

writes, under graphs/:
    digits.onnx         image f32 [batch, 1, 8, 8], ink from 0 to 1  ->  logits f32 [batch, 10]
    digits-images.npy   f32 [360, 1, 8, 8]
    digits-labels.npy   i64 [360]

One thread and fixed seeds: the same versions on the same kind of machine give the same weights.
"""

import argparse
import math
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.nn import functional as F

SEED = 8
HELD_BACK = 360
EPOCHS = 120
BATCH = 64


def conv(inputs, outputs):
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU())


class Digits(nn.Module):
    """8x8 -> 4x4 -> 2x2 -> 10; 24,462 weights."""

    def __init__(self):
        super().__init__()
        self.stem = conv(1, 16)
        self.body = conv(16, 32)
        self.pool = nn.MaxPool2d(2)
        self.head = conv(32, 48)
        self.hidden = nn.Linear(48 * 2 * 2, 28)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(28, 10)

    def forward(self, image):
        x = self.pool(self.body(self.stem(image)))
        x = self.pool(self.head(x)).flatten(1)
        return self.out(self.drop(F.relu(self.hidden(x))))


def jitter(images):
    """Each image turned, scaled and shifted a little, by its own amount."""
    count = len(images)
    angle = (torch.rand(count) - 0.5) * math.radians(24)
    scale = 1 + (torch.rand(count) - 0.5) * 0.2
    shift = (torch.rand(count, 2) - 0.5) * 0.4  # of half the width: up to 0.8 pixels
    cos, sin = angle.cos() * scale, angle.sin() * scale
    affine = torch.stack([torch.stack([cos, -sin, shift[:, 0]], 1), torch.stack([sin, cos, shift[:, 1]], 1)], 1)
    return F.grid_sample(images, F.affine_grid(affine, images.shape, align_corners=False), align_corners=False)


def train(model, images, labels):
    steps = EPOCHS * math.ceil(len(images) / BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps)
    model.train()
    for epoch in range(1, EPOCHS + 1):
        total = 0.0
        for rows in torch.randperm(len(images)).split(BATCH):
            loss = F.cross_entropy(model(jitter(images[rows])), labels[rows], label_smoothing=0.05)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item() * len(rows)
        if epoch % 20 == 0:
            print(f"epoch {epoch:3}  training loss {total / len(images):.4f}")
    model.eval()


def export(model, path):
    """Batch normalisation stays a node of its own, so the graph has something to fold."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (torch.zeros(2, 1, 8, 8),),
            path,
            dynamo=False,
            opset_version=17,
            training=torch.onnx.TrainingMode.PRESERVE,
            do_constant_folding=False,
            input_names=["image"],
            output_names=["logits"],
            dynamic_axes={"image": {0: "batch"}, "logits": {0: "batch"}},
        )
    graph = onnx.load(path)
    graph.graph.name = "digits"
    graph.doc_string = "Handwritten digits: ink from 0 to 1 to ten logits. By tests/compare/train_digits.py."
    onnx.checker.check_model(graph, full_check=True)
    onnx.save(graph, path)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output-dir", type=Path, default=Path(__file__).resolve().parents[2] / "graphs")
    out = parser.parse_args().output_dir
    out.mkdir(parents=True, exist_ok=True)

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(SEED)

    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[:, None]
    labels = digits.target.astype(np.int64)
    images, test_images, labels, test_labels = train_test_split(
        images, labels, test_size=HELD_BACK, random_state=SEED, stratify=labels
    )

    model = Digits()
    print(f"{sum(p.numel() for p in model.parameters()):,} weights, {len(images):,} training images")
    train(model, torch.from_numpy(images), torch.from_numpy(labels))

    export(model, out / "digits.onnx")
    np.save(out / "digits-images.npy", test_images)
    np.save(out / "digits-labels.npy", test_labels)

    logits = onnxruntime.InferenceSession(out / "digits.onnx").run(None, {"image": test_images})[0]
    right = int((logits.argmax(1) == test_labels).sum())
    print(f"held back: {right} of {HELD_BACK} right, {right / HELD_BACK:.2%}")


if __name__ == "__main__":
    main()
