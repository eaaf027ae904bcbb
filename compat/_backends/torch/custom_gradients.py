"""User-defined gradients: autograd functions, and hooks on gradients.

These may need the whole batch in the backward pass, even if the forward pass does not. A call that
has one is tried with its gradients, too: those of three rows together, against those of its parts.
"""

import torch

from ... import _rows
from ..._rows import Fallback, Reason
from .merging import NotMergeable
from .tensors import close

#: Modules whose functions have autograd's gradients: compat's, and torch's checkpoints.
_LIBRARIES = (__name__.partition(".")[0] + ".", "torch.utils.checkpoint")


def custom_gradient(outcome, arguments):
    """Return the first user-defined gradient that leads to a replica's values, or None.

    Arguments:
        outcome: the ``Outcome`` of a replica.
        arguments: tensors among the call's arguments, before which its graph does not go.

    Returns:
        A ``Fallback``.
    """
    if outcome.propagation.hooks:
        return outcome.propagation.hooks[0]
    inputs_of_call = {None, *(value.grad_fn for value in arguments)}

    def is_custom(node):
        function = getattr(type(node), "_forward_cls", None)
        return function is not None and not function.__module__.startswith(_LIBRARIES)

    def inputs(node):
        return [source for source, _ in node.next_functions if source not in inputs_of_call]

    results = [getattr(value, "grad_fn", None) for value in outcome.values.values()]
    roots = [node for node in results if node not in inputs_of_call]
    custom = _rows.nearest(roots, is_custom, inputs)
    if not custom:
        return None
    return Fallback(Reason.CUSTOM_GRADIENT, type(custom[0])._forward_cls.__name__)


def check_gradients(trial, rules, before, home, sources, fallback):
    """Compare the gradients of merged values with those of all rows.

    Arguments:
        trial: a ``PartsTrial``.
        rules: the rule by which each value is merged, by key.
        before: state before the call, by key.
        home: the device of the results.
        sources: tensors that get gradients.
        fallback: what may mix rows.

    Raises:
        NotMergeable: they differ, or cannot be computed.
    """
    try:
        with torch.backends.cudnn.flags(enabled=False):  # which has none in inference for an RNN
            whole, *merged = _gradients(trial, rules, before, home, sources)
    except Exception as error:  # whatever a user-defined gradient has against parts of a batch
        raise NotMergeable(fallback) from error
    if not all(all(map(close, gradients, whole)) for gradients in merged):
        raise NotMergeable(fallback)


def _gradients(trial, rules, before, home, sources):
    """Return the gradients of all rows, and those of merged values for each partition."""
    (whole,), parts = trial.compute([trial.all_rows], True), trial.compute(trial.parts, True)
    others = trial.compute(trial.others, True)
    values = {k: v for k, v in whole.values.items() if isinstance(v, torch.Tensor) and v.grad_fn}
    values = {k: v for k, v in values.items() if k in rules and v.is_floating_point()}
    upstream = {key: value.detach() + 0.5 for key, value in values.items()}

    def of_parts(key, outcomes):
        return [outcome.values[key] for outcome in outcomes]

    def gradients(values, upstream):
        values, upstream = list(values.values()), list(upstream.values())
        options = {"allow_unused": True, "materialize_grads": True}
        return torch.autograd.grad(values, sources, upstream, **options)

    def of_merged(outcomes, rows, upstream):
        sizes = list(map(len, rows))
        with torch.enable_grad():
            merged = {
                key: rules[key].merged(of_parts(key, outcomes), sizes, home, before.get(key))
                for key in values
            }
        return gradients(merged, upstream)

    found = [gradients(values, upstream), of_merged(parts, trial.parts, upstream)]
    if others:
        in_their_order = {
            key: trial.reordered(
                value, rules[key].placement, of_parts(key, others), of_parts(key, parts)
            )
            for key, value in upstream.items()
        }
        found.append(of_merged(others, trial.others, in_their_order))
    return found
