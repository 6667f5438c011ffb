#!/usr/bin/env python3
"""Writes scikit-learn's digits for `plimsoll train`: those that train_digits.py trains on.

    python tests/compare/digits_data.py [FOLDER] [--model]

writes, under FOLDER, which is graphs/ unless it is given:
    digits-train-images.npy   f16 [1437, 1, 8, 8], ink from 0 to 1 in sixteenths, which f16 holds exactly
    digits-train-labels.npy   u8 [1437]
    digits-fresh.onnx         with --model: a network of two hidden layers with PyTorch's initial weights

The other 360 digits, drawn evenly over the classes, are graphs/digits-images.npy and graphs/digits-labels.npy.
"""

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

GRAPHS = Path(__file__).resolve().parents[2] / "graphs"
SEED = 8
HELD_BACK = 360


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=GRAPHS)
    parser.add_argument("--model", action="store_true", help="the network, too, which needs PyTorch")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)

    digits = load_digits()
    images = (digits.images / 16).astype(np.float16)[:, None]
    parts = train_test_split(images, digits.target.astype(np.uint8), test_size=HELD_BACK, random_state=SEED, stratify=digits.target)
    images, _, labels, _ = parts
    for name, array in (("images", images), ("labels", labels)):
        np.save(args.folder / f"digits-train-{name}.npy", array)
        print(f"digits-train-{name}.npy  {array.dtype} {list(array.shape)}")

    if args.model:
        import torch
        from torch import nn

        torch.manual_seed(SEED)
        layers = [nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]
        torch.onnx.export(
            nn.Sequential(*layers),
            (torch.zeros(2, 1, 8, 8),),
            args.folder / "digits-fresh.onnx",
            input_names=["image"],
            output_names=["logits"],
            dynamic_axes={"image": {0: "batch"}, "logits": {0: "batch"}},
            opset_version=17,
            dynamo=False,
        )
        print("digits-fresh.onnx")


if __name__ == "__main__":
    main()
