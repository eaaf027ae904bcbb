"""torch modules on several devices: ``forward`` is replicated, with its buffers and attributes."""

import contextlib
import inspect
import itertools
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence

from ... import errors
from ..._rows import Fallback, Reason
from ..._runtime import patching
from . import tracing
from .expressions import State
from .graph import tag
from .merging import NotMergeable
from .propagation import Propagation
from .replicas import Replicas, ReplicatedCall
from .side_effects import FEW, CallEffects, ModuleReach, Reach
from .state import Hooks, copy_of, moved_late, put_back, version_of


class ForwardMethod(patching.InstanceMethod):
    """A ``forward`` that hides that of a module's class, also from torch.compile()."""

    method = "forward"

    def install(self, module, function=None):
        """Install a function: ``torch.compile`` takes no other callables for methods.

        It leaves the code of this package as it is, and compiles the module's own. Trainers choose
        the columns of their data by the signature of the plain method.
        """
        torch._dynamo.trace_rules.add(__name__.partition(".")[0])

        def forward(module, *args, **kwargs):
            return self(module, *args, **kwargs)

        plain = inspect.signature(self.plain(module))
        bound = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
        forward.__signature__ = plain.replace(parameters=[bound] + list(plain.parameters.values()))
        super().install(module, forward)

    def is_only_traced(self, module: torch.nn.Module, batch: Any) -> bool:
        """Return whether the call is traced, or infers shapes, and nothing is computed."""
        return getattr(batch, "is_meta", False) is True or tracing.is_traced()


class ReplicatedForward(ForwardMethod, ReplicatedCall):
    """The ``forward`` of a torch module on several devices."""

    def converter(self, model):
        """Return None: arrays stay as they are."""
        return None

    def home(self, model, arguments):
        """Return the device of the module's weights, as the plain module's outputs would."""
        kinds = (torch.Tensor, PackedSequence)
        first = next(leaf for leaf in arguments.leaves if isinstance(leaf, kinds))
        packed = isinstance(first, PackedSequence)
        return next(model.parameters(), first.data if packed else first).device

    def reach(self, model: torch.nn.Module) -> Reach:
        """Return the values that calls of the module reach."""
        return ModuleReach.of(model)

    def replicas(self, model: torch.nn.Module) -> "ModuleReplicas":
        """Return new replicas of the module."""
        return ModuleReplicas(model)

    def unsplittable(self, model):
        """Return why no call can be split: copies of weights take no sparse gradients back."""
        is_sparse = any(getattr(part, "sparse", False) is True for part in model.modules())
        return Fallback(Reason.NO_RULE, "that makes sparse gradients") if is_sparse else None


class ModuleReplicas(Replicas):
    """Replicas of a torch module, each with weights and buffers of its own.

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
        place_of = {id(value): (values, name) for values, name, value in reversed(self.places)}
        self.before = {("state", n): v for n, v in module.named_buffers()} if buffers else {}
        self.buffers = {key: place_of[id(buffer)] for key, buffer in self.before.items()}
        states = set(map(id, self.before.values()))
        # By id: those that are tied have one copy.
        self.weights = {id(v): v for _, _, v in self.places if id(v) not in states}
        self.frozen = {key for key, v in self.weights.items() if not v.requires_grad}
        if sum(self.weights[key].numel() for key in self.frozen) > FEW:
            self.frozen = set()
        self.values = {id(v): v for v in self.before.values()}
        self.copied = self.frozen.union(self.values)
        self.values.update(self.weights)
        self.module, self.hooks = module, Hooks(parts)
        self.side_effects, self.register = (
            CallEffects(ModuleReach.of(module, parts), place_of),
            None,
        )

    def run(self, forward, device, copies, args, kwargs, propagation, reducing):
        """Run one replica: see ``Replicas``."""
        watched = isinstance(propagation, Propagation)
        initial_state = {key: copies[id(self.before[key])] for key in self.buffers}
        for key, buffer in initial_state.items() if watched else ():
            tag(buffer, State(self.before[key]))
        versions = [version_of(copies[key]) for key in self.weights]
        state = {}
        with self.side_effects.replica(watched, state, reducing.turn):
            if reducing.turn is not None:
                reducing.turn.suspensions.append(self.suspended)
            try:
                for values, name, value in self.places:
                    values[name] = copies[id(value)]
                with propagation or contextlib.ExitStack():
                    result = forward(*args, **kwargs)
                state.update((key, values[name]) for key, (values, name) in self.buffers.items())
                if any(
                    values[name] is not copies[id(value)]
                    for values, name, value in self.places
                    if id(value) in self.weights
                ):
                    raise NotMergeable(Fallback(Reason.WEIGHT_ASSIGNED))  # another one in its place
            finally:
                for values, name, value in self.places:
                    values[name] = value
                added = list(filter(None, itertools.starmap(put_back, self.held)))
                self.register = self.hooks.taken()
        if added:
            raise NotMergeable(Fallback(Reason.CROSS_BATCH, f"that sets the state {added[0]!r}"))
        now = [version_of(copies[key]) for key in self.weights]
        if now != versions:
            self.note_moved(state, copies, versions, now)
        self.before.update(self.side_effects.before)
        return result, state, initial_state

    def suspended(self):
        """Take out the values and hooks of the replica that runs; return a function to put back.

        Its values may stay where the next replica has others.
        """
        now, register = [values[name] for values, name, _ in self.places], self.hooks.taken()

        def put_back():
            for (values, name, _), value in zip(self.places, now):
                values[name] = value
            if register is not None:
                register.put_back()

        return put_back

    def note_moved(self, state, copies, versions, now):
        """Add the weights that a replica has changed in place to its state."""
        for number, (key, value) in enumerate(self.weights.items()):
            if versions[number] != now[number]:
                if copies[key] is value:
                    raise moved_late(self.module)
                state["weight", number] = copy_of(copies[key])

    def finish(self, merged):
        """Set buffers, weights, attributes and hooks, once."""
        if self.register is not None:
            self.register.put_back()
        self.side_effects.finish(merged)
        weights = list(self.weights.values())
        with torch.no_grad():
            for key, value in merged.items():
                if key in self.buffers:
                    self.before[key].copy_(value)
                elif key[0] == "weight":
                    weights[key[1]].copy_(value)


def refuse_wrapped(model: torch.nn.Module) -> None:
    """Refuse torch's own replicas, which would split each device's shard once more."""
    nn = torch.nn.parallel
    if isinstance(model, (nn.DataParallel, nn.DistributedDataParallel)):
        name = type(model).__name__
        raise errors.UnsupportedError(
            f"parallelize() was given a torch.nn.parallel.{name}, which splits batches by itself. "
            "Pass the module within it: parallelize(model.module), and use that."
        )
