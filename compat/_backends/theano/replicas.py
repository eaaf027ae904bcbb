"""Replicas of a Keras model on several of Theano's contexts, or on simulated devices.

A ``transfer`` inside a graph is optimised away, and in a graph on a context that is not the default
one Theano 1.0.5 still does much on the default one: whatever does not say where (allocations, a
loop's states, a convolution's filters turned around), and what follows from that. So there are
functions of every device's own, with weights of its own, made and run while its context is the
default one.

Keras builds the model, its loss and its metrics as ever. It makes a function when it is first
needed, by a method of the model (``_make_train_function`` and its two siblings). The instance gets
methods of its own for that, which hand Keras another ``K.function``: one that makes a
``ReplicatedFunction``.
"""

import contextlib
import threading
import weakref
from _thread import get_ident

from theano.gof import graph

from ... import _keras, errors
from ..._runtime import patching
from .device import Device
from .graph import placeholder_like
from .replicated_function import ReplicatedFunction, making
from .side_effects import PythonOperations
from .verification import VerifiedStep


def parallelize(model, devices):
    """Run ``model`` on several devices, or give the plain behaviour back.

    Arguments:
        devices: their names and Theano's targets, as ``Device`` takes them; none for the plain
            behaviour.
    """
    current = vars(model).get("_compat_replicas")
    running = [] if current is None else [device.name for device in current.devices]
    if [name for name, _ in devices] == running:
        return
    inner = _keras.inner_model(model)
    if inner is not None:
        _refuse_own_inputs(inner)
    with _keras.rebuilding_functions(inner):
        if current is not None:
            current.uninstall()
        if devices:
            Replicas(model, [Device(*each) for each in devices])


def _refuse_own_inputs(model):
    if any(tensor not in model._feed_inputs for tensor in model.inputs or ()):
        raise errors.unsupported(
            "theano",
            f"run model {model.name!r} on several devices: an input of it is a tensor of the "
            "user's, Input(tensor=...), whose rows cannot be split",
            "Give the model an Input(shape=...) and feed it.",
        )


class Replicas:
    """The three functions of a Keras model, made to run its body on several devices.

    Attributes:
        model: the model that makes them: of an old ``Sequential``, the one inside.
        across: why the model runs whole, an ``Across``, or None.
        doubt: why what no rule knows is not split, after a trial; or None.
        python: the operations of the model's graph that run the user's code.
        forward: the devices' functions that compute variables at cuts, which functions share.
        heads: the functions that compute the rest, of the whole batch.
        running: held while one thread makes or runs them.
    """

    def __init__(self, model, devices):
        self.owner, self.model = model, None
        self.devices = devices
        self.across = self.doubt = None
        self.forward = {}  # type: dict
        self.python = PythonOperations()
        self.verification = None
        self.heads = weakref.WeakSet()
        self.running = threading.RLock()
        patching.attach(model, "_compat_replicas", self)
        _keras.InnerModel.have_prepared(model, self._prepare)

    def _prepare(self, model):
        """Install the methods on a model; an old ``Sequential`` has several of them in turn."""
        _refuse_own_inputs(model)
        self.model = model
        for kind in _KINDS:
            kind(self).install(model)
        if self.verification is not None:
            VerifiedStep.install_on(model, self.verification)

    def __reduce__(self):
        return type(None), ()  # a copy of the model is plain

    def uninstall(self):
        for kind in _KINDS if self.model is not None else ():
            kind.of(self.model).remove(self.model)
        if _keras.InnerModel.of(self.owner) is not None:
            _keras.InnerModel.of(self.owner).remove(self.owner)
        patching.detach(self.owner, "_compat_replicas")


class MakeReplicatedFunction(patching.InstanceMethod):
    """Method by which Keras makes one of a model's functions, which becomes a replicated one.

    Arguments:
        replicas: the model's ``Replicas``.
    """

    def __init__(self, replicas):
        super().__init__([device.name for device in replicas.devices])
        self.replicas = replicas

    def invoke(self, model):
        """Call Keras' method while ``K.function`` makes a replicated one, of gradients to come."""
        from keras import backend as K

        with contextlib.ExitStack() as within:
            within.enter_context(making)
            if model is self.replicas.model:  # no copy of it
                within.enter_context(patching.replaced(K, **self._replacements(K)))
            self.plain(model)()

    def _replacements(self, K):
        """Return replacements for functions of Keras' backend in this thread, by name."""
        thread, asked = get_ident(), []  # the loss, and (weight, variable for its gradient)
        differentiate, make = K.gradients, K.function

        def gradients(loss, variables):
            if get_ident() != thread:
                return differentiate(loss, variables)
            ancestors = set(graph.ancestors([loss]))
            if (asked and asked[0] is not loss) or any(v not in ancestors for v in variables):
                return differentiate(loss, variables)  # which fails for a weight of no influence
            placeholders = [placeholder_like(variable, "cpu") for variable in variables]
            asked[:] = [loss, (asked[1] if asked else []) + list(zip(variables, placeholders))]
            return placeholders

        def function(inputs, outputs, updates=(), **options):
            if get_ident() != thread:
                return make(inputs, outputs, updates, **options)
            return ReplicatedFunction(self.replicas, inputs, outputs, updates, asked, options)

        return {"gradients": gradients, "function": function}


_KINDS = [
    type("MakeReplicatedFunction", (MakeReplicatedFunction,), {"method": "_make_" + name})
    for name in _keras.FUNCTIONS
]
