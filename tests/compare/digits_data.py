#!/usr/bin/env python3
"""Writes scikit-learn's digits, and a network that has learnt nothing yet, for `plimsoll train`.

    python tests/compare/digits_data.py FOLDER [--flat] [--model]

writes, under FOLDER:
    x.npy y.npy              f32 [1437, 1, 8, 8], ink from 0 to 1; i64 [1437]
    valid-x.npy valid-y.npy  the other 360, drawn evenly over the classes: the ones that train_digits.py sets aside
    digits-fresh.onnx        with --model: the network of train_digits.py with PyTorch's initial weights

With --flat the images are rows of 64.
"""

import argparse
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

SEED = 8
HELD_BACK = 360


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--flat", action="store_true", help="images as rows of 64")
    parser.add_argument("--model", action="store_true", help="the network, too, which needs PyTorch")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)

    digits = load_digits()
    images = (digits.images / 16).astype(np.float32)[:, None]
    parts = train_test_split(images, digits.target.astype(np.int64), test_size=HELD_BACK, random_state=SEED, stratify=digits.target)
    for name, array in zip(("x", "valid-x", "y", "valid-y"), parts):
        if args.flat and array.ndim > 1:
            array = array.reshape(len(array), -1)
        np.save(args.folder / f"{name}.npy", array)
        print(f"{name}.npy  {array.dtype} {list(array.shape)}")

    if args.model:
        import torch
        import train_digits

        torch.manual_seed(SEED)
        train_digits.export(train_digits.Digits().eval(), args.folder / "digits-fresh.onnx")
        print("digits-fresh.onnx")


if __name__ == "__main__":
    main()
