"""Models whose batches XLA shards over several devices."""

import jax
import numpy as np
import pytest

import compat
from compat._backends.jax import backend, programs
from compat._backends.jax.configuration import device_name
from compat._keras import watched_methods
from compat.testing import DEVICES, initialise, keras_under_test
from compat.testing.models import fit_in_order

from .. import verification_cases
from .test_contract import executed

ROWS = np.random.RandomState(0).normal(size=(44, 8)).astype("float32")  # do not divide by 3


TARGETS = np.random.RandomState(1).normal(size=(44, 4)).astype("float32")


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_under_test()


def pair(build):
    """Return the same model twice, the second one parallel."""
    return initialise(build()), compat.parallelize(initialise(build()))


def small(keras, name=None):
    layers = keras.layers
    return keras.Sequential(
        [layers.Input((8,)), layers.Dense(6, activation="tanh"), layers.Dense(4)], name=name
    )


def train(keras, model, **options):
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **options)
    return fit_in_order(model, ROWS, TARGETS, epochs=2).history["loss"]


def check_same(keras, build, tolerance=1e-5, **options):
    """Check that a model is trained to the same results on one device and on all."""
    models = pair(build)
    losses = [train(keras, model, **options) for model in models]
    np.testing.assert_allclose(losses[0], losses[1], rtol=tolerance)
    assert_same(models, tolerance / 10)
    return models


def assert_same(models, tolerance=1e-6):
    for expected, found in zip(*(model.get_weights() for model in models)):
        np.testing.assert_allclose(expected, found, atol=tolerance)


def test_batch_statistics_masks_and_added_losses_are_those_of_one_device(keras):
    """Rows with which XLA fills up a shard enter nothing; dropout masks are the very same."""

    def build():
        layers = keras.layers
        return keras.Sequential(
            [
                layers.Input((8,)),
                layers.Dense(6, activity_regularizer="l2"),
                layers.BatchNormalization(momentum=0.5),
                layers.Dropout(0.5, seed=7),
                layers.Dense(4),
            ]
        )

    def prepared(model):  # a variance is above 0
        model.set_weights([np.abs(w) for w in model.get_weights()])
        return model

    models = [prepared(initialise(build())), prepared(compat.parallelize(initialise(build())))]
    losses = [train(keras, model) for model in models]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    variables = zip(*(model.variables for model in models))
    differences = [np.abs(np.array(a) - np.array(b)).max() for a, b in variables]
    assert max(differences) < 1e-5, differences


@pytest.mark.row("subclassed models")
@pytest.mark.parametrize("parts", ["models", "layers"])
def test_step_that_calls_the_parts_of_a_model_runs_on_several_devices(keras, parts):
    """As those of GANs and autoencoders do; its step never calls the model itself."""

    class Parts(keras.Model):
        def __init__(self):
            super().__init__(name="parts")
            wrap = keras.models.Sequential if parts == "models" else lambda layers: layers[0]
            self.encoder = wrap([keras.layers.Dense(16, name="hidden")])
            self.decoder = wrap([keras.layers.Dense(4)])
            self.encoder.build((None, 8)), self.decoder.build((None, 16))
            self.built = True

        def call(self, x):  # by which Keras builds it
            return self.decoder(self.encoder(x))

        def loss_of(self, trainable, data):
            first = len(self.encoder.trainable_variables)
            hidden, _ = self.encoder.stateless_call(trainable[:first], [], data[0])
            outputs, _ = self.decoder.stateless_call(trainable[first:], [], hidden)
            return keras.ops.mean((outputs - data[1]) ** 2)

        def train_step(self, state, data):
            trainable, others, variables, metrics = state
            loss, gradients = jax.value_and_grad(self.loss_of)(trainable, data)
            trainable, variables = self.optimizer.stateless_apply(variables, gradients, trainable)
            return {"loss": loss}, (trainable, others, variables, metrics)

    plain, parallel = pair(Parts)
    for model in plain, parallel:
        model.compile(keras.optimizers.SGD(0.1), "mse")
        fit_in_order(model, ROWS, TARGETS, 44, epochs=2)
    assert_same([plain, parallel])
    found = executed(parallel, ROWS, TARGETS)
    assert sorted(found) == ["cpu:0", "cpu:1", "cpu:2"]
    for ran in found.values():
        shapes = [o.shapes for o in ran if o.shapes[0][-1] == 16 and 8 in o.shapes[1]]
        assert [result for result, _, _ in shapes] == [[15, 16]]
    compat.parallelize(parallel, gpus=1)
    assert "train_step" not in vars(parallel) and "call" not in vars(parallel.encoder)


