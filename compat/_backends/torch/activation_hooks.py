"""Hooks of a script on gradients of activations: a warning says if one changes a gradient.

Such gradients belong to this rank's rows, and nothing is exchanged for them. A rank's loss is
divided by fewer rows than one process's, so they are larger, which a function that is not linear
shows.
"""

import functools
from typing import Callable

import torch
from torch.nn.modules import module

from ... import errors
from ..._runtime import patching


def follow(is_exchanged: "Callable[[], bool]") -> None:
    """Warn of the first hook that changes a gradient of an activation.

    Arguments:
        is_exchanged: a function that returns whether ranks exchange gradients in the current pass.
    """
    if patching.find(module, "BackwardHook") is not None:
        return
    watch = functools.partial(_watched, is_exchanged, [])
    register = torch.Tensor.register_hook

    def register_hook(self, hook):
        is_other = self.grad_fn is None or isinstance(hook, patching.Callback)
        return register(self, hook if is_other else watch(hook, "of a tensor"))

    class WatchedBackwardHook(module.BackwardHook):
        def __init__(self, owner, hooks, pre_hooks):
            place = f"of {type(owner).__name__}"
            hooks, pre_hooks = ([watch(hook, place) for hook in h] for h in (hooks, pre_hooks))
            super().__init__(owner, hooks, pre_hooks)

    patching.WatchingPatch(torch.Tensor, "register_hook", register_hook)
    patching.WatchingPatch(module, "BackwardHook", WatchedBackwardHook)


def _watched(is_exchanged, warned, hook, place):
    """Wrap a hook: warn, once, if it is found to change a gradient."""

    @functools.wraps(hook)
    def call(*args):
        if warned or not is_exchanged():
            return hook(*args)
        before = [(tensor, tensor._version) for tensor in _tensors(args[-2:])]
        result = hook(*args)
        changed = any(tensor._version != version for tensor, version in before)
        if changed or not _are_equal(result, args):
            warned.append(hook)
            errors.warn(
                "The backward hook {} {} changes a gradient. It gets that of this rank's rows, "
                "whose loss is divided by fewer rows than that of one process, and not by all. If "
                "it is not linear, as where it clips, ranks train to other numbers: hooks on "
                "parameters, and changes of their gradients after backward(), see the mean over "
                "all ranks.".format(_name(hook), place)
            )
        return result

    return call


def _tensors(values):
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)


def _are_equal(result, args):
    """Return whether a hook returned nothing, or its arguments."""
    if result is None:
        return True
    # Of a module, gradients of inputs come before those of outputs, which one kind gets alone.
    is_alone = isinstance(args[-1], torch.Tensor) or len(args) < 3
    gradients = [args[-1]] if is_alone else [args[-2]]
    pairs = list(zip(_tensors([result]), _tensors(gradients)))
    return all(one.shape == other.shape and torch.equal(one, other) for one, other in pairs)


def _name(hook):
    """Return a hook's name, and its line."""
    function = getattr(hook, "func", hook)
    code = getattr(function, "__code__", None)
    line = code and errors.innermost_line([(code.co_filename, code.co_firstlineno)])
    name = getattr(function, "__name__", type(hook).__name__)
    return f"{name} ({line})" if line else name
