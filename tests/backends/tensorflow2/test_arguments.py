"""TensorFlow 2: arguments of all kinds, which are data or the same for all rows."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._backends.tensorflow2 import replicas
from compat._backends.tensorflow2.arguments import _PlainValue
from compat._backends.tensorflow2.call_reductions import can_count
from compat.testing import slow, span

from .reductions import (
    is_divided,
    keras_,
    runs_unsplit,
    same,
    three_devices,  # noqa: F401  # the fixture
    trained,
)
from .test_contract import KERAS3, ROWS, TARGETS, TRAIN_STEP, pair


class Attending(keras_.Model):
    """Each query attends to all rows of a memory, which is an argument of its own."""

    def __init__(self):
        super().__init__()
        self.last = keras_.layers.Dense(4)

    def call(self, queries, memory=None, training=None):
        weights = tf.nn.softmax(tf.matmul(queries, memory, transpose_b=True))
        return self.last(tf.matmul(weights, memory))


def check_attending(queries, memory, call):
    """Check that calls of a model that attends to a memory are right with parallelize()."""

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
        "parallelize() splits each batch along its first dimension, and another argument of this "
        "model's call has a different size there than the first, which TensorFlow did not know "
        "when it traced the call. Make it the model's own attribute, have tf.function's "
        "input_signature say how many rows it has, or run this model on one device, with "
        "parallelize(model, gpus=1)."
    ) in str(error.value).replace("\\'", "'")


class Summing(tf.Module):
    def __call__(self, *given):
        return tf.add_n(given)


def test_an_argument_of_as_many_rows_is_data_after_one_whose_rows_only_a_run_tells():
    specs = [tf.TensorSpec((rows, 8)) for rows in (6, None, 6)]
    model = compat.parallelize(Summing())
    call = tf.function(lambda *given: model(*given), input_signature=specs)
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)  # that it runs unsplit
        found = call(*[tf.constant(ROWS[:6])] * 3)
    np.testing.assert_allclose(found, ROWS[:6] * 3, rtol=1e-5)


class Remembering(Attending):
    def call(self, memory, queries=None, training=None):
        return super().call(queries, memory=memory)


def test_an_output_that_follows_another_argument_is_reduced(keras):
    memory, queries = tf.constant(ROWS[10:21]), tf.constant(ROWS[:6])
    model = Remembering()
    expected = model(memory, queries=queries).numpy()
    compat.parallelize(model)
    call = tf.function(lambda memory, queries: model(memory, queries=queries))
    with is_divided() if can_count() else runs_unsplit():
        np.testing.assert_allclose(call(memory, queries), expected, rtol=1e-5, atol=1e-6)


def test_inputs_with_different_rows_run_unsplit(keras):
    rows = (tf.constant(ROWS[:6]), tf.constant(ROWS[10:21]))
    model = Pair()
    expected = model(rows).numpy()
    compat.parallelize(model)
    call = tf.function(lambda *given: model(given))
    with runs_unsplit("different"):
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
        "parallelize() splits each batch along its first dimension, and this model's inputs have "
        "different sizes there. Give inputs with one row for each sample, pass what all samples "
        "share as another argument of the call or as the model's own attribute, or run this model "
        "on one device, with parallelize(model, gpus=1)."
    ) in str(error.value).replace("\\'", "'")


class Pair(Attending):
    def call(self, inputs, training=None):
        return super().call(inputs[0], memory=inputs[1])


class Graph(keras_.Model):
    def call(self, inputs, training=None):
        return tf.matmul(inputs[1], inputs[0])


def test_a_matrix_of_rows_by_rows_runs_unsplit(keras):
    nodes, adjacency = tf.constant(ROWS[:9]), tf.eye(9)
    model = compat.parallelize(Graph())
    with runs_unsplit():
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


@slow
@pytest.mark.skipif(KERAS3 or not TRAIN_STEP, reason="which take no such batches")
def test_ragged_batches_run_unsplit(keras):
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

    with runs_unsplit("unknown"):
        same(trained(build, words, TARGETS[:16]))


# Eager calls that one trace holds for ------------------------------------------------------------

SHARED = np.arange(4000, dtype="float32")
OTHER = SHARED.copy()
OTHER[2000] = 0


class Choosing(tf.Module):
    """It adds up the rows, or leaves them, by an argument that is no tensor, or by its name."""

    def __call__(self, x, first=None, second=None, table=None, factor=1.0):
        is_summed = second is not None or table is not None and table[2000] == 0
        return tf.reduce_sum(x, axis=0) if is_summed else x * factor


CHOICES = {
    "arrays that numpy abbreviates": [{"table": SHARED}, {"table": OTHER}],
    "names": [{"first": TARGETS}, {"second": TARGETS}],
    "numbers": [{"factor": 2.0}, {"factor": 3}],
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_trace_holds_for_calls_with_the_same_arguments(keras, name):
    plain, model, rows = Choosing(), compat.parallelize(Choosing()), tf.constant(ROWS)
    for options in CHOICES[name] * 2:
        options = {key: tf.constant(v) if v is TARGETS else v for key, v in options.items()}
        same([plain(rows, **options)[None], model(rows, **options)[None]])
    assert len(type(model)._compat_call.traces) == 2


def test_traces_of_arguments_that_always_differ_do_not_pile_up(keras, monkeypatch):
    monkeypatch.setattr(replicas, "TRACES", 3)
    model, rows = compat.parallelize(Choosing()), tf.constant(ROWS)
    for factor in (1, 2, 3, 1, 4, 1):
        model(rows, factor=factor)
        traces = type(model)._compat_call.traces
    assert len(traces) == 3
    traced = dict(traces)
    for factor in (1, 3, 4):
        model(rows, factor=factor)
    assert {id(trace) for trace in traces.values()} == {id(trace) for trace in traced.values()}


def test_an_object_is_the_same_argument_as_long_as_it_lives():
    class Config:
        def __repr__(self):
            return "Config()"

    config = Config()
    first, again, other = map(_PlainValue, (config, config, Config()))
    assert first == again and first != other and hash(first) == hash(again)
    del config
    assert first != again
    for value, unequal in ((float("nan"), 1.0), (0.0, -0.0), (1, True), ("1", 1), (None, 0)):
        value, same_value, unequal = map(_PlainValue, (value, value, unequal))
        assert value == same_value and value != unequal
