"""Queries on graphs of Theano's."""

import numpy as np

from . import test_contract

profiles_not_printed = test_contract.profiles_not_printed


def test_nearest_variables_and_those_that_depend_on_others():
    from theano import tensor

    from compat._backends.theano import graph

    x, y = tensor.vectors("x", "y")
    first, other = tensor.exp(x), tensor.exp(y)
    last = tensor.sqr(first) + other

    def is_exp(variable):
        return str(variable.owner.op) == "Elemwise{exp,no_inplace}"

    assert graph.nearest([last], is_exp) == [first, other]
    following = graph.depending_on([x], [last])
    assert {x, first, last} <= following and not {y, other} & following


def test_variables_that_a_function_computes_whenever_the_graph_is_run():
    import theano
    from theano import tensor

    from compat._backends.theano import graph

    x, calls = tensor.vector("x"), []

    def doubled(values):
        calls.append(len(values))
        return values * 2

    (result,) = graph.computed_by(doubled, [x], [x])
    assert graph.is_custom(result.owner.op) and not graph.is_custom(tensor.exp(x).owner.op)
    run = theano.function([x], result)
    for size in (3, 4):
        ones = np.ones(size, x.dtype)
        np.testing.assert_array_equal(run(ones), ones * 2)
    assert calls == [3, 4]


def test_the_line_that_a_variable_was_made_at():
    from theano import tensor

    from compat._backends.theano import graph

    made = tensor.exp(tensor.vector())  # here
    with open(__file__, encoding="utf-8") as file:
        line = next(n for n, text in enumerate(file, 1) if "# here" in text)
    assert graph.line_of(made) == "test_graph.py, line {}".format(line)
