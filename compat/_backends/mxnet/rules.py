"""Rules of MXNet's operations: how they treat the rows of a batch.

``RULES`` maps the name that an operation has in a graph's JSON to a rule: a function of a
``SymbolNode`` and of the ``Value``s of its inputs. What is not there is ``Unknown``, and tried.
Each line is proved by computing it (``tests/backends/mxnet/test_rules.py``).
"""

import ast
import collections
import itertools
import string
from functools import partial
from typing import Any, Dict, List, Union

from ... import _rows
from ..._rows import REPLICATED, Count, Mixed, Placement, Replicated, Unknown, Value, listed

# Operations whose states are moving averages of means over the rows of a batch.
MEANS = ("BatchNorm", "BatchNorm_v1", "_contrib_SyncBatchNorm", "IdentityAttachKLSparseReg")


class SymbolNode(collections.namedtuple("SymbolNode", "type attributes result grows")):
    """A node of a graph.

    Attributes:
        type: the name of its operation.
        attributes: as they are in JSON.
        result: the sizes of the first output, None for sizes that grow with the batch or are
            unknown.
        grows: the dimensions of it that grow with the batch, or None.
    """

    def get(self, name: str, default: "Any" = None) -> "Any":
        """Return the value of an attribute."""
        text = self.attributes.get(name)
        try:
            return default if text is None else ast.literal_eval(text)
        except (SyntaxError, ValueError):
            return text


def placements(op: SymbolNode, values: "List[Value]") -> "Union[Placement, List[Placement]]":
    """Return the placement of all of an operation's outputs, or a list of those of each.

    Arguments:
        op: a ``SymbolNode``.
        values: a ``Value`` for each of its inputs.
    """
    rule = RULES.get(op.type)
    unsharded = _rows.without_rows([value.placement for value in values])
    if values and unsharded is not None and not (rule is None and isinstance(unsharded, Count)):
        return unsharded
    if rule is None and not values:  # made by its attributes: numbers by their places, for example
        return REPLICATED if op.grows == [] else Mixed()
    if rule is None:
        return Unknown()
    if any(value.rank is None for value in values):
        return Unknown()  # the number of dimensions of an input is not known
    return rule(op, values)


# Rules of operations with attributes, each a function of a ``SymbolNode`` and of ``Value``s.


def reduction(op, values, how, default=None):
    """Reduce along the dimensions of an attribute, or along all others."""
    value, axes = values[0], op.get("axis", default)
    axes = None if axes == () else axes
    if op.get("exclude", False):
        axes = sorted(set(range(value.rank)) - listed(axes, value.rank))
    return _rows.reduced(value, axes, how, op.get("keepdims", False))


def along(op, values, default):
    """Compute along a dimension; other inputs, such as LayerNorm's weights, have no rows."""
    value, *weights = values
    are_fixed = all(isinstance(weight.placement, Replicated) for weight in weights)
    return _rows.along(value, op.get("axis", default)) if are_fixed else Unknown()  # other rows


def normalized(op, values):
    """Normalize as BatchNorm, whose other results are the statistics of a device's rows alone."""
    value = values[0]
    channel = op.get("axis", 1) % value.rank
    axis = -1 if value.axis == channel else value.axis
    return [_rows.by_row(values, [axis])] + [Mixed()] * 2


def fully_connected(op, values):
    """Multiply flattened rows, or the last dimension, by a transposed matrix; add a bias."""
    if op.get("flatten", True):
        return _rows.by_row(values, [0])
    return product(op, values, transposed=True)


def product(op, values, transposed=False):
    """Multiply matrices; add further inputs.

    Arguments:
        op: the operation.
        values: of its inputs.
        transposed: whether the second matrix is transposed without an attribute.
    """
    if op.get("axis", -2) != -2:
        return Unknown()  # a product of other dimensions
    first, second = op.get("transpose_a", False), op.get("transpose_b", transposed)
    placement = _rows.product(values[:2], first, second)
    return _rows.added([Value(placement, op.result)] + values[2:])


def dot(op, values):
    """Sum over the last dimension of the first input and the first one of the second."""
    letters, count = string.ascii_lowercase, values[0].rank
    left, right = letters[:count], letters[count : count + values[1].rank]
    summed = left[0 if op.get("transpose_a", False) else -1]
    right = right.replace(right[-1 if op.get("transpose_b", False) else 0], summed)
    result = (left + right).replace(summed, "")
    return _rows.contracted(values, [left, right], result)


def swapped(op, values):
    """Swap two dimensions."""
    order = list(range(values[0].rank))
    first, second = op.get("dim1", 0), op.get("dim2", 0)
    order[first], order[second] = order[second], order[first]
    return _rows.transposed(values[0], order)


def slice(op, values):
    """Slice the first dimensions by begins, ends and steps."""
    ranges = itertools.zip_longest(op.get("begin"), op.get("end"), op.get("step") or ())
    parts = {
        axis: "part"
        for axis, (begin, end, step) in enumerate(ranges)
        if begin not in (None, 0) or end is not None or step not in (None, 1)
    }
    return _rows.sliced(values[0], parts)


