"""TensorFlow 2: sums, means, counters and inputs of all kinds, on three devices and on one."""

import contextlib
import itertools
import re
import warnings

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat.testing import DEVICES, contract_of, initialise, keras_under_test, slow, span

from ..messages import told
from .test_contract import KERAS3, ROWS, TARGETS, TRAIN_STEP, pair

keras_ = keras_under_test()
Layer = keras_.layers.Layer


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


def adding(*losses):
    layers = keras_.layers
    inputs = layers.Input((8,))
    hidden = layers.Dense(6, activation="tanh")(inputs)
    for place, loss in enumerate(losses):
        hidden = Adding(loss, name="adding{}".format(place))(hidden)
    return keras_.models.Model(inputs, layers.Dense(4)(hidden), name="net")


def trained(
    build,
    x=ROWS,
    y=TARGETS,
    batch_size=16,
    eagerly=False,
    parallel=(False, True),
    optimizer=None,
    loss="mse",
):
    """Losses and weights of the plain model and of the parallel one; what optimizers keep, too."""
    results = []
    for is_parallel in parallel:
        model = initialise(build())
        if is_parallel:
            compat.parallelize(model)
        sgd = keras_.optimizers.SGD(0.01, momentum=0.9)
        model.compile(optimizer or sgd, loss, run_eagerly=eagerly)
        if KERAS3 and batch_size:  # its fit() traces a step twice
            losses = [model.train_on_batch(x[:batch_size], y[:batch_size]) for _ in range(2)]
        else:
            options = {"batch_size": batch_size, "shuffle": False, "verbose": 0}
            losses = model.fit(x, y, **options).history["loss"]
        results.append([np.array(losses)] + model.get_weights())
        if KERAS3:
            results[-1] += [variable.numpy() for variable in model.optimizer.variables]
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
    "mean by hand, rank unknown": lambda x: half_sum_of_squares(x) / rows_of(x),
    "of products": lambda x: 0.01 * tf.reduce_sum(tf.matmul(x, x, transpose_a=True)),
    "largest": lambda x: tf.reduce_max(x),
    "keras mean": lambda x: keras_.losses.MeanSquaredError()(tf.zeros_like(x), x),
}


