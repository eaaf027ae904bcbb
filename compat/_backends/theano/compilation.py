"""Functions of a graph's body, compiled for a device: the forward pass and the backward pass."""

from collections import OrderedDict
from typing import Any, Dict, List, NamedTuple, Tuple

import theano
from theano.gof import graph
from theano.tensor import tensor_copy

from . import function_copies
from .graph import gradients_of, is_random, placeholder_like, value_like
from .stages import staged


class Body(NamedTuple):
    """The graph from a device's shard to the values at the cuts, in Keras' variables.

    What a body keeps of the forward pass for the backward one is an input of the latter's stages.

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


class Compiled(NamedTuple):
    """A compiled stage.

    Attributes:
        function: the function.
        inputs, outputs: the variables whose values it takes and returns.
        reductions: the nodes that are computed after it, over the devices.
    """

    function: "Any"
    inputs: "List[Any]"
    outputs: "List[Any]"
    reductions: "List[Any]"


class Program(NamedTuple):
    """The functions of a body on a device, and the variables of its graph.

    Attributes:
        shard: a placeholder for each of the body's inputs.
        at_cuts: the variables at the cuts.
        upstream: placeholders for the gradients of those that have one.
        gradients: the variables that are the weights' gradients.
        forward, backward: the stages.
    """

    shard: "List[Any]"
    at_cuts: "List[Any]"
    upstream: "List[Any]"
    gradients: "List[Any]"
    forward: "List[Compiled]"
    backward: "List[Compiled]"

    def copied(self, swap: "Dict[Any, Any]") -> "Program":
        """Return the program with copies of its functions that have other shared variables."""
        forward, backward = [
            [
                stage._replace(function=function_copies.copied(stage.function, swap))
                for stage in each
            ]
            for each in (self.forward, self.backward)
        ]
        return self._replace(forward=forward, backward=backward)

    def functions(self) -> "List[Any]":
        """Return the compiled functions."""
        return [stage.function for stage in self.forward + self.backward]


def compiled(device: "Any", body: "Body", compile_function: "Any") -> "Tuple[Program, List[Any]]":
    """Compile the functions of a body for a device, of the device's own variables.

    Arguments:
        device: the ``Device``, which is the current one.
        body: the ``Body``.
        compile_function: makes a function of inputs and outputs.

    Returns:
        The ``Program``: without reductions a function of the forward pass and, where a cut has a
        gradient, one of the backward pass. And the weights that have a gradient.
    """
    copies, randoms, count = device.variables, list(filter(is_random, body.used)), len(body.at_cuts)
    shard = [placeholder_like(v, device.place if v in body.sharded else "cpu") for v in body.inputs]
    replaced = {v: value_like(v, placeholder) for v, placeholder in zip(body.inputs, shard)}
    replaced.update((v, value_like(v, copies[v])) for v in body.used)
    values = theano.clone(body.at_cuts + [v.default_update for v in randoms], replaced)
    updates = [(copies[v], new) for v, new in zip(randoms, values[count:])]
    values = values[:count]
    upstream, by_weight = [], {}
    if body.differentiated:
        at_cuts = [values[index] for index in body.differentiated]
        upstream = [placeholder_like(value, device.place) for value in at_cuts]
        # Copies, since one value at the cuts may depend on another one.
        upstream_of = [(tensor_copy(v), value_like(v, u)) for v, u in zip(at_cuts, upstream)]
        weights = [copies[weight] for weight in body.weights]
        by_weight = gradients_of(None, weights, OrderedDict(upstream_of))
    gradients = list(by_weight.values())
    leaves = shard + [state for state, _ in updates]
    stages = staged(values, gradients, updates, leaves, upstream)

    def place_of(variable):
        """Return where a value lies: what is not a float stays in the host's memory."""
        return device.place if "float" in variable.type.dtype else "cpu"

    def function(stage):
        placeholders = [placeholder_like(variable, place_of(variable)) for variable in stage.inputs]
        earlier = {
            v: value_like(v, placeholder) for v, placeholder in zip(stage.inputs, placeholders)
        }
        results = theano.clone(stage.outputs + [new for _, new in stage.updates], earlier)
        count = len(stage.outputs)
        leaves = set(graph.inputs(results))
        fed = [variable for variable in shard + upstream if variable in leaves]
        made = compile_function(
            fed + placeholders,
            [value.transfer(place_of(value)) for value in results[:count]],
            updates=[(state, new) for (state, _), new in zip(stage.updates, results[count:])],
            no_default_updates=True,
        )
        return Compiled(made, fed + stage.inputs, stage.outputs, stage.reductions)

    forward, backward = [list(map(function, each)) for each in stages]
    program = Program(shard, values, upstream, gradients, forward, backward)
    return program, [w for w in body.weights if copies[w] in by_weight]


def takes_values_away(mode):
    """Return whether a function of this mode takes its shared variables' values while it runs.

    Functions that are called meanwhile, such as those of the backward pass, do not find them there.
    """
    return isinstance(theano.compile.mode.get_mode(mode), theano.compile.debugmode.DebugMode)
