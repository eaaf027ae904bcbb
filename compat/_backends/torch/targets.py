"""What a loss was divided by, where that is not the number of rows: the weights of its targets.

``cross_entropy()`` and ``nll_loss()`` divide by the targets that count, which are not those of
``ignore_index``, each by its class's weight. The mean over all ranks' targets is that of the ranks'
means, weighted by these numbers. Autograd's graph has them (``_saved_total_weight``).
"""

import torch

from ..._runtime import patching

_LOSSES = ("NllLossBackward0", "NllLoss2DBackward0")
_MEAN = 1  # of torch's reductions
# What sums up losses, and multiplies and divides them by constants.
_ARITHMETIC = frozenset(
    "{}Backward0".format(name)
    for name in "Add Alias Div Mean Mul Neg Squeeze Stack Sub Sum ToCopy Unsqueeze View".split()
)
# So many operations between a loss and what it is made of are looked at.
_MOST = 100

# Of the backward passes under way, the outermost first: what their losses were divided by.
_under_way = []  # type: list


class Divided:
    """What the loss of a backward pass was divided by.

    Arguments:
        terms: of those of its terms that were, the weights of the targets, and how many there are.
        others: whether it has other terms, which may be means over rows.
    """

    def __init__(self, terms, others):
        self.terms = terms
        self.others = others

    def weight(self):
        """The one number that all of the loss was divided by, or None."""
        if self.others or not self.terms:
            return None
        weights = {float(weight) for weight, _ in self.terms}
        return weights.pop() if len(weights) == 1 else None

    def differs(self):
        """Whether a term may have been divided by another number on each rank."""
        return any(float(weight) != count for weight, count in self.terms)


def follow():
    """Have all backward passes tell from now on what they begin with."""
    if patching.find(torch.autograd, "backward") is not None:
        return
    plain = torch.autograd.backward

    def backward(tensors, *args, **kwargs):
        _under_way.append(divided(tensors))
        try:
            return plain(tensors, *args, **kwargs)
        finally:
            _under_way.pop()

    patching.Patch(torch.autograd, "backward", backward)


def current():
    """What the loss of the backward pass under way was divided by."""
    return _under_way[0] if _under_way else Divided([], True)


def divided(tensors):
    """By what the weights of targets a loss was divided, as far as its graph tells."""
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    # Of an edge of the graph, which may stand in a tensor's place, nothing is known.
    nodes, terms, others = [getattr(each, "grad_fn", None) for each in tensors], [], False
    for node in nodes:
        name = None if node is None else node.name()
        if name in _LOSSES and node._saved_reduction == _MEAN:
            terms.append((node._saved_total_weight, node._saved_target.numel()))
        elif name in _ARITHMETIC and len(nodes) < _MOST:
            nodes += [each for each, _ in node.next_functions if each is not None]
        else:
            others = True
    return Divided(terms, others)
