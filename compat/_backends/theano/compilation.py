"""Functions of a graph's body, compiled for a device: the forward pass and the backward pass."""

from collections import OrderedDict
from typing import Any, List, NamedTuple, Tuple

import theano
from theano.tensor import tensor_copy

from .graph import (
    depending_on,
    gradients_of,
    is_random,
    nearest,
    placeholder_like,
    value_like,
)


class Body(NamedTuple):
    """The graph from a device's shard to the values at the cuts, in Keras' variables.

    Attributes:
        inputs: the variables that a body is given.
        sharded: those of them that have rows.
        at_cuts: the variables at the cuts.
        used: the shared variables that these depend on.
        differentiated: the indices of the cuts that have a gradient.
        weights: the weights whose gradients are wanted then.
    """

    inputs: "List[Any]"
    sharded: "List[Any]"
    at_cuts: "List[Any]"
    used: "List[Any]"
    differentiated: "List[int]"
    weights: "List[Any]"


def compiled(device: "Any", body: "Body", compile_function: "Any") -> "Tuple[List[Any], List[Any]]":
    """Compile the functions of a body for a device, of the device's own variables.

    Arguments:
        device: the ``Device``, which is the current one.
        body: the ``Body``.
        compile_function: makes a function of inputs and outputs.

    Returns:
        The function of the forward pass, from the shard to the values at the cuts and what it
        keeps; where a cut has a gradient also that of the backward pass, from the shard, what is
        kept and the upstream gradients. And the weights that have a gradient.
    """
    copies, randoms, count = device.variables, list(filter(is_random, body.used)), len(body.at_cuts)
    shard = [placeholder_like(v, device.place if v in body.sharded else "cpu") for v in body.inputs]
    replaced = {v: value_like(v, placeholder) for v, placeholder in zip(body.inputs, shard)}
    replaced.update((v, value_like(v, copies[v])) for v in body.used)
    values = theano.clone(body.at_cuts + [v.default_update for v in randoms], replaced)
    updates = [(copies[v], new) for v, new in zip(randoms, values[count:])]
    values = values[:count]

    def place_of(variable):
        """Return where a value lies: what is not a float stays in the host's memory."""
        return device.place if "float" in variable.type.dtype else "cpu"

    def function(inputs, values, updates=()):
        values = [value.transfer(place_of(value)) for value in values]
        return compile_function(inputs, values, updates=updates, no_default_updates=True)

    if not body.differentiated:
        return [function(shard, values, updates)], []
    at_cuts = [values[index] for index in body.differentiated]
    upstream = [placeholder_like(value, device.place) for value in at_cuts]
    # Copies, since one value at the cuts may depend on another one.
    upstream_of = [(tensor_copy(v), value_like(v, u)) for v, u in zip(at_cuts, upstream)]
    weights = [copies[weight] for weight in body.weights]
    gradients_by_weight = gradients_of(None, weights, OrderedDict(upstream_of))
    gradients = list(gradients_by_weight.values())
    kept = _kept(gradients, shard + [state for state, _ in updates], values)
    placeholders = [placeholder_like(variable, place_of(variable)) for variable in kept]
    handed_over = {v: value_like(v, placeholder) for v, placeholder in zip(kept, placeholders)}
    forward = function(shard, values + kept, updates)
    backward = function(shard + placeholders + upstream, theano.clone(gradients, handed_over))
    return [forward, backward], [w for w in body.weights if copies[w] in gradients_by_weight]


def _kept(gradients, leaves, values):
    """Return the variables of the forward pass, from leaves to values, that gradients need."""
    forward = depending_on(leaves, values).difference(leaves)

    def is_kept(variable):
        # A view of another variable would be copied.
        is_view = bool(getattr(variable.owner.op, "view_map", None))
        return variable in forward and hasattr(variable, "broadcastable") and not is_view

    return nearest(gradients, is_kept)


def takes_values_away(mode):
    """Return whether a function of this mode takes its shared variables' values while it runs.

    Functions that are called meanwhile, such as those of the backward pass, do not find them there.
    """
    return isinstance(theano.compile.mode.get_mode(mode), theano.compile.debugmode.DebugMode)
