"""User-defined gradients: autograd functions, and hooks on gradients.

These may compute across rows in the backward pass, whatever they did in the forward pass. A call
that has one is tried with its gradients, too: those of three rows together, against those of its
parts.
"""

import torch

from ... import _rows
from ..._rows import Fallback, Reason
from .merging import NotMergeable
from .tensors import close

#: What computes gradients as autograd would: compat, and torch's checkpoints.
_LIBRARIES = (__name__.partition(".")[0] + ".", "torch.utils.checkpoint")


def custom_gradient(outcome, arguments):
    """Return the first user-defined gradient that leads to a replica's values, or None.

    Arguments:
        arguments: tensors that the call was given; what is before them is not the call's.

    Returns:
        A ``Fallback``.
    """
    if outcome.propagation.hooks:
        return outcome.propagation.hooks[0]
    given = {None, *(value.grad_fn for value in arguments)}

    def is_own(node):
        function = getattr(type(node), "_forward_cls", None)
        return function is not None and not function.__module__.startswith(_LIBRARIES)

    def inputs(node):
        return [each for each, _ in node.next_functions if each not in given]

    results = [getattr(value, "grad_fn", None) for value in outcome.values.values()]
    found = _rows.nearest([each for each in results if each not in given], is_own, inputs)
    return Fallback(Reason.CUSTOM_GRADIENT, type(found[0])._forward_cls.__name__) if found else None


def check_gradients(trial, rules, before, home, sources, fallback):
    """Compare the gradients of merged values with those of all rows.

    Arguments:
        trial: a ``PartsTrial``.
        rules: by key, how values are put together.
        before: state before the call, by key.
        sources: tensors that get gradients.
        fallback: what may mix rows.

    Raises:
        NotMergeable: they differ, or cannot be computed.
    """
    try:
        with torch.backends.cudnn.flags(enabled=False):  # which has none in inference for an RNN
            whole, *parts = [trial.compute(rows, True) for rows in [trial.all_rows] + trial.parts]
            pairs = []
            for key, rule in rules.items():
                value = whole.values.get(key)
                if isinstance(value, torch.Tensor) and value.grad_fn and value.is_floating_point():
                    values = [part.values[key] for part in parts]
                    with torch.enable_grad():
                        merged = rule.merged(values, trial.sizes, home, before.get(key))
                    pairs.append((value, merged))
            upstream = [value.detach() + 0.5 for value, _ in pairs]
            gradients = [
                torch.autograd.grad(v, sources, upstream, allow_unused=True, materialize_grads=True)
                for v in zip(*pairs)
            ]
    except (KeyError, RuntimeError, TypeError, NotMergeable) as error:
        raise NotMergeable(fallback) from error
    if not all(map(close, *gradients)):
        raise NotMergeable(fallback)
