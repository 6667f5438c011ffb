#!/usr/bin/env python3
"""Times plimsoll beside PyTorch on one NVIDIA GPU: the same models, inputs and card, in one run.

    python tests/compare/gpu_compare.py [FOLDER] [--all] [--only WORD]... [--chunks N] [--compile-seconds 0]
        [--json FILE] [--plimsoll PATH]

FOLDER holds what export_models.py wrote with --exporter dy, and with --dtype bf16 and f16. Per model, type, batch:
PyTorch eager (attention by scaled_dot_product_attention, TF32 off, inputs on the device, CUDA events around each run),
torch.compile(mode="max-autotune", in f32 with the libraries' products and convolutions alone) where that is done within
--compile-seconds for all, with --jax the exported file under jax.jit (xla.py; calls in a row, as JAX has no events),
and the steps of plimsoll's plan alone (replay_median_ms of `plimsoll bench`: inputs on the device too), on CUDA and in
f32 on wgpu. Medians after a warm-up.

Memory: what plimsoll planned, and took beside it (modules, libraries, graphs), against the smallest limit of
torch.cuda.set_per_process_memory_fraction under which PyTorch eager runs, searched in fresh processes. Neither counts
the context; the limit leaves out PyTorch's modules and libraries too.

Results: the largest difference over the peak, from PyTorch's on the card and from PyTorch's in f32 with the same
weights. For halves also what no executor goes below that multiplies in the type: the same distance where all arithmetic
is in f64 and only what linear layers and convolutions take is rounded to it.

Then a chain of elementwise operators over 1 GiB against the card's copy rate, an 8192^3 bf16 product against
PyTorch's, and the time from the start of the program to the first result of ResNet-50 with a warm kernel cache.

This process never opens the card: every measurement of PyTorch is in a forked child that does.
"""

import json
import multiprocessing
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# Or else PyTorch opens the driver to see whether there is a card, and no child could.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import numpy as np
import torch
import transformers

import export_models
import zoo
from compare_models import output_error

MODELS = ("resnet50", "bert-base", "gpt2", "llama", "llama-decode")
BATCHES = (1, 32)
FORK = multiprocessing.get_context("fork")
CHAIN = 1 << 28  # elements: 1 GiB of f32
SIDE = 8192


# ---- in children ----


def call(pipe, function, args):
    os.setsid()
    torch.set_num_threads(1)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    try:
        with torch.inference_mode():
            pipe.put((True, function(*args)))
    except Exception as error:  # whatever it is, the parent has to hear of it
        pipe.put((False, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:120]}"))


def start(function, *args):
    pipe = FORK.Queue()
    child = FORK.Process(target=call, args=(pipe, function, args))
    child.start()
    return child, pipe


def finish(child, pipe, seconds=300.0):
    """(whether it went well, its result or what went wrong)"""
    deadline = time.monotonic() + seconds
    result = (False, f"no result within {seconds:.0f} s")
    while time.monotonic() < deadline:
        try:
            result = pipe.get(timeout=0.2)
            break
        except queue.Empty:
            if not child.is_alive():
                result = (False, f"ended with {child.exitcode}")
                break
    child.join(2)
    if child.is_alive():
        os.killpg(child.pid, signal.SIGKILL)
        child.join()
    return result


def median_ms(function, seconds=0.4):
    """Of the milliseconds between CUDA events around each call."""
    for _ in range(5):
        function()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    function()
    torch.cuda.synchronize()
    count = max(10, min(200, round(seconds / (time.perf_counter() - begin))))
    pairs = []
    for _ in range(count):
        pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        pair[0].record()
        function()
        pair[1].record()
        pairs.append(pair)
    torch.cuda.synchronize()
    return statistics.median(first.elapsed_time(last) for first, last in pairs)


