"""MXNet's operations, and the rules that tell how they treat the rows of a batch.

``RULES`` has the name that an operation has in a graph's JSON, and a function of an ``Operation``.
What is not there is ``Unknown``, and tried. Each line is proved by computing it
(``tests/backends/test_mxnet_operations.py``).
"""

from functools import partial

from ... import _rows
from ..._rows import REPLICATED, Count, Mixed, Unknown, Value
from . import operation_rules as rules


def placements(name, operation):
    """The placement of all of an operation's outputs, or a list of those of each."""
    rule = RULES.get(name)
    given = [value.placement for value in operation.values]
    known = _rows.without_rows(given)
    if given and known is not None and not (rule is None and isinstance(known, Count)):
        return known
    if rule is None and not given:  # made by its attributes: numbers by their places, for example
        return REPLICATED if operation.grows == [] else Mixed()
    if rule is None:
        return Unknown("no rule")
    if any(value.rank is None for value in operation.values):
        return Unknown("the number of dimensions of an input is not known")
    return rule(operation)


# The table ----------------------------------------------------------------------------------------


def _all(rule):
    return lambda op: rule(op.values)


def _first(rule, *names):
    """A rule of the first input and of attributes."""
    return lambda op: rule(op.value, *map(op.get, names))


def _named(names, *patterns):
    return " ".join(pattern.format(name) for pattern in patterns for name in names.split())


