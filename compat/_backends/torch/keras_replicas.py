"""Keras models on several devices: ``call`` is replicated, with its losses and state."""

import contextlib
import functools
from typing import Any, Dict, Set

import numpy as np

from ... import _keras, _rows, errors
from ..._rows import Fallback, Reason
from ..._rows.splitting import unsplit
from ..._runtime import patching, synchronized
from . import keras_batch_norm
from .expressions import State, Total
from .graph import tag, tag_of
from .merging import NotMergeable
from .propagation import Propagation
from .replicas import Replicas, ReplicatedCall
from .side_effects import CallEffects, KerasReach, Reach
from .state import moved_late, version_of


class ReplicatedKerasCall(ReplicatedCall):
    """The ``call`` of a Keras model on several devices."""

    def unsplittable(self, model):
        """Return why no call can be split: variables that are set to a gradient.

        Replicas would add the gradients up: those of float8 are largest values.
        """
        variables = model.trainable_variables
        is_set = any(getattr(v, "overwrite_with_gradient", False) for v in variables)
        return Fallback(Reason.CROSS_BATCH) if is_set else None

    def converter(self, model):
        """Return a function that converts arrays, which Keras passes to a model, too."""
        convert = _keras.keras_of(model).ops.convert_to_tensor
        return lambda value: convert(value) if isinstance(value, np.ndarray) else value

    def is_only_traced(self, model, batch):
        """Return whether Keras traces: on the device "meta" for shapes, or in its own scopes."""
        return getattr(batch, "is_meta", False) or _keras.in_stateless_scope(_keras.keras_of(model))

    def home(self, model, arguments):
        """Return the device on which Keras computes."""
        return _keras.keras_of(model).ops.convert_to_tensor(0).device

    def one_device(self, model: Any) -> "contextlib.AbstractContextManager[Any]":
        """Return a context in which layers that ask for the whole batch have it."""
        layers = filter(synchronized.asks, _keras.all_layers(model))
        context = keras_batch_norm.over_replicas(layers, lambda: None)
        context.enter_context(unsplit)
        return context

    def reach(self, model: Any) -> Reach:
        """Return the values that calls of the model reach."""
        return KerasReach.of(model)

    def replicas(self, model: Any) -> "KerasReplicas":
        """Return new replicas of the model."""
        return KerasReplicas(model)