def on_card(row, model, batch):
    """The model and inputs there; attention in the form that PyTorch's users run."""
    for part in model.modules():
        if hasattr(part, "set_attn_implementation"):
            part.set_attn_implementation("sdpa")
    generator = torch.Generator().manual_seed(export_models.SEED + batch)
    inputs = [value.draw({"batch": batch, **row.sizes}, generator) for value in row.inputs]
    return model.cuda(), [tensor.cuda() for tensor in inputs]


def tensors(outputs):
    outputs = outputs if isinstance(outputs, (tuple, list)) else [outputs]
    return [tensor.float().cpu().numpy() for tensor in outputs]


def eager(row, model, batch, folder):
    """Milliseconds; leaves inputs, outputs and outputs in f32 in the folder."""
    model, inputs = on_card(row, model, batch)
    for value, tensor in zip(row.inputs, inputs):
        np.save(folder / ("in." + zoo.file_name(value.name)), tensor.cpu().numpy())
    outputs = tensors(model(*inputs))
    elapsed = median_ms(lambda: model(*inputs))
    exact = tensors(model.model.float()(*inputs)) if isinstance(model, export_models.Half) else outputs
    for name, found, reference in zip(row.outputs, outputs, exact, strict=True):
        np.save(folder / ("out." + zoo.file_name(name)), found)
        np.save(folder / ("ref." + zoo.file_name(name)), reference)
    return elapsed


def rounded(row, model, batch):
    """The error of rounding what linear layers and convolutions take to the model's type, all else exact."""
    model, inputs = on_card(row, model, batch)
    model, dtype = model.model.double(), model.dtype
    inputs = [tensor.double() if tensor.is_floating_point() else tensor for tensor in inputs]
    exact = tensors(model(*inputs))
    for module in model.modules():
        if isinstance(module, (torch.nn.Linear, torch.nn.Conv2d, transformers.pytorch_utils.Conv1D)):
            module.register_forward_pre_hook(lambda _module, operands: tuple(x.to(dtype).double() for x in operands))
    return max(output_error(found, reference) for found, reference in zip(tensors(model(*inputs)), exact, strict=True))


def compiled(row, model, batch):
    if not isinstance(model, export_models.Half):
        # Each of Triton's products in f32 takes minutes to compile.
        from torch._inductor import config

        config.max_autotune_gemm_backends = config.max_autotune_conv_backends = "ATEN"
    model, inputs = on_card(row, model, batch)
    model = torch.compile(model, mode="max-autotune")
    return median_ms(lambda: model(*inputs))


def jitted(path, inputs, outputs):
    """Milliseconds of XLA's program, and its error from PyTorch's results in f32."""
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    import jax

    import xla

    # Or else products of f32 are of TF32.
    jax.config.update("jax_default_matmul_precision", "highest")
    function, weights = xla.load(path)
    function = jax.jit(function)
    weights = jax.device_put(weights)
    inputs = {name: jax.device_put(np.load(file)) for name, file in inputs.items()}
    found = [np.asarray(value).astype(np.float32) for value in function(weights, inputs)]
    error = max(output_error(value, np.load(file)) for value, file in zip(found, outputs, strict=True))

    def calls(count):
        begin = time.perf_counter()
        for _ in range(count):
            last = function(weights, inputs)
        jax.block_until_ready(last)
        return 1e3 * (time.perf_counter() - begin) / count

    calls(5)
    return statistics.median(calls(20) for _ in range(7)), error


def footprint(row, model, batch, limit=None):
    """Bytes at the peak of a run within `limit` bytes: allocated, reserved."""
    total = torch.cuda.get_device_properties(0).total_memory
    if limit is not None:
        torch.cuda.set_per_process_memory_fraction(limit / total)
    model, inputs = on_card(row, model, batch)
    for _ in range(2):
        model(*inputs)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()


def copy_ms():
    source = torch.rand(CHAIN, device="cuda")
    target = torch.empty_like(source)
    return median_ms(lambda: target.copy_(source))


def product_ms():
    a, b = (torch.randn(SIDE, SIDE, device="cuda").bfloat16() for _ in range(2))
    return median_ms(lambda: a @ b, 2.0)


