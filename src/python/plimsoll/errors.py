"""What fails: an exception for each kind, with its fields."""

import json


class PlimsollError(Exception):
    """Any error of plimsoll. `path` is the file that it names, `exit_code` what the command would end with."""

    path = None
    exit_code = 1

    def __reduce__(self):
        # What computes advice stays in its process.
        return _again, (type(self), str(self), {name: value for name, value in vars(self).items() if not name.startswith("_")})


class FileError(PlimsollError, OSError):
    """A file cannot be read or written, or has other content than expected."""


class GraphSyntaxError(PlimsollError, ValueError):
    """A text file does not follow its syntax, at `line` and `column`."""

    line = column = 0


class NodeError(PlimsollError, ValueError):
    """A node breaks a rule of its operator: `node` and `op` name them."""

    node = op = ""


class GraphError(PlimsollError, ValueError):
    """A graph as a whole is malformed."""


class UnboundDims(PlimsollError, ValueError):
    """Named dims have no extent: `dims`."""

    dims = ()


class UsageError(PlimsollError, ValueError):
    """An input or an option does not suit the graph or the device."""


class DoesNotFit(PlimsollError, MemoryError):
    """More bytes are `needed` than the `limit` allows. Nothing was allocated.

    `bound` is what every plan takes at least, if that was proved; `remedies` are changes that would save bytes, each with the bytes of its own
    plan. Both are computed when they are asked for, and `None` where the error is not of a model.
    """

    needed = limit = 0
    _advise = None
    _at = None
    _advice = None

    @property
    def advice(self):
        """What is live at the peak, and what would help; `None` where the error is not of a model."""
        if self._advice is None and self._advise is not None:
            self._advice = self._advise()
        return self._advice

    @property
    def bound(self):
        """The bytes that every order and placement takes, if they were proved."""
        bound = (self.advice.record if self.advice else {}).get("bound")
        return bound["bytes"] if bound else None

    @property
    def remedies(self):
        """Changes that would save bytes, the least first; `fits` says whether one suffices. All that were tried are in `advice`."""
        if self.advice is None:
            return None
        saves = [remedy for remedy in self.advice.remedies if remedy.get("planned_bytes", self.needed) < self.needed]
        return sorted(({**remedy, "fits": remedy["planned_bytes"] <= self.limit} for remedy in saves), key=lambda remedy: remedy["planned_bytes"])


class OutOfMemory(PlimsollError, MemoryError):
    """The host does not have the bytes that are `needed`."""

    needed = 0


class PlanError(PlimsollError, ValueError):
    """A plan breaks a rule that every plan must keep."""


class ResultsDiffer(PlimsollError):
    """Two results that should agree differ."""


class Diverged(PlimsollError, ArithmeticError):
    """The loss of a training became infinite or NaN, at `step`; `losses` has all up to it."""

    step = 0
    losses = ()


class DeviceError(PlimsollError, RuntimeError):
    """A device is absent, is lost, or refused a request. `backend` names it."""

    backend = ""


def _again(kind, text, fields):
    """An exception that comes from another process."""
    error = kind(text)
    vars(error).update(fields)
    return error


_KINDS = {
    "file": FileError,
    "syntax": GraphSyntaxError,
    "node": NodeError,
    "graph": GraphError,
    "unbound": UnboundDims,
    "usage": UsageError,
    "fit": DoesNotFit,
    "memory": OutOfMemory,
    "plan": PlanError,
    "differ": ResultsDiffer,
    "backend": DeviceError,
}


def _made(kind, text, fields):
    """The exception of a kind, with its fields."""
    error = _KINDS.get(kind, PlimsollError)(text)
    for name, value in json.loads(fields).items():
        setattr(error, name, value)
    return error
