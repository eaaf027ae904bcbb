"""TensorFlow 1: tensors of replicas are merged by their rows."""

import numpy as np
import tensorflow as tf

from compat._backends._tensorflow.graph import v1_names
from compat._backends.tensorflow1.merging import Merging
from compat.testing import span

v1 = v1_names(tf)


@span
def test_a_replica_without_rows_of_its_own_adds_nothing():
    """It has computed one row, to be dropped."""
    parts = [np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([[5.0, 6.0]]), np.array([[7.0, 8.0]])]
    with tf.Graph().as_default(), v1.Session() as session:
        merging = Merging(["/cpu:0"] * 3, [tf.constant(size) for size in (2, 1, 0)])
        rows = merging.rows_in_order([tf.constant(part) for part in parts])
        mean = merging.mean([tf.constant(value, tf.float64) for value in (3.0, 6.0, 100.0)])
        steps = merging.mean([tf.constant(value) for value in (4, 4, 4)])
        found = session.run([rows, mean, steps])
    np.testing.assert_array_equal(found[0], np.concatenate(parts[:2]))
    assert found[1:] == [4.0, 4]
