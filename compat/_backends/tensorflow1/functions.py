"""The functions of a Keras model, made to run the batch part of its graph on several devices."""

import contextlib

from ... import _keras, _patching
from .function_errors import explain
from .replicas import Replicas
from .step_counter import counting_after_reading


class ReplicatedFunctions:
    """The three functions of a Keras model, made to run its batch part on several devices.

    Keras makes a function when it is first needed, by a method of the model. The instance gets
    methods of its own for that, which call Keras' and rewire what it made.
    """

    def __init__(self, model, devices):
        self.owner = model
        self.model = _keras.inner_model(model)
        self.devices = list(devices)
        self._rewired = {}  # type: Dict[str, Any]
        self._replicas = None  # type: Optional[Replicas]
        self._replicas_key = None  # type: Any

    def install(self):
        vars(self.owner)["_compat_functions"] = self
        if _keras.wraps_a_model(self.owner):
            vars(self.owner)["build"] = self._build
        if self.model is not None:
            for function in _keras.FUNCTIONS:
                vars(self.model)["_make_" + function] = self._maker(function)

    def uninstall(self):
        vars(self.owner).pop("build", None)
        del vars(self.owner)["_compat_functions"]
        for function in _keras.FUNCTIONS if self.model is not None else ():
            del vars(self.model)["_make_" + function]

    def _build(self, input_shape=None):
        """What an old Sequential does to make its inner model anew, when layers were added."""
        type(self.owner).build(self.owner, input_shape)
        self.model = _keras.inner_model(self.owner)
        self.install()

    def _maker(self, function):
        make = getattr(self.model, "_make_" + function)

        def make_replicated():
            with self._training_on_replicas() if "train" in function else contextlib.ExitStack():
                make()
            made = getattr(self.model, function)
            if made is not self._rewired.get(function):
                replicas = self._replicas_now()
                made.outputs = [replicas.whole(tensor) for tensor in made.outputs]
                made.updates_op = replicas.whole(made.updates_op)
                explain(made, self.model.name, replicas, "train" in function)
                self._rewired[function] = made

        return make_replicated

    def _replicas_now(self):
        """The replicas of the model as it is now: layers may have been added or frozen."""
        model = self.model
        updates = list(model.updates) + list(model.state_updates)
        loss = getattr(model, "total_loss", None)  # once compiled
        losses = [] if loss is None else [loss]
        key = list(model.inputs) + list(model.outputs) + updates + losses
        if self._replicas is None or not _same(key, self._replicas_key):
            self._replicas = Replicas(
                model.name,
                model.inputs,
                model.outputs,
                losses,
                updates,
                _keras.states(model, "handle"),
                _variables_of_batchnorm(model),
                self.devices,
            )
            self._replicas_key = key
        return self._replicas

    @contextlib.contextmanager
    def _training_on_replicas(self):
        """Within, the optimizer takes its gradients from the replicas, each on its device."""
        optimizer = self.model.optimizer
        get_updates = optimizer.get_updates

        def get_updates_on_replicas(loss, params):
            replicas = self._replicas_now()
            counter = getattr(optimizer, "iterations", None)
            with replicas.gradients_colocated(), counting_after_reading(counter):
                return get_updates(loss=replicas.whole(loss), params=params)

        with _patching.replaced(optimizer, get_updates=get_updates_on_replicas):
            yield


def _variables_of_batchnorm(model):
    """The variables of the BatchNorm layers that a model consists of, at any depth."""
    found, pending = [], list(model.layers)
    while pending:
        layer = pending.pop()
        pending += getattr(layer, "layers", None) or ()
        for part in ("layer", "forward_layer", "backward_layer"):  # of wrappers
            pending += [getattr(layer, part)] if hasattr(layer, part) else []
        if any(parent.__name__.startswith("BatchNormalization") for parent in type(layer).__mro__):
            found += layer.weights
    return found


def _same(first, second):
    return len(first) == len(second) and all(a is b for a, b in zip(first, second))
