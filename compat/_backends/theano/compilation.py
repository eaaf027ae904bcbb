"""Functions compiled for a device of the body of a model's graph, to go forward and back."""

from collections import OrderedDict

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


def compiled(device, compile_function, inputs, sharded, wanted, used, places, weights):
    """Compile the functions of the body, the graph from a device's shard to the values at the cut.

    Of variables of the device's own. Call it while the device is the current one.

    Arguments:
        compile_function: makes a function of inputs and outputs.
        inputs: what a body is given, in the words of Keras' graph.
        sharded: those of them that have rows.
        wanted: the variables at the cut.
        used: the shared variables that these depend on.
        places: of the values at the cut whose gradients will be given.
        weights: Keras' variables, whose gradients are wanted then.

    Returns:
        The function that goes forward, of the shard, which returns the values at the cut, and
        then what it keeps for the one that goes back. If there are ``places``, that one, too, of
        the shard, what is kept and the gradients at the cut. And the weights that have a gradient.
    """
    own, randoms = device.variables, list(filter(is_random, used))
    shard = [placeholder_like(v, device.place if v in sharded else "cpu") for v in inputs]
    replaced = {v: value_like(v, given) for v, given in zip(inputs, shard)}
    replaced.update((v, value_like(v, own[v])) for v in used)
    values = theano.clone(wanted + [v.default_update for v in randoms], replaced)
    updates = [(own[v], new) for v, new in zip(randoms, values[len(wanted) :])]
    values = values[: len(wanted)]

    def place_of(variable):
        """Return where a value lies: what is not a float stays in the host's memory."""
        return device.place if "float" in variable.type.dtype else "cpu"

    def function(inputs, values, updates=()):
        values = [value.transfer(place_of(value)) for value in values]
        return compile_function(inputs, values, updates=updates, no_default_updates=True)

    if not places:
        return [function(shard, values, updates)], []
    at_cut = [values[place] for place in places]
    upstream = [placeholder_like(value, device.place) for value in at_cut]
    # Copies, since one value at the cut may depend on another one.
    known = [(tensor_copy(v), value_like(v, given)) for v, given in zip(at_cut, upstream)]
    found = gradients_of(None, [own[weight] for weight in weights], OrderedDict(known))
    gradients = list(found.values())
    kept = _kept(gradients, shard + [state for state, _ in updates], values)
    given = [placeholder_like(variable, place_of(variable)) for variable in kept]
    handed_over = {variable: value_like(variable, value) for variable, value in zip(kept, given)}
    forward = function(shard, values + kept, updates)
    backward = function(shard + given + upstream, theano.clone(gradients, handed_over))
    return [forward, backward], [weight for weight in weights if own[weight] in found]


def _kept(gradients, leaves, values):
    """Return what the forward pass from leaves to values computes that gradients need."""
    forward = depending_on(leaves, values).difference(leaves)

    def is_kept(variable):
        # To hand over a view of another variable would copy it.
        is_view = bool(getattr(variable.owner.op, "view_map", None))
        return variable in forward and hasattr(variable, "broadcastable") and not is_view

    return nearest(gradients, is_kept)


def takes_values_away(mode):
    """Return whether a function of this mode holds its shared variables' values while it runs.

    Functions that are called meanwhile, as the bodies are to go back, do not find them there.
    """
    return isinstance(theano.compile.mode.get_mode(mode), theano.compile.debugmode.DebugMode)
