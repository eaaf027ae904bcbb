"""Hooks that a script registers on the parameters of ranks: they get the mean over all ranks.

Autograd calls a hook as soon as it has this rank's gradient. So the dictionaries in which torch
keeps the hooks of a parameter give autograd something else to call, which only notes that the hook
is due. It is called at the end of the pass, when the mean is there. Until then gradients are sent
as they are without hooks.
"""

import collections
import weakref
from typing import Any

import torch

from ..._runtime import patching

GRADIENT_HOOK = "Parameter.register_hook"
ACCUMULATED_HOOK = "Parameter.register_post_accumulate_grad_hook"

# Parameters for which the script has registered hooks.
_registered = torch.utils.weak.WeakIdKeyDictionary()


class ParameterHooks:
    """The hooks of one parameter that ranks exchange.

    Attributes:
        exchanges: those that average its gradient.
    """

    _all = torch.utils.weak.WeakIdKeyDictionary()

    def __init__(self, parameter):
        self.exchanges: "weakref.WeakSet[Any]" = weakref.WeakSet()
        self.parameter = torch.utils.weak.TensorWeakRef(parameter)
        self.of_gradient = _Hooks(self, GRADIENT_HOOK, parameter._backward_hooks)
        earlier = parameter._post_accumulate_grad_hooks
        self.of_parameter = _Hooks(self, ACCUMULATED_HOOK, earlier)
        parameter._backward_hooks = self.of_gradient
        parameter._post_accumulate_grad_hooks = self.of_parameter

    @classmethod
    def of(cls, parameter):
        """Return the hooks of a parameter; the first call makes them wait for the mean."""
        if parameter not in cls._all:
            cls._all[parameter] = cls(parameter)
        return cls._all[parameter]

    def names(self):
        """Return the names of the kinds of hooks that are registered."""
        return [h.name for h in (self.of_gradient, self.of_parameter) if h.of_script()]

    def note(self, name):
        """Note that hooks of this name are due in the pass under way.

        Returns:
            Whether the end of the pass calls them; else autograd may call them right away.
        """
        parameter = self.parameter()
        joined = [exchange.join() for exchange in self.exchanges if parameter is not None]
        due = next(filter(None, joined), None)
        if due is not None:
            due.note(parameter, name)
        return due is not None

    def call(self, parameter, before):
        """Call the hooks, as autograd does.

        Arguments:
            parameter: the parameter.
            before: the gradient that the parameter had before this pass, or None.
        """
        of_gradient = self.of_gradient.of_script()
        if of_gradient:
            with torch.no_grad():
                mean = parameter.grad.detach()
                gradient = mean.clone() if before is None else mean - before
            first, version = gradient, gradient._version
            for hook in of_gradient:
                result = hook(gradient)
                gradient = gradient if result is None else result
            # Elsewhere hooks may only look: where they change nothing, nothing is rounded.
            if gradient is not first or gradient._version != version:
                with torch.no_grad():
                    parameter.grad.copy_(gradient if before is None else before + gradient)
        for hook in self.of_parameter.of_script():
            if hook(parameter) is not None:
                raise RuntimeError("Tensor post accumulate grad hooks should return None.")


class _Hooks(collections.OrderedDict):
    """A dictionary in which torch keeps hooks, by the numbers of their handles.

    Autograd reads it, and calls what is there. ``__setitem__`` is how torch registers a hook.

    Arguments:
        owner: a ``ParameterHooks``.
        earlier: the dictionary before this one, from which its handles remove hooks, or None.
    """

    def __init__(self, owner, name, earlier):
        super().__init__()
        self.owner, self.name = owner, name
        self.earlier = {} if earlier is None else earlier
        for number, hook in self.earlier.items():
            self[number] = hook
        self.numbers = set(self.earlier)  # of those hooks

    def __setitem__(self, number, hook):
        if not isinstance(hook, patching.Callback):  # else compat has registered it
            _registered[self.owner.parameter()] = self.owner
            hook = _Deferred(self, number, hook)
        super().__setitem__(number, hook)

    def has(self, number: int) -> bool:
        """Return whether the hook of this number is still registered."""
        return number not in self.numbers or number in self.earlier

    def of_script(self):
        """Return the hooks that were registered and not removed."""
        deferred = [hook for hook in self.values() if isinstance(hook, _Deferred)]
        return [hook.hook for hook in deferred if self.has(hook.number)]

    def __reduce__(self):
        return collections.OrderedDict, ()


class _Deferred(patching.Callback):
    """A function that autograd calls in place of a hook."""

    def __init__(self, hooks, number, hook):
        super().__init__(hooks.name, self.note)
        self.hooks, self.number, self.hook = weakref.ref(hooks), number, hook

    def note(self, value: Any) -> Any:
        """Note that the hook is due, or call it if ranks exchange nothing in the pass."""
        hooks = self.hooks()
        if hooks is not None and hooks.has(self.number) and not hooks.owner.note(self.name):
            return self.hook(value)


def registered(parameters, reached):
    """Return the hooks of parameters that a pass has reached.

    Arguments:
        parameters: the parameters.
        reached: for each parameter, how many ranks' passes have.

    Returns:
        Pairs of a parameter and its ``ParameterHooks``, in an order that is the same on all ranks.
    """
    if not _registered:
        return []
    pairs = [(parameter, _registered.get(parameter)) for parameter in parameters[::-1]]
    return [pair for pair, times in zip(pairs, reached[::-1]) if times and pair[1] is not None]
