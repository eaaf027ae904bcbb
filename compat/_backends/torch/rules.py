"""Rules of torch's functions, by name: how their results depend on the rows.

``RULES`` maps a name to a rule: a function of a ``Call`` and of the ``Value``s of its tensors. It
returns the placement of the results, or a list with one for each. A function without a rule is
tried, see ``trial``, so there are rules for what a trial cannot show: totals, whole numbers, what
is random or in place, what a few rows may agree in by chance, and rows of different lengths; and
for what many models call, which need not be tried. ``tests/backends/torch/test_rules.py`` proves
each rule by computing.
"""

import re
from typing import Any, Callable, Dict, List, Optional

import torch

from ... import _rows
from . import rules_indexing
from .graph import Call, call_tensors
from .row_counts import RowCount, counted, has_count

Sharded, Mixed, Partial = _rows.Sharded, _rows.Mixed, _rows.Partial
Rule = Callable[[Call, List[_rows.Value]], Any]

#: The name of a function, and its rule.
RULES: "Dict[str, Rule]" = {}


def register(*names):
    """Return a decorator that makes a function the rule of these, listed in texts."""

    def enter(function):
        for name in " ".join(names).split():
            assert name not in RULES, name
            RULES[name] = function
        return function

    return enter


def canonical(name: str) -> str:
    """Return the name by which a function has a rule: ``add`` for ``add_`` and ``__iadd__``."""
    operator = re.match("__[ri]?(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor|matmul)__$", name)
    return operator.group(1) if operator else name.strip("_") or name


def placements(call: Call) -> "Optional[List[_rows.Placement]]":
    """Return the placement of each result of a call, or None where there is no rule for it."""
    name = canonical(call.name)
    rule = RULES.get(name) or (pointwise if is_pointwise(name) else None)
    if rule is None:
        return None
    results = rule(call, call.values)
    return results if isinstance(results, list) else [results] * len(call.results)


# Element by element.


def is_pointwise(name: str) -> bool:
    """Return whether torch has tagged a function as pointwise."""
    forms = getattr(torch.ops.aten, name, None)
    tags = [getattr(forms, form).tags for form in forms.overloads()] if forms is not None else []
    return any(torch.Tag.pointwise in form for form in tags)


@register(
    "absolute and bernoulli conj copy divide exponential expand_as floor_divide floordiv greater",
    "greater_equal hardswish imag invert isclose less less_equal log_sigmoid multiply negative",
    "not_equal or real softsign subtract tanhshrink uniform xor",
    # Losses, which may be reduced afterwards:
    "binary_cross_entropy binary_cross_entropy_with_logits gaussian_nll_loss hinge_embedding_loss",
    "huber_loss kl_div l1_loss margin_ranking_loss mse_loss poisson_nll_loss smooth_l1_loss",
    "soft_margin_loss",
)
def pointwise(call, values):
    """Compute each element from those at the same place."""
    return _rows.pointwise(values)


@register("where")
def where(call, values):
    """Select by a condition; or list the places where it holds."""
    return pointwise(call, values) if len(call.args) + len(call.kwargs) > 1 else Mixed()


# Functions that take a type, a device or a shape of other tensors.
register(
    "alpha_dropout bfloat16 bool byte char clone contiguous cpu cuda data detach double dropout",
    "empty_like float full_like half int long ones_like rand_like randint_like randn_like",
    "requires_grad resolve_conj rrelu short to type type_as zero zeros_like",
)(lambda call, values: _rows.pointwise(values[:1]))


# Along dimensions.

#: The place of dimensions among the arguments, and their default; 1 and all of them for others.
DIMS = {
    "sort": (1, -1), "argsort": (1, -1), "msort": (9, 0), "topk": (2, -1), "roll": (2, None),
    "normalize": (2, 1), "glu": (1, -1), "gumbel_softmax": (4, -1), "norm": (2, None),
    "linalg_vector_norm": (2, None), "linalg_norm": (2, None),
}  # fmt: skip

#: Reductions as ``_rows`` names them, where torch has another name.
TOTALS = {"nansum": "sum", "count_nonzero": "sum", "amax": "max", "amin": "min"}


