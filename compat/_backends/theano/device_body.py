"""The body of a model's graph on one device: its functions to go forward and back."""

from collections import OrderedDict

import theano

from ..._runtime.patching import replaced
from .context_device import is_random
from .graph_variables import depending_on, gradients_of, nearest, placeholder_like, value_like

_FLOATS = "float16", "float32", "float64"


class Body:
    """The graph from a device's shard to the values at the cut, of variables of the device's own.

    Arguments:
        device: the device.
        compile_function: makes a function of inputs and outputs.
        inputs: what a body is given, in the words of Keras' graph.
        sharded: those of them that have rows.
        wanted: the variables at the cut.
        used: the shared variables that these depend on.
    """

    def __init__(self, device, compile_function, inputs, sharded, wanted, used):
        self.device = device
        self.compile_function = compile_function
        places = [device.place if variable in sharded else "cpu" for variable in inputs]
        self.inputs = list(map(placeholder_like, inputs, places))
        self.kept = []  # what the forward function hands to the backward one
        replaced = dict(zip(inputs, self.inputs))
        replaced.update((variable, device.variables[variable]) for variable in used)
        randoms = [variable for variable in used if is_random(variable)]
        cloned = theano.clone(
            wanted + [variable.default_update for variable in randoms],
            {variable: value_like(variable, own) for variable, own in replaced.items()},
        )
        self.values = cloned[: len(wanted)]
        states = [device.variables[variable] for variable in randoms]
        self.updates = list(zip(states, cloned[len(wanted) :]))

    def differentiate(self, places, weights):
        """Find the gradients of weights, and what the forward pass computes that they need.

        Arguments:
            places: of the values at the cut whose gradients will be given.
            weights: Keras' variables.

        Returns:
            The weights that have a gradient.
        """
        at_cut = [self.values[place] for place in places]
        self.given = [placeholder_like(value, self.device.place) for value in at_cut]
        # Copies, since one value at the cut may depend on another one.
        known = [
            (theano.tensor.tensor_copy(value), value_like(value, given))
            for value, given in zip(at_cut, self.given)
        ]
        own = self.device.variables
        found = gradients_of(None, [own[weight] for weight in weights], OrderedDict(known))
        self.gradients = list(found.values())
        leaves = self.inputs + [state for state, _ in self.updates]
        forward = depending_on(leaves, self.values).difference(leaves)

        def is_kept(variable):
            # To hand over a view of another variable would copy it.
            is_view = bool(getattr(variable.owner.op, "view_map", None))
            return variable in forward and hasattr(variable, "broadcastable") and not is_view

        self.kept = nearest(self.gradients, is_kept)
        return [weight for weight in weights if own[weight] in found]

    def forward(self):
        """The function of the shard that returns the values at the cut, and then what is kept."""
        return self._compiled(self.inputs, self.values + self.kept, self.updates)

    def backward(self):
        """The function of the shard, what is kept and the gradients at the cut."""
        given = [placeholder_like(variable, self._place(variable)) for variable in self.kept]
        replaced = {kept: value_like(kept, own) for kept, own in zip(self.kept, given)}
        gradients = theano.clone(self.gradients, replaced)
        return self._compiled(self.inputs + given + self.given, gradients)

    def _compiled(self, inputs, values, updates=()):
        values = [value.transfer(self._place(value)) for value in values]
        return self.compile_function(inputs, values, updates=updates, no_default_updates=True)

    def _place(self, variable):
        """What is no float stays in the host's memory."""
        return self.device.place if variable.type.dtype in _FLOATS else "cpu"


def copied(function, swap):
    """A function like this one, of other shared variables, for those in ``swap``.

    Theano's copy() alone loses the order in which operations may overwrite what others read: it
    gives the copied graph no DestroyHandler. Gradients of recurrent layers read what had been
    overwritten.
    """
    maker_of = type(function.maker)
    make, held = maker_of.__init__, [given.variable for given in function.maker.inputs]

    def make_in_order(maker, *args, **options):
        options["fgraph"].attach_feature(theano.gof.DestroyHandler())
        make(maker, *args, **options)

    with replaced(maker_of, __init__=make_in_order):
        return function.copy(swap={old: new for old, new in swap.items() if old in held})
