"""TensorFlow 2: batches that graphs count themselves."""

import tensorflow as tf

import compat
from compat._runtime import work
from compat.testing import DEVICES

from .test_contract import ROWS


def test_no_batch_is_lost_where_a_graph_computes_several_at_once():
    class Product(tf.Module):
        def __init__(self):
            super().__init__()
            self.kernel = tf.Variable(tf.ones((8, 4)))

        def __call__(self, rows):
            return rows @ self.kernel

    compat.configure_gpu(simulate=DEVICES)
    model, rows = compat.parallelize(Product()), tf.constant(ROWS)

    @tf.function
    def computed(rows):
        mapped = tf.map_fn(lambda factor: model(rows * factor), tf.range(5.0))
        return sum(model(rows * place) for place in range(5)) + tf.reduce_sum(mapped, axis=0)

    before = sum(work.batches().values())
    for _ in range(50):
        computed(rows)
    assert sum(work.batches().values()) - before == 500
