"""TensorFlow 2: what is read off a function's graph."""

import pytest
import tensorflow as tf

import compat
from compat._backends.tensorflow2 import graph
from compat.testing import DEVICES, span


@pytest.fixture(scope="module", autouse=True)
def configuration():
    return compat.configure_gpu(simulate=DEVICES)


def traced(function, *tensors):
    """Return a function with a graph, which exists as long as the function."""
    return tf.function(function).get_concrete_function(*tensors)


@span
def test_a_variable_may_be_set_where_any_function_within_sets_it():
    read, set_within = tf.Variable(1.0), tf.Variable(1.0)

    @tf.function
    def within(x):
        set_within.assign_add(x)
        return x * read

    function = traced(lambda x: within(x) + read, tf.constant(2.0))
    handles = {id(outside): inside for inside, outside in graph.captures(function.graph)}
    assert not graph.may_be_set(handles[id(read.handle)])
    assert graph.may_be_set(handles[id(set_within.handle)])
    assert graph.eager(handles[id(read.handle)]) is read.handle
    assert graph.eager(function.graph.inputs[0]) is None


@span
def test_bodies_are_those_of_calls_branches_and_loops():
    @tf.function
    def called(x):
        return tf.cond(x > 0, lambda: x, lambda: -x)

    function = traced(
        lambda x: tf.while_loop(lambda y: y < 3, lambda y: [y + 1], [called(x)]), tf.constant(1.0)
    )
    found = {op.type: len(graph.bodies_of(op)) for op in function.graph.get_operations()}
    calls = [kind for kind, number in found.items() if number == 1]
    assert calls and set(calls) <= graph.CALLS
    assert [kind for kind, number in found.items() if number == 2] == [
        kind for kind in found if kind in graph.LOOPS
    ]