_LOGICAL = (
    "equal not_equal greater greater_equal lesser lesser_equal logical_and logical_or logical_xor"
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
SCALAR = (
    _named("maximum minimum mod power hypot rdiv rmod rpower " + _LOGICAL, "_{}_scalar")
    + " "
    + _named(_IN_NUMPY + " rpower rmod rtrue_divide", "_npi_{}_scalar")
)
LINEAR = (
    "_mul_scalar _div_scalar negative _copy BlockGrad make_loss _contrib_gradientmultiplier "
    "_npi_multiply_scalar _npi_true_divide_scalar _npi_negative _np_copy"
)
SHIFTED = (
    "_plus_scalar _minus_scalar _rminus_scalar _npi_add_scalar _npi_subtract_scalar "
    "_npi_rsubtract_scalar"
)
#: Of two inputs.
PAIRS = (
    _named("maximum minimum mod power hypot " + _LOGICAL, "_{}", "broadcast_{}")
    + " "
    + _named(_IN_NUMPY, "_npi_{}")
)

RULES = {}
for _names, _rule in [
    # Each element by itself
    (" ".join([POINTWISE, SCALAR, PAIRS, "_npi_where broadcast_like"]), _all(_rows.pointwise)),
    ("where", rules.where),
    ("elemwise_add elemwise_sub broadcast_add broadcast_sub add_n _grad_add _npi_add "
     "_npi_subtract", _all(_rows.added)),
    (SHIFTED, lambda op: _rows.added(op.values + [Value(REPLICATED, ())])),
    ("elemwise_mul broadcast_mul _npi_multiply", _all(_rows.multiplied)),
    ("elemwise_div broadcast_div _npi_true_divide", _all(_rows.divided)),
    (LINEAR, _all(_rows.multiplied)),
    # Reductions, and what goes along dimensions
    ("sum _np_sum", partial(rules.reduction, how="sum")),
    ("mean _npi_mean", partial(rules.reduction, how="mean")),
    ("max _np_max", partial(rules.reduction, how="max")),
    ("min _np_min", partial(rules.reduction, how="min")),
    ("prod nansum nanprod norm argmax argmin _np_prod _npi_std _npi_var _npi_argmax _npi_argmin",
     partial(rules.reduction, how="other")),
    ("argmax_channel", partial(rules.reduction, how="other", default=1)),
    ("softmax log_softmax softmin", rules.softmax),
    ("sort argsort topk LayerNorm", partial(rules.along, default=-1)),
    ("cumsum _np_cumsum _np_roll _npi_flip", partial(rules.along, default=None)),
    ("reverse", partial(rules.along, default=0)),
    ("_contrib_box_nms", partial(rules.along, default=[-2, -1])),
    ("_contrib_div_sqrt_dim", lambda op: _rows.along(op.value, [-1])),
    ("_shuffle", lambda op: _rows.along(op.value, [0])),
    ("SoftmaxActivation L2Normalization", rules.by_mode),
    # Products
    ("dot _np_dot", rules.dot),
    ("batch_dot _linalg_gemm _linalg_gemm2 _npi_matmul", rules.product),
    ("FullyConnected", rules.fully_connected),
    # Views
    ("Reshape Flatten reshape_like _np_reshape _npi_reshape _npx_reshape",
     lambda op: _rows.reshaped(op.value, op.result)),
    ("expand_dims", _first(_rows.expanded, "axis")),
    ("squeeze _np_squeeze", _first(_rows.squeezed, "axis")),
    ("transpose _np_transpose",
     lambda op: _rows.transposed(op.value, op.get("axes") or range(op.value.rank)[::-1])),
    ("SwapAxis", rules.swapped),
    ("slice", rules.slice),
    ("slice_axis", rules.slice_axis),
    ("slice_like", rules.slice_like),
    ("SliceChannel _split_v2", rules.split),
    ("Concat", lambda op: _rows.concatenated(op.values, op.get("dim", 1))),
    ("_npi_concatenate", lambda op: _rows.concatenated(op.values, op.get("axis", 0))),
    ("stack _npi_stack", lambda op: _rows.stacked(op.values, op.get("axis", 0))),
    ("tile", _first(_rows.tiled, "reps")),
    ("repeat", _first(_rows.repeated, "axis", "repeats")),
    ("broadcast_to broadcast_axis _npi_broadcast_to",
     lambda op: _rows.broadcast(op.value, len(op.result))),
    ("Pad", rules.pad),
    # Looking up
    ("Embedding", lambda op: _rows.gathered(op.values[::-1], 0)),
    ("take", lambda op: _rows.gathered(op.values, op.get("axis", 0))),
    ("pick batch_take", rules.pick),
    # Layers
    ("LeakyReLU", rules.leaky),
    ("Convolution Deconvolution InstanceNorm GroupNorm IdentityAttachKLSparseReg",
     rules.by_row(0, None)),
    ("_contrib_DeformableConvolution", rules.by_row(0, 0, None)),
    ("Pooling LRN BilinearSampler GridGenerator SpatialTransformer space_to_depth "
     "depth_to_space im2col Crop _contrib_AdaptiveAvgPooling2D _contrib_BilinearResize2D "
     "LinearRegressionOutput MAERegressionOutput LogisticRegressionOutput SVMOutput",
     rules.by_row(0)),
    ("BatchNorm _contrib_SyncBatchNorm", rules.normalized),
    ("RNN", rules.rnn),
    ("SequenceMask", lambda op: rules.of_sequences(op, _rows.pointwise(op.values))),
    ("SequenceLast", lambda op: rules.of_sequences(
        op, _rows.sliced(op.value, {op.get("axis", 0): "one"}), keeps=False)),
    ("SequenceReverse", lambda op: rules.of_sequences(op, _rows.along(op.value, [0]))),
    ("_contrib_interleaved_matmul_selfatt_qk _contrib_interleaved_matmul_encdec_qk",
     lambda op: rules.rowwise(op.values, [1, 1], 0, op.get("heads"))),
    ("_contrib_interleaved_matmul_selfatt_valatt _contrib_interleaved_matmul_encdec_valatt",
     rules.attention_values),
    ("SoftmaxOutput", lambda op: rules.loss(op, rules.rowwise(op.values, [0, 0]))),
    ("MakeLoss", lambda op: rules.loss(op, _rows.multiplied(op.values))),
    ("softmax_cross_entropy", rules.cross_entropy),
    ("CTCLoss", rules.by_row(1, 0)),
    # Made by a shape, drawn, counted
    ("_zeros _ones _full _zeros_without_dtype _npi_zeros _npi_ones _random_uniform _random_normal "
     "_random_gamma _random_exponential _random_poisson _random_randint _npi_uniform _npi_normal",
     lambda op: _rows.made(Count(op.grows) if op.grows else REPLICATED, len(op.result or ()))),
    ("_random_uniform_like _random_normal_like _random_gamma_like _random_exponential_like "
     "_random_poisson_like _sample_uniform _sample_normal _sample_gamma", _all(_rows.pointwise)),
    ("_sample_multinomial", lambda op: _rows.along(op.value, [-1])),
    ("_contrib_arange_like",
     lambda op: Mixed() if op.get("axis") in (None, op.value.axis) else REPLICATED),
    ("_contrib_MultiBoxPrior",  # by the size of an image alone
     lambda op: REPLICATED if op.value.axis in (0, 1) else Mixed()),
    ("shape_array", _first(_rows.shape_of)),
    ("size_array", _first(_rows.size_of)),
]:  # fmt: skip
    RULES.update(dict.fromkeys(_names.split(), _rule))
