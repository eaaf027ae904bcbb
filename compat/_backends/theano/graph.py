"""Queries on Theano's graphs, and variables that are added to them."""

import types
from typing import Any, Iterable, List, Optional, Set, Tuple

from theano import tensor
from theano.compile.ops import as_op
from theano.gof import graph

from ... import _rows, errors


def is_random(variable: "Any") -> bool:
    """Return whether a variable is the state of a random generator, Keras' or a device's copy."""
    of_device = getattr(variable, "is_state", False)
    return of_device or getattr(variable, "default_update", None) is not None


def context_of(variable: "Any") -> "Optional[str]":
    """Return the name of the context that a variable lies on, or "cpu"."""
    return getattr(variable.type, "context_name", "cpu")


def depending_on(starts: "Iterable[Any]", wanted: "List[Any]") -> "Set[Any]":
    """Return ``starts``, and the variables that depend on them and that ``wanted`` need."""
    following = set(starts)
    for node in graph.io_toposort([], wanted):
        if any(variable in following for variable in node.inputs):
            following.update(node.outputs)
    return following


def nearest(wanted, is_found, inputs_of=lambda node: node.inputs):
    """Return the nearest ancestors that satisfy a predicate, each once, in order.

    Leaves do not count.

    Arguments:
        wanted: the variables where the search begins, which may themselves be found.
        is_found: the predicate.
        inputs_of: returns the inputs of a node that the search follows.
    """

    def is_one(variable):
        return variable.owner is not None and is_found(variable)

    def before(variable):
        return () if variable.owner is None else inputs_of(variable.owner)

    return _rows.nearest(wanted, is_one, before)


def gradients_of(total, variables, known=None):
    """Return the gradients of a total with respect to variables, as far as it depends on them.

    Arguments:
        total: a scalar; or None.
        variables: the variables.
        known: the gradients with respect to some variables, in place of a total.
    """
    gradients = tensor.grad(
        total, variables, disconnected_inputs="ignore", return_disconnected="None",
        known_grads=known,
    )  # fmt: skip
    return {v: gradient for v, gradient in zip(variables, gradients) if gradient is not None}


def computed_by(function, inputs, like, shapes_of=None):
    """Return variables that a function of arrays computes whenever the graph is run.

    Arguments:
        function: the function.
        inputs: the variables whose values it takes.
        like: for each array that it returns, a variable of the same type.
        shapes_of: as ``infer_shape`` of ``as_op``.
    """
    inputs = [variable.transfer("cpu") for variable in inputs]
    types = [[variable.type for variable in variables] for variables in (inputs, like)]
    operation = as_op(*types, shapes_of)(function)
    operation.do_constant_folding = lambda node: False
    return operation.make_node(*inputs).outputs


def placeholder_like(variable: "Any", place: "Optional[str]") -> "Any":
    """Return a placeholder on a device for values like those of a variable."""
    if not hasattr(variable, "broadcastable"):
        return variable.type()
    if place == "cpu":
        return tensor.TensorType(variable.dtype, variable.broadcastable)()
    from theano.gpuarray import GpuArrayType

    return GpuArrayType(variable.dtype, variable.broadcastable, context_name=place)()


def value_like(variable: "Any", value: "Any") -> "Any":
    """Return a value on the device of a variable."""
    return value if variable.type == value.type else value.transfer(context_of(variable))


def frames_of(variable: "Any") -> "List[Tuple[str, int]]":
    """Return the stack where a variable was made: pairs of a file and a line, innermost last."""
    traces = getattr(variable.tag, "trace", None) or [[]]
    return [(frame[0], frame[1]) for frame in traces[0]]


def line_of(variable: "Any") -> "Optional[str]":
    """Return the user's line where a variable was made, such as "train.py, line 12", or None."""
    return errors.innermost_line(frames_of(variable))


def is_custom(op: "Any") -> bool:
    """Return whether an operation is not Theano's, or calls a user-defined function."""
    functions = [value for value in vars(op).values() if isinstance(value, types.FunctionType)]
    return type(op).__module__.partition(".")[0] != "theano" or any(
        errors.is_users_file(function.__code__.co_filename) for function in functions
    )