@contextlib.contextmanager
def is_divided():
    """Within, no model says that it runs whole."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)
        yield


@pytest.mark.parametrize(
    "eagerly",
    [pytest.param(False, marks=span if KERAS3 else slow), pytest.param(True, marks=slow)],
)
def test_losses_have_the_value_of_one_device(keras, eagerly, pytestconfig):
    names = ["mean", "of products"]
    if not eagerly and contract_of(pytestconfig) != "span":
        # How values depend on rows is found alike for Keras 3.
        names = ["keras mean", "sum"] if KERAS3 else sorted(LOSSES)
    with is_divided():
        same(trained(lambda: adding(*map(LOSSES.get, names)), eagerly=eagerly))


def test_fewer_rows_than_devices_add_nothing_twice(keras):
    losses = LOSSES["sum"], LOSSES["mean"]
    same(trained(lambda: adding(*losses), ROWS[:2], TARGETS[:2]))


#: Besides what tests/idioms and the proof of the walk have.
WHOLE = {
    "variance": lambda x: tf.math.reduce_variance(x),
    "two kinds": lambda x: tf.reduce_sum(x) + tf.reduce_mean(x),
    "masked": lambda x: tf.reduce_sum(x**2 * tf.sigmoid(9 * x)) / tf.reduce_sum(tf.sigmoid(9 * x)),
    "chosen": lambda x: tf.reduce_mean(tf.boolean_mask(x**2, x > 0.3)),
}


@contextlib.contextmanager
def runs_whole(why="mixed"):
    """Within, one model says that it runs with the whole batch on one device."""
    with told() as texts:
        yield texts
    assert len(texts) == 1 and re.fullmatch(WHY[why] + ON_ONE, texts[0]), texts


ON_ONE = r" The model runs on /cpu:0 with the whole batch\."
PLACE = r"The operation \S+ \(\w+\)( in layer '\w+')? \(test_reductions\.py, line \d+\)"
WHY = {
    "mixed": PLACE + r" of '\w+' computes across the rows of a batch, of which each device has a "
    r"part\.",
    "fails": r"Model '\w+' fails on a part of a batch, of which each device has one\.",
    "different": r"Model '\w+' computes across the rows of a batch, of which each device has a "
    r"part\.",
    "gradient": PLACE
    + r" of '\w+' has a gradient of its own that computes, or may compute, across "
    r"the rows of a batch, of which each device has a part\.",
    "table": r"Model '\w+' looks up rows that depend on the batch and rows that do not in one "
    r"table, and the gradients of the two cannot be told apart\.",
    "unknown": r"Model '\w+' may compute across the rows of a batch, of which each device has a "
    r"part: compat has no rule for it, and cannot try it\.",
}


@pytest.mark.parametrize(
    "name", ["variance"] + [pytest.param(name, marks=slow) for name in WHOLE if name != "variance"]
)
def test_losses_of_the_whole_batch_run_whole(keras, name):
    with runs_whole():
        same(trained(lambda: adding(WHOLE[name])))


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
        self.last.assign(tf.math.divide_no_nan(tf.reduce_sum(x, 0), rows_of(x)))
        return 2.0 * x


def counting():
    layers = keras_.layers
    inputs = layers.Input((8,))
    model = keras_.models.Model(inputs, layers.Dense(4)(Counting()(inputs)))
    model.set_weights([0.1 * np.ones_like(w) if w.ndim > 1 else w for w in model.get_weights()])
    return model


@pytest.mark.parametrize("eagerly", [False, True])
def test_state_of_all_kinds_is_that_of_one_device(keras, eagerly):
    results = []
    for is_parallel in (False, True):
        model = counting()
        if is_parallel:
            compat.parallelize(model)
        model.compile(keras.optimizers.SGD(0.01), "mse", run_eagerly=eagerly)
        model.fit(ROWS, TARGETS, batch_size=16, shuffle=False, verbose=0)
        model.train_on_batch(ROWS[:2], TARGETS[:2])
        layer = next(layer for layer in model.layers if isinstance(layer, Counting))
        numbers = [layer.steps, layer.float_steps, layer.rows, layer.float_rows]
        assert [int(tf.convert_to_tensor(n)) for n in numbers] == [4, 4, 47, 47]
        results.append(model.get_weights())
    same(results)


class Sizing(tf.Module):
    """It needs the number of rows before it runs."""

    def __init__(self):
        super().__init__()
        self.sums = tf.Variable(0.0)

    def __call__(self, x):
        self.sums.assign_add(tf.reduce_sum(x) / int(x.shape[0]))
        return x


def test_a_call_that_cannot_be_traced_runs_whole(keras):
    plain, model = Sizing(), compat.parallelize(Sizing())
    with runs_whole("unknown"):
        for rows in (ROWS, ROWS[:7]):
            np.testing.assert_allclose(model(tf.constant(rows)), plain(tf.constant(rows)))
    np.testing.assert_allclose(model.sums.numpy(), plain.sums.numpy(), rtol=1e-5)


class Totalling(tf.Module):
    """It returns an old value and a sum: each device would count the old value once."""

    def __init__(self):
        super().__init__()
        self.total = tf.Variable(3.0)

    def __call__(self, x):
        return x, self.total + tf.reduce_sum(x)


def test_a_result_with_an_old_value_in_it_runs_whole(keras):
    with runs_whole():
        found = compat.parallelize(Totalling())(tf.constant(ROWS))
    same([Totalling()(tf.constant(ROWS)), found])


# Inputs ---------------------------------------------------------------------------------------


class Attending(keras_.Model):
    """Each query attends to all rows of a memory, which is an argument of its own."""

    def __init__(self):
        super().__init__()
        self.last = keras_.layers.Dense(4)

    def call(self, queries, memory=None, training=None):
        weights = tf.nn.softmax(tf.matmul(queries, memory, transpose_b=True))
        return self.last(tf.matmul(weights, memory))


def check_attending(queries, memory, call):
    """Calls of a model that attends to a memory, without parallelize() and with it."""

    def build():
        model = Attending()
        model(queries, memory=memory)
        return model

    same([[each.numpy() for each in call(model)] for model in pair(build)])


def test_an_argument_with_other_rows_goes_whole_to_each_replica(keras):
    queries, memory = tf.constant(ROWS[:6]), tf.constant(ROWS[10:21])

    def calls(model):
        call = tf.function(lambda queries, memory: model(queries, memory=memory))
        return call(queries, memory), model(queries, memory=memory)

    check_attending(queries, memory, calls)


def test_a_constant_with_as_many_rows_is_no_data(keras):
    queries, table = tf.constant(ROWS[:8]), tf.constant(ROWS[10:18])
    check_attending(
        queries, table, lambda model: [tf.function(lambda q: model(q, memory=table))(queries)]
    )


UNKNOWN = [tf.TensorSpec((None, 8)), tf.TensorSpec((None, 8))]


def test_an_argument_with_other_rows_is_refused_where_only_a_run_tells(keras):
    model = compat.parallelize(Attending())
    call = tf.function(lambda rows, memory: model(rows, memory=memory), input_signature=UNKNOWN)
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        call(tf.constant(ROWS[:6]), tf.constant(ROWS[10:21]))
    assert (
        "parallelize() cuts each batch by rows, and another argument of this model's call has "
        "other rows than the first, which TensorFlow did not know when it traced the call. Make "
        "it the model's own attribute, have tf.function's input_signature say how many rows it "
        "has, or run this model on one device, with parallelize(model, gpus=1)."
    ) in str(error.value).replace("\\'", "'")


class Summing(tf.Module):
    def __call__(self, *given):
        return tf.add_n(given)


def test_an_argument_of_as_many_rows_is_data_after_one_whose_rows_only_a_run_tells():
    specs = [tf.TensorSpec((rows, 8)) for rows in (6, None, 6)]
    model = compat.parallelize(Summing())
    call = tf.function(lambda *given: model(*given), input_signature=specs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)  # that it runs whole
        found = call(*[tf.constant(ROWS[:6])] * 3)
    np.testing.assert_allclose(found, ROWS[:6] * 3, rtol=1e-5)


class Remembering(Attending):
    def call(self, memory, queries=None, training=None):
        return super().call(queries, memory=memory)


def test_an_output_that_follows_another_argument_runs_whole(keras):
    memory, queries = tf.constant(ROWS[10:21]), tf.constant(ROWS[:6])
    model = Remembering()
    expected = model(memory, queries=queries).numpy()
    compat.parallelize(model)
    call = tf.function(lambda memory, queries: model(memory, queries=queries))
    with runs_whole():
        np.testing.assert_allclose(call(memory, queries), expected, rtol=1e-5, atol=1e-6)


def test_inputs_with_different_rows_run_whole(keras):
    rows = (tf.constant(ROWS[:6]), tf.constant(ROWS[10:21]))
    model = Pair()
    expected = model(rows).numpy()
    compat.parallelize(model)
    call = tf.function(lambda *given: model(given))
    with runs_whole("different"):
        np.testing.assert_allclose(call(*rows), expected, rtol=1e-5, atol=1e-6)


@span
def test_inputs_with_different_rows_are_refused_where_only_a_run_tells(keras):
    """As a generator's data set gives them: TensorFlow knows no number of rows."""
    first, second = keras.layers.Input((8,)), keras.layers.Input((8,))
    added = keras.layers.add([first, second])
    model = compat.parallelize(keras.models.Model([first, second], keras.layers.Dense(4)(added)))
    call = tf.function(lambda *given: model(list(given)), input_signature=UNKNOWN)
    with pytest.raises(tf.errors.InvalidArgumentError) as error:
        call(tf.constant(ROWS[:6]), tf.constant(ROWS[:1]))
    assert (
        "parallelize() cuts each batch by rows, and this model's inputs have different numbers of "
        "rows. Give inputs with one row for each sample, pass what all samples share as another "
        "argument of the call or as the model's own attribute, or run this model on one device, "
        "with parallelize(model, gpus=1)."
    ) in str(error.value).replace("\\'", "'")


