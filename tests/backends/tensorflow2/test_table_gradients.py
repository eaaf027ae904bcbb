"""TensorFlow 2: gradients of tables in which several devices look up the same rows."""

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat.testing import slow

from .reductions import Layer, runs_unsplit, same, three_devices, trained  # noqa: F401  # the fixture
from .test_contract import KERAS3, ROWS, TARGETS


@pytest.mark.skipif(not KERAS3, reason="the others sum up what there is of a row")
@pytest.mark.parametrize("optimizer", ["adagrad", pytest.param("adam", marks=slow)])
def test_rows_that_several_devices_look_up_count_once(keras, optimizer):
    class Summing(keras.Model):
        def __init__(self):
            super().__init__()
            self.table, self.last = keras.layers.Dense(4), keras.layers.Dense(4)

        def call(self, x):
            return self.last(keras.ops.tanh(self.table(x)))

    batch = tf.sparse.from_dense(ROWS * (ROWS > 0.5))

    def build():
        model = Summing()
        model(tf.sparse.slice(batch, [0, 0], [2, 8]))
        return model

    data = tf.data.Dataset.from_tensor_slices((batch, TARGETS)).batch(16)
    same(trained(build, data, None, None, optimizer=optimizer))


@pytest.mark.skipif(not KERAS3, reason="the others sum up what there is of a row")
@pytest.mark.parametrize(
    "kinds, eagerly",
    [
        (["positions", "distances", "read"], False),
        (["positions"], True),
        (["drawn"], False),
    ],
)
def test_rows_that_every_device_looks_up_count_once(keras, kinds, eagerly):
    """Embeddings of positions, as in a ViT; of distances between them, each several times."""

    class Positions(keras.layers.Layer):
        def __init__(self, kind):
            super().__init__()
            self.kind = kind

        def build(self, shape):
            self.table = self.add_weight(shape=(8, 4), initializer="uniform")

        def call(self, x):
            kind, places = self.kind, np.arange(8)
            if kind == "distances":
                places = np.abs(places[:, None] - places[None])
            if kind == "drawn":  # in another order by each replica
                places = tf.argsort(tf.random.uniform((8,)))
                weighted = tf.gather(self.table, places) * tf.gather(ROWS[:8, :1], places)
                return x[:, :, None] * tf.reduce_sum(weighted, 0)
            table = self.table.value if kind == "positions" else self.table
            found = tf.gather(table + 0 if kind == "read" else table, places)
            return x[:, :, None] * (tf.reduce_sum(found, 1) if kind == "distances" else found)

    def build():
        inputs = keras.layers.Input((8,))
        found = [keras.layers.Flatten()(Positions(kind)(inputs)) for kind in kinds]
        hidden = keras.layers.concatenate(found) if len(found) > 1 else found[0]
        return keras.models.Model(inputs, keras.layers.Dense(4)(hidden))

    optimizer = "sgd" if kinds == ["drawn"] else "adam"
    same(trained(build, eagerly=eagerly, optimizer=optimizer))


@pytest.mark.skipif(not KERAS3, reason="the others sum up what there is of a row")
def test_a_table_of_what_is_in_the_batch_and_of_all_that_there_is(keras):
    """As a recommender scores all items by the embeddings of those that somebody has seen."""

    class Scores(keras.Model):
        def __init__(self):
            super().__init__()
            self.items = keras.layers.Embedding(9, 4)

        def call(self, seen):
            user = keras.ops.mean(self.items(seen), axis=1)
            return keras.ops.matmul(user, keras.ops.transpose(self.items(keras.ops.arange(9))))

    seen = (np.arange(45 * 3).reshape(45, 3) % 9).astype("int32")

    def build():
        model = Scores()
        model(seen[:2])
        return model

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with runs_unsplit("table"):
        same(trained(build, seen, seen[:, 0], optimizer="adam", loss=loss))


@pytest.mark.parametrize("reduce", [tf.reduce_mean, tf.reduce_sum, tf.reduce_max])
@pytest.mark.parametrize("in_function", [False, True])
def test_gradients_of_a_table_where_a_device_has_no_rows(keras, reduce, in_function):
    """Such a device has no part in the loss that the model returns."""

    class Net(tf.Module):
        def __init__(self):
            super().__init__()
            self.weight = tf.Variable(tf.ones([8, 4]))
            self.table = tf.Variable(tf.ones([5, 4]))

        def __call__(self, x):
            return reduce(x @ self.weight * tf.gather(self.table, [0, 1, 1])[1])

    results = []
    for parallel in (False, True):
        net = Net()
        if parallel:
            compat.parallelize(net)

        def gradients(x, net=net):
            with tf.GradientTape() as tape:
                loss = net(x)
            return list(map(tf.convert_to_tensor, tape.gradient(loss, [net.weight, net.table])))

        results.append(
            (tf.function(gradients) if in_function else gradients)(tf.constant(ROWS[:2]))
        )
    for expected, found in zip(*results):
        np.testing.assert_allclose(expected, found, rtol=1e-5, atol=1e-6)
