#!/usr/bin/env python3
"""Compares training steps of plimsoll with PyTorch's eager ones on the CPU: the bytes that they take, and their time.

    python tests/compare/training.py --bytes [--plan-only] [--limit-curve] [--only GLOB]... [--plimsoll PATH]
    python tests/compare/training.py --speed [--threads 2] [--rounds 3] [--only GLOB]... [--plimsoll PATH]
    python tests/compare/training.py --export-only FOLDER

A case is a model with random weights and random data. Its folder, which --from FOLDER reads in place of a new one:

    model.onnx       the model, exported for inference, batch normalisations as nodes
    x.npy y.npy      the data, three batches
    flags.txt        the words behind `plimsoll`, for a shell in the folder; --steps is to be added

--bytes: what a step takes above weights, optimizer state and batch. Of PyTorch it is the highest sum of all live storages in the second
step (forward, loss, backward, update, gradients set to None), by the profiler's record of its allocator. Of plimsoll it is the arena of
the plan; the batch lies in it. The column "fused" is PyTorch with scaled_dot_product_attention, which does not keep the scores.
--limit-curve adds the least arena at a tenth and at a third of extra work, as shares of PyTorch's peak. The work of a step is three times
that of its forward products and convolutions, as PyTorch counts it.

--speed: both take turns, --rounds times per case. A turn's figure is the median time of a step without the first three; the case's is the
median over the turns. Both read the loss of each step, and take the rows in the order of the file. PyTorch's attention is fused.

Exit code 3 if a case fails.
"""

import argparse
import fnmatch
import json
import math
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
from onnx import numpy_helper

import zoo

# PyTorch's profiler says on stderr that there is no GPU.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")

SEED = 19
BATCHES = 3
SKIPPED = 3


# ---- cases ----


@dataclass
class Case:
    """`build` makes the model, `data` some rows of x and y. `known` is the peak of PyTorch in MB that is to be found again; tiny cases have
    none."""

    name: str
    title: str
    build: object
    data: object
    batch: int
    optimizer: str
    lr: float = 1e-3
    loss: str = "cross_entropy"
    momentum: float = 0.0
    decay: float = 0.0
    known: float = 0.0
    attention: bool = False

    def flags(self):
        words = ["train", "model.onnx", "--data", "x.npy", "--labels", "y.npy"]
        words += f"--loss {self.loss} --optimizer {self.optimizer} --lr {self.lr:g} --batch {self.batch}".split()
        words += ["--momentum", f"{self.momentum:g}"] * bool(self.momentum)
        words += ["--weight-decay", f"{self.decay:g}"] * bool(self.decay)
        return [*words, "--no-shuffle", "--backend", "cpu"]

    def slots(self):
        """Tensors of optimizer state per weight."""
        return 2 if "adam" in self.optimizer else int(bool(self.momentum))


def floats(*shape):
    return lambda random, rows: random.standard_normal((rows, *shape)).astype(np.float32)


def numbers(most, *shape):
    return lambda random, rows: random.integers(most, size=(rows, *shape))


def table():
    import training_models as m

    picture = floats(3, 64, 64)
    ten = numbers(10)
    momentum = {"optimizer": "sgd", "momentum": 0.9, "lr": 0.01}
    adamw = {"optimizer": "adamw", "decay": 0.01, "attention": True}
    return [
        Case("linear", "linear 10-1", m.linear, (floats(10), floats(1)), 16, "sgd", loss="mse", lr=0.1),
        Case("mlp", "MLP 784-100-10", m.mlp, (floats(784), ten), 256, "adam"),
        Case("cnn", "CNN, 8 x 8 digits", m.cnn, (floats(1, 8, 8), ten), 32, "adam"),
        Case("resmlp", "residual MLP 16 x 256", m.ResidualMLP, (floats(256), ten), 256, "adam", known=8.9),
        Case("bert", "BERT-tiny, 128 tokens", m.BERT, (numbers(1000, 128), numbers(2)), 16, known=43.4, **adamw),
        Case("resnet18", "ResNet-18, 64 px", m.resnet18, (picture, ten), 16, known=69.4, **momentum),
        Case("mobilenetv2", "MobileNetV2, 64 px", m.mobilenet_v2, (picture, ten), 16, known=105.1, **momentum),
        Case("vit", "ViT 6 x 192, 64 px", m.ViT, (picture, ten), 16, known=86.2, **adamw),
        Case("gpt2", "GPT-2 4 x 256, 128 tokens", m.GPT2, (numbers(1000, 128), numbers(1000, 128)), 8, known=90.0, **adamw),
        Case("unet", "U-Net, 64 px", m.UNet, (picture, numbers(10, 64, 64)), 8, "adam", known=99.5),
    ]


