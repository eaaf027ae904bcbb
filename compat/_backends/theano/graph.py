"""Queries on Theano's graphs, and variables that are built into them."""

import types

from theano import tensor
from theano.compile.ops import as_op
from theano.gof import graph

from ... import _rows, errors


def is_random(variable):
    """Return whether this is the state of a random generator, Keras' or a device's own."""
    of_device = getattr(variable, "is_state", False)
    return of_device or getattr(variable, "default_update", None) is not None


def context_of(variable):
    """Return the name of the context that a variable lies on, or "cpu"."""
    return getattr(variable.type, "context_name", "cpu")


def depending_on(starts, wanted):
    """Return ``starts``, and the variables that depend on them and that ``wanted`` need."""
    following = set(starts)
    for node in graph.io_toposort([], wanted):
        if any(variable in following for variable in node.inputs):
            following.update(node.outputs)
    return following


def nearest(wanted, is_found, inputs_of=lambda node: node.inputs):
    """Return the variables nearest to ``wanted`` of which a function is true, each once, in order.

    Leaves are none of them.

    Arguments:
        inputs_of: the inputs of a node that are looked at.
    """

    def is_one(variable):
        return variable.owner is not None and is_found(variable)

    def before(variable):
        return () if variable.owner is None else inputs_of(variable.owner)

    return _rows.nearest(wanted, is_one, before)


def gradients_of(total, variables, known=None):
    """Return the gradients with respect to the variables that ``total`` depends on.

    Arguments:
        known: the gradients of some variables, in place of a total.
    """
    found = tensor.grad(
        total, variables, disconnected_inputs="ignore", return_disconnected="None",
        known_grads=known,
    )  # fmt: skip
    return {v: gradient for v, gradient in zip(variables, found) if gradient is not None}


def computed_by(function, given, like, shapes_of=None):
    """Return variables that a function of arrays computes whenever the graph is run.

    Arguments:
        given: the variables whose values the function takes.
        like: for each array that it returns, a variable of the same type.
        shapes_of: as ``infer_shape`` of ``as_op``.
    """
    given = [variable.transfer("cpu") for variable in given]
    types = [[variable.type for variable in variables] for variables in (given, like)]
    operation = as_op(*types, shapes_of)(function)
    operation.do_constant_folding = lambda node: False
    return operation.make_node(*given).outputs


def placeholder_like(variable, place):
    """Return a variable to be given a value, like ``variable``, that lies at ``place``."""
    if not hasattr(variable, "broadcastable"):
        return variable.type()
    if place == "cpu":
        return tensor.TensorType(variable.dtype, variable.broadcastable)()
    from theano.gpuarray import GpuArrayType

    return GpuArrayType(variable.dtype, variable.broadcastable, context_name=place)()


def value_like(variable, own):
    """Return the value of ``own`` where ``variable`` has its own."""
    return own if variable.type == own.type else own.transfer(context_of(variable))


def frames_of(variable):
    """Return where a variable was made: pairs of a file and a line, the innermost last."""
    traces = getattr(variable.tag, "trace", None) or [[]]
    return [(frame[0], frame[1]) for frame in traces[0]]


def line_of(variable):
    """Return the user's line that a variable was made at: "train.py, line 12", or None."""
    return errors.innermost_line(frames_of(variable))


def is_custom(op):
    """Return whether an operation is not Theano's, or calls a user-defined function."""
    functions = [each for each in vars(op).values() if isinstance(each, types.FunctionType)]
    return type(op).__module__.partition(".")[0] != "theano" or any(
        errors.is_users_file(function.__code__.co_filename) for function in functions
    )