@register(
    "sum nansum count_nonzero mean amax amin any all logsumexp norm linalg_norm",
    "linalg_vector_norm max min std var std_mean var_mean prod argmax argmin median",
)
def reduced(call, values):
    """Reduce dimensions."""
    name, value = canonical(call.name), values[0]
    if isinstance(call.get(1, "other"), torch.Tensor):  # the larger ones
        return pointwise(call, values)
    how, keepdims = TOTALS.get(name, name), call.results[0].dim() == value.rank
    placement = _rows.reduced(value, dims_of(call), how, keepdims, denominator="elements")
    others = [Mixed()] * (len(call.results) - 1)
    return [Partial(how)] + others if isinstance(placement, Partial) else placement


def dims_of(call):
    """Return the dimensions that a function goes along, or reduces; None for all."""
    at, default = DIMS.get(canonical(call.name), (1, None))
    dims = call.get(at, "dim", "axis", "dims", default=default)
    is_another = isinstance(dims, (torch.Tensor, torch.dtype, bool, str))
    return default if is_another or dims == () else dims


@register(
    "softmax log_softmax softmin special_softmax special_log_softmax cumsum cumprod cummax cummin",
    "logcumsumexp sort argsort msort topk roll flip normalize glu gumbel_softmax",
)
def along(call, values):
    """Compute along dimensions, from whole lines of elements."""
    dims = call.sizes(1, "dims") if call.name == "flip" else dims_of(call)
    return _rows.along(values[0], dims)


@register(
    "linear layer_norm rms_norm tril triu max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d",
    "avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d",
    "adaptive_max_pool2d adaptive_max_pool3d conv1d conv2d conv3d conv_transpose1d",
    "conv_transpose2d conv_transpose3d isin bucketize",
    # All but the first dimension:
    "interpolate dropout1d dropout2d dropout3d feature_alpha_dropout feature_dropout group_norm",
    "instance_norm",
)
def along_the_last(call, values):
    """Compute along the last dimensions, with the same weights for all rows."""
    if not isinstance(call.first, torch.Tensor):  # isin() and bucketize() of a number
        return _rows.Unknown()
    name = canonical(call.name)
    counts = {"linear": 1, "tril": 2, "triu": 2, "isin": 0, "bucketize": 0}
    count = counts.get(name, call.first.dim() - 1)
    if name in ("layer_norm", "rms_norm"):
        count = len(call.get(1, "normalized_shape"))
    elif "pool" in name or "conv" in name:  # and channels
        count = int(name[-2]) + ("conv" in name)
    if any(not isinstance(value.placement, _rows.Replicated) for value in values[1:]):
        return Mixed()
    return _rows.along(values[0], list(range(-count, 0)))


# Products.


@register("matmul mm bmm mv dot linalg_matmul")
def product(call, values):
    """Multiply matrices."""
    return _rows.product(values[::-1] if call.name == "__rmatmul__" else values)


@register("einsum")
def einsum(call, values):
    """Multiply and sum, as an equation says."""
    equation = call.args[0]
    if not isinstance(equation, str) or "." in equation:
        return _rows.Unknown()
    inputs, _, result = equation.replace(" ", "").partition("->")
    if "->" not in equation:
        result = "".join(sorted(c for c in set(inputs) - {","} if inputs.count(c) == 1))
    return _rows.contracted(values, inputs.split(","), result)


@register("scaled_dot_product_attention")
def attention(call, values):
    """Attend along the last two dimensions: time and features; of a mask, time twice."""
    if any(value.axis is not None and value.axis >= value.rank - 2 for value in values):
        return Mixed()
    return _rows.pointwise([_rows.Value(value.placement, value.shape[:-2]) for value in values])


# Layers.


@register("embedding")
def embedding(call, values):
    """Look up vectors in a table, which comes after the numbers."""
    return _rows.gathered(values[1::-1], 0)


@register("one_hot")
def one_hot(call, values):
    """Encode classes, whose number is not that of the largest one among the rows."""
    return values[0].placement if call.get(1, "num_classes", default=-1) > 0 else Mixed()


RECURRENT = ("lstm", "gru", "rnn_tanh", "rnn_relu")
PACKED = RECURRENT + ("_pack_padded_sequence", "_pad_packed_sequence")
SEQUENCES = RECURRENT + ("multi_head_attention_forward",)