class Pair(Attending):
    def call(self, inputs, training=None):
        return super().call(inputs[0], memory=inputs[1])


class Graph(keras_.Model):
    def call(self, inputs, training=None):
        return tf.matmul(inputs[1], inputs[0])


def test_a_matrix_of_rows_by_rows_runs_whole(keras):
    nodes, adjacency = tf.constant(ROWS[:9]), tf.eye(9)
    model = compat.parallelize(Graph())
    with runs_whole():
        np.testing.assert_allclose(model((nodes, adjacency)), ROWS[:9])
    with pytest.raises(Exception) as error:  # one's own mistake stays what it is
        model((nodes, tf.eye(7)[:, :5]))
    assert "MatMul" in str(error.value)


@pytest.mark.parametrize("build", ["in the first call", "never"])
def test_losses_of_a_model_that_an_eager_step_builds(keras, build):
    class Model(keras.Model):
        def __init__(self):
            super().__init__()
            self.last = keras.layers.Dense(4, kernel_initializer="ones")

        def call(self, x):
            self.add_loss(tf.reduce_sum(x**2))
            return x[:, :4] if build == "never" else self.last(x)

    results = []
    for is_parallel in (False, True):
        model = compat.parallelize(Model()) if is_parallel else Model()
        model.compile("sgd", "mse", run_eagerly=True)
        results.append(model.fit(ROWS, TARGETS, batch_size=16, epochs=2, verbose=0, shuffle=False))
    same([[result.history["loss"]] for result in results])


