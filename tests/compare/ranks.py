"""Models that PyTorch exports, computed by one process and by the ranks of meshes: outputs, and the losses of trainings.

    python tests/compare/ranks.py PLIMSOLL [FOLDER]

Needs torch, torchvision, transformers and onnxscript; mpirun on the PATH, and the library of MPI that goes with it. Prints a line per model: how far
the outputs of each mesh are from those of one process, as a share of the largest element; then one per training: how far the loss of any of 30 updates
is from that of one process, as a share of it.
"""

import json
import os
import subprocess
import sys
import warnings
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor

import numpy as np
import torch

warnings.filterwarnings("ignore")
MESHES = ["data=2", "tensor=2", "tensor=4", "stage=2"]
VISION = {
    "resnet18": ("resnet18", {}),
    "resnet50": ("resnet50", {}),
    "mobilenet_v2": ("mobilenet_v2", {}),
    "mobilenet_v3": ("mobilenet_v3_small", {}),
    "vgg11": ("vgg11_bn", {}),
    "densenet": ("densenet121", {}),
    "efficientnet": ("efficientnet_b0", {}),
    "squeezenet": ("squeezenet1_1", {}),
    "shufflenet": ("shufflenet_v2_x1_0", {}),
    "regnet": ("regnet_y_400mf", {}),
    "convnext": ("convnext_tiny", {}),
    "swin": ("swin_t", {}),
    "vit": ("vit_b_32", {"image_size": 64}),
    "mnasnet": ("mnasnet0_5", {}),
    "alexnet": ("alexnet", {}),
}
TEXT = ["bert", "gpt2", "distilbert", "llama", "albert"]
TRAINED = ["resnet18", "mobilenet_v3", "squeezenet", "shufflenet", "regnet", "mnasnet", "vit", "densenet"]


class Only(torch.nn.Module):
    """One output of a model of tokens."""

    def __init__(self, model, output):
        super().__init__()
        self.model, self.output = model, output

    def forward(self, ids):
        return getattr(self.model(ids), self.output)


def vision(name):
    import torchvision

    model, options = VISION[name]
    size = 96 if name == "alexnet" else 64
    return getattr(torchvision.models, model)(weights=None, num_classes=10, **options), (torch.randn(4, 3, size, size),)


def text(name):
    import transformers as t

    of = {"vocab_size": 500, "attn_implementation": "eager"}
    wide = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model, output = {
        "bert": lambda: (t.BertModel(t.BertConfig(**of, **wide)), "last_hidden_state"),
        "albert": lambda: (t.AlbertModel(t.AlbertConfig(embedding_size=64, **of, **wide)), "last_hidden_state"),
        "llama": lambda: (t.LlamaForCausalLM(t.LlamaConfig(use_cache=False, **of, **wide)), "logits"),
        "gpt2": lambda: (
            t.GPT2LMHeadModel(t.GPT2Config(n_embd=64, n_layer=2, n_head=4, n_positions=64, use_cache=False, **of)),
            "logits",
        ),
        "distilbert": lambda: (
            t.DistilBertModel(t.DistilBertConfig(dim=64, n_layers=2, n_heads=4, hidden_dim=128, **of)),
            "last_hidden_state",
        ),
    }[name]()
    return Only(model, output), (torch.randint(0, 500, (4, 16)),)


def export(task):
    name, folder = task
    torch.manual_seed(1)
    torch.set_num_threads(2)
    model, inputs = vision(name) if name in VISION else text(name)
    path = f"{folder}/{name}.onnx"
    torch.onnx.export(model.eval(), inputs, path, dynamo=True, verbose=False, external_data=False)


def command(plimsoll, verb, path, mesh):
    ranks = int(np.prod([int(axis.split("=")[1]) for axis in mesh.split(",")])) if mesh else 1
    launcher = ["mpirun", "-n", str(ranks)] if ranks > 1 else []
    of = ["--mesh", mesh] if mesh else []
    return [*launcher, plimsoll, verb, path, "--backend", "cpu", "--threads", "1", *of]


def run(plimsoll, folder, name, mesh):
    """The outputs of a run, or why there are none."""
    out = f"{folder}/{name}-{mesh or 'one'}"
    os.makedirs(out, exist_ok=True)
    ran = command(plimsoll, "run", f"{folder}/{name}.onnx", mesh) + ["--output-dir", out, "--json"]
    done = subprocess.run(ran, capture_output=True, text=True, timeout=300)
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    memory = json.loads(done.stdout.splitlines()[-1])["memory"]
    if memory["planned_bytes"] != memory["allocated_bytes"]:
        return "planned != allocated"
    return {file: np.load(f"{out}/{file}").astype(np.float64) for file in sorted(os.listdir(out))}


def compared(plimsoll, folder, name):
    expected = run(plimsoll, folder, name, "")
    if isinstance(expected, str):
        return f"{name:14} one process: {expected}"
    told = []
    for mesh in MESHES:
        found = run(plimsoll, folder, name, mesh)
        if isinstance(found, str):
            told.append(f"{mesh} FAILED: {found}")
            continue
        off = max(np.abs(a - found[file]).max() / max(np.abs(a).max(), 1e-30) for file, a in expected.items())
        told.append(f"{mesh} {off:.1e}{'' if off <= 1e-5 else ' OFF'}")
    return f"{name:14} {'  '.join(told)}"


def trained(plimsoll, folder, name):
    numbers = np.random.default_rng(0)
    data, labels = f"{folder}/{name}-x.npy", f"{folder}/{name}-y.npy"
    np.save(data, numbers.standard_normal((64, 3, 64, 64)).astype(np.float32))
    np.save(labels, numbers.integers(0, 10, 64))
    method = "--loss cross_entropy --batch 8 --accumulate 2 --clip-norm 1 --optimizer sgd --momentum 0.9 --lr 0.001 --steps 30 -q"
    losses = []
    for mesh in ["", "data=2", "data=4"]:
        log = f"{folder}/{name}-{mesh or 'one'}.log"
        ran = command(plimsoll, "train", f"{folder}/{name}.onnx", mesh)
        ran += ["--data", data, "--labels", labels, "--log", log, *method.split()]
        done = subprocess.run(ran, capture_output=True, text=True, timeout=600)
        if done.returncode:
            return f"train {name:14} {mesh or 'one process'} FAILED: {done.stderr.strip().splitlines()[-1]}"
        with open(log) as lines:
            losses.append(np.array([row["loss"] for row in map(json.loads, lines) if "loss" in row]))
    off = [np.max(np.abs(losses[0] - own) / np.abs(losses[0])) for own in losses[1:]]
    return f"train {name:14} 2 ranks {off[0]:.1e}  4 ranks {off[1]:.1e}"


def main():
    plimsoll, folder = os.path.abspath(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else "exported"
    os.makedirs(folder, exist_ok=True)
    names = [*VISION, *TEXT]
    with ProcessPoolExecutor(4) as pool:
        list(pool.map(export, [(name, folder) for name in names]))
    with ThreadPoolExecutor(4) as pool:
        for line in pool.map(lambda name: compared(plimsoll, folder, name), names):
            print(line, flush=True)
        for line in pool.map(lambda name: trained(plimsoll, folder, name), TRAINED):
            print(line, flush=True)


if __name__ == "__main__":
    main()
