"""Keras models and torch's own modules on several devices.

What is replicated of a Keras model is its ``call``, with its losses and its state; of a module its
``forward``, with its buffers and attributes.
"""

import contextlib
import functools
import inspect
import itertools

import numpy as np
import torch

from ... import _keras, _rows, errors
from ..._runtime import patching
from . import batches, tracing
from .calls import NotMergeable, State, Total, tag, tag_of
from .replicas import ReplicatedMethod
from .side_effects import (
    FEW,
    CallEffects,
    KerasReach,
    ModuleReach,
    copy_of,
    moved_late,
    version_of,
)

# Keras ----------------------------------------------------------------------------------------


class ReplicatedKerasCall(ReplicatedMethod):
    """The ``call`` of a Keras model on several devices."""

    def layouts(self, model, arguments):
        return super().layouts(model, arguments)

    def first_call(self, model, arguments, layouts, numbers):
        if any(getattr(v, "overwrite_with_gradient", False) for v in model.trainable_variables):
            # Set to a gradient, which replicas would add up: the largest values of float8.
            raise NotMergeable(_rows.Across(None))
        return super().first_call(model, arguments, layouts, numbers)

    def converter(self, model):
        """Keras hands arrays to a model, too."""
        convert = _keras.keras_of(model).ops.convert_to_tensor
        return lambda value: convert(value) if isinstance(value, np.ndarray) else value

    def is_only_traced(self, model, batch):
        """Keras runs a model on the device "meta" to learn shapes, and in scopes of its own."""
        return getattr(batch, "is_meta", False) or _keras.in_stateless_scope(_keras.keras_of(model))

    def home(self, model, arguments):
        return _keras.keras_of(model).ops.convert_to_tensor(0).device  # where Keras computes

    def reach(self, model):
        return KerasReach.of(model)

    def state(self, model):
        return KerasReplicas(model)


class KerasReplicas:
    """Losses and state of a Keras model's replicas: a stateless scope keeps them from being set.

    Each replica has the variables on its device. All but the first get copies even on the CPU, so
    that simulated devices do what GPUs would. Random seeds go from replica to replica, so that
    dropout masks are independent.
    """

    def __init__(self, model):
        self.keras, self.model = _keras.keras_of(model), model
        weights = {id(variable._value) for variable in model.variables}
        self.outside = CallEffects(KerasReach.of(model), weights)
        self.variables = {}  # those that were set, by key
        self.before = {}  # their values, by key
        self.seeds = {}  # the values of random seeds, by id

    def run(self, call, device, copy, args, kwargs, watch):
        watched = _keras.all_layers(self.model) if watch is not None else []
        kind = self.keras.layers.BatchNormalization
        normalising = [layer for layer in watched if isinstance(layer, kind)]
        averages = {id(v) for layer in normalising for v in layer.non_trainable_variables}
        with self.keras.device(str(device)):
            variables = [v for v in self.model.variables if v._value is not None]
            pairs = [
                (v, self.seeds.get(id(v), v._value).to(device, copy=copy or not v.trainable))
                for v in variables
            ]
            scope = self.keras.StatelessScope(pairs, collect_losses=True)
            given = dict(scope.state_mapping)
            for variable in variables if watch is not None else ():
                if not variable.trainable and not _is_seed(variable):
                    tag(scope.state_mapping[id(variable)], State(variable._value))
            versions = {key: version_of(value) for key, value in given.items()}
            state = {}
            watching = watch or contextlib.ExitStack()
            with self.outside.replica(watch is not None, state):
                with scope, watching, _unwatched(normalising, watch):
                    result = call(*args, **kwargs)
        for index, variable in enumerate(variables):
            value = scope.state_mapping[id(variable)]
            if _is_seed(variable):
                self.seeds[id(variable)] = value
            elif value is not given[id(variable)] or version_of(value) != versions[id(variable)]:
                if variable.trainable and value is variable._value:
                    raise moved_late(self.model)
                if variable.trainable:
                    # SpectralNormalization does: the gradient is that of the value it has set.
                    raise NotMergeable(_rows.Across(None, why="weight"))
                key = ("state", index, variable.path)
                self.variables[key], self.before[key] = variable, variable._value
                state[key] = value
                if id(variable) in averages:
                    tag(value, Total("mean", value, watch.rows, regular=True))
        state.update((("loss", index), loss) for index, loss in enumerate(scope.losses))
        self.before.update(self.outside.before)
        return result, state, {}

    def finish(self, merged):
        """Set the state, once, and add the losses."""
        self.outside.finish(merged)
        for variable in self.model.variables:
            if id(variable) in self.seeds:
                variable.assign(self.seeds[id(variable)])
        for key, value in merged.items():
            if key in self.variables:
                self.variables[key].assign(value)
            elif key[0] == "loss":
                # The base class's method: functional models refuse their own.
                self.keras.Layer.add_loss(self.model, value)


