"""Values of the whole batch that operations in the middle of a model need."""

import warnings

import numpy as np
import pytest

import compat
from compat import _keras
from compat.testing import DEVICES, initialise, largest_difference, optimizer

from . import test_contract, test_replicas
from .test_trial import named

keras, profiles_not_printed = test_replicas.keras, test_contract.profiles_not_printed

#: Rows of batches: three devices have uneven shards of the first two, and one has none of the last.
ROWS = (61, 14, 2)


@pytest.fixture
def float64(keras):
    """Let Keras compute in float64; return it."""
    import theano

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(theano.config, "floatX", "float64")
        floatx = keras.backend.floatx()
        keras.backend.set_floatx("float64")
        yield keras
        keras.backend.set_floatx(floatx)


def padded(T, x):
    """Return rows with one of zeros before them."""
    return T.concatenate([T.zeros_like(x[:1]), x])


def plan_of(model, function="train_function"):
    return getattr(_keras.inner_model(model), function).plan


def reductions(model, stages="forward"):
    """How many values each device reduces in the stages of a pass."""
    counts = {
        sum(len(stage.reductions) for stage in getattr(program, stages))
        for program in plan_of(model).programs
    }
    (count,) = counts
    return count


def trained(keras, build, parallel, rows=ROWS, **options):
    """Train a model; return it, and results of each step with all weights."""
    random = np.random.RandomState(1)
    model = build()
    # Variances, too, which are positive.
    model.set_weights([0.3 * np.abs(random.normal(size=w.shape)) for w in model.get_weights()])
    if parallel:
        compat.parallelize(model, **options)
    model.compile(optimizer(keras, "sgd"), "mse")
    results = []
    shapes = [tuple(size or 5 for size in shape[1:])
              for shape in (model.input_shape, model.output_shape)]  # fmt: skip
    for count in rows:
        inputs, targets = [random.normal(size=(count,) + shape) for shape in shapes]
        results.append(np.array(model.train_on_batch(inputs, targets)))
        results.append(np.array(model.test_on_batch(inputs, targets)))
        results.append(model.predict_on_batch(inputs))
    return model, results + model.get_weights()


def assert_split(keras, build, rows=ROWS, **options):
    """Check that three devices give the results of one, without a warning; return the model."""
    _, plain = trained(keras, build, False, rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)
        model, parallel = trained(keras, build, True, rows, **options)
    assert largest_difference(plain, parallel) < 1e-10
    assert len(plan_of(model).programs) == DEVICES
    return model


def around(keras, function):
    """Return a model with a function between two layers."""
    layers = keras.layers
    first = layers.Dense(5, activation="tanh", input_shape=(8,))
    function = layers.Lambda(function, output_shape=(5,), name="function")
    return keras.models.Sequential([first, function, layers.Dense(4)])


def functions(keras):
    """Functions over the batch, with the number of values that they reduce, forward and backward.

    No gradient goes through a maximum that is subtracted.
    """
    K = keras.backend
    T = __import__("theano").tensor

    def twice(x):
        spread = K.std(x - K.mean(x, axis=0), axis=0)
        return x / (1.0 + spread)

    return {
        "mean": (lambda x: x - K.mean(x, axis=0, keepdims=True), 1, 1),
        "mean, as one operation": (lambda x: x * T.mean(K.stop_gradient(x), 0, op=True), 1, 0),
        "mean of everything": (lambda x: x * (1.0 + K.mean(x)), 1, 1),
        "sum of products": (lambda x: 0.01 * K.dot(x, K.dot(K.transpose(x), x)), 1, 1),
        "largest and smallest": (lambda x: x * (K.max(x, axis=0) - K.min(x, axis=0)), 2, 2),
        "standard deviation of what is centred": (twice, 3, 3),
        "softmax": (lambda x: K.transpose(K.softmax(K.transpose(x))), 2, 1),
        "logarithm of softmax": (lambda x: T.nnet.logsoftmax(x.T).T, 2, 1),
        "number of rows": (lambda x: x / K.cast(K.shape(x)[0], K.floatx()), 0, 0),
        "mean of a mean": (lambda x: x - K.mean(K.mean(x, axis=0)), 1, 1),
        "any": (lambda x: x * (1.0 + K.cast(K.any(x > 0.9, axis=0), K.floatx())), 1, 0),
    }


NAMES = (
    "mean", "mean, as one operation", "mean of everything", "sum of products",
    "largest and smallest", "standard deviation of what is centred", "softmax",
    "logarithm of softmax", "number of rows", "mean of a mean", "any",
)  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_value_of_the_whole_batch_is_reduced(float64, name):
    """Each is so once, and once more for its gradient, and the layers after it are split, too."""
    function, forward, backward = functions(float64)[name]
    model = assert_split(float64, lambda: around(float64, function))
    assert reductions(model) == forward
    assert reductions(model, "backward") == backward
    assert plan_of(model).body_weights == model.trainable_weights
    assert test_contract.number_of_products(plan_of(model).head) == 0
    for program in plan_of(model).programs:
        products = [
            sum(test_contract.number_of_products(stage.function) for stage in stages)
            for stages in (program.forward, program.backward)
        ]
        assert products[0] >= 2 and products[1] >= 3


def test_equal_maxima_on_two_devices(float64):
    """All that are as large have the gradient, as on one device."""
    K = float64.backend
    layer = float64.layers.Lambda(lambda x: x * K.max(K.clip(x, -0.1, 0.1), axis=0), (8,))
    assert_split(float64, lambda: float64.models.Sequential(
        [float64.layers.Dense(8, input_shape=(8,)), layer, float64.layers.Dense(4)]))  # fmt: skip