# Ragged batches -------------------------------------------------------------------------------


@slow
@pytest.mark.skipif(KERAS3 or not TRAIN_STEP, reason="which take no such batches")
def test_ragged_batches_run_whole(keras):
    class Embedding(keras.Model):
        """The mean of the embeddings of each row's words."""

        def __init__(self):
            super().__init__()
            self.table, self.last = keras.layers.Embedding(7, 5), keras.layers.Dense(4)

        def call(self, words, training=None):
            return self.last(tf.reduce_mean(tf.ragged.map_flat_values(self.table, words), axis=1))

    lengths = [n % 4 + 1 for n in range(16)]
    words = tf.RaggedTensor.from_row_lengths((np.arange(sum(lengths)) % 7), lengths)

    def build():
        model = Embedding()
        model(words)
        return model

    with runs_whole("unknown"):
        same(trained(build, words, TARGETS[:16]))


# What the trace shows besides -----------------------------------------------------------------


@slow
def test_normalization_is_divided(keras):
    """tf.keras computes that of layers by that of fused batches, where each row is a channel."""

    def build(normalized):
        inputs = keras.layers.Input((8,))
        hidden = normalized()(keras.layers.Dense(5)(inputs))
        return keras.models.Model(inputs, keras.layers.Dense(4)(hidden))

    with is_divided():
        same(trained(lambda: build(keras.layers.LayerNormalization)))
        trained(lambda: build(keras.layers.BatchNormalization), parallel=[True])


@tf.custom_gradient
def clipped(x):
    """All that comes back is one vector, whose length has a limit."""
    return tf.identity(x), lambda upstream: tf.clip_by_norm(upstream, 0.01)


@tf.custom_gradient
def clipped_each(x):
    return tf.identity(x), lambda upstream: tf.clip_by_value(upstream, -0.01, 0.01)