def test_loop_of_ones_own(keras):
    """``stateless_call`` under ``jax.jit`` is sharded like Keras' loops."""
    models, results = pair(lambda: small(keras)), []
    for model in models:

        @jax.jit
        def step(weights, rows, model=model):
            def loss(weights):
                outputs, _ = model.stateless_call(weights, [], rows, training=True)
                return (outputs**2).mean()

            return jax.value_and_grad(loss)(weights)

        weights = [v.value for v in model.trainable_variables]
        lowered = step.lower(weights, ROWS).compile()
        value, gradients = step(weights, ROWS)
        results.append([value] + gradients)
    for expected, found in zip(*results):
        np.testing.assert_allclose(expected, found, atol=1e-6)
    computed = sum(programs.operations(lowered.as_text()).values(), [])
    assert computed and not any(len(ROWS) in sum(each.shapes, []) for each in computed)


def test_uneven_batches_that_share_a_divisor_with_the_devices(run):
    """XLA would have cut what a program is given, such as targets, into two parts for four."""
    printed = run(
        """
        import compat
        compat.configure_gpu(simulate=4, verify=0)
        import jax, keras, numpy as np

        keras.utils.set_random_seed(0)
        layers = [keras.layers.Input((4, 3)), keras.layers.SimpleRNN(3), keras.layers.Dense(2)]
        model = keras.Sequential(layers)
        rows, targets = np.ones((10, 4, 3), "float32"), np.ones((10, 2), "float32")

        def loss(weights, rows, targets):
            others = [v.value for v in model.non_trainable_variables]
            outputs, _ = model.stateless_call(weights, others, rows)
            return ((outputs - targets) ** 2).mean()

        def results(count):
            weights = [v.value for v in model.trainable_variables]
            step = jax.jit(jax.value_and_grad(loss))
            value, gradients = step(weights, rows[:count], targets[:count])
            return [value] + gradients

        expected = [results(count) for count in (10, 2)]
        compat.parallelize(model)
        for count, one in zip((10, 2), expected):
            for a, b in zip(one, results(count)):
                print(np.allclose(a, b, atol=1e-6))
        model.compile("sgd", "mse")
        model.fit(rows, targets, batch_size=6, verbose=0)
        print(model.predict(rows, verbose=0).shape)
        """
    )
    assert printed.splitlines() == ["True"] * 12 + ["(10, 2)"]


