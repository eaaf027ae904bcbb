"""Values at cuts, of devices of which some have no rows."""

import numpy as np

from compat._backends.theano import merging
from compat._rows import Sharded


def test_rows_are_in_order_and_those_of_an_empty_shard_are_left_out():
    parts = [np.array([[1, 2]]), np.array([[3, 4]]), np.array([[-1, -1]])]
    np.testing.assert_array_equal(merging.merged(Sharded(0), parts, [1, 1, 0]), [[1, 2], [3, 4]])
    np.testing.assert_array_equal(merging.merged(Sharded(1), parts, [2, 2, 0]), [[1, 2, 3, 4]])


def test_a_gradient_is_split_as_values_were_and_is_zero_for_an_empty_shard():
    parts = [np.ones((2, 3)), np.ones((1, 3)), np.ones((1, 3))]
    gradient = np.arange(9.0).reshape(3, 3)
    first, second, third = merging.split_gradient(gradient, Sharded(0), parts, [2, 1, 0])
    np.testing.assert_array_equal(first, gradient[:2])
    np.testing.assert_array_equal(second, gradient[2:])
    np.testing.assert_array_equal(third, np.zeros((1, 3)))
