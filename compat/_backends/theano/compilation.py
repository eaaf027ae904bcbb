"""A device of Theano's, with weights of its own, and the body of a model's graph on it."""

import contextlib
import weakref
from collections import OrderedDict

import numpy as np
import theano
from theano import tensor
from theano.compile.ops import as_op
from theano.gof import graph
from theano.tensor import tensor_copy

from ... import _rows


def is_random(variable):
    """Whether this is the state of a generator of random numbers, Keras' or a device's own."""
    of_device = getattr(variable, "is_state", False)
    return of_device or getattr(variable, "default_update", None) is not None


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


class Device:
    """A device: its ``name``, and Theano's ``target`` for it, a context's name or "cpu".

    ``place`` is the target in its own graphs: "cpu", or the default context, None.
    """

    def __init__(self, name, target):
        self.name = name
        self.target = target
        self.place = "cpu" if target == "cpu" else None
        self.variables = {}  # type: Any  # Keras' shared variables, and those used here
        self.functions = weakref.WeakSet()  # type: Any  # those of bodies that run here

    @contextlib.contextmanager
    def current(self):
        """Within, Theano's default context is this device's."""
        if self.target == self.place:
            yield
            return
        from theano.gpuarray import type as contexts

        registered = contexts._context_reg  # what reg_context() fills refuses a second one
        default = {None: registered[None]} if None in registered else {}
        registered[None] = contexts.get_context(self.target)
        try:
            yield
        finally:
            del registered[None]
            registered.update(default)

    def adopt(self, variable, number, is_apart=False):
        """Make this device's variable for one of Keras', unless it has one.

        Arguments:
            number: the device's among those of its model. The first uses Keras' variables
                themselves, if they lie there.
            is_apart: whether the first has variables of its own as well.
        """
        known = self.variables.get(variable)
        if known is not None and not (is_apart and known is variable):
            return
        if number == 0 and context_of(variable) == self.target and not is_apart:
            self.variables[variable] = variable
            return
        value, options = variable.get_value(), {}
        if is_random(variable):
            value = independent_state(value, number)
        if hasattr(variable, "broadcastable"):
            options = {"target": self.place, "broadcastable": variable.broadcastable}
        with self.current():
            own = self.variables[variable] = theano.shared(value, variable.name, **options)
        own.is_state = is_random(variable)

    @contextlib.contextmanager
    def randomness_kept(self):
        """Afterwards, the generators of random numbers are where they were."""
        states = list(filter(is_random, self.variables.values()))
        before = [state.get_value() for state in states]
        try:
            yield
        finally:
            with self.current():
                for state, value in zip(states, before):
                    state.set_value(value)

    def take_weights(self):
        """Bring this device's weights up to date."""
        for keras, own in self.variables.items():
            if own is not keras and not is_random(keras):
                value = np.asarray(keras.get_value(borrow=True))
                with self.current():
                    own.set_value(value)


# Graphs ----------------------------------------------------------------------------------------


def depending_on(starts, wanted):
    """``starts``, and the variables that depend on them and that ``wanted`` need."""
    following = set(starts)
    for node in graph.io_toposort([], wanted):
        if any(variable in following for variable in node.inputs):
            following.update(node.outputs)
    return following


def nearest(wanted, is_found, inputs_of=lambda node: node.inputs):
    """The variables nearest to ``wanted`` of which a function is true, each once, in order.

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
    """The gradients with respect to those of the variables that ``total`` depends on.

    Arguments:
        known: the gradients of some variables, in place of a total.
    """
    found = tensor.grad(
        total, variables, disconnected_inputs="ignore", return_disconnected="None",
        known_grads=known,
    )  # fmt: skip
    return {v: gradient for v, gradient in zip(variables, found) if gradient is not None}


def computed_by(function, given, like, shapes_of=None):
    """Variables that a function of arrays computes whenever the graph is run.

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
    """A variable to be given a value, like ``variable``, that lies at ``place``."""
    if not hasattr(variable, "broadcastable"):
        return variable.type()
    if place == "cpu":
        return tensor.TensorType(variable.dtype, variable.broadcastable)()
    from theano.gpuarray import GpuArrayType

    return GpuArrayType(variable.dtype, variable.broadcastable, context_name=place)()


def value_like(variable, own):
    """The value of ``own`` where ``variable`` has its own."""
    return own if variable.type == own.type else own.transfer(context_of(variable))


# The body of a model's graph: its functions to go forward and back ------------------------------


def compiled(device, compile_function, inputs, sharded, wanted, used, places, weights):
    """The functions of the body, the graph from a device's shard to the values at the cut.

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
        """What is no float stays in the host's memory."""
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
    """What the way from leaves forward to values computes that gradients need."""
    forward = depending_on(leaves, values).difference(leaves)

    def is_kept(variable):
        # To hand over a view of another variable would copy it.
        is_view = bool(getattr(variable.owner.op, "view_map", None))
        return variable in forward and hasattr(variable, "broadcastable") and not is_view

    return nearest(gradients, is_kept)


def takes_values_away(mode):
    """Whether a function of this mode holds the values of its shared variables while it runs.

    Functions that are called meanwhile, as the bodies are to go back, do not find them there.
    """
    return isinstance(theano.compile.mode.get_mode(mode), theano.compile.debugmode.DebugMode)


def can_be_copied(function):
    """Whether Theano's ``copy()`` gives functions like this one.

    That of ``DebugMode``, which has a maker of its own, would be without its shared variables;
    linkers that wrap others, as ``MonitorMode`` has, do not keep what it needs.
    """
    return type(function.maker) is theano.compile.FunctionMaker and hasattr(
        function.fn, "storage_map"
    )


def copied(function, swap):
    """A function like this one, of other shared variables, for those in ``swap``.

    Theano's copy() alone loses the order in which operations may overwrite what others read: it
    gives the copied graph no DestroyHandler. Gradients of recurrent layers read what had been
    overwritten.
    """
    maker = function.maker
    of_theano, held = type(maker), [given.variable for given in maker.inputs]

    class Maker(of_theano):
        def __init__(self, *args, **options):
            options["fgraph"].attach_feature(theano.gof.DestroyHandler())
            super(Maker, self).__init__(*args, **options)

    maker.__class__ = Maker  # of this one alone: other threads may be compiling
    try:
        return function.copy(swap={old: new for old, new in swap.items() if old in held})
    finally:
        maker.__class__ = of_theano