@register(*RECURRENT)
def recurrent(call, values):
    """Run a recurrent layer, whose states have the rows in the second dimension always."""
    value = values[0]
    if isinstance(call.args[1], torch.Tensor) and isinstance(call.args[3], (list, tuple)):
        fits = value.axis is not None  # packed: the data is one sequence after the other, or so
    else:
        states = [call.value(state) for state in call_tensors([call.args[1]])]
        fits = all(state.placement == _rows.REPLICATED or state.axis == 1 for state in states)
        fits = fits and value.axis == (0 if call.args[8] else 1)
    return [value.placement] + [Sharded(1)] * (len(call.results) - 1) if fits else Mixed()


# The data, and how many sequences go on at each time.
register("pack_padded_sequence")(
    lambda call, values: [Sharded(0, inner=None, even=False), _rows.REPLICATED]
)
register("pad_packed_sequence")(
    lambda call, values: [Sharded(0 if call.args[2] else 1), Sharded(0)]
)


@register("multi_head_attention_forward")
def multi_head(call, values):
    """Attend, with the rows of queries, keys and values in the second dimension."""
    fits = all((value.rank, value.axis) == (3, 1) for value in values[:3])
    return [Sharded(1), Sharded(0)][: len(call.results)] if fits else Mixed()


# Losses, which may be reduced.


@register(
    "cross_entropy nll_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss",
    "cosine_embedding_loss triplet_margin_loss",
)
def loss_of_rows(call, values):
    """Compute a loss of (rows, classes, ...), targets with rows first, and weights of classes."""
    count = 3 if canonical(call.name) in ("cosine_embedding_loss", "triplet_margin_loss") else 2
    axes = [0] * count + [None] * (len(values) - count)
    return _rows.by_row(values, axes) if call.first.dim() > 1 else Mixed()


@register("ctc_loss")
def ctc_loss(call, values):
    """Compute losses of sequences: of log-probabilities, targets, and the lengths of both."""
    tensors = [call.value(t) for t in call.args[:4] if isinstance(t, torch.Tensor)]
    if len(tensors) < 4 or (tensors[0].rank, tensors[1].rank) != (3, 2):
        return Mixed()
    return _rows.by_row(tensors, [1, 0, 0, 0], result=0)


# Views.


@register(
    "transpose swapaxes swapdims t permute movedim moveaxis adjoint T mT H mH unsqueeze select",
    "narrow",
)
def viewed(call, values):
    """View a tensor with dimensions in another order, or with other ones."""
    value = values[0]
    if value.axis is None:
        return value.placement
    stand_in = rules_indexing.stand_in(call.first.shape, value.axis)
    return rules_indexing.moved(value.placement, call.func(stand_in, *call.args[1:], **call.kwargs))


@register("view reshape flatten ravel")
def reshaped(call, values):
    """Reshape, to sizes among which may be a number of rows."""
    value, after = values[0], list(call.results[0].shape)
    places = range(len(after))  # those of flattened rows follow from where they are
    if canonical(call.name) in ("view", "reshape"):
        if isinstance(call.get(1, "dtype"), torch.dtype):
            return _rows.along(value, -1)
        # Where the rows are for certain; then where they may be, as far as numbers tell.
        sizes = call.sizes(1, "size", "shape")
        growing = [place for place, size in enumerate(sizes) if isinstance(size, RowCount)]
        places = growing if len(growing) == 1 else [p for p, size in enumerate(sizes) if size == -1]
        if call.counting and not growing:
            places += [place for place, size in enumerate(after) if size % call.rows == 0]
    for place in places:
        placement = _rows.reshaped(value, after[:place] + [None] + after[place + 1 :])
        if not isinstance(placement, (Mixed, _rows.Unknown)):
            return placement
    return _rows.REPLICATED if value.axis is None else Mixed()


@register("squeeze")
def squeezed(call, values):
    """Leave the rows' dimension where none are named, see ``propagation``."""
    value, dims = values[0], call.sizes(1, "dim")
    return Mixed() if value.axis in [dim % value.rank for dim in dims] else viewed(call, values)


