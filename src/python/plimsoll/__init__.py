"""Plans every byte of a model's memory before it runs, and runs and trains it in exactly these.

A model is the path of an ONNX file, its bytes, or a `torch.nn.Module`, which PyTorch exports with the example `inputs`. Options have the names
of the command's flags: `batch=8`, `dims={"sequence": 128}`, `memory_limit="6GiB"`, `device="cuda"`, `f16=True`, `quantize="int4"` ...
Bytes are numbers of bytes. Extents are numbers, ranges such as `range(1, 65)` or `"1..64"`.
"""

import json
import math
import operator
import os
from collections.abc import Callable, Iterable
from typing import Any, Optional, Union

from . import _plimsoll
from ._plimsoll import Tensor, devices
from .errors import (
    DeviceError,
    Diverged,
    DoesNotFit,
    FileError,
    GraphError,
    GraphSyntaxError,
    NodeError,
    OutOfMemory,
    PlanError,
    PlimsollError,
    ResultsDiffer,
    UnboundDims,
    UsageError,
)

__version__ = _plimsoll.__version__

Path = Union[str, "os.PathLike[str]"]
#: A path, the bytes of a file, a model of the package onnx, or a torch.nn.Module.
Source = Any
#: A number of bytes, or a text such as "6GiB".
Bytes = Union[int, str]

__all__ = [
    "Advice", "Comparison", "DeviceError", "Difference", "Diverged", "DoesNotFit", "FileError", "Fit", "GraphError", "GraphSyntaxError", "InferenceSession",
    "Largest", "NodeError", "OutOfMemory", "Plan", "PlanError", "PlimsollError", "ResultsDiffer", "Score", "Session", "Tensor", "Times", "Trained", "UnboundDims",
    "UsageError", "advise", "bench", "check", "compare", "devices", "diff", "fit", "load_plan", "max_batch", "plan", "place", "run", "train",
]


def _plain(value):
    """What JSON has for a value that it has not: the ends of a range, a path, a scalar of NumPy."""
    if isinstance(value, range) and value.step == 1:
        return [value.start, value.stop - 1]
    return os.fspath(value) if isinstance(value, os.PathLike) else value.item()


def _json(options, what="option"):
    """A record as JSON, without what is `None`."""
    record = {name: value for name, value in options.items() if value is not None}
    for name, value in record.items():
        try:
            json.dumps(value, allow_nan=False, default=_plain)
        except (TypeError, ValueError, AttributeError):
            expected = "a number, a text, a range of step 1, or a list or a dict of these"
            raise UsageError(f"{what} {name}: expected {expected}, found {value!r:.80}") from None
    return json.dumps(record, default=_plain)


def _count(name, value, least=0):
    """A whole number that is not below another."""
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not least <= number < 1 << 63:
        raise UsageError(f"{name}: expected a whole number of at least {least}, found {value!r:.80}")
    return number


def _dict(name, value, of="arrays by name"):
    """A dict."""
    if not isinstance(value, dict):
        raise UsageError(f"{name}: expected a dict of {of}, found {type(value).__name__}")
    return value


def _options(options):
    """Options as JSON."""
    limit = options.get("memory_limit")
    return _json({**options, "memory_limit": int(limit)} if isinstance(limit, float) and limit.is_integer() else options)


def _source(model, inputs=None):
    """A path or bytes; a module of PyTorch is exported."""
    if isinstance(model, (bytes, bytearray, memoryview)):
        return bytes(model)
    if isinstance(model, (str, os.PathLike)):
        return model
    if hasattr(model, "SerializeToString"):
        return model.SerializeToString()
    if hasattr(model, "state_dict") and hasattr(model, "forward"):
        return _exported(model, inputs)
    raise UsageError(f"model: expected a path, bytes, an ONNX model or a torch.nn.Module, found {type(model).__name__}")


