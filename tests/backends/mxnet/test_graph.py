"""Graphs of MXNet in the form of their JSON: what is asked of them."""

import numpy as np

from compat._backends.mxnet.graph import Graph

from .gluon_models import mx as mx  # the fixture
from .test_module import custom


def test_a_graph_knows_its_states_gradients_and_ancestors(mx):
    sym = mx.sym
    weight = sym.var("e_weight")
    words = sym.Embedding(sym.var("words"), weight, 9, 4, sparse_grad=True, name="e")
    other = sym.FullyConnected(sym.var("other"), num_hidden=4, name="dense")
    own = custom(mx, "compat_in_a_graph", lambda gradient: gradient)(sym.mean(words, 1), name="own")
    norm = sym.BatchNorm(own, name="norm")
    graph = Graph([norm], sym.Group([norm, other]))
    names = [node["name"] for node in graph.nodes]
    assert graph.outputs == [(names.index("norm"), 0)]
    assert graph.heads == graph.outputs + [(names.index("dense"), 0)]
    assert graph.sparse_gradients() == {"e_weight"}
    assert [names[number] for number in graph.custom_gradients()] == ["own"]
    assert graph.states() == {"norm_moving_mean": "BatchNorm", "norm_moving_var": "BatchNorm"}
    before = {names[number] for number in graph.ancestors(graph.outputs)}
    assert {"words", "e_weight", "e", "own", "norm_gamma", "norm"} <= before
    assert before.isdisjoint(["other", "dense_weight", "dense"])


def test_only_embeddings_have_sparse_gradients(mx):
    """Variables, and operations that are user-defined, may have any attributes."""

    @mx.operator.register("compat_with_sparse_grad")
    class _Properties(mx.operator.CustomOpProp):
        def __init__(self, sparse_grad):
            super().__init__()

    words = mx.sym.var("words", attr={"sparse_grad": "True"})
    own = mx.sym.Custom(words, op_type="compat_with_sparse_grad", sparse_grad=True)
    assert Graph([], own).sparse_gradients() == set()


def test_a_part_of_a_graph_computes_what_it_did_there(mx):
    sym = mx.sym
    inner = sym.tanh(sym.var("x"), name="inner")
    graph = Graph([], sym.exp(inner, name="outer"))
    part = graph.symbol([(1, 0), (2, 0)])
    inputs = np.array([[0.0, 1.0], [2.0, -1.0]], "float32")
    found = [each.asnumpy() for each in part.eval(mx.cpu(), x=mx.nd.array(inputs))]
    np.testing.assert_allclose(found[0], np.tanh(inputs), rtol=1e-6)
    np.testing.assert_allclose(found[1], np.exp(np.tanh(inputs)), rtol=1e-6)
