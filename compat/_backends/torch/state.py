"""A model's state as it is now, to be restored or compared: tensors, hooks, random generators."""

import collections

import torch

from ... import _verification, errors
from ..._runtime.containers import MISSING
from .graph import tag, tag_of
from .tensors import array_of, tensors_in

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
        """Return hooks that were registered in place of these, which are put back, or None."""
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


def generators():
    """Return torch's own random generators, by device; those of GPUs once CUDA has started."""
    found = {f"cuda:{index}": each for index, each in enumerate(torch.cuda.default_generators)}
    return dict(found, cpu=torch.default_generator)


def random_numbers():
    """Return a context that restores the random numbers which a model may draw."""
    afterwards = _verification.random_numbers()
    for generator in generators().values():
        afterwards.callback(generator.set_state, generator.get_state())
    return afterwards


class Snapshot:
    """Values that calls of a model reach, as they are now; verification restores them.

    Arguments:
        kind: a subclass of ``Reach``.
        model: the model.
        others: what is put back, too: has a method ``put_back``.
    """

    def __init__(self, kind, model, *others):
        self.effects, self.others = kind(model, kind.parts_of(model)).effects, others
        self.effects.note()
        tensors = {id(v): v for v in self.effects.values() if isinstance(v, torch.Tensor)}
        self.tensors = [
            (each, version_of(each), each.detach().clone()) for each in tensors.values()
        ]

    def put_back(self):
        self.effects.restore()
        for tensor, version, value in self.tensors:
            if version_of(tensor) != version:
                tensor.data.copy_(value)
        for each in self.others:
            each.put_back()

    def changed(self):
        """Return what has changed since then, by label: arrays."""
        found, counts = {}, collections.Counter()
        for change in self.effects.changes():
            leaves = [] if change.after is MISSING else tensors_in(change.after)
            for leaf in leaves:
                counts[str(change)] += 1
                found[f"output kept as {change} ({counts[str(change)]})"] = array_of(leaf)
        for number, (tensor, version, _) in enumerate(self.tensors):
            if version_of(tensor) != version:
                found[f"output kept in place ({number})"] = array_of(tensor)
        return found


def moved_late(model):
    """Return the error where a tensor was changed of whose value nothing is left."""
    return errors.UnsupportedError(
        f"{type(model).__name__} changes a weight or another large tensor in place, which it left "
        "alone in its first call, so that its value of before, with which each device begins, is "
        "not known any more. Have the first call change it, too, or register_buffer() it; or run "
        "the model on one device: parallelize(model, gpus=1)."
    )


def version_of(tensor):
    """Return a number that changes where a tensor does: in place, or by its ``data``."""
    held = tensor._values() if tensor.is_sparse else tensor
    # Other layouts have no pointer of their own.
    return tensor._version, held.data_ptr() if held.layout is torch.strided else None


def copy_of(tensor):
    """Return a copy of a tensor, with its tag."""
    value = tensor.detach().clone()
    if tag_of(tensor) is not None:
        tag(value, tag_of(tensor))
    return value