@register("expand broadcast_to")
def expanded(call, values):
    """Expand dimensions of one element, or add some in front."""
    value, sizes = values[0], call.sizes(1, "size")
    placement, place = _rows.broadcast(value, len(sizes)), counted(sizes)
    if place is None or getattr(placement, "axis", None) == place:
        return placement
    return Sharded(place, inner=sizes[place].per) if placement == _rows.REPLICATED else Mixed()


@register("repeat tile")
def tiled(call, values):
    """Repeat the whole along dimensions."""
    value, times = values[0], call.sizes(1, "repeats", "dims")
    times = [1] * (value.rank - len(times)) + times
    place, shape = counted(times), [1] * (len(times) - value.rank) + list(value.shape)
    if place is None:
        return _rows.tiled(value, times)
    placement = Sharded(place, inner=(shape[place] or 1) * times[place].per)
    return placement if value.placement == _rows.REPLICATED else Mixed()


@register("repeat_interleave")
def repeated(call, values):
    """Repeat each element along a dimension."""
    value, times, dim = values[0], call.get(1, "repeats"), call.get(2, "dim")
    is_number = not isinstance(times, (torch.Tensor, RowCount))
    return _rows.repeated(value, dim, times) if is_number else Mixed()


@register("unbind split chunk tensor_split split_with_sizes")
def parts(call, values):
    """Split a dimension, or drop it."""
    at, part = (1, "one") if call.name == "unbind" else (2, "part")
    return _rows.sliced(values[0], {call.get(at, "dim", default=0): part})


@register("pad constant_pad_nd")
def padded(call, values):
    """Pad dimensions, counted from the last one."""
    dims = [-1 - place // 2 for place, size in enumerate(call.get(1, "pad")) if size]
    return _rows.resized(values[0], dims)


register("stack")(lambda call, values: _rows.stacked(values, call.get(1, "dim", "axis", default=0)))


@register("cat concat concatenate")
def joined(call, values):
    """Concatenate, but for empty tensors of one dimension, which torch leaves out."""
    values = [value for value in values if value.shape != (0,)]
    return _rows.concatenated(values, call.get(1, "dim", "axis", default=0))


# Looking up and sorting in.


register("getitem")(rules_indexing.indexed)
register("setitem")(rules_indexing.indexed_and_set)
register("index_select")(lambda call, values: _rows.gathered(values, call.get(1, "dim")))


@register("gather")
def gather(call, values):
    """Look elements up along a dimension, where the others are the same."""
    value, numbers = values[:2]
    dim = call.get(1, "dim") % max(value.rank, 1)
    if isinstance(value.placement, _rows.Replicated):
        return numbers.placement if numbers.axis == dim else Mixed()
    return scattered(call, values)


@register("scatter scatter_add scatter_reduce")
def scattered(call, values):
    """Scatter each row into itself."""
    value, dim = values[0], call.get(1, "dim") % max(values[0].rank, 1)
    if value.axis is None or value.axis == dim:
        return Mixed()
    others = [value for value in values if value.rank]
    return _rows.by_row(others, [value.axis] * len(others))


# New values.

#: Functions that make new values of a size.
MADE = ("zeros", "ones", "empty", "full", "rand", "randn", "randint", "new_zeros", "new_ones",
        "new_empty", "new_full")  # fmt: skip


@register(*MADE)
def made(call, values):
    """Fill, or draw, each element alike."""
    arguments = list(call.args) + list(call.kwargs.values())
    shapes = [value for value in arguments if isinstance(value, (list, tuple))]
    sizes = shapes[0] if shapes else [value for value in arguments if isinstance(value, int)]
    place = counted(sizes)
    if place is None:
        return Mixed() if has_count(sizes) else _rows.REPLICATED
    return Sharded(place, inner=sizes[place].per)


# Of a size, or drawn for each element of other tensors.
@register("normal")
def normal(call, values):
    """Draw normally distributed numbers."""
    has_size = isinstance(call.get(2, "size"), (list, tuple))
    return made(call, values) if has_size else pointwise(call, values)


@register("tensor as_tensor asarray scalar_tensor")
def from_numbers(call, values):
    """Make a tensor of a tensor, of a number of rows, or of other numbers."""
    if isinstance(call.first, torch.Tensor):
        return values[0].placement
    return Partial("sum") if isinstance(call.first, RowCount) else Mixed()