def _exported(module, inputs):
    """A module of PyTorch as the bytes of an ONNX file, the first axis of each input open."""
    import io
    import tempfile

    try:
        import torch
    except ImportError:
        raise UsageError("a torch.nn.Module is exported by PyTorch, which is not installed") from None
    if inputs is None:
        raise UsageError("a torch.nn.Module is exported with example inputs: expected inputs=(tensor, ...)")
    args = tuple(inputs.values()) if isinstance(inputs, dict) else tuple(inputs) if isinstance(inputs, (list, tuple)) else (inputs,)
    names = list(inputs) if isinstance(inputs, dict) else None
    with torch.no_grad(), tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "model.onnx")
        try:
            batch = torch.export.Dim("batch")
            shapes = tuple({0: batch} if getattr(x, "ndim", 0) else None for x in args)
            program = torch.onnx.export(module, args, dynamo=True, input_names=names, dynamic_shapes=shapes, verbose=False)
        except Exception:
            # Not all modules take any number of rows.
            program = torch.onnx.export(module, args, dynamo=True, input_names=names, verbose=False)
        program.save(path, external_data=False)
        with open(path, "rb") as file:
            return io.BytesIO(file.read()).getvalue()


def _advising(error, advise):
    """Lets an error that is no fit say what would help."""
    error._advise = advise
    return error


class _Record:
    """A record, whose fields are attributes and items, with a text for people."""

    def __init__(self, record, text=None):
        self.record = record
        self._text = text

    def __getattr__(self, name):
        if name.startswith("__") or name == "record":
            raise AttributeError(name)
        try:
            return self.record[name]
        except KeyError:
            raise AttributeError(f"{type(self).__name__} has no '{name}'; it has {', '.join(self.record)}") from None

    def __getitem__(self, name):
        return self.record[name]

    def __dir__(self):
        return [*super().__dir__(), *self.record]

    def __str__(self):
        return self._text or json.dumps(self.record, indent=1)

    def __repr__(self):
        if self._text:
            return self._text
        told = (f"{name} {value:,}" if isinstance(value, int) else f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {value}"
                for name, value in self.record.items() if isinstance(value, (int, float, str)))
        return f"<{type(self).__name__.strip('_')}: {', '.join(told)}>"


class Advice(_Record):
    """What is live at the peak (`peak`), and what would help (`remedies`); with a limit, the `verdict`."""


class Largest(_Record):
    """The largest extent of a dim that fits: `dim`, `extent`, its `planned_bytes`, and the `next` larger one."""

    def __init__(self, record):
        super().__init__({"dim": record["dim"], **record["largest"], **record})

    @property
    def bytes(self) -> int:
        """The bytes that are planned for it."""
        return self.planned_bytes

    def __int__(self):
        return self.extent


class Score(_Record):
    """The mean `loss` over data, and the `accuracy`: the share of right answers, where there are classes."""


class Times(_Record):
    """Milliseconds of runs: `median`, `least`, `most`, `all`."""


class Comparison(_Record):
    """A model run as others do, buffer by buffer, and as it was planned: `columns`."""


class Difference(_Record):
    """What differs between two plans."""


class Fit(_Record):
    """The fewest cards on which it fits (`fewest`), the meshes that are worth a look (`best`), the most cards that cannot hold it (`refused`)."""


class Plan:
    """Where every tensor lies, and when: known before anything runs."""

    def __init__(self, plan):
        self._plan = plan
        #: Dims that no option gave: they are 1.
        self.assumed = plan.assumed

    @property
    def bytes(self) -> int:
        """All bytes that the device gives, when it runs."""
        return self._plan.bytes

    @property
    def classes(self):
        """The bytes by class: constants, states, arena (`activation`), staging ..."""
        return json.loads(self._plan.classes())

    @property
    def peak(self):
        """The tensors that are live where most is."""
        return _Record(json.loads(self._plan.peak()))

    @property
    def inputs(self) -> "list[Node]":
        """Names, types and shapes of the inputs."""
        return [Node(*port) for port in self._plan.ports()[0]]

    @property
    def outputs(self) -> "list[Node]":
        """Names, types and shapes of the outputs."""
        return [Node(*port) for port in self._plan.ports()[1]]

    def table(self) -> str:
        """The bytes by class, in a table."""
        return self._plan.table()

    def json(self) -> str:
        """The plan as the command's `plan -o` writes it."""
        return self._plan.json()

    def html(self, path: Optional[Path] = None) -> str:
        """A page with the picture of the plan; written to `path` if there is one."""
        return _written(self._plan.html(), path)

    def svg(self, path: Optional[Path] = None) -> str:
        """The picture of the plan; written to `path` if there is one."""
        return _written(self._plan.svg(), path)

    def save(self, path: Path) -> None:
        """Writes the plan, for `load_plan` and the command."""
        self._plan.save(path)

    def check(self):
        """Proves that no two live tensors overlap and that each is written before it is read; raises `PlanError` if not."""
        self._plan.check()

    def diff(self, other):
        """What differs from another plan."""
        if not isinstance(other, Plan):
            raise UsageError(f"diff: expected a plan, found {type(other).__name__}")
        record, text = self._plan.diff(other._plan)
        return Difference(json.loads(record), text)

    def __str__(self):
        return self.table()

    def __repr__(self):
        assumed = "".join(f", {dim}=1 as none was given" for dim in self.assumed)
        return f"<Plan: {self.bytes:,} bytes{assumed}>"

    def _repr_html_(self):
        import html

        return f"{self._plan.svg()}<pre>{html.escape(repr(self)[1:-1])}\n{html.escape(self.table())}</pre>"