def _unwatched(layers, watch):
    """A context in which each of these layers is one function: each device's own rows."""

    def call(hidden, inputs, *args, **kwargs):
        if watch.probing:
            kwargs["training"] = False
        with patching.replaced(watch, paused=True):
            outputs = hidden(inputs, *args, **kwargs)
        tag(outputs, tag_of(inputs))
        return outputs

    patched = contextlib.ExitStack()
    for layer in layers:
        own = functools.partial(call, layer.call)
        patched.enter_context(patching.replaced(layer, call=own))
    return patched


def _is_seed(variable):
    """Whether random numbers are drawn with it (keras.random.SeedGenerator)."""
    return variable.name == "seed_generator_state"


def refuse_torch_compile(model):
    if _keras.compiled_with(model).get("jit_compile") is True:
        raise errors.unsupported(
            "torch",
            "run a model on several devices under jit_compile=True: torch.compile() makes one "
            "program for one device",
            "Compile the model with jit_compile=False.",
        )


# torch ----------------------------------------------------------------------------------------


class ForwardMethod(patching.InstanceMethod):
    """A ``forward`` that hides that of a module's class, also from torch.compile()."""

    method = "forward"

    def install(self, module, function=None):
        """A function: ``torch.compile`` takes no other callables for methods.

        It leaves the code of this package as it is, and compiles the module's own. Trainers choose
        the columns of their data by the signature of the plain method.
        """
        torch._dynamo.trace_rules.add(__name__.partition(".")[0])

        def forward(module, *args, **kwargs):
            return self(module, *args, **kwargs)

        plain = inspect.signature(self.plain(module))
        own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = plain.replace(parameters=[own] + list(plain.parameters.values()))
        super().install(module, forward)

    def is_only_traced(self, module, batch):
        return getattr(batch, "is_meta", False) is True or tracing.is_traced()


class ReplicatedForward(ForwardMethod, ReplicatedMethod):
    """The ``forward`` of a torch module on several devices."""

    def converter(self, model):
        return None

    def home(self, model, arguments):
        """Where the module's weights lie, as the plain module's outputs would."""
        kinds = (torch.Tensor, batches.PackedSequence)
        first = next(leaf for leaf in arguments.leaves if isinstance(leaf, kinds))
        packed = isinstance(first, batches.PackedSequence)
        return next(model.parameters(), first.data if packed else first).device

    def reach(self, model):
        return ModuleReach.of(model)

    def state(self, model):
        return ModuleReplicas(model)

    def first_call(self, model, arguments, layouts, numbers):
        if any(getattr(part, "sparse", False) is True for part in model.modules()):
            # No copy on another device takes such a gradient back.
            raise NotMergeable(_rows.Across("that makes sparse gradients", why="unknown"))
        return super().first_call(model, arguments, layouts, numbers)


#: Where modules keep what ``register_forward_hook()`` and its like are given.
HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
         "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")  # fmt: skip


class Hooks:
    """The hooks that a module and those within it have now."""

    def __init__(self, parts):
        self.parts = parts
        held = [vars(part).get(name) for part in parts for name in HOOKS]
        self.held = [hooks for hooks in held if hooks is not None]
        self.counts = list(map(len, self.held))
        self.kept = {place: dict(self.held[place]) for place, n in enumerate(self.counts) if n}

    def put_back(self):
        """Let the modules have these, and no others."""
        for place, (hooks, count) in enumerate(zip(self.held, self.counts)):
            if len(hooks) != count:
                hooks.clear()
                hooks.update(self.kept.get(place, {}))

    def taken(self):
        """Those that there are in place of these, which the modules have afterwards, or None."""
        if list(map(len, self.held)) == self.counts:
            return None
        found = Hooks(self.parts)
        self.put_back()
        return found


