"""Errors of a model's functions that a divided batch causes, with an explanation."""

import functools
import re

from ... import errors

# What TensorFlow calls what runs a part of the batch, and what puts the parts together.
_OF_REPLICAS = re.compile(r"\breplica_\d|rows_in_order|mean_by_rows")

_HINT = (
    "\n\nparallelize() runs the operations named replica_... of a part of the batch. An operation "
    "that needs all rows, or a size that is the whole batch's, fails there: use sizes of its "
    "inputs, such as K.shape(x)[0], or one device: parallelize(model, gpus=1)."
)


def explain(function, model, divided):
    """Have one of a model's functions check what it is fed, and explain TensorFlow's errors.

    Arguments:
        function: what ``K.function`` returned.
        model: the model's name.
        divided: the tensors whose rows are divided.
    """
    vars(function)["_compat_divided"] = (model, list(divided))
    function.__class__ = _explaining(type(function))


@functools.lru_cache(maxsize=None)
def _explaining(kind):
    from tensorflow.python.framework.errors import InvalidArgumentError

    class Function(kind):
        def __call__(self, inputs):
            _check_rows(self, inputs)
            try:
                return super().__call__(inputs)
            except InvalidArgumentError as error:
                if not _OF_REPLICAS.search(error.message):
                    raise
                raise type(error)(error.node_def, error.op, error.message + _HINT) from error

    Function.__name__ = kind.__name__
    return Function


def _check_rows(function, inputs):
    model, divided = vars(function)["_compat_divided"]
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
