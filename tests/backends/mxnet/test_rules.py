"""MXNet's operations: each line of the table of row rules, proved by computing it."""

import itertools
import json

import missing_rules
import numpy as np
import pytest
import row_proof

from compat import _rows
from compat._backends.mxnet import rules, synchronization
from compat._backends.mxnet.graph import Graph
from compat._backends.mxnet.propagation import Propagation
from compat._rows import Partial

RANDOM = np.random.RandomState(0)


@pytest.fixture(scope="module")
def mx():
    import mxnet

    return mxnet


def array(*shape):
    return RANDOM.uniform(0.1, 0.9, size=shape).astype("float32")


def numbers(*shape, below=3):
    return RANDOM.randint(below, size=shape).astype("float32")


A, B = array(3, 4), array(3, 4)
SQUARE = array(3, 3)
CUBE = array(3, 3, 3)
IMAGES = array(3, 4, 6, 6)
INSTANCES = array(3, 3, 3, 3)


def of_axes(op, inputs, axes=(0, 1), name="axis", **attributes):
    return [(op, dict(attributes, **{name: axis}), inputs) for axis in axes]


def cases():
    """(operation, attributes, inputs), for all lines of the table.

    An ``Ellipsis`` among the inputs says that those after it are weights, which have no rows.
    """
    found = []
    special = {
        "Cast": {"dtype": "float16"}, "amp_cast": {"dtype": "float16"},
        "clip": {"a_min": 0.2, "a_max": 0.5}, "one_hot": {"depth": 4},
        "Activation": {"act_type": "tanh"}, "Dropout": {"p": 0.5},
        "cast_storage": {"stype": "default"}, "_npi_around": {"decimals": 1},
    }  # fmt: skip
    names = rules.POINTWISE.split()
    found += [(op, special.get(op, {}), [A]) for op in names]
    for op in (rules.SCALAR + " " + rules.SHIFTED).split():
        found.append((op, {"scalar": 0.5}, [A]))
    for op in rules.LINEAR.split():
        found.append((op, {"scalar": 2.0} if "scalar" in op else {}, [A]))
    pairs = (
        "elemwise_add elemwise_sub elemwise_mul elemwise_div _grad_add broadcast_add broadcast_sub "
        "broadcast_mul broadcast_div _npi_add _npi_subtract _npi_multiply _npi_true_divide "
    )
    for op in (pairs + rules.PAIRS).split():
        found += [(op, {}, [A, B])]
        if op.startswith(("broadcast", "_npi")):
            found += [(op, {}, [SQUARE, array(1, 3)]), (op, {}, [array(3, 1), array(1, 3)])]
    found += [("add_n", {"num_args": 3}, [A, B, A])]
    found += [("broadcast_like", {}, [array(1, 4), A]), ("broadcast_like", {}, [array(3, 1), A])]
    found += [("where", {}, [A > 0.5, A, B]), ("where", {}, [array(3) > 0.5, SQUARE, SQUARE])]
    found += [("_npi_where", {}, [A > 0.5, A, B])]
    # Reductions, and what goes along dimensions
    for op in "sum mean max min prod nansum nanprod".split():
        for axis, keepdims in [((), False), (0, False), (1, True), ((0, 1), False), (-1, False)]:
            found.append((op, {"axis": axis, "keepdims": keepdims}, [array(3, 4, 3)]))
        found += [(op, {}, [A]), (op, {"axis": 1, "exclude": True}, [A])]
    for op in "_np_sum _npi_mean _np_max _np_min _np_prod _npi_std _npi_var".split():
        found += [(op, {"axis": axis}, [array(3, 4, 3)]) for axis in (None, (0,), (1,), (0, 2))]
    found += [("norm", {"axis": axis, "ord": 2}, [array(3, 4)]) for axis in (None, 0, 1, (0, 1))]
    for op in "argmax argmin _npi_argmax _npi_argmin".split():
        found += of_axes(op, [A]) + [(op, {"axis": 1, "keepdims": True}, [A])]
    found += [("argmax_channel", {}, [A])]
    for op in "softmax log_softmax softmin sort argsort".split():
        found += of_axes(op, [CUBE], (0, 1, -1)) + [(op, {}, [SQUARE])]
    for op in ("cumsum", "reverse"):
        found += of_axes(op, [CUBE], (0, 1, 2))
    found += of_axes("_np_cumsum", [A], (None, 0, 1))
    found += [("_np_roll", {"shift": 1, "axis": axis}, [SQUARE]) for axis in (0, 1)]
    found += of_axes("_npi_flip", [SQUARE], [(0,), (1,)])
    for how in ("indices", "value", "mask", "both"):
        found += of_axes("topk", [CUBE], (0, 1, -1), ret_typ=how, k=1)
    found += [("topk", {"ret_typ": "mask", "axis": None, "k": 2}, [SQUARE])]
    found += [("LayerNorm", {"axis": axis}, [SQUARE, array(3), array(3)]) for axis in (0, 1)]
    found += [("_contrib_div_sqrt_dim", {}, [CUBE]), ("_contrib_box_nms", {}, [array(3, 3, 6)])]
    # Products
    for a in (False, True):
        for b in (False, True):
            both = {"transpose_a": a, "transpose_b": b}
            found += [("dot", both, [SQUARE, SQUARE]), ("batch_dot", both, [CUBE, CUBE])]
            found += [("_linalg_gemm2", both, [CUBE, CUBE])]
    found += [("dot", {}, [array(3, 2, 3), array(3, 3)]), ("dot", {}, [array(3), array(3)])]
    found += [("dot", {"transpose_a": True}, [array(3, 2, 3), array(3, 3)])]
    found += [("_np_dot", {}, [SQUARE, SQUARE]), ("_npi_matmul", {}, [CUBE, CUBE])]
    found += [("_linalg_gemm", {}, [SQUARE, SQUARE, SQUARE])]
    found += [("FullyConnected", {"num_hidden": 5}, [A, ..., array(5, 4), array(5)])]
    found += [("FullyConnected", {"num_hidden": 3, "no_bias": True}, [SQUARE, SQUARE])]
    flat = {"num_hidden": 3, "flatten": False}
    found += [("FullyConnected", flat, [CUBE, SQUARE, array(3)])]
    found += [("FullyConnected", dict(flat, no_bias=True), [CUBE, SQUARE])]
    # Views
    for shape, value in [
        ((-1, 24), IMAGES[..., 0]), ((0, -1), IMAGES), ((-3, 0), CUBE), ((-1,), A),
        ((4, -1), array(4, 3, 2)), ((-1, 2, 3), array(3, 6)), ((2, -1, 3), array(2, 3, 3)),
        ((-1, 4), array(3, 6)), ((0, 0, -4, 2, -1), array(3, 4, 6)), ((2, -1), array(3, 4)),
    ]:  # fmt: skip
        found += [("Reshape", {"shape": shape}, [value])]
    found += [("Flatten", {}, [CUBE]), ("reshape_like", {}, [array(3, 4), array(3, 2, 2)])]
    found += [("_np_reshape", {"newshape": (-1, 6)}, [array(3, 2, 3)])]
    found += [("_npi_reshape", {"newshape": (-1, 6)}, [array(3, 2, 3)])]
    found += [("_npx_reshape", {"newshape": (-2, -1)}, [array(3, 2, 3)])]
    found += of_axes("expand_dims", [SQUARE], (0, 1, -1))
    found += of_axes("squeeze", [array(3, 1, 3, 1)], (1, None, (1, 3)))
    found += of_axes("_np_squeeze", [array(3, 1, 3)], (1, None))
    found += [("transpose", {}, [CUBE]), ("_np_transpose", {}, [CUBE])]
    for order in [(1, 0, 2), (2, 0, 1)]:
        found += [(op, {"axes": order}, [CUBE]) for op in ("transpose", "_np_transpose")]
    found += [("SwapAxis", {"dim1": 0, "dim2": 2}, [CUBE]), ("SwapAxis", {}, [CUBE])]
    for begin, end, step in [
        ((None, 1), (None, 3), None), ((0, 0), (None, 2), None), ((1,), (3,), None),
        ((None, None), (None, None), (-1, 1)), ((None, 0), (None, None), (1, 2)),
    ]:  # fmt: skip
        attributes = {"begin": begin, "end": end}
        found += [("slice", dict(attributes, step=step) if step else attributes, [SQUARE])]
    for axis in (0, 1, -1):
        found += [("slice_axis", {"axis": axis, "begin": 0, "end": None}, [SQUARE])]
        found += [("slice_axis", {"axis": axis, "begin": 1, "end": None}, [SQUARE])]
        found += [("SliceChannel", {"axis": axis, "num_outputs": 3}, [CUBE])]
        attributes = {"axis": axis, "num_outputs": 3, "squeeze_axis": True}
        found += [("SliceChannel", attributes, [CUBE])]
        found += [("_split_v2", {"axis": axis, "indices": (0, 1)}, [CUBE])]
        found += [("Concat", {"dim": axis, "num_args": 2}, [CUBE, CUBE])]
        found += [("_npi_concatenate", {"axis": axis, "num_args": 2}, [CUBE, CUBE])]
        found += [("stack", {"axis": axis, "num_args": 2}, [SQUARE, SQUARE])]
        found += [("_npi_stack", {"axis": axis, "num_args": 2}, [SQUARE, SQUARE])]
        found += [("repeat", {"axis": axis, "repeats": 2}, [SQUARE])]
        found += [("take", {"axis": axis}, [CUBE, numbers(3)])]
    found += [("Concat", {"num_args": 2}, [SQUARE, SQUARE]), ("repeat", {"repeats": 2}, [SQUARE])]
    found += of_axes("tile", [SQUARE], [(2, 1), (1, 2), (2, 1, 1)], "reps")
    found += [("broadcast_to", {"shape": (0, 4)}, [array(3, 1)])]
    found += [("broadcast_axis", {"axis": 1, "size": 4}, [array(3, 1)])]
    found += [("_npi_broadcast_to", {"shape": (-2, 4)}, [array(3, 1)])]
    widths = {"mode": "constant", "pad_width": (0, 0, 0, 0, 1, 1, 0, 0)}
    found += [("Pad", widths, [INSTANCES])]
    # Looking up
    table = {"input_dim": 3, "output_dim": 3}
    found += [("Embedding", table, [numbers(3, 3), SQUARE])]
    for axis in (0, 1, -1):
        for keepdims in (False, True):
            pick = {"axis": axis, "keepdims": keepdims}
            found += [("pick", pick, [SQUARE, numbers(3)])]
    found += [("pick", {"axis": 1, "keepdims": True}, [SQUARE, numbers(3, 1)])]
    found += [("batch_take", {}, [SQUARE, numbers(3).astype("int32")])]
    # Layers
    kernel = {"kernel": (3, 3), "num_filter": 5}
    found += [("Convolution", kernel, [IMAGES, ..., array(5, 4, 3, 3), array(5)])]
    found += [("Convolution", dict(kernel, num_group=1), [INSTANCES, array(5, 3, 3, 3), array(5)])]
    found += [("Deconvolution", kernel, [IMAGES, ..., array(4, 5, 3, 3)])]
    found += [("InstanceNorm", {}, [CUBE, array(3), array(3)])]
    found += [("GroupNorm", {"num_groups": 3}, [CUBE, array(3), array(3)])]
    for act, more in [("leaky", []), ("elu", []), ("gelu", []), ("prelu", [array(3)])]:
        found += [("LeakyReLU", {"act_type": act}, [CUBE] + more)]
    found += [("IdentityAttachKLSparseReg", {}, [SQUARE, ..., array(3)])]
    deformed = {"kernel": (1, 1), "num_filter": 2, "no_bias": True}
    offsets = [INSTANCES, array(3, 2, 3, 3), ..., array(2, 3, 1, 1)]
    found += [("_contrib_DeformableConvolution", deformed, offsets)]
    for kind in ("max", "avg"):
        found += [("Pooling", {"kernel": (2, 2), "pool_type": kind}, [INSTANCES])]
    found += [("Pooling", {"global_pool": True, "pool_type": "avg", "kernel": (1, 1)}, [INSTANCES])]
    found += [("LRN", {"nsize": 3}, [INSTANCES])]
    grid = (RANDOM.uniform(-1, 1, (3, 2, 3, 3))).astype("float32")
    found += [("BilinearSampler", {}, [INSTANCES, grid])]
    affine = {"transform_type": "affine", "target_shape": (3, 3)}
    found += [("GridGenerator", affine, [array(3, 6)])]
    found += [("GridGenerator", {"transform_type": "warp"}, [grid])]
    sampled = dict(affine, sampler_type="bilinear")
    found += [("SpatialTransformer", sampled, [INSTANCES, array(3, 6)])]
    found += [("space_to_depth", {"block_size": 3}, [INSTANCES])]
    found += [("depth_to_space", {"block_size": 2}, [array(3, 4, 3, 3)])]
    found += [("im2col", {"kernel": (2, 2)}, [INSTANCES])]
    found += [("Crop", {"num_args": 2}, [array(3, 3, 5, 5), INSTANCES])]
    found += [("Crop", {"num_args": 1, "h_w": (2, 2)}, [INSTANCES])]
    found += [("_contrib_AdaptiveAvgPooling2D", {"output_size": 2}, [INSTANCES])]
    found += [("_contrib_BilinearResize2D", {"height": 5, "width": 5}, [INSTANCES])]
    for axis in (1, -1):
        weights = [array(3) for _ in range(4)]
        found += [("BatchNorm", {"axis": axis, "fix_gamma": False}, [CUBE, ...] + weights)]
    found += [("_contrib_SyncBatchNorm", {"key": "k"}, [CUBE, ...] + [array(3) for _ in range(4)])]
    found += [("BatchNorm", {}, [SQUARE] + [array(3) for _ in range(4)])]
    for mode, gates, states in [("lstm", 4, 2), ("gru", 3, 1), ("rnn_tanh", 1, 1)]:
        size = gates * 3 * (3 + 3 + 2)
        rnn = {"mode": mode, "state_size": 3, "num_layers": 1, "state_outputs": True, "p": 0}
        inputs = [CUBE, array(size)] + [array(1, 3, 3) for _ in range(states)]
        found += [("RNN", rnn, inputs)]
    for op in ("LinearRegressionOutput", "MAERegressionOutput", "LogisticRegressionOutput"):
        found += [(op, {}, [SQUARE, SQUARE])]
    found += [("SVMOutput", {}, [SQUARE, numbers(3)]), ("SoftmaxOutput", {}, [SQUARE, numbers(3)])]
    found += [("SoftmaxOutput", {"multi_output": True}, [CUBE, numbers(3, 3)])]
    found += [("MakeLoss", {}, [SQUARE])]
    found += [("CTCLoss", {}, [array(6, 3, 5), 1 + numbers(3, 3)])]
    lengths = {"use_data_lengths": True, "use_label_lengths": True}
    sequences = [array(6, 3, 5), 1 + numbers(3, 3), 3 + numbers(3), 1 + numbers(3)]
    found += [("CTCLoss", lengths, sequences)]
    # Counted, and made of shapes
    found += of_axes("_contrib_arange_like", [A], (None, 0, 1))
    found += [("_contrib_MultiBoxPrior", {"sizes": (0.5,)}, [INSTANCES])]
    found += [("shape_array", {}, [A]), ("size_array", {}, [A])]
    return found


