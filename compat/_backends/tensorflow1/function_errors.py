"""What a model's functions are fed: checked, counted, and explained where dividing it fails."""

import re

from ... import errors
from ..._rows import split_rows
from ..._runtime import work
from ..._runtime.process import process
from . import op_placement

# What TensorFlow calls what runs a part of the batch, and what puts the parts together.
_OF_REPLICAS = re.compile(r"\breplica_\d|rows_in_order|mean_by_rows")

_HINT = (
    "\n\nparallelize() runs the operations named replica_... of a part of the batch. An operation "
    "that needs all rows, or a size that is the whole batch's, fails there: use sizes of its "
    "inputs, such as K.shape(x)[0], or one device: parallelize(model, gpus=1)."
)


def explain(function, owner, replicas, training):
    """Have one of a model's functions check and count what it is fed, and explain its errors.

    Arguments:
        function: what ``K.function`` returned.
        owner: the ``ReplicatedGraphFunctions`` of the model.
        replicas: the ``Replicas`` that it runs.
        training: whether it trains.
    """
    kind = type(function)
    vars(function)["_compat_divided"] = (owner, replicas, training)
    function.__class__ = type(kind.__name__, (_TriedFunction, kind), {})


def become(function, new):
    """Have a function that others hold do what a new one does."""
    recorded = ("run_options", "run_metadata")
    vars(function).update((k, v) for k, v in vars(new).items() if k not in recorded)


class _TriedFunction:
    _compat_tried = False

    def try_on(self, inputs):
        """Try what it takes of the replicas on the first rows; returns the rows it is fed."""
        rows = _checked_rows(self, inputs)
        while not self._compat_tried:
            owner, replicas, _ = self._compat_divided
            self._compat_tried = not owner.try_on(replicas, self.inputs, inputs)
        return rows

    def __call__(self, inputs):
        from tensorflow.python.framework.errors import InvalidArgumentError

        rows = self.try_on(inputs)
        try:
            results = super().__call__(inputs)
        except InvalidArgumentError as error:
            if not _OF_REPLICAS.search(error.message):
                raise
            raise type(error)(error.node_def, error.op, error.message + _HINT) from error
        _count(self, inputs, rows)
        return results


def _count(function, inputs, rows):
    _, replicas, training = function._compat_divided
    devices, sizes = replicas.devices, None
    if process.configuration is not None:
        devices = op_placement.as_configured(devices, process.configuration.devices)
    if rows:
        sizes = split_rows.sizes(next(iter(rows.values())), len(devices))
    elif not replicas.part.divided and inputs and _rows_of(inputs[0]) is not None:
        sizes = work.undivided(devices, _rows_of(inputs[0]))
    work.count(devices, sizes, training)  # None: the model has tensors that are not fed


def _rows_of(value):
    """How many rows an array has; of a tensor of the graph, where that is known; else None."""
    shape = getattr(value, "shape", None)
    return getattr(shape[0], "value", shape[0]) if shape else None


def _checked_rows(function, inputs):
    """The number of rows of each divided tensor that is fed, by name."""
    owner, replicas, _ = function._compat_divided
    rows = {
        getattr(tensor, "name", ""): _rows_of(value)
        for tensor, value in zip(function.inputs, inputs)
        if any(tensor is each for each in replicas.part.divided) and _rows_of(value) is not None
    }
    if len(set(rows.values())) > 1:
        sizes = ", ".join(f"{name} has {rows[name]}" for name in sorted(rows))
        raise errors.UnsupportedError(rows_differ(owner.model.name, ": " + sizes))
    return rows


def rows_differ(model, found=""):
    return (
        f"parallelize() divides each input of model {model!r} by its rows, but they do not have as "
        f"many{found}. Give each input a row for each row of the batch, or use one device: "
        "parallelize(model, gpus=1)."
    )
