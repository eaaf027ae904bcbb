"""Variables of Theano's graphs: what depends on what, and others like them on a device."""

import numpy as np


def leaves_of(variables):
    from theano.gof import graph

    return graph.inputs(variables)


def ancestors_of(variables):
    from theano.gof import graph

    return set(graph.ancestors(variables))


def depending_on(starts, wanted):
    """``starts``, and the variables that depend on them and that ``wanted`` need."""
    from theano.gof import graph

    following = set(starts)
    for node in graph.io_toposort([], wanted):
        if any(variable in following for variable in node.inputs):
            following.update(node.outputs)
    return following


def nearest(wanted, is_found):
    """The variables nearest to ``wanted`` of which a function is true, each once, in order.

    Leaves are none of them.
    """
    found, seen, stack = [], set(), list(reversed(wanted))
    while stack:
        variable = stack.pop()
        if variable in seen or variable.owner is None:
            continue
        seen.add(variable)
        if is_found(variable):
            found.append(variable)
        else:
            stack += reversed(variable.owner.inputs)
    return found


def gradients_of(total, variables, known=None):
    """The gradients with respect to those of the variables that ``total`` depends on.

    Arguments:
        known: the gradients of some variables, in place of a total.
    """
    from theano import tensor

    found = tensor.grad(
        total, variables, disconnected_inputs="ignore", return_disconnected="None",
        known_grads=known,
    )  # fmt: skip
    return {v: gradient for v, gradient in zip(variables, found) if gradient is not None}


def is_random(variable):
    """Whether this is the state of a generator of random numbers."""
    return getattr(variable, "default_update", None) is not None


def independent_state(value, number):
    """The state of a generator whose numbers are independent of those that ``value`` gives."""
    from theano.sandbox import rng_mrg

    if isinstance(value, np.random.RandomState):
        return np.random.RandomState([number] + list(value.get_state()[1][:8]))
    states = np.array(value)
    for _ in range(number):
        states = np.array([rng_mrg.ff_2p134(state) for state in states], dtype=states.dtype)
    return states


def context_of(variable):
    """The name of the context that a variable lies on, or "cpu"."""
    return getattr(variable.type, "context_name", "cpu")


def host_type_of(variable):
    from theano import tensor

    return tensor.TensorType(variable.dtype, variable.broadcastable)


def placeholder_like(variable, place):
    """A variable to be given a value, like ``variable``, that lies at ``place``."""
    if place == "cpu" or not hasattr(variable, "broadcastable"):
        return host_type_of(variable)() if hasattr(variable, "broadcastable") else variable.type()
    from theano.gpuarray import GpuArrayType

    return GpuArrayType(variable.dtype, variable.broadcastable, context_name=place)()


def value_like(variable, own):
    """The value of ``own`` where ``variable`` has its own."""
    return own if variable.type == own.type else own.transfer(context_of(variable))


def frames_of(variable):
    """Where a variable was made: pairs of a file and a line, the innermost last."""
    traces = getattr(variable.tag, "trace", None) or [[]]
    return [(frame[0], frame[1]) for frame in traces[0]]