#: What is drawn at random, or made without an input: there is nothing to compare.
UNPROVED = set(
    "_random_uniform_like _random_normal_like _random_gamma_like _random_exponential_like "
    "_random_poisson_like _sample_uniform _sample_normal _sample_gamma _sample_multinomial "
    "_shuffle _zeros _ones _full _zeros_without_dtype _npi_zeros _npi_ones _random_uniform "
    "_random_normal _random_gamma _random_exponential _random_poisson _random_randint "
    "_npi_uniform _npi_normal".split()
)
#: What MXNet computes without looking whether its inputs fit each other, beyond their ends: parts
#: of these are computed only where a rule says something of them.
UNCHECKED = set(
    "where BilinearSampler SpatialTransformer batch_take pick take Embedding SoftmaxOutput "
    "SVMOutput CTCLoss _contrib_DeformableConvolution RNN Crop".split()
)
CASES = cases()


class Node:
    """One operation, computed and followed."""

    def __init__(self, mx, op, attributes, inputs):
        self.mx, self.op = mx, op
        self.inputs = [np.asarray(x, "float32" if x.dtype == bool else x.dtype) for x in inputs]
        names = ["x{}".format(place) for place in range(len(inputs))]
        nodes = [{"op": "null", "name": name, "inputs": []} for name in names]
        said = {name: str(value) for name, value in attributes.items()}
        ends = [[place, 0, 0] for place in range(len(inputs))]
        nodes.append({"op": op, "name": "node", "attrs": said, "inputs": ends})
        graph = {"nodes": nodes, "arg_nodes": list(range(len(inputs)))}
        graph["heads"] = [[len(inputs), 0, 0]]
        graph["attrs"] = json.loads(mx.sym.var("x").tojson())["attrs"]  # MXNet's version
        self.symbol = mx.sym.load_json(json.dumps(graph))
        self.names = names
        self.graph = Graph([], self.symbol)
        self.executors = {}

    def compute(self, inputs):
        mx = self.mx
        key = tuple(x.shape for x in inputs)
        # oneDNN's products go on with the weights of their first batch.
        if key not in self.executors or self.op == "FullyConnected":
            held = {n: mx.nd.array(x, dtype=x.dtype) for n, x in zip(self.names, inputs)}
            auxiliary = self.symbol.list_auxiliary_states()
            self.executors[key] = self.symbol.bind(
                mx.cpu(),
                {n: x for n, x in held.items() if n not in auxiliary},
                grad_req="null",
                aux_states={n: held[n] for n in auxiliary},
            )
        executor = self.executors[key]
        for name, x in zip(self.names, inputs):
            (executor.arg_dict if name in executor.arg_dict else executor.aux_dict)[name][:] = x
        try:
            results = [output.asnumpy() for output in executor.forward(is_train=False)]
            mx.nd.waitall()  # an error of the background would be the next one's
            return results
        except mx.base.MXNetError:
            synchronization.clear_errors()
            raise

    def claim(self, placements):
        shapes = {name: x.shape for name, x in zip(self.names, self.inputs)}
        try:
            propagation = Propagation(self.graph, dict(zip(self.names, placements)), shapes)
        except self.mx.base.MXNetError:
            return []  # they do not fit each other
        without_rule = set(propagation.without_rule)
        return [
            _rows.Unknown() if head in without_rule else propagation.placement_of(head)
            for head in self.graph.heads
        ]