def slice_axis(op, values):
    """Slice one dimension."""
    is_whole = op.get("begin") == 0 and op.get("end") is None
    return _rows.sliced(values[0], {} if is_whole else {op.get("axis"): "part"})


def split(op, values):
    """Split a dimension, which may be dropped then."""
    part = "one" if op.get("squeeze_axis", False) else "part"
    return _rows.sliced(values[0], {op.get("axis", 1): part})


def pad(op, values):
    """Pad each dimension of which a width is not 0."""
    widths = op.get("pad_width")
    return _rows.resized(values[0], [i // 2 for i, width in enumerate(widths) if width])


def pick(op, values):
    """Pick an element along a dimension, by indices of all others."""
    value, index = values
    axis = op.get("axis", -1) % value.rank
    if index.rank < value.rank:
        shape = index.shape[:axis] + (1,) + index.shape[axis:]
        index = Value(_rows.expanded(index, [axis]), shape)
    rows = Value(_rows.pointwise([value, index]), value.shape)
    keeps_axis = op.get("keepdims", False)
    return _rows.along(rows, [axis]) if keeps_axis else _rows.sliced(rows, {axis: "one"})


def rnn(op, values):
    """Run a recurrent layer, whose rows are the second dimension of sequences and states."""
    axes = [1, None] + [1] * (len(values) - 2)
    if op.get("use_sequence_length", False):
        axes[-1] = 0
    return _rows.by_row(values, axes)


def softmax_output(op, values):
    """Compute a softmax, whose gradient is that of a loss."""
    return _rows.by_row(values, [0, 0]) if _is_summed(op) else Mixed()


def make_loss(op, values):
    """Take a value for a loss."""
    return _rows.multiplied(values) if _is_summed(op) else Mixed()


def _is_summed(loss):
    """Return whether a loss is not divided by the number of rows, which would mix them."""
    return loss.get("normalization", "null") == "null"


def leaky(op, values):
    """Apply a leaky ReLU, with learned slopes if there are two inputs."""
    return _rows.pointwise(values) if len(values) == 1 else _rows.by_row(values, [0])


def reshaped(op, values):
    """Reshape, by an attribute or to another input's shape."""
    return _rows.reshaped(values[0], op.result)


def transposed(op, values):
    """Permute dimensions, or reverse them."""
    return _rows.transposed(values[0], op.get("axes") or range(values[0].rank)[::-1])


def made(op, values):
    """Fill a shape with a constant or with random numbers."""
    placement = Count(op.grows) if op.grows else REPLICATED
    return _rows.made(placement, len(op.result or ()))


def arange_like(op, values):
    """Enumerate elements, or places along a dimension."""
    return Mixed() if op.get("axis") in (None, values[0].axis) else REPLICATED


def box_prior(op, values):
    """Make anchors by the height and width of images alone."""
    return REPLICATED if values[0].axis in (0, 1) else Mixed()


# Rules without attributes, as rules of a ``SymbolNode``.


def by_row(*axes, result=None):
    """Return the rule of a function of each row, for as many inputs as there are ``axes``."""
    return lambda op, values: _rows.by_row(values, axes, result)


def _all(rule):
    return lambda op, values: rule(values)


def _first(rule, *names):
    """Return a rule of the first input and of attributes."""
    return lambda op, values: rule(values[0], *map(op.get, names))


def _along_axis(rule, name, default):
    """Return a rule of all inputs and of a dimension, which is an attribute."""
    return lambda op, values: rule(values, op.get(name, default))


def _named(names, *patterns):
    return "".join(pattern.format(name) + " " for pattern in patterns for name in names.split())


_BINARY = (
    "maximum minimum mod power hypot equal not_equal greater greater_equal lesser lesser_equal "
    "logical_and logical_or logical_xor"
)
_IN_NUMPY = "mod power equal not_equal greater greater_equal less less_equal"
_COMMON = (
    "arccos arccosh arcsin arcsinh arctan arctanh cbrt ceil cos cosh degrees exp expm1 fix floor "
    "log log10 log1p log2 logical_not radians reciprocal rint sign sin sinh sqrt square tan tanh "
    "trunc"
)
#: Functions of each element, of one input.
POINTWISE = (
    "abs erf erfinv gamma gammaln rcbrt relu round rsqrt sigmoid softsign Cast amp_cast clip "
    "smooth_l1 hard_sigmoid Activation Dropout zeros_like ones_like one_hot cast_storage "
    "_contrib_quadratic _npi_absolute _npi_around _npx_relu _npx_sigmoid "
) + _named(_COMMON, "{}", "_npi_{}")
#: With a number; and those among them that are linear.
SCALAR = _named(_BINARY + " rdiv rmod rpower", "_{}_scalar")
SCALAR += _named(_IN_NUMPY + " rpower rmod rtrue_divide", "_npi_{}_scalar")
LINEAR = (
    "_mul_scalar _div_scalar negative _copy BlockGrad make_loss _contrib_gradientmultiplier "
    "_npi_multiply_scalar _npi_true_divide_scalar _npi_negative _np_copy"
)
SHIFTED = (
    "_plus_scalar _minus_scalar _rminus_scalar _npi_add_scalar _npi_subtract_scalar "
    "_npi_rsubtract_scalar"
)
#: Of two inputs.
PAIRS = _named(_BINARY, "_{}", "broadcast_{}") + _named(_IN_NUMPY, "_npi_{}")

RULES: "Dict[str, Any]" = {}  # by operation: a rule(op, values)
for _names, _rule in [
    # Each element by itself
    (" ".join([POINTWISE, SCALAR, PAIRS, "_npi_where broadcast_like"]), _all(_rows.pointwise)),
    ("where", _all(_rows.selected)),
    ("elemwise_add elemwise_sub broadcast_add broadcast_sub add_n _grad_add _npi_add "
     "_npi_subtract", _all(_rows.added)),
    (SHIFTED, lambda op, values: _rows.added(values + [Value(REPLICATED, ())])),
    ("elemwise_div broadcast_div _npi_true_divide", _all(_rows.divided)),
    (LINEAR + " elemwise_mul broadcast_mul _npi_multiply", _all(_rows.multiplied)),
    # Reductions, and operations along dimensions
    ("sum _np_sum", partial(reduction, how="sum")),
    ("mean _npi_mean", partial(reduction, how="mean")),
    ("max _np_max", partial(reduction, how="max")),
    ("min _np_min", partial(reduction, how="min")),
    ("prod nansum nanprod norm argmax argmin _np_prod _npi_std _npi_var _npi_argmax _npi_argmin",
     partial(reduction, how="other")),
    ("argmax_channel", partial(reduction, how="other", default=1)),
    ("softmax log_softmax softmin sort argsort topk LayerNorm _contrib_div_sqrt_dim "
     "_sample_multinomial", partial(along, default=-1)),
    ("cumsum _np_cumsum _np_roll _npi_flip", partial(along, default=None)),
    ("reverse _shuffle", partial(along, default=0)),
    ("_contrib_box_nms", partial(along, default=[-2, -1])),
    # Products
    ("dot _np_dot", dot),
    ("batch_dot _linalg_gemm _linalg_gemm2 _npi_matmul", product),
    ("FullyConnected", fully_connected),
    # Views
    ("Reshape Flatten reshape_like _np_reshape _npi_reshape _npx_reshape", reshaped),
    ("expand_dims", _first(_rows.expanded, "axis")),
    ("squeeze _np_squeeze", _first(_rows.squeezed, "axis")),
    ("transpose _np_transpose", transposed),
    ("SwapAxis", swapped),
    ("slice", slice),
    ("slice_axis", slice_axis),
    ("SliceChannel _split_v2", split),
    ("Concat", _along_axis(_rows.concatenated, "dim", 1)),
    ("_npi_concatenate", _along_axis(_rows.concatenated, "axis", 0)),
    ("stack _npi_stack", _along_axis(_rows.stacked, "axis", 0)),
    ("tile", _first(_rows.tiled, "reps")),
    ("repeat", _first(_rows.repeated, "axis", "repeats")),
    ("broadcast_to broadcast_axis _npi_broadcast_to",
     lambda op, values: _rows.broadcast(values[0], len(op.result))),
    ("Pad", pad),
    # Looking up
    ("Embedding", lambda op, values: _rows.gathered(values[::-1], 0)),
    ("take", _along_axis(_rows.gathered, "axis", 0)),
    ("pick batch_take", pick),
    # Layers
    ("LeakyReLU", leaky),
    ("Convolution Deconvolution InstanceNorm GroupNorm IdentityAttachKLSparseReg", by_row(0)),
    ("_contrib_DeformableConvolution", by_row(0, 0)),
    ("Pooling LRN BilinearSampler GridGenerator SpatialTransformer space_to_depth "
     "depth_to_space im2col Crop _contrib_AdaptiveAvgPooling2D _contrib_BilinearResize2D "
     "LinearRegressionOutput MAERegressionOutput LogisticRegressionOutput SVMOutput", by_row(0, 0)),
    ("BatchNorm _contrib_SyncBatchNorm", normalized),
    ("RNN", rnn),
    ("SoftmaxOutput", softmax_output),
    ("MakeLoss", make_loss),
    ("CTCLoss", by_row(1, 0, 0, 0, result=0)),
    # Made by a shape, drawn, counted
    ("_zeros _ones _full _zeros_without_dtype _npi_zeros _npi_ones _random_uniform _random_normal "
     "_random_gamma _random_exponential _random_poisson _random_randint _npi_uniform _npi_normal",
     made),
    ("_random_uniform_like _random_normal_like _random_gamma_like _random_exponential_like "
     "_random_poisson_like _sample_uniform _sample_normal _sample_gamma", _all(_rows.pointwise)),
    ("_contrib_arange_like", arange_like),
    ("_contrib_MultiBoxPrior", box_prior),
    ("shape_array", _first(_rows.shape_of)),
    ("size_array", _first(_rows.size_of)),
]:  # fmt: skip
    RULES.update(dict.fromkeys(_names.split(), _rule))
