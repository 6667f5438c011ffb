#!/usr/bin/env python3
"""Times the tokens of decoders on one NVIDIA GPU, in one run: plimsoll with growing caches as states, PyTorch with a StaticCache and its
step as a CUDA graph.

    python tests/compare/decoder_cuda.py [FOLDER] [--tokens 1000] [--dtype f32|bf16] [--layers N] [--width N] [--vocabulary N]
        [--only WORD]... [--exporter dy|ts] [--rounds N] [--compile] [--json FILE] [--plimsoll PATH]

The decoders are those of decoder_caches.py. FOLDER is where their files are, or are written: the weights of a file are those of its seed, so
files that other versions of the packages wrote may hold others. Both sides generate the same tokens from an empty cache, with an ArgMax on
the device and no word to the host between tokens: PyTorch replays its graph once per token and waits at the end; plimsoll is `run --iters`.
PyTorch attends with scaled_dot_product_attention, TF32 off; with --compile its forward pass is also compiled (max-autotune) before it is captured.
The two take turns; medians and the fastest of the rounds are printed. Memory: what plimsoll planned, and the most that PyTorch's tensors took.

Exit code 1 if a token in f32 differs, or if plimsoll's bytes at the last token are not those planned.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch
from transformers import StaticCache

import decoder_caches

DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16}


class Generator:
    """PyTorch's side: one step, captured, and the tensors that it goes on with."""

    def __init__(self, name, size, dtype, tokens, is_compiled):
        model, _ = decoder_caches.made(name, size)
        model.set_attn_implementation("sdpa")
        self.model = model.to("cuda", dtype)
        self.cache = StaticCache(config=model.config, max_cache_len=tokens)
        self.token = torch.zeros(1, 1, dtype=torch.int64, device="cuda")
        self.history = torch.zeros(1, tokens, dtype=torch.int64, device="cuda")
        self.tokens = tokens
        self.best = torch.compile(self.next, mode="max-autotune-no-cudagraphs") if is_compiled else self.next
        torch.cuda.reset_peak_memory_stats()
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(3):
                self.step()
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.step()
        self.bytes = torch.cuda.max_memory_allocated()

    def next(self, token):
        """The next token; the cache is updated in place."""
        return self.model(input_ids=token, past_key_values=self.cache, use_cache=True).logits[:, -1:].argmax(-1)

    def step(self):
        token = self.best(self.token)
        self.history.copy_(torch.cat([self.history[:, 1:], token], 1))
        self.token.copy_(token)

    def generate(self):
        """The tokens from an empty cache, and the seconds per token."""
        for layer in self.cache.layers:
            for tensor in (layer.keys, layer.values, layer.cumulative_length):
                tensor.zero_()
        self.token.zero_()
        self.history.zero_()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(self.tokens):
            self.graph.replay()
        torch.cuda.synchronize()
        return self.history.cpu().numpy(), (time.perf_counter() - start) / self.tokens


def measure(arguments, name, size):
    """A row of the table, and what is wrong with it."""
    tokens, folder = arguments.tokens, arguments.folder
    path = folder / f"{name}.{arguments.exporter}-cache-{size.layers}x{size.width}-{arguments.dtype}-{tokens}.onnx"
    if not path.exists():
        decoder_caches.export(name, arguments.exporter, tokens, str(path), size, DTYPES[arguments.dtype])
    sides = {"graph": Generator(name, size, DTYPES[arguments.dtype], tokens, False)}
    if arguments.compile:
        sides["compiled"] = Generator(name, size, DTYPES[arguments.dtype], tokens, True)
    # A run compiles plimsoll's kernels first, into the cache on disk.
    times, found = {side: [] for side in ("plimsoll", *sides)}, {}
    for turn in range(arguments.rounds + 1):
        found["plimsoll"], report = decoder_caches.by_plimsoll(arguments.plimsoll, path, tokens, "cuda", 1, folder)
        times["plimsoll"].append(report["runs"]["seconds"] / tokens)
        for side, generator in sides.items():
            found[side], seconds = generator.generate()
            times[side].append(seconds)
        if turn == 0:
            times = {side: [] for side in times}
    memory, runs = report["memory"], report["runs"]
    row = {"model": name, "exporter": arguments.exporter, "dtype": arguments.dtype, "layers": size.layers, "width": size.width}
    row |= {"tokens": tokens, "planned": memory["planned_bytes"], "pytorch_bytes": sides["graph"].bytes}
    row["median_us"] = {side: 1e6 * statistics.median(values) for side, values in times.items()}
    row["least_us"] = {side: 1e6 * min(values) for side, values in times.items()}
    row["equal"] = {side: int((found[side] == found["plimsoll"]).sum()) for side in sides}
    wrong = []
    if arguments.dtype == "f32" and row["equal"]["graph"] != tokens:
        wrong.append(f"{name}: {row['equal']['graph']} of {tokens} tokens are equal")
    held = {memory["planned_bytes"], memory["allocated_bytes"], runs["allocated_bytes_first"], runs["allocated_bytes_last"]}
    if len(held) != 1:
        wrong.append(f"{name}: planned, allocated, at the first and at the last token: {held} bytes")
    return row, wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, nargs="?", default=Path("tests/models"))
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--layers", type=int, default=decoder_caches.Size.layers)
    parser.add_argument("--width", type=int, default=decoder_caches.Size.width)
    parser.add_argument("--vocabulary", type=int, default=decoder_caches.Size.vocabulary)
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--exporter", choices=decoder_caches.EXPORTERS, default="dy")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--compile", action="store_true", help="PyTorch's step compiled, too")
    parser.add_argument("--json", type=Path, help="append each row to this file")
    parser.add_argument("--plimsoll", default="target/release/plimsoll")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    size = decoder_caches.Size(arguments.layers, arguments.width, arguments.vocabulary)
    wrongs = []
    torch.set_grad_enabled(False)
    for name in decoder_caches.MODELS:
        if arguments.only and not any(word in name for word in arguments.only):
            continue
        row, wrong = measure(arguments, name, size)
        wrongs += wrong
        if arguments.json:
            with arguments.json.open("a") as file:
                file.write(json.dumps(row) + "\n")
        print(f"{name} {arguments.dtype}, {size.layers} layers of {size.width}, {arguments.tokens} tokens, {arguments.exporter}")
        for side, median in row["median_us"].items():
            equal = f", {row['equal'][side]} tokens equal" if side in row["equal"] else ""
            ratio = row["median_us"]["plimsoll"] / median
            print(f"  {side:10} {median:8.1f} us per token, fastest {row['least_us'][side]:8.1f}, plimsoll / it {ratio:.2f}{equal}")
        print(f"  {row['planned'] / 2**20:.1f} MiB planned; PyTorch's tensors took {row['pytorch_bytes'] / 2**20:.1f} MiB", flush=True)
    for what in wrongs:
        print(what, file=sys.stderr)
    sys.exit(len(wrongs) > 0)


if __name__ == "__main__":
    main()