def run(mx, found, op, attributes, given):
    weights = [place for place, each in enumerate(given) if each is ...] + [len(given)]
    inputs = [each for each in given if each is not ...]
    node = Node(mx, op, attributes, inputs)
    choices = []
    for place, each in enumerate(node.inputs):
        several = row_proof.placements_of(each)
        if len(inputs) > 1:
            several = [p for p in several if p not in (Partial("min"), Partial("max"))]
        if len(inputs) > 2:
            several = [p for p in several if p != Partial("mean")]
        if len(inputs) > 3:
            several = [p for p in several if not isinstance(p, Partial)]
        choices.append(several if place < weights[0] else [_rows.REPLICATED])
    name = "{}{} of {}".format(op, attributes, [x.shape for x in inputs])
    if op not in UNCHECKED:
        return row_proof.prove(name, node.inputs, node.compute, node.claim, choices, found)
    for given in itertools.product(*choices):
        if not all(isinstance(each, (_rows.Mixed, _rows.Unknown)) for each in node.claim(given)):
            one = [[placement] for placement in given]
            row_proof.prove(name, node.inputs, node.compute, node.claim, one, found)
    return found


def test_every_line_of_the_table_is_proved(mx):
    """Wrong ones: none. Missing ones, which are slower and never wrong, are listed."""
    available = known_operations(mx)
    found = row_proof.Found()
    refused = []
    for case in CASES:
        try:
            if case[0] in available:
                run(mx, found, *case)
        except (mx.base.MXNetError, AssertionError):
            refused.append(case[:2])  # older ones lack some attributes
    assert not refused or mx.__version__ < "1.9" and len(refused) < 30, refused
    assert not found.wrong, "\n".join(found.wrong)
    if mx.__version__ == "1.9.1":
        missing_rules.check("MXNet", found)
    assert found.claimed > 1000
    proved = {case[0] for case in CASES} | UNPROVED
    assert not set(rules.RULES) - proved


def known_operations(mx):
    """Return the names of all operations that this MXNet has."""
    import ctypes

    from mxnet.base import _LIB, check_call, mx_uint, py_str

    names, size = ctypes.POINTER(ctypes.c_char_p)(), mx_uint()
    check_call(_LIB.MXListAllOpNames(ctypes.byref(size), ctypes.byref(names)))
    return {py_str(names[place]) for place in range(size.value)}
