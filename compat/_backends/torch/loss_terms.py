"""Terms of a loss, which show whether ranks weight its rows as one process does.

The ranks' gradients become their mean, weighted by rows. That is one process's gradient where the
loss is a mean over rows, and not where each rank divides by what it alone knows: row weights, or
the rows behind a mask. Autograd's graph has each sum and mean that a loss is made of, and the
gradient that arrives there shows the weight of one element in the loss.

``cross_entropy()`` and ``nll_loss()`` divide by the targets that count, which are not those of
``ignore_index``, each by its class's weight (``_saved_total_weight``). The mean over all ranks'
targets is that of the ranks' means, weighted by these numbers.
"""

import zlib
from typing import List, NamedTuple, Optional, Sequence

import numpy as np
import torch

from ... import errors
from ..._ranks import losses

_MEAN, _SUM = 1, 2  # of torch's reductions
_REDUCTIONS = {"MeanBackward0": _MEAN, "MeanBackward1": _MEAN,
               "SumBackward0": _SUM, "SumBackward1": _SUM}  # fmt: skip
# Operations that sum up losses, and multiply and divide them by constants.
_ARITHMETIC = frozenset(
    "{}Backward0".format(name)
    for name in "Add Alias Div Mean Mul Neg Squeeze Stack Sub Sum ToCopy Unsqueeze View".split()
)
# So many operations between a loss and its terms are traversed.
_MOST = 100


class Term:
    """A sum or mean that a loss is made of.

    Arguments:
        node: of autograd's graph.
        reduction: the number of its kind.
    """

    def __init__(self, node, reduction):
        self.node, self.kind = node, "{} {}".format(node.name(), reduction)
        self.gradient = None  # of the loss, by the value of this term
        is_mean, self.count = reduction == _MEAN, 1
        # The sum of their weights.
        self.targets = getattr(node, "_saved_total_weight", None) if is_mean else None
        chained = node.name() in _REDUCTIONS
        while reduction is not None:  # a mean over columns of a mean over rows, say
            result, ((node, self.shape), *_) = _shape(node), _inputs(node)
            self.count *= self.shape.numel() / max(1, result.numel()) if reduction == _MEAN else 1
            reduction = _REDUCTIONS.get(node.name()) if chained else None
        self.is_sum = not is_mean and self.count == 1

    def note(self, gradients: "Sequence[torch.Tensor]") -> None:
        """Note the gradient of the loss with respect to the term."""
        self.gradient = gradients[0]

    def factor(self) -> float:
        """Return the weight of one element of the term in the loss; NaN if it is unknown."""
        if self.gradient is None or self.gradient.numel() != 1:
            return float("nan")
        count = self.count if self.targets is None else float(self.targets)
        return float(self.gradient) / count if count else float("nan")


class Loss(NamedTuple):
    """The loss of a backward pass.

    Arguments:
        terms: the sums and means of which it is a sum, times constants.
        others: whether it has other terms, too.
    """

    terms: "List[Term]"
    others: bool

    def targets(self) -> "Optional[float]":
        """Return the sum of the targets' weights by which all of the loss was divided, or None."""
        totals = {None if term.targets is None else float(term.targets) for term in self.terms}
        return None if self.others or len(totals) != 1 else totals.pop()


def loss_of(tensors):
    """Return the ``Loss`` of a backward pass that begins with these tensors."""
    # The terms before an edge of the graph, which may stand in a tensor's place, are unknown.
    nodes = list(dict.fromkeys(getattr(tensor, "grad_fn", None) for tensor in tensors))
    terms: "List[Term]" = []
    others = False
    for place, node in enumerate(nodes):  # which grow meanwhile
        if node is None or place >= _MOST:
            others = True
            continue
        name, inputs = node.name(), [source for source, _ in _inputs(node)]
        reduction = getattr(node, "_saved_reduction", None) or _REDUCTIONS.get(name)
        if reduction in (_MEAN, _SUM) and inputs and not _is_of_scalars(inputs[0]):
            terms.append(Term(node, reduction))
        elif all(map(_is_of_scalars, inputs)):
            others = others or name not in _ARITHMETIC
            nodes += [source for source in dict.fromkeys(inputs) if source not in nodes]
        else:
            others = True
    return Loss(terms, others)