def _written(text, path):
    """Writes a text, and returns the path; without one, returns the text."""
    if path is not None:
        try:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            raise FileError(f"{os.fspath(path)}: cannot write it: {error.strerror}") from error
        return path
    return text


class Node:
    """An input or an output: `name`, `type` as in `tensor(float)`, `dtype` as NumPy has it, `shape` with the names of open dims."""

    _TYPES = {"float32": "float", "float64": "double", "float16": "float16", "bfloat16": "bfloat16", "bool": "bool"}

    def __init__(self, name, dtype, shape):
        self.name = name
        self.dtype = dtype
        self.shape = shape
        self.type = f"tensor({self._TYPES.get(dtype, dtype)})"

    def __repr__(self):
        return f"Node(name={self.name!r}, type={self.type!r}, shape={self.shape})"


def _model(model, inputs, options):
    return _plimsoll.Model(_source(model, inputs), _options(options))


def _train_options(train):
    """The batch of a training, and its method as JSON."""
    train = _dict("train", train, "values by name")
    batch = train.get("batch")
    method = _json({name: value for name, value in train.items() if name != "batch"}, "train:")
    return batch if batch is None else _count("train['batch']", batch, 1), method


def _training(train):
    """The batch of a training and its method as JSON, if there is a training."""
    if train is None:
        return None
    batch, method = _train_options(train)
    if batch is None:
        raise UsageError("train: expected a batch, as in train={'loss': 'mse', 'batch': 32}")
    return batch, method


def _no_device(options):
    """A plan is for a target."""
    if options.get("device") is not None:
        raise UsageError(f"device: a plan is for a target: expected target={str(options['device']).split(':')[0]!r}")


def plan(model: Source, *, inputs: Any = None, target: str = "cpu", train: Optional[dict] = None, **options: Any) -> "Plan":
    """Plans a model for a target, with no device and no weights.

    `target` is `cpu`, `cuda`, `wgpu` or another that the command `plimsoll plan --help` names. `train` plans a training step:
    `train={"loss": "cross_entropy", "batch": 32, "optimizer": "adamw"}`.

    >>> plan("graphs/mlp.onnxtxt", batch=8).bytes > 0
    True
    """
    _no_device(options)
    made, training = _model(model, inputs, options), _training(train)
    try:
        return Plan(made.plan(target, training))
    except DoesNotFit as error:
        raise _advising(error, lambda: _advice(made.advise(target, training))) from None


def _target(device):
    """The target that tells of a device."""
    return str(device or "cpu").split(":")[0].replace("auto", "cpu")


def _advice(told):
    record, text = told
    return Advice(json.loads(record), text)


def advise(model: Source, *, inputs: Any = None, target: str = "cpu", train: Optional[dict] = None, **options: Any) -> Advice:
    """What is live at the peak, and the bytes that each remedy would save.

    >>> [remedy["name"] for remedy in advise("graphs/mlp.onnxtxt", batch=8).remedies][0]
    'half the extent'
    """
    _no_device(options)
    return _advice(_model(model, inputs, options).advise(target, _training(train)))


