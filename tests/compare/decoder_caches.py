#!/usr/bin/env python3
"""Generates tokens with exported decoders whose caches grow by Concat: plimsoll with caches as states, onnxruntime with caches that the
host feeds back. The tokens must be equal.

    python tests/compare/decoder_caches.py [--tokens 1000] [--output-dir DIR] [--only WORD]... [--backend cpu|wgpu|cuda] [--threads N]
        [--copying]

With --copying the tokens are also compared with those of the plan that copies: caches are inputs and outputs of a run, which is a process of
its own for each token.

GPT-2 and Llama with seeded random weights (4 layers of width 256, a vocabulary of 1000), by both of PyTorch's exporters. The next token
is an ArgMax inside of the graph, and a list of the last tokens is a state, too, so that one command generates and returns them all.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import onnx
import onnxruntime
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import DynamicCache

SEED, HEAD = 7, 64
EXPORTERS = ("ts", "dy")


@dataclass
class Size:
    layers: int = 4
    width: int = 256
    vocabulary: int = 1000

    @property
    def heads(self):
        return self.width // HEAD


def gpt2(size):
    config = GPT2Config(n_layer=size.layers, n_embd=size.width, n_head=size.heads, vocab_size=size.vocabulary)
    config.n_positions, config.initializer_range, config._attn_implementation = 4096, 0.3, "eager"
    return GPT2LMHeadModel(config), size.heads


def llama(size):
    config = LlamaConfig(hidden_size=size.width, intermediate_size=2 * size.width, num_hidden_layers=size.layers)
    config.vocab_size, config.num_attention_heads, config.num_key_value_heads = size.vocabulary, size.heads, size.heads // 2
    config.head_dim, config.initializer_range, config._attn_implementation = HEAD, 0.3, "eager"
    return LlamaForCausalLM(config), size.heads // 2


MODELS = {"gpt2": gpt2, "llama": llama}


def made(name, size):
    """A model with the weights of the seed, and its heads of keys and values."""
    torch.manual_seed(SEED)
    model, heads = MODELS[name](size)
    return model.eval(), heads


class Step(torch.nn.Module):
    """One token in, the next one out; `history` keeps the last tokens."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids, history, *past):
        cache = DynamicCache()
        for layer in range(len(past) // 2):
            cache.update(past[2 * layer], past[2 * layer + 1], layer)
        out = self.model(input_ids=input_ids, past_key_values=cache, use_cache=True)
        present = [t for layer in out.past_key_values.layers for t in (layer.keys, layer.values)]
        token = out.logits[:, -1:].argmax(-1)
        later = torch.cat([history[:, 1:], token], 1)
        return (token, later, later.clone(), *present)


def export(name, exporter, tokens, path, size=Size(), dtype=torch.float32):
    model, heads = made(name, size)
    step = Step(model.to(dtype))
    past = [torch.randn(1, heads, 5, HEAD).to(dtype) for _ in range(2 * size.layers)]
    inputs = (torch.ones(1, 1, dtype=torch.int64), torch.zeros(1, tokens, dtype=torch.int64), *past)
    caches = [f"past_key_values.{layer}.{part}" for layer in range(size.layers) for part in ("key", "value")]
    presents = [cache.replace("past_key_values", "present") for cache in caches]
    names = {
        "input_names": ["input_ids", "history", *caches],
        "output_names": ["next_token", "next_history", "tokens", *presents],
    }
    with torch.no_grad():
        if exporter == "dy":
            dim = torch.export.Dim("past_sequence_length", min=1, max=4000)
            shapes = {"input_ids": None, "history": None, "past": tuple({2: dim} for _ in past)}
            torch.onnx.export(step, inputs, dynamo=True, dynamic_shapes=shapes, verbose=False, **names).save(path)
        else:
            axes = {cache: {2: "past_sequence_length"} for cache in caches}
            axes.update({present: {2: "total_sequence_length"} for present in presents})
            torch.onnx.export(step, inputs, path, dynamo=False, dynamic_axes=axes, opset_version=17, **names)


def by_onnxruntime(path, tokens, threads):
    """The tokens, and the seconds per token."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    outputs = [output.name for output in session.get_outputs()]
    feeds = {}
    for value in session.get_inputs():
        dtype = np.int64 if "int64" in value.type else np.float32
        feeds[value.name] = np.zeros([d if isinstance(d, int) else 0 for d in value.shape], dtype)
    start = time.perf_counter()
    for _ in range(tokens):
        found = dict(zip(outputs, session.run(None, feeds)))
        feeds["input_ids"], feeds["history"] = found["next_token"], found["next_history"]
        feeds.update({name: found[name.replace("past_key_values", "present")] for name in feeds if "past" in name})
    return found["tokens"], (time.perf_counter() - start) / tokens


def by_plimsoll(binary, path, tokens, backend, threads, folder):
    """The tokens, and the report of the run."""
    states = ["past_key_values.*=present.*", "input_ids=next_token", "history=next_history"]
    command = [binary, "run", path, "--backend", backend, "--iters", tokens, "--output-dir", folder, "--json"]
    command += [part for state in states for part in ("--state", state)]
    command += ["--set", f"past_sequence_length=0..{tokens}"]
    command += ["--threads", threads] if backend == "cpu" else []
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(done.stderr)
    return np.load(folder / "tokens.npy"), json.loads(done.stdout)


def by_copies(binary, path, tokens, backend, threads, folder):
    """The tokens, where each run gets the caches as inputs and gives new ones as outputs."""
    model = onnx.load(path, load_external_data=False).graph
    feeds, held = {}, folder / "copies"
    for value in model.input:
        dims = value.type.tensor_type
        dtype = np.int64 if dims.elem_type == onnx.TensorProto.INT64 else np.float32
        feeds[value.name] = np.zeros([d.dim_value for d in dims.shape.dim], dtype)
    threads = ["--threads", str(threads)] if backend == "cpu" else []
    for at in range(tokens):
        command = [str(binary), "run", str(path), "--backend", backend, *threads, "--output-dir", str(held)]
        command += ["--set", f"past_sequence_length={at}"]
        for number, (name, array) in enumerate(feeds.items()):
            np.save(folder / f"copy-{number}.npy", array)
            command += ["--input", f"{name}={folder / f'copy-{number}.npy'}"]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            sys.exit(done.stderr)
        found = lambda name: np.load(held / f"{name}.npy")
        feeds["input_ids"], feeds["history"] = found("next_token"), found("next_history")
        feeds.update({name: found(name.replace("past_key_values", "present")) for name in feeds if "past" in name})
    return found("tokens")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--output-dir", type=Path, default=Path("tests/models"))
    parser.add_argument("--only", action="append", default=[])
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--copying", action="store_true", help="compare with a plan that copies the caches, too")
    parser.add_argument("--binary", default="target/release/plimsoll")
    arguments = parser.parse_args()
    tokens, folder = arguments.tokens, arguments.output_dir
    folder.mkdir(parents=True, exist_ok=True)
    failed = 0
    print(f"{'model':10} {'tokens':>6} {'equal':>6} {'onnxruntime':>13} {'plimsoll':>13} {'bytes at token 1':>17} {'at the last':>12}")
    for name in MODELS:
        for exporter in EXPORTERS:
            label = f"{name}.{exporter}"
            if arguments.only and not any(word in label for word in arguments.only):
                continue
            path = folder / f"{label}-cache.onnx"
            if not path.exists():
                export(name, exporter, tokens, str(path))
            expected, theirs = by_onnxruntime(str(path), tokens, arguments.threads)
            found, report = by_plimsoll(arguments.binary, path, tokens, arguments.backend, arguments.threads, folder)
            runs, equal = report["runs"], int((expected == found).sum())
            failed += equal != expected.size
            ours = runs["seconds"] / tokens
            first, last = runs["allocated_bytes_first"], runs["allocated_bytes_last"]
            failed += first != last
            if arguments.copying:
                copied = by_copies(arguments.binary, path, tokens, arguments.backend, arguments.threads, folder)
                same = int((copied == found).sum())
                failed += same != found.size
                print(f"{label:10} {same} tokens are those of the plan that copies")
            print(f"{label:10} {tokens:6} {equal:6} {theirs * 1e6:10.0f} us {ours * 1e6:10.0f} us {first:17} {last:12}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