def prepare(case):
    """The model with its weights, the same at every call."""
    import torch

    torch.manual_seed(SEED)
    return case.build()


def export_model(model, x, path):
    """Exports a model for inference, with an open batch."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model.eval(),
            (x,),
            path,
            input_names=["x"],
            output_names=["output"],
            dynamic_axes={"x": {0: "batch"}, "output": {0: "batch"}},
            opset_version=17,
            dynamo=False,
            # PRESERVE leaves batch normalisations as nodes, in the form of the model, which is that of inference.
            training=torch.onnx.TrainingMode.PRESERVE,
            do_constant_folding=False,
        )


def export(case, folder):
    """Writes the case's folder."""
    import torch

    folder.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(SEED)
    x, y = (draw(random, BATCHES * case.batch) for draw in case.data)
    np.save(folder / "x.npy", x)
    np.save(folder / "y.npy", y)
    (folder / "flags.txt").write_text(shlex.join(case.flags()) + "\n")
    export_model(prepare(case), torch.from_numpy(x[:2]), folder / "model.onnx")
    onnx.checker.check_model(onnx.load(folder / "model.onnx"), full_check=True)


# ---- the step in PyTorch ----


class Eager:
    """PyTorch's training of a case, a step at a time."""

    def __init__(self, case, folder):
        import torch

        self.case, self.model = case, prepare(case).train()
        self.x, self.y = (torch.from_numpy(np.load(folder / name)) for name in ("x.npy", "y.npy"))
        weights, common = self.model.parameters(), {"lr": case.lr, "weight_decay": case.decay}
        kinds = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
        if case.optimizer == "sgd":
            self.optimizer = torch.optim.SGD(weights, momentum=case.momentum, **common)
        else:
            self.optimizer = kinds[case.optimizer](weights, **common)

    def loss(self, output, labels):
        from torch.nn import functional as F

        if self.case.loss == "mse":
            return F.mse_loss(output, labels)
        # The classes of a row of tokens are the last axis, those of an image axis 1.
        if output.ndim == 3:
            output, labels = output.flatten(0, 1), labels.flatten()
        return F.cross_entropy(output, labels)

    def batch(self, step):
        first = step % BATCHES * self.case.batch
        return self.x[first : first + self.case.batch], self.y[first : first + self.case.batch]

    def step(self, x, labels):
        """As it is usually written: the output lives until the end."""
        output = self.model(x)
        loss = self.loss(output, labels)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.item()


def eager_peak(case, folder, fused=False):
    """Bytes above those before the second step."""
    import torch
    import training_models

    training_models.Attention.fused = fused
    eager = Eager(case, folder)
    first, second = eager.batch(0), eager.batch(1)
    eager.step(*first)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        eager.step(*second)
    training_models.Attention.fused = False
    events = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    live = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    if live:
        raise zoo.Failed(f"{live} bytes more are live behind a step of PyTorch than before it")
    return peak


def eager_flop(case, folder):
    """Of the products and convolutions of a step: a backward one for each operand of a forward one."""
    from torch.utils.flop_counter import FlopCounterMode

    eager = Eager(case, folder)
    # Of the forward computation alone: the counter takes the gradients of grouped convolutions for those of whole ones.
    with FlopCounterMode(display=False) as counter:
        eager.model(eager.batch(0)[0])
    return 3 * counter.get_total_flops()


# ---- plimsoll ----


