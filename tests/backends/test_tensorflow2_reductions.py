"""TensorFlow 2: sums, means, counters and inputs of all kinds, on three devices and on one."""

import re
import warnings

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat.testing import DEVICES, in_span, initialise, keras_under_test, span

from .test_tensorflow2 import KERAS3, ROWS, TARGETS, TRAIN_STEP, pair

keras_ = keras_under_test()
Layer = keras_.layers.Layer
MASK = (np.arange(45) % 7 > 2).astype("float32")  # other sums in each device's rows


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_


def rows_of(x):
    return tf.cast(tf.shape(x)[0], "float32")


class Adding(Layer):
    """Adds a loss of its inputs; ``loss`` makes it."""

    def __init__(self, loss, **options):
        super().__init__(**options)
        self.loss_of = loss

    def call(self, x):
        self.add_loss(self.loss_of(x))
        return x


def adding(loss):
    layers = keras_.layers
    inputs = layers.Input((8,))
    hidden = Adding(loss, name="adding")(layers.Dense(6, activation="tanh")(inputs))
    return keras_.models.Model(inputs, layers.Dense(4)(hidden), name="net")


def trained(build, x=ROWS, y=TARGETS, batch_size=16, eagerly=False, parallel=(False, True)):
    """Losses and weights of the plain model and of the parallel one."""
    results = []
    for is_parallel in parallel:
        model = initialise(build())
        if is_parallel:
            compat.parallelize(model)
        model.compile(keras_.optimizers.SGD(0.01, momentum=0.9), "mse", run_eagerly=eagerly)
        history = model.fit(x, y, batch_size=batch_size, epochs=2, shuffle=False, verbose=0)
        results.append([np.array(history.history["loss"])] + model.get_weights())
    return results


def same(results, rtol=1e-5, atol=1e-6):
    assert len(results[0]) == len(results[1])
    for expected, found in zip(*results):
        np.testing.assert_allclose(expected, found, rtol=rtol, atol=atol)


# Losses within the call -----------------------------------------------------------------------


@tf.function(input_signature=[tf.TensorSpec(None)])
def half_sum_of_squares(x):
    """As models saved by TensorFlow 2.0 have activity regularizers: the rank is unknown."""
    return 0.5 * tf.reduce_sum(x**2)


LOSSES = {
    "sum": lambda x: 0.01 * tf.reduce_sum(x**2),
    "mean": lambda x: tf.reduce_mean(x**2),
    "sum, rank unknown": lambda x: 0.01 * half_sum_of_squares(x),
    "mean by hand, rank unknown": lambda x: half_sum_of_squares(x) / rows_of(x),
    "mean by hand": lambda x: tf.reduce_sum(x**2) / rows_of(x),
    "mean of shares": lambda x: tf.reduce_sum(x**2 / rows_of(x)),
    "inverse": lambda x: 1.0 / rows_of(x) * tf.reduce_sum(x**2),
    "per row": lambda x: tf.reduce_mean(tf.reduce_sum(x**2, axis=1) - 0.5 * x[:, 0]),
    "of products": lambda x: 0.01 * tf.reduce_sum(tf.matmul(x, x, transpose_a=True)),
    "masked": lambda x: tf.reduce_sum(x**2 * tf.sigmoid(9 * x)) / tf.reduce_sum(tf.sigmoid(9 * x)),
    "masked, safe": lambda x: (
        tf.reduce_sum(x**2 * tf.cast(x > 0.3, "float32"))
        / tf.maximum(tf.reduce_sum(tf.cast(x > 0.3, "float32")) + 5.0, 1.0)
    ),
    "chosen": lambda x: tf.reduce_mean(tf.boolean_mask(x**2, x > 0.3)),
    "zero first": lambda x: 0.0 + 0.01 * tf.reduce_sum(x),
    "l2_loss": lambda x: 0.01 * tf.nn.l2_loss(x),
    "keras": lambda x: (
        0.01
        * keras_.losses.MeanSquaredError(
            reduction="sum" if TRAIN_STEP else tf.keras.losses.Reduction.SUM
        )(tf.zeros_like(x), x)
    ),
    "keras mean": lambda x: keras_.losses.MeanSquaredError()(tf.zeros_like(x), x),
}


