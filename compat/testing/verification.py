"""That the first steps of a Keras model on several devices are compared with one device."""

import warnings

import pytest

import compat

from .contract import BackendContract
from .models import CASES, initialise, largest_difference, optimizer
from .spans import in_span, span


class VerificationContract(BackendContract):
    """What ``verify=`` finds, and what it leaves behind."""

    #: What becomes of an operation across the rows of a batch: "right", or "found" and refused.
    across_rows = "found"

    @pytest.mark.parametrize("name", in_span(sorted(CASES), ["dense"]))
    def test_first_steps_are_verified(self, keras, name):
        """They leave the model as steps do that are not, and say what they compared."""
        inputs, targets = CASES[name].data(45)
        models = [self.compiled(keras, name, parallel=True) for _ in range(2)]
        record = self.verified(models[1], 2)
        for model in models:
            model.fit(
                inputs, targets, batch_size=16, epochs=1, shuffle=False, verbose=0,
                validation_data=(inputs, targets),
            )  # fmt: skip
            model.predict(inputs, verbose=0)
        assert record.steps == {"train": 2, "evaluate": 1, "predict": 1}
        assert record.compared > 2 * len(models[0].get_weights())
        assert not record.incomparable
        assert 0 < record.largest[0] < 1e-3  # the same work in another order
        self.close(models[0].get_weights(), models[1].get_weights())

    def test_a_step_that_cannot_be_compared_is_taken_all_the_same(self, keras):
        """Its weights and slots are those of a step that nobody looked at."""

        def build():
            layers = keras.layers
            return keras.models.Sequential(
                [layers.BatchNormalization(momentum=0.5, input_shape=(8,)), layers.Dense(4)]
            )

        inputs, targets = CASES["dense"].data(45)
        models = [build(), build()]
        models[1].set_weights(models[0].get_weights())
        for model in models:
            compat.parallelize(model)
            model.compile(optimizer(keras, "sgd"), "mse")
        self.verified(models[1])
        for model in models:
            for _ in range(3):
                model.train_on_batch(inputs, targets)
        self.close(models[0].get_weights(), models[1].get_weights())

    @span
    def test_a_difference_is_found_and_the_model_left_as_it_was(self, keras, monkeypatch):
        """A weight that a step on several devices changes by a tenth too much."""
        inputs, targets = CASES["dense"].data(45)
        model = self.compiled(keras, "dense", parallel=True)
        model.train_on_batch(inputs, targets)
        start = model.get_weights()
        self.verified(model)
        difference = self.disturb(monkeypatch)
        with pytest.raises(compat.ResultsDifferError) as caught:
            model.train_on_batch(inputs, targets)
        assert "model {!r} does a training step on 3 devices".format(model.name) in str(
            caught.value
        )
        assert difference and difference[0] in str(caught.value)
        self.close(start, model.get_weights(), 1e-12)
        model.train_on_batch(inputs, targets)  # it can be trained on
        assert largest_difference(start, model.get_weights()) > 1e-4

    @span
    def test_operation_across_rows_is_right_or_found(self, keras):
        """Each row less the mean of all rows of the batch, which no replica sees."""
        K = keras.ops if hasattr(keras, "ops") else keras.backend

        def build():
            layers = keras.layers
            rows = layers.Input(shape=(8,))
            hidden = layers.Dense(6, name="hidden")(rows)
            centred = layers.Lambda(lambda x: x - K.mean(x, axis=0, keepdims=True))(hidden)
            return keras.models.Model(rows, layers.Dense(4, name="classes")(centred))

        inputs, targets = CASES["dense"].data(45)
        plain, parallel = initialise(build()), initialise(build())
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", compat.CompatWarning)
                compat.parallelize(parallel)
                for model in (plain, parallel):
                    model.compile(optimizer(keras, "sgd"), "mse")
                self.verified(parallel)
                for model in (plain, parallel):
                    model.train_on_batch(inputs, targets)
        except (compat.ResultsDifferError, compat.UnsupportedError, compat.CompatWarning) as error:
            assert self.across_rows == "found", error
        else:
            assert self.across_rows == "right"
            self.close(plain.get_weights(), parallel.get_weights())