# ---- plimsoll ----


def bench(args, model, *flags):
    """Milliseconds of the steps alone."""
    command = [args.plimsoll.resolve(), "bench", model, "--json", "--warmup", 5, "--iters", 20, *flags]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120)
    if done.returncode:
        raise zoo.Failed(f"exit {done.returncode}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    return json.loads(done.stdout)["replay_median_ms"]


def result(args, case, row, folder):
    """One run: its memory, and errors against PyTorch, against f32, and PyTorch's own against f32."""
    inputs = [f"--input={value.name}={folder / ('in.' + zoo.file_name(value.name))}" for value in row.inputs]
    found = folder / "found"
    flags = ["--backend", "cuda", "--chunks", args.chunks, "--json", "--output-dir", found]
    text = zoo.plimsoll(args.plimsoll, "run", case, *inputs, *flags)
    memory = json.loads(text)["memory"]
    errors = []
    for name in row.outputs:
        ours = np.load(found / zoo.file_name(name)).astype(np.float32)
        theirs, exact = (np.load(folder / (part + zoo.file_name(name))) for part in ("out.", "ref."))
        errors.append((output_error(ours, theirs), output_error(ours, exact), output_error(theirs, exact)))
    return memory, [max(column) for column in zip(*errors)]


def smallest_limit(row, model, batch):
    """Bytes: the smallest limit that PyTorch runs under, to 2 % or 2 MiB."""
    good, value = finish(*start(footprint, row, model, batch))
    if not good:
        raise zoo.Failed(value)
    low, high = value
    while high - low > max(high // 50, 2 << 20):
        points = [low + (high - low) * i // 13 for i in range(1, 13)]
        probes = [start(footprint, row, model, batch, point) for point in points]
        results = [finish(*probe)[0] for probe in probes]
        # Allocators are not monotonic by law; from above, the first failure ends the search.
        failed = [point for point, good in zip(points, results) if not good]
        low = max(failed, default=low)
        high = min([point for point in points if point > low], default=high)
        if not failed:
            break
    return high


# ---- tables ----


def note(args, record):
    print(json.dumps(record), file=sys.stderr, flush=True)
    if args.json:
        with args.json.open("a") as file:
            file.write(json.dumps(record) + "\n")


def attempt(record, key, function, *arguments):
    """Sets record[key], or says under `notes` why it is not there."""
    try:
        record[key] = function(*arguments)
    except (zoo.Failed, subprocess.TimeoutExpired, OSError, ValueError, KeyError) as error:
        record.setdefault("notes", []).append(f"{key}: {error}")


def measure(args, row, model, dtype, batch):
    name = row.name + ("" if dtype == "f32" else f"-{dtype}")
    case = zoo.Case(args.models / f"{name}.dy.onnx", batch)
    record = {"model": row.name, "dtype": dtype, "batch": batch}
    if not case.model.is_file():
        return record | {"notes": [f"no {case.model}: tests/compare/export_models.py writes it"]}
    known = {dim.dim_param for v in case.input_values().values() for dim in v.type.tensor_type.shape.dim}
    bound = {dim: size for dim, size in {"batch": batch, **row.sizes}.items() if dim in known}
    sizes = [flag for dim, size in bound.items() for flag in ("--set", f"{dim}={size}")]
    with tempfile.TemporaryDirectory() as folder:
        good, value = finish(*start(eager, row, model, batch, Path(folder)))
        if good:
            record["eager"] = value
            attempt(record, "run", result, args, case, row, Path(folder))
        else:
            record["notes"] = [f"eager: {value}"]
        if good and args.jax:
            inputs, outputs = (
                {name: Path(folder) / (part + zoo.file_name(name)) for name in names}
                for part, names in (("in.", [value.name for value in row.inputs]), ("ref.", row.outputs))
            )
            good, value = finish(*start(jitted, case.model, inputs, list(outputs.values())))
            if good:
                record["jax"], record["jax_error"] = value
            else:
                record["notes"] = [*record.get("notes", []), f"jax: {value}"]
    if dtype in export_models.HALVES:
        good, value = finish(*start(rounded, row, model, batch))
        record.update({"rounded": value} if good else {"notes": [*record.get("notes", []), f"rounded: {value}"]})
    for backend in ("cuda", "wgpu") if dtype == "f32" else ("cuda",):
        attempt(record, backend, bench, args, case.model, *sizes, "--backend", backend, "--chunks", args.chunks)
    if "run" in record:
        memory, record["errors"] = record.pop("run")
        record["planned"] = memory["allocated_bytes"]
        record["beside"] = memory["overhead"]
    return record


def compile_all(args, records, case):
    """Side by side first, for what the compiler keeps on disk; then each alone, for its time."""
    deadline = time.monotonic() + args.compile_seconds
    if args.compile_seconds:
        probes = [start(compiled, *case(record)) for record in records]
        for probe in probes:
            finish(*probe, deadline - time.monotonic())
    for record in records if args.compile_seconds else []:
        good, value = finish(*start(compiled, *case(record)), 60)
        if good:
            record["compile"] = value
        else:
            record.setdefault("notes", []).append(f"torch.compile: {value}")
        note(args, record)


def number(record, key, digits=3):
    return f"{record[key]:.{digits}f}" if key in record else "-"


def ratio(record, over, under):
    return f"{record[over] / record[under]:.2f}" if over in record and under in record else "-"


def name(record):
    return f"{record['model']} {record['dtype']} b{record['batch']}"


def print_tables(records):
    rows = []
    for r in records:
        others = ("eager", "compile", "jax", "wgpu")
        rows.append([name(r), *(number(r, key) for key in ("cuda", *others))])
        rows[-1] += [ratio(r, key, "cuda") for key in others]
    head = ["model", "plimsoll ms", "eager ms", "compiled ms", "jax ms", "wgpu ms"]
    head += ["eager / ours", "compiled / ours", "jax / ours", "wgpu / ours"]
    print(zoo.table(head, rows, right=range(1, 10)), end="\n\n")

    rows = []
    for r in (r for r in records if "planned" in r):
        beside = sum(r["beside"].values())
        row = [name(r), f"{r['planned'] / 1e6:.1f}", f"{beside / 1e6:.1f}"]
        if "limit" in r:
            limit = r["limit"]
            row += [f"{limit / 1e6:.1f}", f"{r['planned'] / limit:.2f}", f"{(r['planned'] + beside) / limit:.2f}"]
        rows.append(row + ["-"] * (6 - len(row)))
    head = ["model", "planned MB", "beside MB", "PyTorch MB", "planned / PyTorch", "with beside / PyTorch"]
    print(zoo.table(head, rows, right=range(1, 6)), end="\n\n")

    floors = [f"{r['rounded']:.1e}" if "rounded" in r else "-" for r in records if "errors" in r]
    rows = [[name(r), *(f"{error:.1e}" for error in r["errors"])] for r in records if "errors" in r]
    head = ["model", "plimsoll - PyTorch", "plimsoll - f32", "PyTorch - f32", "rounded - exact"]
    print(zoo.table(head, [[*row, floor] for row, floor in zip(rows, floors)], right=(1, 2, 3, 4)), end="\n\n")
    for r in records:
        for text in r.get("notes", []):
            print(f"{name(r)}: {text}")


GRAPH = '<ir_version: 10, opset_import: ["" : 21]>\n'


def chain_text():
    """Six operators; each element is read once and written once."""
    return GRAPH + (
        f"chain (float[{CHAIN}] x) => (float[{CHAIN}] y)\n"
        "{\n  a = Mul (x, x)\n  b = Add (a, x)\n  c = Relu (b)\n  d = Sub (c, x)\n  e = Mul (d, c)\n  y = Neg (e)\n}\n"
    )


def product_text():
    shape = f"bfloat16[{SIDE}, {SIDE}]"
    return GRAPH + f"product ({shape} a, {shape} b) => ({shape} y)\n{{\n  y = MatMul (a, b)\n}}\n"


def print_bars(args):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        for title, text, theirs in (
            ("elementwise chain over 1 GiB against a copy", chain_text(), copy_ms),
            ("8192^3 bf16 product against PyTorch", product_text(), product_ms),
        ):
            file = folder / "graph.onnxtxt"
            file.write_text(text)
            record = {"bar": title}
            good, value = finish(*start(theirs))
            if good:
                record["pytorch_ms"] = value
                attempt(record, "ours_ms", bench, args, file, "--backend", "cuda")
                if "ours_ms" in record:
                    record["rate"] = value / record["ours_ms"]
            note(args, record)
            rate = f"{100 * record['rate']:.1f} % of its rate" if "rate" in record else record.get("notes", value)
            print(
                f"{title}: PyTorch {number(record, 'pytorch_ms')} ms, plimsoll {number(record, 'ours_ms')} ms, {rate}"
            )

        model = args.models / "resnet50.dy.onnx"
        if not model.is_file():
            return
        command = [args.plimsoll.resolve(), "run", model, "--set", "batch=1", "--backend", "cuda"]
        environment = {**os.environ, "PLIMSOLL_CACHE_DIR": str(folder / "cache")}
        times = []
        for _ in range(6):
            begin = time.perf_counter()
            done = subprocess.run(command, env=environment, capture_output=True, text=True)
            if done.returncode:
                print(f"start of the process: exit {done.returncode}: {done.stderr.strip()[-200:]}")
                return
            times.append(time.perf_counter() - begin)
        warm = statistics.median(times[1:])
        note(args, {"bar": "start", "cold_s": times[0], "warm_s": times[1:]})
        print(f"start of the process to ResNet-50's result: {times[0]:.2f} s with an empty cache, then {warm:.2f} s")


def main():
    parser = zoo.arguments(__doc__)
    parser.add_argument("--all", action="store_true", help="every model that export_models.py writes but the small ones")
    parser.add_argument("--dtype", action="append", choices=("f32", *export_models.HALVES), help="only this type")
    parser.add_argument("--compile-seconds", type=float, default=0, help="torch.compile too, given so long")
    parser.add_argument("--jax", action="store_true", help="time jax.jit too")
    parser.add_argument("--chunks", type=int, default=1, help="plimsoll computes models in so many chunks")
    parser.add_argument("--no-times", action="store_true", help="neither time models nor compare their results")
    parser.add_argument("--no-memory", action="store_true", help="do not search PyTorch's smallest limit")
    parser.add_argument("--json", type=Path, help="append each measurement to this file as it is made")
    args = parser.parse_args()
    rows = [m for m in export_models.MODELS if m.name in MODELS or args.all and not m.small]
    rows = [m for m in rows if not args.only or any(word in m.name for word in args.only)]
    records, models = [], {}
    for row in rows:
        for dtype in args.dtype or ("f32", *export_models.HALVES):
            models[row.name, dtype] = export_models.prepare(row, dtype)[0]
            for batch in args.batch or BATCHES:
                if args.no_times:
                    records.append({"model": row.name, "dtype": dtype, "batch": batch})
                    continue
                records.append(measure(args, row, models[row.name, dtype], dtype, batch))
                note(args, records[-1])
    if not args.no_times:
        print_bars(args)
    by_name = {row.name: row for row in rows}
    if not args.no_memory:
        for record in records:
            key = record["model"], record["dtype"]
            attempt(record, "limit", smallest_limit, by_name[key[0]], models[key], record["batch"])
            note(args, record)
    compile_all(args, records, lambda r: (by_name[r["model"]], models[r["model"], r["dtype"]], r["batch"]))
    print()
    print_tables(records)


if __name__ == "__main__":
    main()