def in_a_loop(function):
    """Twice, in a loop that no trace unrolls."""

    def looped(x):
        def body(i, x):
            return i + 1, function(x)

        return tf.while_loop(lambda i, x: i < 2, body, [tf.constant(0), x])[1]

    return looped


OWN_GRADIENTS = {
    "all": (clipped, True),
    "in a function": (tf.function(clipped), True),
    "in a loop": (in_a_loop(clipped), True),
    "each row": (lambda x: in_a_loop(clipped_each)(tf.recompute_grad(tf.sin)(3 * x)), False),
}


@pytest.mark.parametrize(
    "name",
    ["all", pytest.param("in a loop", marks=slow)]
    + [pytest.param(name, marks=slow) for name in ("each row", "in a function")] * (not KERAS3),
)
def test_own_gradients_that_mix_rows_run_whole(keras, name):
    function, mixes = OWN_GRADIENTS[name]
    layers = keras.layers

    class Own(Layer):
        def call(self, x):
            return function(x)

    def build():
        inputs = layers.Input((8,))
        hidden = layers.Dense(6, activation="tanh")(inputs)
        return keras.models.Model(inputs, layers.Dense(4)(Own(name="own")(hidden)), name="net")

    with runs_whole("gradient") if mixes else is_divided():
        same(trained(build))


def test_one_other_device_computes_whatever_the_model_does(keras):
    results = []
    for gpus in (1, [1]):
        model = compat.parallelize(initialise(adding(WHOLE["variance"])), gpus=gpus)
        model.compile(keras_.optimizers.SGD(0.01), "mse")
        model.train_on_batch(ROWS[:16], TARGETS[:16])
        results.append(model.get_weights())
    same(results)


def test_a_model_is_traced_once_more(keras):
    traced = itertools.count()  # replicas merge what they add to a list, but not its steps

    class Noting(Layer):
        def call(self, x):
            next(traced)
            return x

    layers = keras.layers
    inputs = layers.Input((8,))
    hidden = layers.BatchNormalization()(layers.Dropout(0.5)(Noting()(inputs)))
    model = compat.parallelize(keras.models.Model(inputs, layers.Dense(4)(hidden)))
    step = tf.function(lambda rows: model(rows, training=True))
    before = next(traced)
    step.get_concrete_function(tf.TensorSpec((None, 8)))
    assert next(traced) - before - 1 == DEVICES + 1


@pytest.mark.skipif(not hasattr(keras_.layers.Dense, "quantize"), reason="Keras 3 quantizes")
def test_float8_has_the_largest_values_of_the_whole_batch(keras):
    """Keras 3 sets its history of them to its gradient."""

    def build():
        layers = keras.layers
        model = keras.Sequential([layers.Input((8,)), layers.Dense(16), layers.Dense(4)])
        initialise(model)
        model.layers[0].quantize("float8")
        return model

    results = []
    with runs_whole("different"):
        for is_parallel in (False, True):
            model = build()
            if is_parallel:
                compat.parallelize(model)
            model.compile(keras.optimizers.SGD(0.01), "mse")
            for _ in range(2):
                model.train_on_batch(ROWS[:16], TARGETS[:16])
            results.append(model.get_weights())
    same(results)


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
    with runs_whole("table"):
        same(trained(build, seen, seen[:, 0], optimizer="adam", loss=loss))


def test_what_divides_by_the_number_of_rows_is_named(keras):
    """Not the layer after it, in which that first makes a difference."""
    inputs = keras.layers.Input((8,))
    shares = keras.layers.Lambda(lambda x: x / rows_of(x), output_shape=(8,), name="shares")
    model = keras.models.Model(inputs, keras.layers.Dense(4)(shares(inputs)))
    expected = model(ROWS).numpy()
    compat.parallelize(model)
    with runs_whole() as texts:
        found = model(ROWS).numpy()
    assert re.match(r"The operation shares\S* \(RealDiv\)", texts[0]), texts
    np.testing.assert_allclose(found, expected, atol=1e-6)
