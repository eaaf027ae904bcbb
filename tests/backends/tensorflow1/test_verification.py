"""Verification on TensorFlow 1: optimizers of all kinds, learning phases, metrics with state."""

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat._configuration import registry
from compat.testing import CASES, initialise, keras_under_test, largest_difference, slow

from .. import graph_cases
from ..verification_cases import verified
from .row_models import three_devices  # noqa: F401  # the fixture
from .test_trial import paired

backend = registry.find("tensorflow1")
OLD = keras_under_test() is not getattr(tf, "keras", None)


def wrapping(keras):
    """As keras-lookahead: keeps slow weights, and has its updates from another optimizer."""
    K = keras.backend

    class Lookahead(keras.optimizers.Optimizer):
        def __init__(self, optimizer):
            super(Lookahead, self).__init__()
            self.optimizer = optimizer

        @property
        def iterations(self):
            return self.optimizer.iterations

        def get_updates(self, loss, params):
            slow = [K.variable(K.get_value(p)) for p in params]
            self.updates = list(self.optimizer.get_updates(loss=loss, params=params))
            with tf.control_dependencies(self.updates):
                for p, s in zip(params, slow):
                    mean = 0.5 * (s + p)
                    self.updates.append(K.update(s, mean))
            self.weights = self.optimizer.weights + slow
            return self.updates

        def get_config(self):
            return {}

    return Lookahead(keras.optimizers.Adam())


def grouping(keras):
    """As keras-lr-multiplier, twice: each group of weights has its updates, which all count."""

    class Groups(keras.optimizers.Optimizer):
        def __init__(self, optimizer):
            super(Groups, self).__init__()
            self.optimizer = optimizer

        def get_updates(self, loss, params):
            self.updates = []
            for group in params[::2], params[1::2]:
                self.updates += self.optimizer.get_updates(loss=loss, params=group)
            self.weights = self.optimizer.weights
            return self.updates

        def get_config(self):
            return {}

    return Groups(Groups(keras.optimizers.Adam()))


@slow
@pytest.mark.parametrize("make", [graph_cases.accumulating, wrapping, grouping])
def test_state_that_an_optimizer_does_not_list(keras, make):
    graph_cases.check_state_that_an_optimizer_does_not_list(keras, backend, make)


@slow
def test_a_function_that_a_trial_has_made_anew(keras):
    """Its optimizer's state is in other variables than before."""
    layers = keras.layers
    inputs, targets = CASES["dense"].data(13)
    trained = []
    for steps in (0, 2):
        hidden = [layers.Dense(3, input_shape=(8,)), layers.Lambda(paired)]
        model = keras.models.Sequential(hidden + [layers.Dense(4)])
        compat.parallelize(initialise(model))
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        if steps:
            record = verified(backend, model, steps)
        with pytest.warns(compat.CompatWarning, match="runs unsplit on /device:CPU:0"):
            for _ in range(3):
                model.train_on_batch(inputs, targets)
        trained.append(model.get_weights())
    assert record.steps["train"] == 2
    assert largest_difference(*trained) == 0


@slow
def test_prediction_in_the_learning_phase_of_training(keras):
    told = graph_cases.check_prediction_in_the_learning_phase_of_training(keras, backend)
    assert len(told) == 2


@slow
def test_a_metric_with_state_is_compared_from_where_it_was(keras):
    """In inference, where a step with dropout is compared; the counts grow with each run."""
    K = keras.backend

    class Positives(keras.layers.Layer):
        def __init__(self):
            super(Positives, self).__init__(name="positives")
            self.stateful = True
            self.count = K.variable(0, dtype="int32")

        def reset_states(self):
            K.set_value(self.count, 0)

        def __call__(self, expected, outputs):
            new = K.cast(K.sum(K.cast(K.greater(outputs, 0.0), "int32")), "int32")
            before = self.count * 1
            # Keras' own metrics of this form leave the order open, and count twice now and then.
            with tf.control_dependencies([before]):
                self.add_update(K.update_add(self.count, new), inputs=[expected, outputs])
            return before + new

    inputs, targets = CASES["dense"].data(40)
    model = graph_cases.small(keras, keras.layers.Dropout(0.5))
    metric = Positives()
    model.compile("sgd", "mse", metrics=[metric])
    record = verified(backend, model, 3)
    model.fit(inputs, targets, batch_size=8, epochs=1, shuffle=False, verbose=0)
    assert record.seen("train") == 3
    count = model.evaluate(inputs, targets, batch_size=8, verbose=0)[-1]
    assert count == np.sum(model.predict(inputs) > 0)


# What this Keras does not have is not tested.
if not OLD:
    del test_state_that_an_optimizer_does_not_list
# Such metrics came with Keras 2.1.3, and have another form since 2.3.
if not OLD or hasattr(keras_under_test().metrics, "Metric"):
    del test_a_metric_with_state_is_compared_from_where_it_was
