"""A model's state as it is now, to be restored or compared: tensors, hooks, random generators."""

import collections
import contextlib
from typing import Any, Dict, Optional, Tuple

import torch

from ... import _verification, errors
from ..._runtime.containers import MISSING
from .graph import tag, tag_of
from .tensors import array_of, changes_of, tensors_in

#: Attributes in which modules keep hooks.
HOOKS = ("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called",
         "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs")  # fmt: skip


class Hooks:
    """The hooks that modules have now."""

    def __init__(self, parts):
        self.parts = parts
        held = [vars(part).get(name) for part in parts for name in HOOKS]
        self.held = [hooks for hooks in held if hooks is not None]
        self.counts = list(map(len, self.held))
        self.kept = {place: dict(self.held[place]) for place, n in enumerate(self.counts) if n}

    def put_back(self) -> None:
        """Restore these hooks, and no others."""
        for place, (hooks, count) in enumerate(zip(self.held, self.counts)):
            if len(hooks) != count:
                hooks.clear()
                hooks.update(self.kept.get(place, {}))

    def taken(self) -> "Optional[Hooks]":
        """Restore these hooks; return those that were there instead, or None."""
        if list(map(len, self.held)) == self.counts:
            return None
        others = Hooks(self.parts)
        self.put_back()
        return others


def put_back(values: "Dict[str, Any]", held: "Dict[str, Any]") -> "Optional[str]":
    """Restore a dictionary's items; return the name of one that was added, or None."""
    names = [name for name, value in values.items() if value is not held.get(name)]
    if not names and len(values) == len(held):
        return None
    values.clear()
    values.update(held)
    return names[0] if names else None


def generators() -> "Dict[str, torch.Generator]":
    """Return torch's default generators, by device; those of GPUs once CUDA has started."""
    of_gpus = {f"cuda:{index}": each for index, each in enumerate(torch.cuda.default_generators)}
    return dict(of_gpus, cpu=torch.default_generator)


def random_numbers() -> contextlib.ExitStack:
    """Return a context after which random numbers are drawn as from now on."""
    afterwards = _verification.random_numbers()
    for generator in generators().values():
        afterwards.callback(generator.set_state, generator.get_state())
    return afterwards


class Snapshot:
    """Values that calls of a model reach, as they are now; verification restores them.

    Arguments:
        kind: a subclass of ``Reach``.
        model: the model.
        others: other objects with a method ``put_back``, which is called, too.
    """

    def __init__(self, kind, model, *others):
        self.effects, self.others = kind(model, kind.parts_of(model)).effects, others
        self.effects.note()
        tensors = {id(v): v for v in self.effects.values() if isinstance(v, torch.Tensor)}
        self.tensors = [(v, version_of(v), v.detach().clone()) for v in tensors.values()]

    def put_back(self) -> None:
        """Restore the values."""
        self.effects.restore()
        for tensor, version, value in self.tensors:
            if version_of(tensor) != version:
                tensor.data.copy_(value)
        for other in self.others:
            other.put_back()

    def changed(self) -> "Dict[str, Any]":
        """Return the values that have changed since, as arrays by label."""
        arrays: "Dict[str, Any]" = {}
        counts: "collections.Counter[str]" = collections.Counter()
        for change in self.effects.changes():
            leaves = [] if change.after is MISSING else tensors_in(change.after)
            for leaf in leaves:
                counts[str(change)] += 1
                arrays[f"output kept as {change} ({counts[str(change)]})"] = array_of(leaf)
        for number, (tensor, version, _) in enumerate(self.tensors):
            if version_of(tensor) != version:
                arrays[f"output kept in place ({number})"] = array_of(tensor)
        return arrays


def moved_late(model: Any) -> errors.UnsupportedError:
    """Return the error for a changed tensor of which there is no copy."""
    return errors.UnsupportedError(
        f"{type(model).__name__} changes a weight or another large tensor in place, which it left "
        "alone in its first call, so that its value of before, with which each device begins, is "
        "not known any more. Have the first call change it, too, or register_buffer() it; or run "
        "the model on one device: parallelize(model, gpus=1)."
    )


def version_of(tensor: torch.Tensor) -> "Tuple[int, Optional[int]]":
    """Return a key that changes with a tensor's values: in place, or by its ``data``."""
    held = tensor._values() if tensor.is_sparse else tensor
    # Other layouts have no pointer of their own.
    return changes_of(tensor), held.data_ptr() if held.layout is torch.strided else None


def copy_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a tensor, with its tag."""
    value = tensor.detach().clone()
    if tag_of(tensor) is not None:
        tag(value, tag_of(tensor))
    return value