def max_batch(model: Source, *, memory_limit: Bytes, dim: Optional[str] = None, inputs: Any = None, target: str = "cpu",
              train: Optional[dict] = None, **options: Any) -> Largest:
    """The largest extent of a dim whose plan fits the limit; of a training, the largest batch.

    >>> max_batch("graphs/mlp.onnxtxt", memory_limit="2MiB").extent > 100
    True
    """
    _no_device(options)
    if options.get("batch") is not None and dim is None:
        raise UsageError("batch: it is what is looked for; name another dim to enlarge that one")
    made = _model(model, inputs, {**options, "memory_limit": memory_limit})
    batch, method = (None, None) if train is None else _train_options(train)
    if train is not None and dim is not None:
        raise UsageError("dim: a training enlarges its batch")
    if batch is not None:
        raise UsageError("train['batch']: it is what is looked for")
    try:
        return Largest(json.loads(made.max_batch(target, dim, method)))
    except DoesNotFit as error:
        if error._at is None:
            raise
        dim, extent = error._at

        def advise():
            if method is not None:
                return _advice(made.advise(target, (extent, method)))
            # The option batch may be what bound the dim.
            dims, by_batch = options.get("dims") or {}, dim not in made.assumed
            kept = {**options, "batch": None} if by_batch and dim not in dims else options
            least = _model(model, inputs, {**kept, "memory_limit": memory_limit, "dims": {**dims, dim: extent}})
            return _advice(least.advise(target, None))

        raise _advising(error, advise) from None


def fit(model: Source, *, memory_limit: Bytes, cards: Union[int, range] = range(1, 9), cluster: Optional[dict] = None, inputs: Any = None,
        target: str = "cuda", **options: Any) -> Fit:
    """The fewest cards, each with this memory, on which a model fits."""
    _no_device(options)
    made = _model(model, inputs, {**options, "memory_limit": memory_limit})
    cards = cards if isinstance(cards, range) else range(1, _count("cards", cards, 1) + 1)
    if not cards or cards.step != 1 or cards.start < 1:
        raise UsageError(f"cards: expected a number, or a range of step 1 from 1 on, found {cards!r}")
    cluster = _json(_dict("cluster", cluster, "values by name"), "cluster:") if cluster is not None else None
    return Fit(json.loads(made.fit(target, cards.start, cards.stop - 1, cluster)))


def compare(model: Source, feeds: Optional[dict] = None, *, runs: int = 5, inputs: Any = None, **options: Any) -> Comparison:
    """Runs a model as others do, buffer by buffer, and as it is planned: peaks, driver calls, times, differences."""
    record, text = _model(model, inputs, options).compare(_dict("feeds", feeds or {}), _count("runs", runs, 1))
    return Comparison(json.loads(record), text)


def run(model: Source, feeds: dict, **options: Any) -> dict:
    """Plans, loads and runs a model once.

    >>> import numpy as np
    >>> run("graphs/product.onnxtxt", {"a": np.eye(2, dtype="f4"), "b": np.ones((2, 2), "f4")}, dims={"n": 2})["y"].tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    """
    source = _source(model)
    dims = {} if options.get("batch") is not None else _open_dims(_declared(source)[0], _dict("feeds", feeds))
    return Session(source, **{**options, "dims": {**dims, **(options.get("dims") or {})}}).run(feeds)


def _declared(source):
    """The inputs and the outputs that a file declares."""
    return tuple([Node(*node) for node in nodes] for nodes in _plimsoll.declared(source))


def _open_dims(inputs, feeds):
    """The extents that arrays give open dims."""
    open_dims = {}
    for node in inputs:
        array = feeds.get(node.name)
        shape = getattr(array, "shape", None)
        if shape is None:
            continue
        if len(shape) != len(node.shape):
            raise UsageError(f"input '{node.name}': expected {len(node.shape)} axes, {node.shape}, found {list(shape)}")
        for axis, (dim, extent) in enumerate(zip(node.shape, shape)):
            if not isinstance(dim, int):
                open_dims[f"{node.name}.{axis}" if dim is None else dim] = int(extent)
    return open_dims