def test_state_and_losses_of_reduced_values(float64):
    """The head gets a moving average's new value from one device, and not all rows for it."""
    K, base = float64.backend, float64.layers.Layer

    class Centred(base):
        def build(self, shape):
            self.mean = self.add_weight(
                name="mean", shape=(shape[1],), initializer="zeros", trainable=False
            )
            super(Centred, self).build(shape)

        def call(self, x):
            mean = K.mean(x, axis=0)
            self.add_update([K.update(self.mean, 0.9 * self.mean + 0.1 * mean)], x)
            self.add_loss(0.1 * K.sum(K.square(mean)), x)
            return x - mean

    def build():
        layers = float64.layers
        return float64.models.Sequential(
            [layers.Dense(5, input_shape=(8,)), Centred(), layers.Dense(4)]
        )

    model = assert_split(float64, build)
    assert reductions(model) == reductions(model, "backward") == 1
    assert sorted(type(cut.placement).__name__ for cut in plan_of(model).cuts) == [
        "Replicated", "Sharded"
    ]  # fmt: skip


def test_a_large_value_is_not_reduced(keras, monkeypatch):
    """It would cost more to send than what it is computed from."""
    from compat._backends.theano import propagation

    monkeypatch.setattr(propagation, "LARGEST", 24)
    K = keras.backend
    model = around(keras, lambda x: K.dot(x, K.dot(K.transpose(x), x)))
    compat.parallelize(model).compile("sgd", "mse")
    with pytest.warns(compat.CompatWarning, match="needs the whole batch"):
        model.train_on_batch(np.ones((13, 8)), np.ones((13, 4)))
    assert reductions(model) == 0


def test_a_loop_of_steps_reduces_nothing(float64):
    """A loop would have to wait for the other devices in each of its steps."""
    K, layers = float64.backend, float64.layers

    def centred(x):
        _, steps, _ = K.rnn(lambda x, states: (x - K.mean(x, axis=0), []), x, [])
        return steps

    def build():
        layer = layers.Lambda(centred, output_shape=(3, 5))
        return float64.models.Sequential(
            [layers.Dense(5, input_shape=(3, 8)), layer, layers.Dense(2)]
        )

    _, plain = trained(float64, build, False)
    with pytest.warns(compat.CompatWarning, match="needs the whole batch"):
        model, parallel = trained(float64, build, True)
    assert largest_difference(plain, parallel) < 1e-10 and reductions(model) == 0


def test_an_error_between_reductions_is_the_users(keras):
    """Nothing has changed then, and the next step is as ever."""
    import theano

    K, failing = keras.backend, []

    @theano.compile.ops.as_op([theano.tensor.fmatrix], [theano.tensor.fmatrix])
    def checked(x):
        if failing:
            raise KeyboardInterrupt("in a step")
        return np.array(x)

    checked.grad = lambda inputs, upstream: upstream
    checked.infer_shape = lambda node, shapes: shapes
    weights = []
    for fails in (False, True):
        model = initialise(around(keras, lambda x: checked(x - K.mean(x, axis=0))))
        compat.parallelize(model).compile(optimizer(keras, "sgd"), "mse")
        for step in range(3):
            batch = np.random.RandomState(step).normal(size=(13, 8)), np.ones((13, 4))
            if fails and step == 1:
                before = model.get_weights()
                failing.append(True)
                with pytest.raises(KeyboardInterrupt, match="in a step"):
                    model.train_on_batch(*batch)
                failing.clear()
                assert largest_difference(before, model.get_weights()) == 0
            model.train_on_batch(*batch)
        assert reductions(model) == 1
        weights.append(model.get_weights())
    assert largest_difference(*weights) == 0


@pytest.mark.parametrize("sizes", [(3, 2, 2), (0, 1, 1)])
def test_what_is_reduced_counts_each_row_once(sizes):
    from compat._backends.theano.reductions import reduced

    random = np.random.RandomState(0)
    shards = [random.normal(size=(size, 4)) + 1000 for size in sizes]
    rows = np.concatenate(shards)
    parts = [shard if len(shard) else np.full((1, 4), 7.0) for shard in shards]

    def of_parts(*functions, how=None):
        values = [[function(part, 0) for function in functions] for part in parts]
        return reduced(how or functions[0].__name__, values, sizes)

    for function in (np.sum, np.mean, np.max, np.min):
        how = {"amax": "max", "amin": "min"}.get(function.__name__, function.__name__)
        for (value,) in of_parts(function, how=how):
            np.testing.assert_allclose(value, function(rows, 0), rtol=1e-12)
    for mean, variance in of_parts(np.mean, np.var, how="moments"):
        np.testing.assert_allclose(mean, rows.mean(0), rtol=1e-12)
        np.testing.assert_allclose(variance, rows.var(0), rtol=1e-9)
    gradients = of_parts(np.mean, how="gradient")
    total = sum(part.mean(0) for part, size in zip(parts, sizes) if size)
    for (gradient,), size in zip(gradients, sizes):
        np.testing.assert_allclose(gradient, total if size else 0 * total)


def test_what_follows_a_reduction_and_is_not_split_is_named(keras):
    K = keras.backend
    T = __import__("theano").tensor
    model, _ = named(keras, lambda x: padded(T, K.dot((x - K.mean(x, axis=0))[1:], T.eye(5))))
    compat.parallelize(model).compile("sgd", "mse")
    with pytest.warns(compat.CompatWarning, match="dot"):
        model.train_on_batch(np.ones((13, 8)), np.ones((13, 4)))