@pytest.mark.parametrize("name", in_span(sorted(LOSSES), ["sum", "masked"]))
@pytest.mark.parametrize("eagerly", [False, True])
def test_losses_of_all_kinds_have_the_value_of_one_device(keras, name, eagerly):
    same(trained(lambda: adding(LOSSES[name]), eagerly=eagerly))


@span
def test_fewer_rows_than_devices_add_nothing_twice(keras):
    for name in ("sum", "masked, safe"):
        same(trained(lambda name=name: adding(LOSSES[name]), ROWS[:2], TARGETS[:2]))


WHOLE = {
    "square of a mean": lambda x: tf.reduce_mean(x) ** 2,
    "variance": lambda x: tf.math.reduce_variance(x),
    "largest": lambda x: tf.reduce_max(x),
    "similarity": lambda x: tf.reduce_mean(tf.matmul(x, x, transpose_b=True)),
    "first row": lambda x: tf.reduce_sum(x[0]),
    "two kinds": lambda x: tf.reduce_sum(x) + tf.reduce_mean(x),
    "covariance": lambda x: tf.reduce_sum(tf.square(tf.matmul(x, x, transpose_a=True))),
    "softmax of rows": lambda x: tf.reduce_sum(tf.nn.softmax(x, axis=0)[:, 0] ** 2),
    "masked, in a function": lambda x: tf.function(masked_mean)(x),
}
REASONS = {
    "two kinds": "by adding sums and means over the rows, or means with different weights",
    "variance": "from rows that have a statistic of the whole batch in them",
    "masked, in a function": "within a tf.function, by a mean with a weight of its own",
}


def masked_mean(x):
    mask = tf.sigmoid(9 * x)
    return tf.reduce_sum(x**2 * mask) / tf.reduce_sum(mask)


def not_put_together(what, model, reason):
    return (
        r"parallelize\(\) cannot put {} of model '{}' together from the devices' parts: it is "
        r"computed from the whole batch, {}\. Compute it from each row by itself, as one sum or "
        r"one mean over the rows, or in the loss, which sees the whole batch; or run this model on "
        r"one device, with parallelize\(model, gpus=1\)\.".format(what, model, reason)
    )


@pytest.mark.parametrize("name", in_span(sorted(WHOLE), ["variance"]))
def test_losses_of_the_whole_batch_are_refused(keras, name):
    with pytest.raises(Exception) as error:
        trained(lambda: adding(WHOLE[name]), parallel=[True])
    what = "loss 1 of those added by layers" if KERAS3 else "the loss added by layer 'adding'"
    reason = REASONS.get(name, r"by the operation '\S+' \(\w+\)")
    assert re.search(not_put_together(what, "net", reason), str(error.value))


# State ----------------------------------------------------------------------------------------


class Counting(Layer):
    """Counts steps and rows, sums up, and keeps moving averages."""

    def build(self, shape):
        def number(name, dtype="float32", shape=()):
            return self.add_weight(
                name=name, shape=shape, dtype=dtype, initializer="zeros", trainable=False
            )

        self.steps, self.float_steps = number("steps", "int32"), number("float_steps")
        self.rows, self.float_rows = number("rows", "int64"), number("float_rows")
        self.sums, self.average = number("sums", shape=(8,)), number("average", shape=(8,))
        self.last = number("last", shape=(8,))

    def call(self, x):
        self.steps.assign_add(1)
        self.float_steps.assign(self.float_steps + 1.0)
        self.rows.assign_add(tf.cast(tf.shape(x)[0], "int64"))
        self.float_rows.assign_add(tf.reduce_sum(tf.ones_like(x[:, 0])))
        self.sums.assign(self.sums + tf.reduce_sum(x, axis=0))
        self.average.assign_sub(0.1 * (self.average - tf.reduce_mean(x, axis=0)))
        mask = tf.cast(x > 0.5, "float32")
        self.last.assign(tf.math.divide_no_nan(tf.reduce_sum(x * mask, 0), tf.reduce_sum(mask, 0)))
        return 2.0 * x