class KerasReplicas(Replicas):
    """Losses and state of a Keras model's replicas: a stateless scope keeps them from being set.

    Each replica has the variables on its device. Random seeds go from replica to replica, so that
    dropout masks are independent.
    """

    def __init__(self, model):
        self.keras, self.model = _keras.keras_of(model), model
        self.variables = [v for v in model.variables if v._value is not None]
        weights = {id(variable._value) for variable in self.variables}
        self.side_effects = CallEffects(KerasReach.of(model), weights)
        self.values = {id(v): v._value for v in self.variables if not _is_seed(v)}
        self.copied = {id(variable) for variable in self.variables if not variable.trainable}
        self.changed: "Dict[Any, Any]" = {}  # variables that were set, by key
        self.before: "Dict[Any, Any]" = {}  # their values, by key
        self.seeds: "Dict[int, Any]" = {}  # the values of random seeds, by id
        self.averages: "Set[int]" = set()  # ids of means and variances of each replica's own rows
        self.propagation: Any = None  # those of the replica that runs
        self.reducing: Any = None

    def prepared(self, watched):
        """Return a context in which layers of batch normalization are known to compat."""
        layers = self.keras.layers.BatchNormalization
        normalising = [v for v in _keras.all_layers(self.model) if isinstance(v, layers)]
        is_asked = synchronized.is_asked(self.model)
        over_replicas = [v for v in normalising if is_asked or synchronized.asks(v)]
        self.averages = {
            id(v)
            for layer in normalising
            if layer not in over_replicas
            for v in layer.non_trainable_variables
        }
        prepared = keras_batch_norm.over_replicas(over_replicas, lambda: self.reducing)
        if watched:
            prepared.enter_context(_unwatched(normalising, lambda: self.propagation))
        return prepared

    def suspended(self, scope, device, propagation, reducing):
        """Take out what the replica that runs has set; return a function that puts it back."""
        seeds = [variable for variable in self.variables if _is_seed(variable)]
        self.seeds.update((id(v), scope.state_mapping[id(v)]) for v in seeds)

        def put_back():
            self.propagation, self.reducing = propagation, reducing
            for variable in seeds:
                seed = self.seeds[id(variable)]
                scope.state_mapping[id(variable)] = seed.to(device, copy=True)

        return put_back

    def run(self, call, device, copies, args, kwargs, propagation, reducing):
        """Run one replica: see ``Replicas``."""
        self.propagation, self.reducing = propagation, reducing
        watched = isinstance(propagation, Propagation)
        with self.keras.device(str(device)):
            seeds = {id(v): self.seeds.get(id(v), v._value) for v in self.variables if _is_seed(v)}
            copies.update((key, seed.to(device, copy=True)) for key, seed in seeds.items())
            pairs = [(variable, copies[id(variable)]) for variable in self.variables]
            scope = self.keras.StatelessScope(pairs, collect_losses=True)
            initial = dict(scope.state_mapping)
            for variable in self.variables if watched else ():
                if not variable.trainable and not _is_seed(variable):
                    tag(scope.state_mapping[id(variable)], State(variable._value))
            versions = {key: version_of(value) for key, value in initial.items()}
            state = {}
            mode = propagation or contextlib.ExitStack()
            with self.side_effects.replica(watched, state, reducing.turn), scope, mode:
                if reducing.turn is not None:
                    reducing.turn.suspensions.append(
                        functools.partial(self.suspended, scope, device, propagation, reducing)
                    )
                result = call(*args, **kwargs)
        for index, variable in enumerate(self.variables):
            value = scope.state_mapping[id(variable)]
            if _is_seed(variable):
                self.seeds[id(variable)] = value
            elif value is not initial[id(variable)] or version_of(value) != versions[id(variable)]:
                if variable.trainable and value is variable._value:
                    raise moved_late(self.model)
                if variable.trainable:
                    # SpectralNormalization does: the gradient is that of the value it has set.
                    raise NotMergeable(Fallback(Reason.WEIGHT_ASSIGNED))
                key = ("state", index, variable.path)
                self.changed[key], self.before[key] = variable, variable._value
                state[key] = value
                if watched and id(variable) in self.averages:
                    tag(value, Total(_rows.Partial("mean"), propagation.rows, is_regular=True))
        state.update((("loss", index), loss) for index, loss in enumerate(scope.losses))
        self.before.update(self.side_effects.before)
        return result, state, {}

    def finish(self, merged):
        """Set the state, once, and add the losses."""
        self.side_effects.finish(merged)
        for variable in self.variables:
            if id(variable) in self.seeds:
                variable.assign(self.seeds[id(variable)])
        for key, value in merged.items():
            if key in self.changed:
                self.changed[key].assign(value)
            elif key[0] == "loss":
                # The base class's method: functional models refuse their own.
                self.keras.Layer.add_loss(self.model, value)


def _unwatched(layers, current):
    """Return a context in which each layer is one function: each device's own rows.

    Arguments:
        layers: the layers.
        current: a function that returns the ``Propagation`` of the replica that runs.
    """

    def call(hidden, inputs, *args, **kwargs):
        propagation = current()
        if propagation.probing:
            kwargs["training"] = False
        was_paused, propagation.paused = propagation.paused, True
        try:
            outputs = hidden(inputs, *args, **kwargs)
        finally:
            propagation.paused = was_paused
        tag(outputs, tag_of(inputs))
        return outputs

    patched = contextlib.ExitStack()
    for layer in layers:
        patched.enter_context(patching.replaced(layer, call=functools.partial(call, layer.call)))
    return patched


def _is_seed(variable):
    """Return whether random numbers are drawn with it (keras.random.SeedGenerator)."""
    return variable.name == "seed_generator_state"


def refuse_torch_compile(model: Any) -> None:
    """Refuse a model that Keras compiles with torch.compile().

    Raises:
        UnsupportedError: it is one.
    """
    if _keras.compiled_with(model).get("jit_compile") is True:
        raise errors.unsupported(
            "torch",
            "run a model on several devices under jit_compile=True: torch.compile() makes one "
            "program for one device",
            "Compile the model with jit_compile=False.",
        )