def run(program, folder, words):
    """The JSON object that plimsoll prints."""
    done = subprocess.run([program, *map(str, words), "--json"], cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode:
        raise zoo.Failed(
            f"exit {done.returncode}: {(done.stderr.strip().splitlines() or done.stdout.strip().splitlines() or ['no message'])[-1]}"
        )
    return json.loads(done.stdout)


def train_words(folder, *more):
    return [*shlex.split((folder / "flags.txt").read_text()), *more]


def plan_words(folder, *more):
    """The same training for `plimsoll plan`, which takes no data."""
    words = train_words(folder)
    for flag, values in {"--data": 1, "--labels": 1, "--backend": 1, "--no-shuffle": 0}.items():
        at = words.index(flag)
        del words[at : at + 1 + values]
    return ["plan", "--train", *words[1:], "--target", "cpu", *more]


def arena_of_plan(record):
    """The bytes of the arena, which the programs share."""
    return max(plan["summary"]["arena_bytes"] for plan in record.get("programs", [record]))


def resident(case, folder, trained):
    """Bytes of weights, constants and optimizer state."""
    graph = onnx.load(folder / "model.onnx").graph
    sizes = {tensor.name: numpy_helper.to_array(tensor).nbytes for tensor in graph.initializer}
    # Equal initializers are written once; the others have a name by an Identity.
    for node in graph.node:
        if node.op_type == "Identity" and node.input[0] in sizes:
            sizes.setdefault(node.output[0], sizes[node.input[0]])
    weights = {name: sizes[name] for name in trained}
    fixed = sum(tensor.ByteSize() for tensor in graph.initializer if tensor.name not in weights)
    return (1 + case.slots()) * sum(weights.values()) + fixed


def arena(args, case, folder):
    """The bytes of the arena, and where they are from."""
    threads = ("--threads", args.threads)
    if args.plan_only:
        return arena_of_plan(run(args.plimsoll, folder, plan_words(folder, *threads))), "plan"
    record = run(args.plimsoll, folder, train_words(folder, "--steps", 2, *threads))
    if record["planned_bytes"] != record["allocated_bytes"]:
        raise zoo.Failed(f"planned {record['planned_bytes']} bytes, allocated {record['allocated_bytes']}")
    if not math.isfinite(record["loss"]):
        raise zoo.Failed(f"the loss is {record['loss']}")
    if "arena_bytes" in record:
        return record["arena_bytes"], "train"
    try:
        return arena_of_plan(run(args.plimsoll, folder, plan_words(folder, *threads))), "plan"
    except zoo.Failed:
        return record["planned_bytes"] - resident(case, folder, record["trained"]), "rest"


def points(args, case, folder):
    """(share of extra work, bytes of the arena) of plans under limits: those of --curve, or of limits tried here."""
    words = plan_words(folder, "--threads", args.threads)
    whole = run(args.plimsoll, folder, words)
    beside = whole["planned_bytes"] - arena_of_plan(whole)
    try:
        found = run(args.plimsoll, folder, [*words, "--curve"])["curve"]
    except zoo.Failed:
        found = list(sweep(args, folder, words, whole["planned_bytes"], arena_of_plan(whole)))
    pairs = []
    for point in found:
        work = point.get("recompute") or point
        if "extra_flop" not in work or not {"arena_bytes", "planned_bytes"} & set(point):
            raise zoo.Failed(f"a point of the curve has {' '.join(point)}: expected planned_bytes or arena_bytes, and extra_flop")
        pairs.append((work["extra_flop"], point.get("arena_bytes") or point["planned_bytes"] - beside))
    flop = eager_flop(case, folder)
    return [(extra / flop, size) for extra, size in pairs]


def sweep(args, folder, words, planned, arena):
    """Plans under limits, a twentieth of the arena apart, until one is refused."""
    for part in range(20):
        limit = planned - part * arena // 20
        try:
            record = run(args.plimsoll, folder, [*words, "--memory-limit", limit])
        except zoo.Failed:
            return
        if record["planned_bytes"] > limit:
            raise zoo.Failed(f"planned {record['planned_bytes']} bytes under a limit of {limit}")
        yield record


# ---- tables ----


def limits(args, case, folder, peak):
    """The least arena at a tenth and at a third of extra work, as shares of PyTorch's peak."""
    found = points(args, case, folder)
    return [min((size for share, size in found if share <= most), default=math.inf) / peak for most in (0.10, 1 / 3)]


def mean_line(what, ratios, worst=True):
    mean = f"{what}: geometric mean of {len(ratios)} {statistics.geometric_mean(ratios):.3f}"
    return f"{mean}, worst {max(ratios):.3f}" if worst else mean


def compare_bytes(args, cases, folder):
    header = ["step", "batch", "optimizer", "known MB", "eager MB", "fused", "arena MB", "ratio", "of fused", "from"]
    header += ["10 %", "33 %"] * args.limit_curve
    rows, notes, ratios, fused_ratios, curve = [], [], [], [], []
    for case in cases:
        zoo.progress(case.title)
        row = [case.title, case.batch, case.optimizer, f"{case.known:.1f}"]
        try:
            peak = eager_peak(case, folder / case.name)
            fused = eager_peak(case, folder / case.name, fused=True) if case.attention else peak
            row += [f"{peak / 1e6:.1f}", f"{fused / 1e6:.1f}" if case.attention else ""]
            size, source = arena(args, case, folder / case.name)
            ratios.append(size / peak)
            fused_ratios.append(size / fused)
            row += [f"{size / 1e6:.1f}", f"{size / peak:.3f}", f"{size / fused:.3f}" if case.attention else "", source]
            if args.limit_curve:
                curve.append(limits(args, case, folder / case.name, peak))
                row += [f"{share:.3f}" for share in curve[-1]]
        except zoo.Failed as error:
            notes.append(f"{case.title}: {error}")
        rows.append(row + [""] * (len(header) - len(row)))
    zoo.progress("")
    print(zoo.table(header, rows, right=(1, 3, 4, 5, 6, 7, 8, 10, 11)))
    print("\narena from: `train`, its arena_bytes; `plan`, the plan's segments; `rest`, planned less weights and state")
    if ratios:
        print(mean_line("ratios", ratios))
        print(mean_line("with fused attention in PyTorch", fused_ratios))
    for what, shares in zip(("at 10 % extra work", "at 33 % extra work"), zip(*curve)):
        print(mean_line(what, shares))
    return notes


def our_times(args, case, folder, steps):
    """Milliseconds of each step."""
    with tempfile.TemporaryDirectory() as place:
        log = Path(place) / "log.jsonl"
        run(args.plimsoll, folder, train_words(folder, "--steps", steps, "--threads", args.threads, "--log", log))
        return [json.loads(line)["ms"] for line in log.read_text().splitlines()]


def their_times(eager, steps):
    """The same of PyTorch."""
    times = []
    for step in range(steps):
        start = time.perf_counter()
        eager.step(*eager.batch(step))
        times.append((time.perf_counter() - start) * 1e3)
    return times


def measure(args, case, folder):
    """Median milliseconds of a step: plimsoll's and PyTorch's, which is faster with fused attention."""
    import training_models

    training_models.Attention.fused = True
    eager = Eager(case, folder)
    pace = min(their_times(eager, 3))
    steps = SKIPPED + (args.steps or max(5, min(300, round(args.seconds * 1e3 / pace))))
    engines = {"plimsoll": lambda: our_times(args, case, folder, steps), "eager": lambda: their_times(eager, steps)}
    medians = {name: [] for name in engines}
    for turn in range(args.rounds):
        for name in list(engines)[:: -1 if turn % 2 else 1]:
            medians[name].append(statistics.median(engines[name]()[SKIPPED:]))
    return [statistics.median(found) for found in medians.values()]


def compare_speed(args, cases, folder):
    rows, notes, ratios = [], [], {}
    for case in cases:
        zoo.progress(case.title)
        try:
            ours, theirs = measure(args, case, folder / case.name)
        except zoo.Failed as error:
            notes.append(f"{case.title}: {error}")
            continue
        ratios[case.name] = ours / theirs
        rows.append([case.title, case.batch, case.optimizer, f"{ours:.3f}", f"{theirs:.3f}", f"{ours / theirs:.3f}"])
    zoo.progress("")
    print(zoo.table(["step", "batch", "optimizer", "plimsoll ms", "eager ms", "ratio"], rows, right=(1, 3, 4, 5)))
    print(f"\n{args.threads} threads, {args.rounds} turns each")
    tiny = [ratios[case.name] for case in cases if case.name in ratios and not case.known]
    for what, found in (("all", list(ratios.values())), ("tiny", tiny)):
        if found:
            print(mean_line(what, found))
    return notes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", action="store_true", help="compare bytes, over the cases that are not tiny")
    parser.add_argument("--limit-curve", action="store_true", help="with --bytes: read `plan --train --curve`, too")
    parser.add_argument("--plan-only", action="store_true", help="with --bytes: plan the steps, and run none")
    parser.add_argument("--speed", action="store_true", help="compare times")
    parser.add_argument("--export-only", type=Path, metavar="FOLDER", help="write the cases and stop")
    parser.add_argument("--from", type=Path, dest="folder", metavar="FOLDER", help="read what --export-only wrote")
    parser.add_argument("--only", action="append", default=[], metavar="GLOB", help="only cases of such names")
    parser.add_argument("--plimsoll", type=Path, default=zoo.ROOT / "target/release/plimsoll", metavar="PATH")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=2.0, help="about how long a turn of PyTorch takes")
    parser.add_argument("--steps", type=int, default=0, help="steps of a turn, in place of --seconds")
    args = parser.parse_args()
    args.plimsoll = args.plimsoll.resolve()
    cases = [case for case in table() if not args.only or any(fnmatch.fnmatchcase(case.name, glob) for glob in args.only)]
    if not cases:
        sys.exit(f"no such case; there are {' '.join(case.name for case in table())}")
    if not (args.bytes or args.speed or args.export_only):
        sys.exit("expected --bytes, --speed or --export-only")
    if not args.export_only and not args.plimsoll.is_file():
        sys.exit(f"no {args.plimsoll}: build it with `cargo build --release`, or say where it is with --plimsoll PATH")
    import torch

    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as made:
        folder = args.export_only or args.folder or Path(made)
        if not args.folder or args.export_only:
            for case in cases:
                zoo.progress(f"export {case.title}")
                export(case, folder / case.name)
            zoo.progress("")
        if args.export_only:
            return
        notes = compare_bytes(args, [case for case in cases if case.known], folder) if args.bytes else []
        notes += compare_speed(args, cases, folder) if args.speed else []
    if notes:
        print("failed:", *notes, sep="\n")
        sys.exit(3)


if __name__ == "__main__":
    main()
