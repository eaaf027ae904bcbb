"""What a model's functions are fed: checked, counted, and explained where dividing it fails."""

import functools
import re

from ... import _replicas, _work, errors
from ..._process import process
from . import op_placement

# What TensorFlow calls what runs a part of the batch, and what puts the parts together.
_OF_REPLICAS = re.compile(r"\breplica_\d|rows_in_order|mean_by_rows")

_HINT = (
    "\n\nparallelize() runs the operations named replica_... of a part of the batch. An operation "
    "that needs all rows, or a size that is the whole batch's, fails there: use sizes of its "
    "inputs, such as K.shape(x)[0], or one device: parallelize(model, gpus=1)."
)


def explain(function, model, replicas, training):
    """Have one of a model's functions check and count what it is fed, and explain its errors.

    Arguments:
        function: what ``K.function`` returned.
        model: the model's name.
        replicas: the ``Replicas`` that it runs.
        training: whether it trains.
    """
    vars(function)["_compat_divided"] = (model, replicas, training)
    function.__class__ = _explaining(type(function))


@functools.lru_cache(maxsize=None)
def _explaining(kind):
    from tensorflow.python.framework.errors import InvalidArgumentError

    class Function(kind):
        def __call__(self, inputs):
            rows = _checked_rows(self, inputs)
            try:
                results = super().__call__(inputs)
            except InvalidArgumentError as error:
                if not _OF_REPLICAS.search(error.message):
                    raise
                raise type(error)(error.node_def, error.op, error.message + _HINT) from error
            _count(self, inputs, rows)
            return results

    Function.__name__ = kind.__name__
    return Function


def _count(function, inputs, rows):
    _, replicas, training = vars(function)["_compat_divided"]
    devices, sizes = replicas.devices, None
    if process.configuration is not None:
        devices = op_placement.as_configured(devices, process.configuration.devices)
    if rows:
        sizes = _replicas.sizes(next(iter(rows.values())), len(devices))
    elif not replicas.part.divided and inputs and getattr(inputs[0], "shape", None):
        sizes = _work.undivided(devices, inputs[0].shape[0])
    _work.count(devices, sizes, training)  # None: the model has tensors that are not fed


def _checked_rows(function, inputs):
    """The number of rows of each divided tensor that is fed, by name."""
    model, replicas, _ = vars(function)["_compat_divided"]
    divided = replicas.part.divided
    rows = {
        getattr(tensor, "name", ""): value.shape[0]
        for tensor, value in zip(function.inputs, inputs)
        if getattr(value, "shape", None) and any(tensor is each for each in divided)
    }
    if len(set(rows.values())) > 1:
        sizes = ", ".join("{} has {}".format(name, rows[name]) for name in sorted(rows))
        raise errors.UnsupportedError(
            "parallelize() divides each input of model {!r} by its rows, but they do not have as "
            "many: {}. Give each input a row for each row of the batch, or use one device: "
            "parallelize(model, gpus=1).".format(model, sizes)
        )
    return rows
