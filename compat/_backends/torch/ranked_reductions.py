"""Values of all ranks' rows that a model needs while it runs: reduced over ranks.

What a rank differentiates is the mean over its own rows, and the gradients of all ranks become
their mean weighted by rows (``gradient_exchange``). So a gradient that passes to another rank by a
reduced value is weighted in the same way.
"""

from typing import Any, List, Tuple

import torch

from ... import errors
from .backward_passes import BackwardCall
from .reductions import merged_moments

_FORWARD, _WITHOUT_GRADIENTS, _BACKWARD = range(3)
_PASSES = "a forward pass", "a forward pass without gradients", "a backward pass"
# Numbers of samples are sent as two numbers, which float32 holds.
_PART = 1 << 20


class RankReductions:
    """Reductions over ranks, in the forward and the backward pass of one model.

    Arguments:
        exchange: the ``Exchange`` of the model's gradients.
        group: the process group of the ranks; None: all of them.
    """

    def __init__(self, exchange: Any, group: Any = None) -> None:
        self.exchange, self.engine = exchange, exchange.engine
        self.group = self.engine.statistics if group is None else group

    def moments(self, value: torch.Tensor, dims: Any) -> Any:
        """Return mean and variance of all ranks' samples, and the number of values.

        Arguments:
            value: this rank's samples, which may be none.
            dims: the dimensions of which they are, which are kept.
        """
        return _Moments.apply(value, dims, self, _pass_of(value))

    def reduce(self, how: str, value: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks."""
        return _Sum.apply(value, self, _pass_of(value), 0.0)

    def weighted(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the gradient by a reduced value, from what this rank's loss contributes to it."""
        weight = self.exchange.expected_weight()
        scale = weight or 1.0  # of gradients by the statistics alone: see ``Exchange.run``
        return _Sum.apply(gradient * scale, self, _BACKWARD, weight) / scale

    def gather(
        self, kind: int, numbers: "List[float]", value: torch.Tensor
    ) -> "Tuple[List[List[float]], torch.Tensor]":
        """Return two numbers, and the values, of each rank.

        Arguments:
            kind: the pass, by its place in ``_PASSES``.
            numbers: those of this rank.
            value: its value.

        Raises:
            RankError: another rank is in another pass.
        """
        mine = torch.cat([value.new_tensor([kind, *numbers]), value.reshape(-1)])
        heads, rows = self.engine.gather_rows(mine, self.group, 3)
        kinds = [int(head[0]) for head in heads]
        if len(set(kinds)) > 1:
            passes = [f"rank {rank} in {_PASSES[kind]}" for rank, kind in enumerate(kinds)]
            raise errors.RankError(
                "Batch normalization of all ranks' samples needs all ranks in the same pass, and "
                f"they are in different ones: {', '.join(passes)}. Have each call the model in "
                "training for the same batches, in the same order. In inference (model.eval()) a "
                "rank may call it alone."
            )
        return [head[1:] for head in heads], rows.reshape(len(heads), *value.shape)

    def note_weights(self, weights: "List[float]", weight: float) -> None:
        """Note the weights of all ranks in a backward pass, and this rank's."""
        if self.group is self.engine.statistics:
            share = weight / sum(weights) if any(weights) else 0.0
            BackwardCall.current().outermost.shares[self.exchange.number] = share


def _pass_of(value):
    is_differentiated = torch.is_grad_enabled() and value.requires_grad
    return _FORWARD if is_differentiated else _WITHOUT_GRADIENTS


class _Sum(torch.autograd.Function):
    """The sum over all ranks."""

    @staticmethod
    def forward(ctx, value, reductions, kind, weight):
        ctx.reductions = reductions
        heads, rows = reductions.gather(kind, [weight, 0.0], value)
        if kind == _BACKWARD:
            reductions.note_weights([weight for weight, _ in heads], weight)
        return rows.sum(0)

    @staticmethod
    def backward(ctx, gradient):
        return ctx.reductions.weighted(gradient), None, None, None


class _Moments(torch.autograd.Function):
    """Mean and variance of all ranks' samples, and how many these are."""

    @staticmethod
    def forward(ctx, value, dims, reductions, kind):
        shape = [1 if dim in dims else size for dim, size in enumerate(value.shape)]
        count = value.numel() // max(1, torch.Size(shape).numel())
        moments = value.new_zeros(2, *shape)
        if count:
            variance, mean = torch.var_mean(value, dims, correction=0, keepdim=True)
            moments = torch.stack([mean, variance])
        heads, rows = reductions.gather(kind, [count // _PART, count % _PART], moments)
        counts = [int(high) * _PART + int(low) for high, low in heads]
        pairs = [(each, row) for each, row in zip(counts, rows) if each]
        total = sum(counts)
        if total:
            mean, variance = merged_moments([row for _, row in pairs], [each for each, _ in pairs])
        else:
            mean, variance = moments + 0
        ctx.reductions, ctx.total = reductions, total
        ctx.save_for_backward(value, mean)
        return mean, variance, total

    @staticmethod
    def backward(ctx, mean_gradient, variance_gradient, _):
        value, mean = ctx.saved_tensors
        gradients = torch.stack([mean_gradient, variance_gradient])
        by_mean, by_variance = ctx.reductions.weighted(gradients) / max(1, ctx.total)
        return by_mean + 2 * by_variance * (value - mean), None, None, None