def counting():
    layers = keras_.layers
    inputs = layers.Input((8,))
    model = keras_.models.Model(inputs, layers.Dense(4)(Counting()(inputs)))
    model.set_weights([0.1 * np.ones_like(w) if w.ndim > 1 else w for w in model.get_weights()])
    return model


@span
@pytest.mark.parametrize("eagerly", [False, True])
def test_state_of_all_kinds_is_that_of_one_device(keras, eagerly):
    results = []
    for is_parallel in (False, True):
        model = counting()
        if is_parallel:
            compat.parallelize(model)
        model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=eagerly)
        model.fit(ROWS, TARGETS, batch_size=16, epochs=2, shuffle=False, verbose=0)
        model.train_on_batch(ROWS[:2], TARGETS[:2])
        layer = next(layer for layer in model.layers if isinstance(layer, Counting))
        numbers = [layer.steps, layer.float_steps, layer.rows, layer.float_rows]
        assert [int(tf.convert_to_tensor(n)) for n in numbers] == [7, 7, 92, 92]
        results.append(model.get_weights())
    same(results)


class Decaying(Layer):
    def build(self, shape):
        self.sums = self.add_weight(name="decaying", shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.sums.assign(0.9 * self.sums + 0.1 * tf.reduce_sum(x))
        return x


class Largest(Decaying):
    def call(self, x):
        self.sums.assign(tf.maximum(self.sums, tf.reduce_max(x)))
        return x


@pytest.mark.parametrize("layer", [Decaying, Largest])
def test_state_of_the_whole_batch_is_refused(keras, layer):
    def build():
        inputs = keras.layers.Input((8,))
        return keras.models.Model(inputs, keras.layers.Dense(4)(layer()(inputs)))

    with pytest.raises(compat.UnsupportedError, match="put variable '.*decaying"):
        trained(build, parallel=[True])


class Normalizing(Layer):
    """Somebody's own batch normalization."""

    def build(self, shape):
        names = ("own_mean", "own_variance")
        self.mean, self.variance = [
            self.add_weight(name=name, shape=(8,), initializer="zeros", trainable=False)
            for name in names
        ]

    def call(self, x):
        mean, variance = tf.nn.moments(x, axes=[0])
        self.mean.assign(0.9 * self.mean + 0.1 * mean)
        self.variance.assign(0.9 * self.variance + 0.1 * variance)
        return x


def test_own_statistics_are_the_mean_of_the_replicas(keras):
    inputs = keras.layers.Input((8,))
    model = keras.models.Model(inputs, Normalizing()(inputs))
    compat.parallelize(model)
    model.compile("sgd", "mse")
    model.train_on_batch(ROWS, ROWS)
    mean, variance = model.get_weights()
    np.testing.assert_allclose(mean, 0.1 * ROWS.mean(axis=0), rtol=1e-4, atol=1e-6)
    shards = [ROWS[15 * i : 15 * (i + 1)] for i in range(3)]
    expected = 0.1 * np.mean([shard.var(axis=0) for shard in shards], axis=0)
    np.testing.assert_allclose(variance, expected, rtol=1e-4)


class Module(tf.Module):
    def __init__(self):
        super().__init__()
        self.weight = tf.Variable(np.random.RandomState(3).normal(size=(8, 4)).astype("float32"))
        self.steps, self.rows = tf.Variable(0), tf.Variable(0.0)  # trainable, as tf.Variable is
        self.sums = tf.Variable(tf.zeros(4))

    def __call__(self, x):
        outputs = x @ self.weight
        self.steps.assign_add(1)
        self.rows.assign_add(rows_of(x))
        self.sums.assign_add(tf.reduce_sum(outputs, axis=0))
        return outputs, tf.reduce_sum(outputs), tf.reduce_mean(outputs, axis=0)


@span
@pytest.mark.parametrize("eagerly", [False, True])
def test_native_model_sums_count_as_on_one_device(keras, eagerly):
    results = []
    for is_parallel in (False, True):
        model = Module()
        if is_parallel:
            compat.parallelize(model)

        def step(x, model=model):
            with tf.GradientTape() as tape:
                outputs, total, mean = model(x)
                loss = total + tf.reduce_sum(mean**2) + tf.reduce_mean(outputs**2)
            return [tape.gradient(loss, model.weight), total, mean]

        step = step if eagerly else tf.function(step)
        found = [value.numpy() for n in (44, 45, 2) for value in step(tf.constant(ROWS[:n]))]
        assert (model.steps.numpy(), model.rows.numpy()) == (3, 91.0)
        results.append(found + [model.sums.numpy()])
    same(results, rtol=1e-4, atol=1e-5)


class Sizing(tf.Module):
    """It needs the number of rows before it runs."""

    def __init__(self):
        super().__init__()
        self.sums = tf.Variable(0.0)

    def __call__(self, x):
        self.sums.assign_add(tf.reduce_sum(x) / int(x.shape[0]))
        return x


@span
def test_a_call_that_cannot_be_traced_is_refused(keras):
    model = compat.parallelize(Sizing())
    with pytest.raises(compat.UnsupportedError) as error:
        model(tf.constant(ROWS))
    cause = error.value.__cause__
    assert str(error.value) == (
        "parallelize() cannot tell how losses, state and outputs without rows of model 'sizing' "
        "are put together from the devices' parts: its call cannot be traced for a batch with an "
        "unknown number of rows. {}: {}\nTake the number of rows from tf.shape(x)[0], or run this "
        "model on one device, with parallelize(model, gpus=1).".format(type(cause).__name__, cause)
    )


# Inputs ---------------------------------------------------------------------------------------


class Attending(keras_.Model):
    """Each query attends to all rows of a memory, which is an argument of its own."""

    def __init__(self):
        super().__init__()
        self.last = keras_.layers.Dense(4)

    def call(self, queries, memory=None, training=None):
        weights = tf.nn.softmax(tf.matmul(queries, memory, transpose_b=True))
        return self.last(tf.matmul(weights, memory))


@span
@pytest.mark.parametrize("known", [True, False])
def test_an_argument_with_other_rows_goes_whole_to_each_replica(keras, known):
    queries, memory = tf.constant(ROWS[:6]), tf.constant(ROWS[10:21])
    results = []
    for is_parallel in (False, True):
        model = Attending()
        model(queries, memory=memory)
        initialise(model)
        if is_parallel:
            compat.parallelize(model)
        specs = [
            tf.TensorSpec((6 if known else None, 8)),
            tf.TensorSpec((11 if known else None, 8)),
        ]

        @tf.function(input_signature=specs)
        def call(queries, memory, model=model):
            return model(queries, memory=memory)

        results.append([call(queries, memory).numpy(), model(queries, memory=memory).numpy()])
    same(results)


def test_a_constant_with_as_many_rows_is_no_data(keras):
    queries, table = tf.constant(ROWS[:8]), tf.constant(ROWS[10:18])
    results = []
    for is_parallel in (False, True):
        model = Attending()
        model(queries, memory=table)
        initialise(model)
        if is_parallel:
            compat.parallelize(model)
        outputs = tf.function(lambda rows, model=model: model(rows, memory=table))(queries)
        results.append([outputs.numpy()])
    same(results)


class Remembering(Attending):
    def call(self, memory, queries=None, training=None):
        return super().call(queries, memory=memory)


@pytest.mark.parametrize("known", [True, False])
def test_an_output_that_follows_another_argument_is_refused(keras, known):
    memory, queries = tf.constant(ROWS[10:21]), tf.constant(ROWS[:6])
    model = Remembering()
    model(memory, queries=queries)
    compat.parallelize(model)
    specs = [tf.TensorSpec((11 if known else None, 8)), tf.TensorSpec((6 if known else None, 8))]

    @tf.function(input_signature=specs)
    def call(memory, queries):
        return model(memory, queries=queries)

    with pytest.raises(Exception) as error:
        call(memory, queries)
    if known:
        reason = r"by the operation '\S+' \(\w+\)"
        assert re.search(not_put_together("output 1", model.name, reason), str(error.value))
    else:
        assert (
            "parallelize() cut the first argument of this model, some rows on this device, and an "
            "output has others: it does not follow the rows of the first argument. Pass the "
            "argument that it follows first, or run this model on one device, with "
            "parallelize(model, gpus=1)."
        ) in str(error.value)


@span
def test_inputs_with_different_rows_are_refused(keras):
    """As a generator's data set gives them: TensorFlow knows no number of rows."""
    layers = keras.layers
    queries, memory = layers.Input((8,), name="queries"), layers.Input((8,), name="memory")
    attend = layers.Lambda(lambda x: tf.matmul(tf.matmul(x[0], x[1], transpose_b=True), x[1]))
    attended = attend([queries, memory]) if TRAIN_STEP and not KERAS3 else None
    if attended is None:
        model = Pair()
    else:
        model = keras.models.Model([queries, memory], layers.Dense(4)(attended))
    compat.parallelize(model)
    model.compile("sgd", "mse")

    def batches():
        yield (ROWS[:6], ROWS[10:21]), TARGETS[:6]

    data = tf.data.Dataset.from_generator(
        batches,
        output_types=((tf.float32, tf.float32), tf.float32),
        output_shapes=(((None, 8), (None, 8)), (None, 4)),
    )
    text = (
        "parallelize() cuts each batch by rows, and this model's inputs have different numbers of "
        "rows: {} and {}. Give inputs with one row for each sample, pass what all samples share "
        "as another argument of the call or as the model's own attribute, or run this model on "
        "one device, with parallelize(model, gpus=1)."
    )
    with pytest.raises(Exception) as error:
        model.fit(data, epochs=1, verbose=0)
    assert text.format("some", "others") in str(error.value).replace("\\'", "'")
    with pytest.raises(Exception) as error:
        model((tf.constant(ROWS[:6]), tf.constant(ROWS[10:21])))
    assert text.format(6, 11) in str(error.value)


class Pair(Attending):
    def call(self, inputs, training=None):
        return super().call(inputs[0], memory=inputs[1])


class Graph(keras_.Model):
    def call(self, inputs, training=None):
        return tf.matmul(inputs[1], inputs[0])


@span
def test_a_matrix_of_rows_by_rows_fails_with_a_hint(keras):
    nodes, adjacency = tf.constant(ROWS[:9]), tf.eye(9)
    model = Graph()
    np.testing.assert_allclose(model((nodes, adjacency)), ROWS[:9])
    compat.parallelize(model)
    with pytest.raises(compat.UnsupportedError) as error:
        model((nodes, adjacency))
    assert (
        "model {!r} fails on a part of the batch's rows, though not on all of them. parallelize() "
        "cuts every input by its first dimension, so each row has to be computed by itself: a "
        "matrix of rows by rows (a graph's adjacency, a similarity) or of time by time cannot be "
        "cut. Make such a matrix an attribute of the model or compute it in the loss, or run this "
        "model on one device, with parallelize(model, gpus=1). InvalidArgumentError: ".format(
            model.name
        )
    ) in str(error.value)
    with pytest.raises(Exception) as error:  # one's own mistake stays what it is
        model((nodes, tf.eye(7)[:, :5]))
    assert "fails on a part" not in str(error.value)


# Ragged and sparse batches --------------------------------------------------------------------


def ragged(rows):
    lengths = [n % 4 + 1 for n in range(rows)]
    return tf.RaggedTensor.from_row_lengths((np.arange(sum(lengths)) % 7).astype("int64"), lengths)


class Embedding(keras_.Model):
    """The mean of the embeddings of each row's words."""

    def __init__(self, add_loss=False):
        super().__init__()
        self.table = keras_.layers.Embedding(7, 5)
        self.last = keras_.layers.Dense(4)
        self.adds_loss = add_loss

    def call(self, words, training=None):
        found = tf.ragged.map_flat_values(self.table, words)
        if self.adds_loss:
            self.add_loss(tf.reduce_mean(found.flat_values**2))
        return self.last(tf.reduce_mean(found, axis=1))


if TRAIN_STEP and not KERAS3:  # the others take no such batches

    @pytest.mark.parametrize("add_loss", in_span([False, True], [False]))
    def test_ragged_batches_train_and_predict_as_on_one_device(keras, add_loss):
        results = []
        for is_parallel in (False, True):
            model = Embedding(add_loss)
            model(ragged(3))
            initialise(model)
            if is_parallel:
                compat.parallelize(model)
            model.compile(keras.optimizers.SGD(0.1), "mse")
            data = tf.data.Dataset.from_tensor_slices((ragged(45), TARGETS)).batch(16)
            model.fit(data, epochs=2, verbose=0)
            model.fit(ragged(2), TARGETS[:2], verbose=0)
            results.append(model.get_weights() + [model.predict(ragged(10), verbose=0)])
        same(results)

    @span
    def test_sparse_batches_train_and_predict_as_on_one_device(keras):
        layers = keras.layers

        def build():
            inputs = layers.Input((8,), sparse=True)
            return keras.models.Model(inputs, layers.Dense(4)(inputs))

        batch = tf.sparse.from_dense(ROWS * (ROWS > 0.5))
        results = []
        for model in pair(build):
            model.compile(keras.optimizers.SGD(0.1), "mse")
            data = tf.data.Dataset.from_tensor_slices((batch, TARGETS)).batch(16)
            model.fit(data, epochs=2, verbose=0)
            results.append(model.get_weights() + [model.predict(batch, batch_size=16, verbose=0)])
        same(results)


# What the trace shows besides -----------------------------------------------------------------


class Centring(Layer):
    def call(self, x):
        self.add_loss(tf.reduce_sum(x))
        return x - tf.reduce_mean(x, axis=0)


class Comparing(Layer):
    def call(self, x):
        self.add_loss(tf.reduce_sum(x))
        return tf.matmul(tf.matmul(x, x, transpose_b=True), x)


class Scaling(Layer):
    def call(self, x):
        self.add_loss(tf.reduce_sum(x))
        return x * tf.math.rsqrt(tf.reduce_mean(x**2, axis=0))


@pytest.mark.parametrize("layer", [Centring, Comparing, Scaling, keras_.layers.BatchNormalization])
def test_rows_computed_from_other_rows_are_told_of(keras, layer):
    layers = keras.layers

    def build():
        inputs = layers.Input((8,))
        regularizer = None if layer in (Centring, Comparing, Scaling) else "l2"
        outputs = layers.Dense(4, activity_regularizer=regularizer)(layer()(inputs))
        return keras.models.Model(inputs, outputs)

    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        trained(build, parallel=[True])
    texts = [str(w.message) for w in record if w.category is compat.CompatWarning]
    assert bool(texts) == (layer is not keras.layers.BatchNormalization)
    for text in texts:
        assert re.fullmatch(
            r"model '\w+' computes each row of an output from other rows of the batch, too, "
            r"besides batch normalization\. On several devices these are the rows of one device's "
            r"part, so the numbers differ from one device's\. Compute this in the loss, which sees "
            r"the whole batch, or run this model on one device, with parallelize\(model, "
            r"gpus=1\)\.",
            text,
        )


@pytest.mark.parametrize("name", ["variance", "two kinds"])
def test_one_other_device_computes_whatever_the_model_does(keras, name):
    results = []
    for gpus in (1, [1]):
        model = compat.parallelize(initialise(adding(WHOLE[name])), gpus=gpus)
        model.compile(keras_.optimizers.SGD(0.01), "mse")
        model.fit(ROWS, TARGETS, batch_size=16, shuffle=False, verbose=0)
        results.append(model.get_weights())
    same(results)


def test_a_plain_model_is_not_traced_once_more(keras):
    traced = []

    class Noting(Layer):
        def call(self, x):
            traced.append(x)
            return x

    layers = keras.layers
    inputs = layers.Input((8,))
    hidden = layers.BatchNormalization()(layers.Dropout(0.5)(Noting()(inputs)))
    model = compat.parallelize(keras.models.Model(inputs, layers.Dense(4)(hidden)))
    step = tf.function(lambda rows: model(rows, training=True))
    del traced[:]
    step.get_concrete_function(tf.TensorSpec((None, 8)))
    assert len(traced) == DEVICES
