"""Models for the tests of verification, of Keras 3 if nothing else is said."""

import warnings

import numpy as np
import pytest

import compat
from compat import _verification
from compat._configuration.settings import Every
from compat.testing import initialise, largest_difference

ROWS = np.random.RandomState(0).normal(size=(20, 4)).astype("float32")


def verified(backend, model, steps=1):
    """Have the model's steps verified: the record of what was."""
    name = getattr(model, "name", type(model).__name__)
    verification = _verification.Verification(name, backend.devices(), steps)
    backend.verify(model, verification)
    return verification.record


def check_quantized_tables(keras):
    """Check shards of one row, and of none."""
    for kind, rows in ("int8", 2), ("int8", 13), ("int4", 2), ("int4", 13):
        inputs = keras.layers.Input((1,), dtype="int32")
        model = keras.Model(inputs, keras.layers.Embedding(12, 16, name="table")(inputs))
        model.get_layer("table").quantize(kind)
        batch = np.random.RandomState(0).randint(0, 12, (rows, 1))
        expected = model.predict(batch, verbose=0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", compat.CompatWarning)  # on torch int8 runs unsplit
            found = compat.parallelize(model).predict(batch, verbose=0)
        np.testing.assert_allclose(expected, found, rtol=1e-6, err_msg=kind)


def mixes_rows_from_a_later_batch(keras, parallel):
    """Return a model that subtracts the mean over its rows once one of them is above 5."""

    class Centred(keras.layers.Layer):
        def call(self, x):
            is_large = keras.ops.max(x) > 5
            return x - keras.ops.where(is_large, keras.ops.mean(x, axis=0, keepdims=True), 0.0)

    layers = [keras.layers.Input((4,)), Centred(), keras.layers.Dense(2)]
    model = initialise(keras.models.Sequential(layers))
    if parallel:
        compat.parallelize(model)
    model.compile(keras.optimizers.SGD(0.01), "mse")
    return model


def batches():
    """Six batches; rows mix in the last three."""
    random = np.random.RandomState(0)
    inputs = random.uniform(-1, 1, size=(6, 12, 4)).astype("float32")
    inputs[3:, :, 0] += 6
    return list(zip(inputs, random.normal(size=(6, 12, 2)).astype("float32")))


def weights_until_found(backend, keras):
    """Train on those batches, with every second step verified.

    Returns:
        Weights on one device and on several; or the error of what was found, and the step's number.
    """
    models = [mixes_rows_from_a_later_batch(keras, parallel) for parallel in (False, True)]
    verified(backend, models[1], Every(2))
    for number, batch in enumerate(batches()):
        for model in models:
            try:
                model.train_on_batch(*batch)
            except compat.ResultsDifferError as error:
                return error, number
    return [model.get_weights() for model in models]


def check_an_optional_input_that_is_not_given(keras, backend):
    class Sum(keras.layers.Layer):
        def call(self, first, second=None):
            return first if second is None else first + second

        def compute_output_shape(self, first_shape, second_shape=None):
            return first_shape

    def generated():
        while True:
            yield (ROWS[:7], None), ROWS[:7, :2]

    given, missing = keras.layers.Input((4,)), keras.layers.Input((4,), optional=True)
    for fed in ("arrays", "generator"):
        model = keras.Model([given, missing], keras.layers.Dense(2)(Sum()(given, missing)))
        compat.parallelize(model)
        model.compile("sgd", "mse")
        record = verified(backend, model)
        if fed == "arrays":
            model.fit([ROWS, None], ROWS[:, :2], verbose=0)
            assert model.predict([ROWS, None], verbose=0).shape == (20, 2)
        else:
            model.fit(generated(), steps_per_epoch=2, verbose=0)
        assert record.steps["train"] == 1


def check_the_users_error_is_the_one_that_is_raised(keras, backend):
    """Keras raises it in the first step, when it makes the metrics."""
    rows = keras.layers.Input((4,))
    outputs = {name: keras.layers.Dense(2, name=name)(rows) for name in ("first", "second")}
    model = keras.models.Model(rows, outputs)
    compat.parallelize(model)
    model.compile("adam", "mse", metrics={"first": ["mae"], "third": ["mae"]})
    verified(backend, model)
    with pytest.raises(ValueError, match="third|The two structures"):
        model.fit(ROWS, {"first": ROWS[:, :2], "second": ROWS[:, :2]}, verbose=0)


def check_rows_that_mix_in_a_later_batch(keras, backend):
    """They are right, or found."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", compat.CompatWarning)
        first, second = weights_until_found(backend, keras)
    if isinstance(first, compat.ResultsDifferError):
        assert second == 4, "the first step that is verified and mixes rows"
        assert "does a training step on 3 devices" in str(first)
    else:
        assert largest_difference(first, second) < 1e-5