def put_back(values, held):
    """Let a dictionary have what it had; return the name of what was added, or None."""
    names = [name for name, value in values.items() if value is not held.get(name)]
    if not names and len(values) == len(held):
        return None
    values.clear()
    values.update(held)
    return names[0] if names else None


class ModuleReplicas:
    """Runs the replicas of a torch module, each with weights and buffers of its own.

    Buffers start from the same value in each replica, and are set once. So are weights that the
    forward pass moves, what it leaves in attributes and containers, and the hooks it registers.
    """

    def __init__(self, module):
        parts = list(module.modules())
        weights = [(p._parameters, n, v) for p in parts for n, v in p._parameters.items()]
        buffers = [(p._buffers, n, v) for p in parts for n, v in p._buffers.items()]
        # Dictionary of a module within, name there, weight or buffer.
        self.places = [place for place in weights + buffers if place[2] is not None]
        self.held = [(d, dict(d)) for p in parts for d in (p._parameters, p._buffers)]
        known = {id(value): (values, name) for values, name, value in reversed(self.places)}
        self.before = {("state", n): v for n, v in module.named_buffers()} if buffers else {}
        self.buffers = {key: known[id(buffer)] for key, buffer in self.before.items()}  # places
        states = set(map(id, self.before.values()))
        # By id: those that are tied have one copy.
        self.weights = {id(v): v for _, _, v in self.places if id(v) not in states}
        self.frozen = {key for key, v in self.weights.items() if not v.requires_grad}
        if sum(self.weights[key].numel() for key in self.frozen) > FEW:
            self.frozen = set()
        self.module, self.hooks = module, Hooks(parts)
        self.outside, self.register = CallEffects(ModuleReach.of(module, parts), known), None

    def run(self, forward, device, copy, args, kwargs, watch):
        given = {key: self.before[key].to(device, copy=True) for key in self.buffers}
        copies = {id(self.before[key]): buffer for key, buffer in given.items()}
        for key, buffer in given.items() if watch is not None else ():
            tag(buffer, State(self.before[key]))
        copies.update(
            (key, value.to(device, copy=copy or key in self.frozen))
            for key, value in self.weights.items()
        )
        versions = [version_of(copies[key]) for key in self.weights]
        state = {}
        with self.outside.replica(watch is not None, state):
            try:
                for values, name, value in self.places:
                    values[name] = copies[id(value)]
                with watch or contextlib.ExitStack():
                    result = forward(*args, **kwargs)
                state.update((key, values[name]) for key, (values, name) in self.buffers.items())
                if any(
                    values[name] is not copies[id(value)]
                    for values, name, value in self.places
                    if id(value) in self.weights
                ):
                    raise NotMergeable(_rows.Across(None, why="weight"))  # another one in its place
            finally:
                for values, name, value in self.places:
                    values[name] = value
                added = list(filter(None, itertools.starmap(put_back, self.held)))
                self.register = self.hooks.taken()
        if added:
            raise NotMergeable(_rows.Across(f"that sets the state {added[0]!r}"))
        now = [version_of(copies[key]) for key in self.weights]
        if now != versions:
            self.note_moved(state, copies, versions, now)
        self.before.update(self.outside.before)
        return result, state, given

    def note_moved(self, state, copies, versions, now):
        """Add the weights that a replica has moved."""
        for number, (key, value) in enumerate(self.weights.items()):
            if versions[number] != now[number]:
                if copies[key] is value:
                    raise moved_late(self.module)
                state["weight", number] = copy_of(copies[key])

    def finish(self, merged):
        """Set buffers, weights, all that is outside, and hooks, once."""
        if self.register is not None:
            self.register.put_back()
        self.outside.finish(merged)
        weights = list(self.weights.values())
        with torch.no_grad():
            for key, value in merged.items():
                if key in self.buffers:
                    self.before[key].copy_(value)
                elif key[0] == "weight":
                    weights[key[1]].copy_(value)
