"""One Keras model on several of Theano's contexts, or on simulated devices.

A ``transfer`` inside a graph is optimised away, and in a graph on a context that is not the default
one Theano 1.0.5 still does much on the default one: whatever does not say where (allocations, a
loop's states, a convolution's filters turned around), and what follows from that. So there are
functions of every device's own, with weights of its own, made and run while its context is the
default one. Keras builds the model, its loss and its metrics as ever;
when it then turns tensors into a function to run (``_make_train_function`` and its two
siblings), its graph is cut in two:

- The *body*, all that the model's outputs depend on, is compiled for each device and computes its
  shard of the batch. What leaves it, towards loss, metrics or updates, has rows, which are put
  together on the host.
- The *head*, the rest, runs once, with the whole batch: losses, metrics, penalties, statistics of
  the batch, and what computes across its rows (``row_operations.py``) with all that follows. Its
  gradient at the cut goes back to the devices' bodies, the sum of whose gradients the optimizer
  sees.

So any loss, also one that compares rows with one another, and every metric is that of one device,
however uneven the shards. A compiled function keeps nothing for the next one, so the one that goes
forward returns, besides, whatever the one that goes back needs of what it has computed.
"""

import functools

from theano.gof import graph

from ... import _keras, errors
from ..._runtime.patching import replaced
from .context_device import Device
from .graph_variables import placeholder_like
from .replicated_function import ReplicatedFunction


def parallelize(model, devices):
    """Run ``model`` on several devices, or give the plain behaviour back.

    Arguments:
        devices: their names and Theano's targets, as ``Device`` takes them; none for the plain
            behaviour.
    """
    current = vars(model).get("_compat_functions")
    running = [] if current is None else [device.name for device in current.devices]
    if [name for name, _ in devices] == running:
        return
    if any(tensor not in model._feed_inputs for tensor in model.inputs or ()):
        raise errors.unsupported(
            "theano",
            f"run model {model.name!r} on several devices: an input of it is a tensor of the "
            "user's, Input(tensor=...), whose rows cannot be split",
            "Give the model an Input(shape=...) and feed it.",
        )
    with _keras.rebuilding_functions(model):
        if current is not None:
            current.uninstall()
        if devices:
            ReplicatedTheanoFunctions(model, [Device(*device) for device in devices])


class ReplicatedTheanoFunctions:
    """The three functions of a Keras model, made to run its body on several devices.

    Keras makes a function when it is first needed, by a method of the model. The instance gets
    methods of its own for that, which hand Keras another ``K.function``.
    """

    METHODS = ["_make_" + name for name in _keras.FUNCTIONS]

    def __init__(self, model, devices):
        self.model = model
        self.devices = devices
        self.across = None  # why the model runs whole, an `Across`
        self.doubt = None  # why what no rule knows is not split, after a trial
        # The devices' functions that compute variables at cuts, which functions have in common.
        self.forward = {}  # type: dict
        for name in self.METHODS:
            vars(model)[name] = functools.partial(self._make, getattr(model, name))
        vars(model)["_compat_functions"] = self

    def uninstall(self):
        for name in self.METHODS + ["_compat_functions"]:
            del vars(self.model)[name]

    def _make(self, make):
        """Keras' method, for which ``K.function`` makes a replicated one, of gradients to come."""
        from keras import backend as K

        differentiate = K.gradients
        asked = []  # the loss, and (weight, variable in the place of its gradient)

        def gradients(loss, variables):
            ancestors = set(graph.ancestors([loss]))
            if (asked and asked[0] is not loss) or any(v not in ancestors for v in variables):
                return differentiate(loss, variables)  # which fails for a weight of no influence
            placeholders = [placeholder_like(variable, "cpu") for variable in variables]
            asked[:] = [loss, (asked[1] if asked else []) + list(zip(variables, placeholders))]
            return placeholders

        def function(inputs, outputs, updates=(), **options):
            return ReplicatedFunction(self, inputs, outputs, updates, asked, options)

        with replaced(K, function=function, gradients=gradients):
            make()
