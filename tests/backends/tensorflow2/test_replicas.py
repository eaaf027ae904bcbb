"""TensorFlow 2: steps of one's own that call a model's parts, whose replicas compute them."""

import warnings

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._backends.tensorflow2 import replicas
from compat._backends.tensorflow2.profiler import products
from compat._backends.tensorflow2.run_metadata import nodes_executed
from compat.testing import DEVICES, initialise, keras_under_test, slow, span

from ..messages import refusal, told
from .test_contract import KERAS3, ROWS, TARGETS, TRAIN_STEP, weights_of

keras_ = keras_under_test()
layers = keras_.layers
RATE = 0.01


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_


def dense(inputs, *units):
    parts = [layers.Input((inputs,))]
    parts += [layers.Dense(unit, activation="tanh") for unit in units[:-1]]
    return initialise(keras_.models.Sequential(parts + [layers.Dense(units[-1])]), seed=sum(units))


def apply(optimizer, tape, loss, model):
    gradients = tape.gradient(loss, weights_of(model))
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))


class Autoencoder(keras_.Model):
    """keras.io's VAE."""

    def __init__(self):
        super().__init__()
        inputs = layers.Input((8,))
        hidden = layers.Dense(6, activation="tanh")(inputs)
        outputs = [layers.Dense(3)(hidden), layers.Dense(3)(hidden)]
        self.encoder = initialise(keras_.models.Model(inputs, outputs, name="encoder"))
        self.decoder = dense(3, 6, 8)
        self.tracker = keras_.metrics.Mean(name="loss")

    def train_step(self, data):
        rows, noise = data
        with tf.GradientTape() as tape:
            mean, log_variance = self.encoder(rows)
            decoded = self.decoder(mean + tf.exp(0.5 * log_variance) * noise[:, :3])
            loss = tf.reduce_mean(tf.reduce_sum((rows - decoded) ** 2, axis=1))
            divergence = -0.5 * (1 + log_variance - mean**2 - tf.exp(log_variance))
            loss += tf.reduce_mean(tf.reduce_sum(divergence, axis=1))
        apply(self.optimizer, tape, loss, self)
        self.tracker.update_state(loss)
        return {"loss": self.tracker.result()}


def fitted(model, parallel):
    if parallel:
        assert compat.parallelize(model) is model
    options = {} if not KERAS3 else {"jit_compile": False}
    model.compile(keras_.optimizers.SGD(RATE), **options)
    return model.fit(ROWS, TARGETS, batch_size=16, shuffle=False, verbose=0)


if TRAIN_STEP:  # TensorFlow 2.0 has no steps of one's own

    @slow
    @pytest.mark.row("subclassed models")
    def test_steps_that_call_parts_train_to_the_numbers_of_one_device(keras):
        results = []
        for parallel in (False, True):
            model = Autoencoder()
            with warnings.catch_warnings():
                warnings.simplefilter("error", compat.CompatWarning)
                history = fitted(model, parallel).history
            results.append(model.get_weights() + [history[name] for name in sorted(history)])
        for expected, found in zip(*results):
            np.testing.assert_allclose(expected, found, rtol=1e-5, atol=1e-6)

    def test_parts_called_by_a_step_run_on_every_device(keras):
        model = Autoencoder()
        found = products(nodes_executed(lambda: fitted(model, True)))
        assert set(found) == {"/cpu:0", "/cpu:1", "/cpu:2"}
        assert len(set(found.values())) == 1 and all(found["/cpu:1"]), found
        compat.parallelize(model, gpus=1)
        for each in (model, model.encoder, model.decoder):
            assert not {"call", "make_train_function"} & set(vars(each))

    class Hidden(keras_.Model):
        """Its step calls models that Keras does not know of."""

        def __init__(self, hidden):
            super().__init__()
            self.hidden, self.shown = hidden, dense(8, 2, 4)

        def train_step(self, data):
            rows, targets = data
            (model,) = self.hidden()
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((model(rows) - targets) ** 2)
            apply(self.optimizer, tape, loss, model)
            return {"loss": loss}

    @slow
    @pytest.mark.parametrize("verify", [0, 1])
    def test_a_step_that_reaches_no_replica_says_so(keras, verify, monkeypatch):
        monkeypatch.setattr(
            compat._runtime.process.process.configuration.settings, "verify", verify
        )
        part = dense(8, 6, 4)
        model = compat.parallelize(Hidden(lambda: [part]))
        model.compile(keras.optimizers.SGD(RATE))
        with told() as texts:
            model.fit(ROWS, TARGETS, batch_size=16, verbose=0)
        assert texts == [
            "The first step of training {!r} ran on one device: its train_step() calls neither "
            "the model nor a model within it (model.shown). Write compat.parallelize(part) for "
            "each model that it calls; put layers that it calls by themselves into a keras.Model "
            "first.".format(model.name)
        ]
        compat.parallelize(part)
        with warnings.catch_warnings():
            warnings.simplefilter("error", compat.CompatWarning)
            compat.parallelize(model)
            model.fit(ROWS, TARGETS, batch_size=16, verbose=0)


# Strategies and graphs around the model -------------------------------------------------------


@span
def test_a_strategy_around_parallelize_is_refused(keras):
    strategy = tf.distribute.MirroredStrategy(["/cpu:0", "/cpu:1"])
    plain = dense(8, 4)
    with strategy.scope():
        model = dense(8, 4)
        with pytest.raises(compat.UnsupportedError) as error:
            compat.parallelize(plain)
    assert str(error.value) == (
        "parallelize() and tf.distribute both run a model on several devices: it was called "
        "within the scope of a MirroredStrategy. Build the model and call parallelize() outside "
        'of the strategy\'s scope, or write compat.parallelize(build_model, strategy="mirrored").'
    )
    assert refusal(compat.UnsupportedError, compat.parallelize, model) == (
        "parallelize() and tf.distribute both run a model on several devices: the variables of "
        "{!r} were made in the scope of a strategy. Build the model and call parallelize() outside "
        "of the strategy's scope, or write compat.parallelize(build_model, "
        'strategy="mirrored").'.format(model.name)
    )
    assert compat.parallelize(model, gpus=1) is model
    assert "call" not in vars(model)


if not KERAS3:  # which builds no model there

    @span
    def test_a_graph_around_parallelize_is_named(keras):
        with tf.Graph().as_default():
            model = keras.models.Sequential([layers.Dense(4, input_shape=(8,))])
            with pytest.raises(compat.UnsupportedError) as error:
                compat.parallelize(model)
        assert str(error.value) == (
            "tensorflow2 cannot run a model on several devices within tf.Graph().as_default(). "
            "Build the model outside of that graph, or write "
            "tf.compat.v1.disable_v2_behavior() at the top of the script, to have TensorFlow 1."
        )


def test_variables_that_a_replica_makes_stay_listed():
    """TensorFlow 1's Saver, for example, saves what the graph lists."""
    with tf.Graph().as_default():
        before = tf.compat.v1.get_variable("before", ())
        with replicas._listing_no_variables():
            assert not tf.compat.v1.global_variables()
            within = tf.compat.v1.get_variable("within", ())
        assert [v.name for v in tf.compat.v1.global_variables()] == [before.name, within.name]
