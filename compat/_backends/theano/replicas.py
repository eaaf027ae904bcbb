"""Replicas of a Keras model on several of Theano's contexts, or on simulated devices.

A ``transfer`` inside a graph is optimized away, and in a graph on another context than the default
one Theano 1.0.5 still does much on the default one: operations without a context (allocations, a
loop's states, a convolution's flipped filters), and those that depend on them. So every device has
its own functions and weights, which are made and run while its context is the default one.

Keras builds the model, its loss and its metrics for one device. It makes a function when it is
first needed, by a method of the model (``_make_train_function`` and its two siblings). These are
replaced by methods of the instance, which give Keras another ``K.function``: one that makes a
``ReplicatedFunction``.
"""

import contextlib
import threading
import weakref
from _thread import get_ident
from typing import Any, Dict, List, Tuple

from theano.gof import graph

from ... import _keras, errors
from ..._runtime import patching
from .graph import placeholder_like
from .replica_device import Device
from .replicated_function import ReplicatedFunction, making
from .side_effects import PythonOperations
from .verification import VerifiedStep


def parallelize(model: "Any", devices: "List[Tuple[str, str]]") -> None:
    """Run a model on several devices, or restore its plain behaviour.

    Arguments:
        model: the model.
        devices: names and Theano's targets, as ``Device`` takes them; none for the plain behaviour.
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
            Replicas(model, [Device(*pair) for pair in devices])


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
        fallback: why the model runs unsplit, a ``Fallback``, or None.
        doubt: the ``Reason`` not to split operations without a rule, after a trial; or None.
        python: the operations of the model's graph that run the user's code.
        forward: the devices' functions of bodies without gradients, which functions share.
        heads: the compiled functions of heads.
        running: held while one thread makes or runs functions.
    """

    def __init__(self, model, devices):
        self.owner, self.model = model, None
        self.devices = devices
        self.fallback = self.doubt = None
        self.forward: "Dict[Any, Any]" = {}
        self.python = PythonOperations()
        self.verification = None
        self.heads = weakref.WeakSet()
        self.running = threading.RLock()
        patching.attach(model, "_compat_replicas", self)
        _keras.InnerModel.have_prepared(model, self._prepare)

    def _prepare(self, model):
        """Install the methods on a model; an old ``Sequential`` has several models in turn."""
        _refuse_own_inputs(model)
        self.model = model
        for kind in _KINDS:
            kind(self).install(model)
        if self.verification is not None:
            VerifiedStep.install_on(model, self.verification)

    def __reduce__(self):
        return type(None), ()  # a copy of the model is plain

    def uninstall(self) -> None:
        """Remove the methods from the model."""
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
        """Call Keras' method while ``K.function`` makes a ``ReplicatedFunction``."""
        from keras import backend as K

        with contextlib.ExitStack() as within:
            within.enter_context(making)
            if model is self.replicas.model:  # no copy of it
                within.enter_context(patching.replaced(K, **self._replacements(K)))
            self.plain(model)()

    def _replacements(self, K):
        """Return replacements for functions of Keras' backend in this thread, by name.

        ``K.gradients`` returns placeholders: the gradients are computed once the graph is cut.
        """
        thread = get_ident()
        differentiated: "List[Any]" = []  # the loss, and pairs of a weight and its placeholder
        differentiate, make = K.gradients, K.function

        def gradients(loss, variables):
            if get_ident() != thread:
                return differentiate(loss, variables)
            ancestors = set(graph.ancestors([loss]))
            is_other = differentiated and differentiated[0] is not loss
            if is_other or any(variable not in ancestors for variable in variables):
                return differentiate(loss, variables)  # which fails for a weight of no influence
            placeholders = [placeholder_like(variable, "cpu") for variable in variables]
            pairs = differentiated[1] if differentiated else []
            differentiated[:] = [loss, pairs + list(zip(variables, placeholders))]
            return placeholders

        def function(inputs, outputs, updates=(), **options):
            if get_ident() != thread:
                return make(inputs, outputs, updates, **options)
            return ReplicatedFunction(
                self.replicas, inputs, outputs, updates, differentiated, options
            )

        return {"gradients": gradients, "function": function}


_KINDS: "List[Any]" = [
    type("MakeReplicatedFunction", (MakeReplicatedFunction,), {"method": "_make_" + name})
    for name in _keras.FUNCTIONS
]