def test_direct_calls(keras):
    """Outside of a program only a batch that divides is sharded; others are right, too."""
    plain, parallel = pair(lambda: small(keras))
    for rows in (42, 44, 1):
        outputs = parallel(ROWS[:rows])
        np.testing.assert_allclose(plain(ROWS[:rows]), outputs, atol=1e-6)
        assert len(outputs.devices()) == DEVICES
        shards = [shard.data.shape[0] for shard in outputs.addressable_shards]
        assert shards == [rows if rows % DEVICES else rows // DEVICES] * DEVICES


def test_eager_steps_of_batches_that_do_and_do_not_divide(keras):
    models = pair(lambda: keras.Sequential([keras.layers.Input((8,)), keras.layers.Dense(4)]))
    for model in models:
        model.compile(keras.optimizers.SGD(0.1), "mse", run_eagerly=True)
        for rows in (7, 6):
            model.train_on_batch(ROWS[:rows], TARGETS[:rows])
    assert_same(models)


def test_the_users_error_is_the_one_that_is_raised(keras):
    verification_cases.check_the_users_error_is_the_one_that_is_raised(keras, backend)


def test_quantized_tables(keras):
    verification_cases.check_quantized_tables(keras)


def test_float8_has_the_largest_values_of_the_whole_batch(keras):
    """Keras sets its history of them to its gradient."""

    def build():
        model = small(keras)
        model.layers[-1].quantize("float8")
        return model

    check_same(keras, build)


def test_mixed_precision_scales_the_loss(keras):
    keras.config.set_dtype_policy("mixed_float16")
    try:
        models = check_same(keras, lambda: small(keras), 1e-3)
    finally:
        keras.config.set_dtype_policy("float32")
    assert type(models[1].optimizer).__name__ == "LossScaleOptimizer"


def test_weights_shared_by_models_on_different_devices(keras):
    """Each loop takes them to its own devices; a plain model leaves them where they are."""
    template = initialise(small(keras))
    inputs = keras.layers.Input((8,))
    all_three, two = (
        compat.parallelize(keras.Model(inputs, template(inputs)), gpus) for gpus in (None, [2, 1])
    )
    weight = template.weights[0]
    for model, devices in [
        (all_three, ["cpu:0", "cpu:1", "cpu:2"]),
        (two, ["cpu:1", "cpu:2"]),
        (template, None),
        (all_three, ["cpu:0", "cpu:1", "cpu:2"]),
    ]:
        before = template.get_weights()
        losses = train(keras, model)
        assert losses[0] > losses[-1]
        assert np.abs(before[0] - np.array(weight)).max() > 1e-4
        if devices:
            assert sorted(map(device_name, weight.value.devices())) == devices
    outputs = [model.predict(ROWS, verbose=0) for model in (all_three, two, template)]
    np.testing.assert_allclose(outputs[0], outputs[1], atol=1e-6)
    np.testing.assert_allclose(outputs[0], outputs[2], atol=1e-6)


def test_inner_model_does_not_split_again(keras):
    inner = compat.parallelize(initialise(small(keras)), [0, 1])
    inputs = keras.layers.Input((8,))
    outer = compat.parallelize(keras.Model(inputs, inner(inputs)))
    plain = initialise(small(keras))
    np.testing.assert_allclose(train(keras, plain), train(keras, outer), rtol=1e-5)
    assert_same([plain, outer])
    np.testing.assert_allclose(train(keras, plain), train(keras, inner), rtol=1e-5)


def test_one_device_leaves_nothing_behind(keras):
    model = small(keras)
    train(keras, model)
    before = set(vars(model))
    assert compat.parallelize(model, gpus=1) is model
    assert set(vars(model)) == before
    compat.parallelize(model)
    train(keras, model)
    assert len(model.weights[0].value.devices()) == DEVICES
    added = {name for name in set(vars(model)) - before if not name.startswith("make_")}
    # And what verifies the first steps, and what checks that they use all devices.
    added -= set(watched_methods._KINDS)
    assert added == {"call", "_get_jax_state", "_make_function"}
    compat.parallelize(model, gpus=1)
    assert set(vars(model)) == before
    for variable in model.variables + model.optimizer.variables + model.metrics_variables:
        assert variable.value.devices() == {jax.devices()[0]}
        assert not variable.value.committed  # goes where its step goes, as a new one does
    train(keras, model)
    assert model.weights[0].value.devices() == {jax.devices()[0]}


def test_keras_own_distribution_is_refused(keras):
    """It shards batches before the step, where JAX takes none that does not divide."""
    text = (
        "parallelize() cannot shard the batches of model {!r}: a keras.distribution is set, or was "
        "when the model was built, and Keras shards them itself, with an error for batches that do "
        "not divide. Use one of the two: call keras.distribution.set_distribution(None) before the "
        "model is built, or leave parallelize() out."
    )
    model, spread = compat.parallelize(small(keras, "before")), keras.distribution.DataParallel()
    with spread.scope():
        for name, call in (
            ("in_scope", lambda: compat.parallelize(small(keras, "in_scope"))),
            ("before", lambda: model.predict_on_batch(ROWS)),
        ):
            with pytest.raises(compat.UnsupportedError) as error:
                call()
            assert str(error.value) == text.format(name)
        laid_out = small(keras, "laid_out")
        with pytest.raises(Exception, match="divisible|divide"):
            train(keras, laid_out)
    with pytest.raises(compat.UnsupportedError) as error:
        compat.parallelize(laid_out)
    assert str(error.value) == text.format("laid_out")
    train(keras, model)


def test_parts_of_a_model_have_no_device_of_their_own(keras):
    """``jax.default_device``, which keras.device() sets, moves nothing within a program."""

    @jax.jit
    def step(rows):
        with jax.default_device(jax.devices()[1]):
            return rows @ rows.T

    assert step(ROWS).devices() == {jax.devices()[0]}
    with pytest.raises(compat.UnsupportedError) as error:
        compat.device(1)
    assert str(error.value) == (
        "jax cannot place parts of a model on cpu:1: under jax.jit a step is one program, all of "
        "which runs on the same devices. Leave compat.device() out; parallelize() splits the "
        "batches of the whole model."
    )
