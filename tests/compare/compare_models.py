#!/usr/bin/env python3
"""Runs exported models in plimsoll and compares every output with onnxruntime's.

    python tests/compare/compare_models.py [FOLDER] [--backend cpu|cuda|wgpu] [--batch 1] [--only WORD]...
        [--plimsoll PATH]

The error of an output is its largest absolute difference over the largest magnitude that onnxruntime computed; an
output fails above --tolerance, on another shape or dtype, and on NaN. Exit code 3 when any model fails.
"""

import sys
import tempfile
import time
from pathlib import Path

import numpy as np

import zoo


def output_error(found, expected):
    """Relative to the expected peak; infinite where the two cannot be compared."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if expected.size == 0:
        return 0.0
    found, expected = found.astype(np.float64), expected.astype(np.float64)
    difference = float(np.abs(found - expected).max())
    peak = float(np.abs(expected).max())
    return difference / peak if peak else difference


def compare(plimsoll, case, backend):
    """The worst output's error and name."""
    with tempfile.TemporaryDirectory() as folder:
        flags = ["--output-dir", folder, "--backend", backend]
        zoo.plimsoll(plimsoll, "run", case, *zoo.input_flags(case), *flags)
        errors = []
        for name, path in case.output_files().items():
            found = Path(folder) / zoo.file_name(name)
            if not found.is_file():
                raise zoo.Failed(f"no {found.name}")
            errors.append((output_error(np.load(found), np.load(path)), name))
    # NaN first, then the largest.
    return max(errors, key=lambda pair: (np.isnan(pair[0]), pair[0]))


def main():
    parser = zoo.arguments(__doc__)
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    args = parser.parse_args()
    found = zoo.cases_or_exit(args)
    rows, failed = [], 0
    for case in found:
        zoo.progress(case.label)
        start = time.monotonic()
        try:
            error, note = compare(args.plimsoll, case, args.backend)
        except zoo.Failed as problem:
            error, note = float("nan"), str(problem)
        good = error <= args.tolerance
        failed += not good
        rows.append([case.label, f"{error:.1e}", note, f"{time.monotonic() - start:.1f}", "ok" if good else "FAILED"])
    zoo.progress("")
    print(zoo.table(["model", "error / peak", "worst output", "seconds", ""], rows, right=(1, 3)))
    print(f"{len(found) - failed} of {len(found)} within {args.tolerance:g} on {args.backend}")
    sys.exit(3 if failed else 0)


if __name__ == "__main__":
    main()