def bench(model: Source, *, runs: int = 20, seed: int = 0, **options: Any) -> Times:
    """Milliseconds of runs on random inputs: `median`, `least`, `most`, `all`."""
    times = sorted(Session(model, **options)._session.bench(_count("runs", runs, 1), _count("seed", seed)))
    return Times({"median": times[len(times) // 2], "least": times[0], "most": times[-1], "all": times})


def load_plan(path: Path) -> Plan:
    """Reads a plan that was saved."""
    return Plan(_plimsoll.Plan.load(path))


def check(plan: Union[Plan, Path]) -> None:
    """Checks a plan, or the file of one; raises `PlanError` if it breaks a rule."""
    (plan if isinstance(plan, Plan) else load_plan(plan)).check()


def diff(before: Union[Plan, Path], after: Union[Plan, Path]) -> Difference:
    """What differs between two plans, or the files of two."""
    before, after = (of if isinstance(of, Plan) else load_plan(of) for of in (before, after))
    return before.diff(after)


def place(buffers: Iterable[tuple]) -> tuple:
    """Places buffers in one arena: each is `(bytes, lower, upper)`, live from step `lower` on, and before `upper`. Returns the offsets, and the
    bytes of the arena.

    >>> place([(64, 0, 2), (64, 1, 3), (64, 2, 4)])[1]
    128
    """
    checked = []
    for at, buffer in enumerate(buffers):
        if len(buffer) != 3:
            raise UsageError(f"buffer {at}: expected (bytes, lower, upper), found {buffer!r}")
        checked.append(tuple(_count(f"buffer {at}", number) for number in buffer))
    return _plimsoll.place(checked)


class Session:
    """A plan that is loaded, and runs.

    Inputs are arrays of NumPy, or of whatever has DLPack: no element is copied on the way to the device's memory. `out` has arrays for outputs.

    >>> import numpy as np
    >>> session = Session("graphs/product.onnxtxt", dims={"n": 2}, device="cpu")
    >>> session.run({"a": np.eye(2, dtype="f4"), "b": np.ones((2, 2), "f4")})["y"].tolist()
    [[1.0, 1.0], [1.0, 1.0]]
    >>> session.bytes == session.allocated
    True
    """

    def __init__(self, model: Source, *, inputs: Any = None, **options: Any) -> None:
        made = _model(model, inputs, options)
        self.assumed = made.assumed
        try:
            self._session = made.session()
        except DoesNotFit as error:
            raise _advising(error, lambda: _advice(made.advise(_target(options.get("device")), None))) from None

    @property
    def device(self) -> str:
        """The device in one line, and why it was chosen."""
        return self._session.device

    @property
    def bytes(self) -> int:
        """The bytes that were planned."""
        return self._session.bytes

    @property
    def allocated(self) -> int:
        """The bytes that the device has given: as planned. It waits for a run."""
        return self._session.allocated

    @property
    def inputs(self) -> "list[Node]":
        """Names, types and shapes of the inputs."""
        return [Node(*port) for port in self._session.ports()[0]]

    @property
    def outputs(self) -> "list[Node]":
        """Names, types and shapes of the outputs."""
        return [Node(*port) for port in self._session.ports()[1]]

    def run(self, feeds: dict, out: Optional[dict] = None) -> dict:
        """Runs once: arrays by the inputs' names in, arrays by the outputs' names out."""
        try:
            return self._session.run(feeds, out)
        except TypeError:
            _dict("feeds", feeds), _dict("out", {} if out is None else out)
            raise
        except UsageError as error:
            if self.assumed and "expected" in str(error) and "found" in str(error):
                error.args = (f"{error}; {', '.join(self.assumed)} was not given, and is 1: give it an extent, or a range of them",)
            raise

    def fork(self) -> "Session":
        """Another run on the same constants, for another thread. `forks` of the options says how many runs there are at most."""
        other = object.__new__(Session)
        other._session, other.assumed = self._session.fork(), self.assumed
        return other

    @property
    def states(self):
        """The names of the states."""
        return self._session.state_names()

    def state(self, name):
        """The elements of a state, after the last run."""
        import numpy

        return numpy.from_dlpack(self._session.state(name))

    def set_state(self, name, array):
        """Gives a state elements."""
        self._session.set_state(name, array)

    def reset_state(self):
        """Gives all states the elements that they began with."""
        self._session.reset_state()

    def save_states(self, path):
        """Writes all states as a safetensors file."""
        self._session.save_states(path)

    def load_states(self, path):
        """Reads all states from a safetensors file."""
        self._session.load_states(path)

    def __repr__(self):
        return f"<Session on {self.device}: {self.bytes:,} bytes>"


class Trained:
    """A model after its training: `losses`, `bytes`, and what `save` writes."""

    def __init__(self, trainer, losses, source=None):
        self._trainer = trainer
        self._source = source
        #: The mean loss of each update, before it.
        self.losses = losses

    @property
    def bytes(self) -> int:
        """The bytes that were planned for the training."""
        return self._trainer.bytes[0]

    @property
    def allocated(self) -> int:
        """The bytes that the device has given: as planned."""
        return self._trainer.bytes[1]

    @property
    def device(self) -> str:
        """The device that trained it."""
        return self._trainer.device

    @property
    def weights(self):
        """The names of the trained weights."""
        return self._trainer.trained

    def weight(self, name):
        """The elements of a weight, or of another state of the training."""
        import numpy

        return numpy.from_dlpack(self._trainer.weight(name))

    def evaluate(self, data, labels):
        """The mean loss over data, and the share of right answers where there are classes."""
        loss, accuracy = self._trainer.evaluate(_rows(data), labels)
        return Score({"loss": loss, "accuracy": accuracy})

    def save(self, path: Path, overwrite: bool = False) -> None:
        """Writes the trained model as an .onnx file. It may be the file that was trained only if `overwrite` says so."""
        own = self._source is not None and os.path.exists(path) and os.path.samefile(path, self._source)
        if own and not overwrite:
            raise UsageError(f"{os.fspath(path)}: it is the file that was trained: expected another one, or overwrite=True")
        self._trainer.save(path)

    def __repr__(self):
        last = f", last loss {self.losses[-1]:.6g}" if self.losses else ""
        return f"<Trained: {len(self.losses)} updates{last}>"


def _rows(data):
    return _dict("data", data, "arrays or paths by the inputs' names")


def train(model: Source, data: dict, labels: Any, *, batch: int, epochs: int = 1, steps: Optional[int] = None,
          callback: Optional[Callable[[int, float], Any]] = None, shuffle: Optional[int] = 0, progress: Optional[bool] = None, inputs: Any = None,
          device: Optional[str] = None, dims: Optional[dict] = None, memory_limit: Optional[Bytes] = None, threads: Optional[int] = None,
          prefer: Optional[str] = None, offload: Optional[str] = None, **method: Any) -> Trained:
    """Trains a model in a memory that is known before the first update.

    `data` has an array, or the path of an .npy file, for each input; `labels` is one. `callback(step, loss)` is called after each update; what it
    returns, if it is `False`, ends the training, and so does Ctrl-C. `shuffle` is the seed of the rows' order, `None` for the order as it is.
    The method has the names of the command's flags: `loss`, `optimizer`, `lr`, `weight_decay`, `accumulate`, `precision` ... A loss that has
    become infinite or NaN ends the training with `Diverged`. An epoch has whole batches: rows that are left over are in another one.
    """
    options = {"device": device, "dims": dims, "memory_limit": memory_limit, "threads": threads, "prefer": prefer, "offload": offload}
    made = _model(model, inputs, options)
    batch, epochs = _count("batch", batch, 1), _count("epochs", epochs)
    shuffle = shuffle if shuffle is None else _count("shuffle", shuffle)
    steps = steps if steps is None else _count("steps", steps)
    method = _json(method)
    try:
        trainer = made.trainer(_rows(data), labels, batch, method, epochs, steps)
    except DoesNotFit as error:
        raise _advising(error, lambda: _advice(made.advise(_target(device), (batch, method)))) from None
    losses = []
    source = model if isinstance(model, (str, os.PathLike)) else None
    for step in _progress(range(trainer.steps), progress):
        loss, _, _ = trainer.step(step, shuffle)
        losses.append(loss)
        if not math.isfinite(loss):
            error = Diverged(f"step {step}: the loss is {loss}: no weight was changed by it; a smaller lr, a warmup or clip_norm may help")
            error.step, error.losses = step, losses
            raise error
        if callback is not None:
            result = callback(step, loss)
            # NumPy has a False of its own.
            if type(result).__name__ in ("bool", "bool_") and not result:
                break
    return Trained(trainer, losses, source)


def _progress(steps, wanted):
    """Steps under a bar of tqdm, if it is there and wanted."""
    if wanted is False:
        return steps
    try:
        from tqdm.auto import tqdm
    except ImportError:
        return steps
    return tqdm(steps, unit="step", disable=None if wanted is None else False)


class InferenceSession:
    """The shape of onnxruntime's class, for programs that were written for it: `get_inputs`, `run(names, feeds)`, `io_binding`.

    `providers` name devices: `CUDAExecutionProvider` is CUDA, `CPUExecutionProvider` the CPU; without them, the best that is there. Open dims
    follow the arrays: each shape that was not seen yet is planned and loaded once.
    """

    _DEVICES = {"CUDAExecutionProvider": "cuda", "CPUExecutionProvider": "cpu", "WebGpuExecutionProvider": "wgpu"}
    _KEPT = 8

    def __init__(self, path_or_bytes, sess_options=None, providers=None, provider_options=None, **options):
        self._source = _source(path_or_bytes)
        self._options = options
        if "batch" in options:
            raise UsageError("batch: the arrays' shapes say it; a Session has a batch")
        _dict("dims", options.get("dims") or {}, "extents by name")
        if providers and "device" not in options:
            given = [providers] if isinstance(providers, str) else list(providers)
            names = [name[0] if isinstance(name, (tuple, list)) and name else name for name in given]
            usable = [self._DEVICES[name] for name in names if isinstance(name, str) and name in self._DEVICES]
            if not usable:
                raise UsageError(f"providers: expected some of {', '.join(self._DEVICES)}, found {', '.join(map(str, names))}")
            # The first that is on this machine, as onnxruntime does.
            there = [device.split(":")[0].split(",")[0].split(" ")[0] for device in devices()] if len(usable) > 1 else usable
            self._options = {**options, "device": next((of for of in usable if of in there), usable[-1])}
        self._inputs, self._outputs = _declared(self._source)
        self._sessions = {}

    def get_inputs(self) -> "list[Node]":
        """The inputs, as the file declares them."""
        return self._inputs

    def get_outputs(self):
        """The outputs, as the file declares them."""
        return self._outputs

    def get_providers(self):
        """The device that runs."""
        device = self._options.get("device", "auto")
        return [name for name, of in self._DEVICES.items() if of == device] or ["CPUExecutionProvider"]

    def _session(self, feeds):
        """The session for the shapes of these arrays."""
        open_dims = _open_dims(self._inputs, feeds)
        key = tuple(sorted(open_dims.items()))
        if key not in self._sessions:
            # Shapes come and go: the session that was used longest ago makes room.
            while len(self._sessions) >= self._KEPT:
                self._sessions.pop(next(iter(self._sessions)))
            self._sessions[key] = Session(self._source, **{**self._options, "dims": {**(self._options.get("dims") or {}), **open_dims}})
        else:
            self._sessions[key] = self._sessions.pop(key)
        return self._sessions[key]

    def run(self, output_names: Optional[list], input_feed: dict, run_options: Any = None) -> list:
        """Runs once: the outputs of these names, or all, as a list."""
        import numpy

        own = (list, float, int, bool, numpy.ndarray, numpy.generic)
        feeds = _dict("input_feed", input_feed)
        try:
            feeds = {name: numpy.asarray(x, order="C") if isinstance(x, own) else x for name, x in feeds.items()}
        except ValueError as error:
            raise UsageError(f"input_feed: {error}") from None
        found = self._session(feeds).run(feeds)
        names = [output_names] if isinstance(output_names, str) else output_names or [node.name for node in self._outputs]
        unknown = [name for name in names if name not in found]
        if unknown:
            raise UsageError(f"output '{unknown[0]}': not an output of the graph; its outputs: {', '.join(found)}")
        return [found[name] for name in names]

    def io_binding(self):
        """Inputs and outputs in arrays of the program."""
        return IOBinding(self)

    def run_with_iobinding(self, binding, run_options=None):
        """Runs over bound arrays."""
        if not isinstance(binding, IOBinding):
            raise UsageError(f"binding: expected what io_binding() gives, found {type(binding).__name__}")
        binding._run()


class IOBinding:
    """Arrays that a run reads and writes in their place."""

    def __init__(self, session):
        self._session, self._feeds, self._out, self._found = session, {}, {}, {}
        self._names = []

    def bind_cpu_input(self, name, array):
        """An array that is read."""
        self._feeds[name] = array

    def bind_input(self, name, array, *_rest):
        """An array, or a tensor of the device, that is read."""
        self._feeds[name] = array

    def bind_output(self, name, array=None, *_rest):
        """An array, or a tensor of the device, that is written; without one, a new array is."""
        known = [node.name for node in self._session.get_outputs()]
        if name not in known:
            raise UsageError(f"output '{name}': not an output of the graph; its outputs: {', '.join(known)}")
        self._names.append(name)
        if array is not None and not isinstance(array, str):
            self._out[name] = array

    def copy_outputs_to_cpu(self):
        """The outputs."""
        return [self._found[name] for name in self._names or self._found]

    get_outputs = copy_outputs_to_cpu

    def _run(self):
        self._found = self._session._session(self._feeds).run(self._feeds, self._out)


def __dir__():
    return [*__all__, "__version__"]
