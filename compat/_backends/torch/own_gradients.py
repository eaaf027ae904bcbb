"""Gradients of the user's own: autograd functions, and hooks on what comes back.

These may compute across rows on the way back, whatever they did on the way there. A call that has
one is tried with its gradients, too: those of three rows together, against those of its parts.
"""

import torch

from ... import _rows
from .reductions import NotMergeable
from .trials import close


def found(outcome, arguments):
    """The first gradient of the user's own that leads to a replica's values, or None.

    Arguments:
        arguments: tensors that the call was given; what is before them is not the call's.

    Returns:
        An ``Across``.
    """
    if outcome.watch.hooks:
        return outcome.watch.hooks[0]
    seen = {value.grad_fn for value in arguments}
    pending = [getattr(value, "grad_fn", None) for value in outcome.values.values()]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        function = getattr(type(node), "_forward_cls", None)
        if function is not None and not function.__module__.startswith(_LIBRARIES):
            return _rows.Across(function.__name__, why="gradient")
        pending += [before for before, _ in node.next_functions]
    return None


#: What computes gradients as autograd would: compat, and torch's checkpoints.
_LIBRARIES = (__name__.partition(".")[0] + ".", "torch.utils.checkpoint")


def prove(trial, rules, before, home, sources, across):
    """Hold the gradients of what was put together against those of all rows.

    Arguments:
        trial: a ``PartsTrial``.
        rules: by key, how values are put together.
        before: state before the call, by key.
        sources: tensors that get gradients.
        across: what may mix rows.

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
                torch.autograd.grad(values, sources, upstream, allow_unused=True)
                for values in zip(*pairs)
            ]
    except (KeyError, RuntimeError, TypeError) as error:
        raise NotMergeable(across) from error
    for gradient, other in zip(*gradients):
        known = [each for each in (gradient, other) if each is not None]
        if known and not close(known[0], known[1] if len(known) > 1 else 0 * known[0]):
            raise NotMergeable(across)