def _inputs(node):
    """List a node's inputs, as far as it is differentiated: nodes and shapes."""
    edges = [edge for edge in node.next_functions if edge[0] is not None]
    return [(source, _shape(source, place)) for source, place in edges]


def _shape(node, place=0):
    """Return the shape of a node's result; of a nested tensor, which has none, no elements."""
    metadata = node._input_metadata[place : place + 1]
    has_shape = metadata and not metadata[0].is_nested_tensor
    return torch.Size(metadata[0].shape if has_shape else [0])


def _is_of_scalars(node):
    """Return whether the result of a node is a scalar, or concatenated scalars."""
    is_joined = node.name() in ("StackBackward0", "CatBackward0")
    return not _shape(node) or (is_joined and not any(shape for _, shape in _inputs(node)))


def check_loss(engine, name, loss, weight, rows):
    """Warn where the loss of a backward pass is not the one that one process would compute.

    All ranks call it at once.

    Arguments:
        engine: the engine of the ranks.
        name: the model's class.
        loss: the ``Loss`` of the pass under way.
        weight: that of this rank's gradients in the mean over ranks.
        rows: of the pass, or None.

    Returns:
        Whether there is a warning, the same on all ranks.
    """
    terms = loss.terms
    kinds = [zlib.crc32(" ".join(term.kind for term in terms).encode()) & 0xFFFFFF, len(terms)]
    if any(others != kinds for others in engine.gather(kinds)) or not terms:
        return False  # such as where a rank leaves out a term: its meaning is unknown
    undivided = [term for term in terms if term.factor() == 1 and term.shape[:1] == (rows,)]
    is_sum = bool(undivided) and rows > 1 and all(term.is_sum for term in terms)
    mine = [weight, is_sum] + [term.factor() for term in terms]
    table = [float(value) if flag else 0.0 for flag in engine.flags(True) for value in mine]
    weights, sums, *factors = engine.sum(table).reshape(engine.place.size, -1).T
    types = [str(term.gradient.dtype) for term in terms if term.gradient is not None]
    limit = max(losses.rounding(dtype.split(".")[-1]) for dtype in types + [""])

    def differ(values):
        with np.errstate(invalid="ignore"):  # such as in a step that overflows
            return np.ptp(values) > limit * np.abs(values).max()

    # A sum or mean of a batch has a weight by its rows. Other terms, such as a penalty on weights,
    # have the same on all ranks.
    counts = [weights * f for f in factors if differ(f) and differ(weights * f)]
    count = sum(counts)
    # Together they may, where terms are mixed in a proportion that each rank draws at random.
    if counts and differ(count):
        other = int(np.abs(count - count[0]).argmax())
        pair = count[[0, other]] / np.abs(count[[0, other]]).max()
        text = (
            "The loss of {} counts a row of rank 0 and a row of rank {} as {:.3g} to {:.3g}, and "
            "one process would count all rows alike. Each rank divides by a number of its own, "
            "such as the sum of its row weights or of its mask, or it takes a root or another "
            "function of its mean. So the ranks train to other numbers than one process. Divide by "
            "the number of all ranks, from torch.distributed.all_reduce(), times this rank's share "
            "of the rows.".format(name, other, *pair)
        )
    elif all(sums):
        text = (
            "The loss of {} is a sum over the rows of a batch. Ranks train with the mean of their "
            "gradients, which of a sum is 1/{} of one process's. Divide the sum by the number of "
            "rows. If what it sums up is divided already, such as by the sum of row weights, then "
            "divide by that of all ranks, from torch.distributed.all_reduce(), times this rank's "
            "share of the rows.".format(name, engine.place.size)
        )
    else:
        return False
    if engine.place.rank == 0:
        errors.warn(text)
    return True
