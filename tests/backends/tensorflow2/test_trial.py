"""TensorFlow 2: what a trial of a call's operations cannot try."""

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._rows import Sharded
from compat.testing import (
    DEVICES,
    keras_under_test,
)

from ..messages import told
from .test_contract import (
    ROWS,
)


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_under_test()


def test_sparse_strings_are_not_tried_and_sparse_results_are_given(keras):
    """Of strings none can be made up; a table that is the same for all rows comes back once."""
    table = tf.sparse.from_dense(tf.eye(2))

    def call(words, rows):
        lengths = tf.strings.length(tf.sparse.to_dense(words, default_value=""))
        return rows + tf.reduce_sum(tf.cast(lengths, tf.float32), 1, keepdims=True), table

    model, rows = compat.parallelize(tf.function(call)), tf.constant(ROWS[:6])
    words = tf.sparse.from_dense([["a", ""], ["", "bc"]] * 3)
    with told() as texts:
        found, shared = tf.function(lambda *given: model(*given))(words, rows)
        _, of_rows = compat.parallelize(tf.function(lambda rows: (rows, table)))(rows)
    assert [text.split(", but each")[0] for text in texts] == [
        "Model 'call' may need the whole batch"
    ]
    np.testing.assert_allclose(found, call(words, rows)[0])
    assert shared.values.shape == of_rows.values.shape == (2,)


def test_what_three_rows_have_by_chance_is_not_that_of_all():
    """They are sorted already; only parts in another order show what sorts them."""
    from compat._backends.tensorflow2 import trial as op_trial

    whole = np.array([[0.0], [1.0], [2.0]])
    parts = [whole[:2], whole[2:]]
    in_their_order, sorted_again = [whole[[2, 0]], whole[[1]]], [whole[[0, 2]], whole[[1]]]
    arguments = [whole, parts, in_their_order], [whole, parts, sorted_again]
    found = [op_trial._placement_shown(*each, [Sharded(0)]) for each in arguments]
    assert found == [Sharded(0), None]
