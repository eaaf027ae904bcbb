"""Functions of Keras models that run on several devices."""

import copy

import numpy as np
import pytest

import compat
from compat._configuration import registry
from compat.testing import initialise, slow

from .. import graph_cases
from ..messages import told
from . import test_contract, test_replicas
from .test_replicas import dense, steps
from .test_trial import whole

keras, profiles_not_printed = test_replicas.keras, test_contract.profiles_not_printed


def test_no_step_is_kept_after_an_error(keras):
    model = initialise(keras.models.Sequential([keras.layers.Dense(2, input_shape=(3,))]))
    compat.parallelize(model).compile("sgd", "mse")
    model.train_on_batch(np.ones((6, 3)), np.ones((6, 2)))

    plan = model.train_function.plan

    def head(*args):
        assert plan.step is not None
        raise OSError("of the head")

    plan.head = head
    with pytest.raises(OSError, match="of the head"):
        model.train_on_batch(np.ones((6, 3)), np.ones((6, 2)))
    assert plan.step is None


def assert_runs_unsplit(model, inputs, text):
    """Check that a call of it runs on one device, and so does the next, without a warning."""
    expected = model.predict_on_batch(inputs)
    compat.parallelize(model)
    with told() as texts:
        found = [model.predict_on_batch(inputs) for _ in range(2)]
    assert texts == [text]
    for each in found:
        np.testing.assert_array_equal(each, expected)


def test_inputs_with_other_numbers_of_rows_run_unsplit(keras):
    K, layers = keras.backend, keras.layers
    both = [layers.Input(shape=(8,)), layers.Input(shape=(8,))]
    read = layers.Lambda(lambda p: K.dot(K.softmax(K.dot(p[0], K.transpose(p[1]))), p[1]), (8,))
    model = keras.models.Model(both, read(both), name="two")
    inputs = [np.ones((6, 8)), np.ones((11, 8))]
    assert_runs_unsplit(model, inputs, whole(None, "two", reach="The model"))


def test_what_fails_for_a_part_of_a_batch_runs_unsplit(keras):
    from theano import tensor
    from theano.compile.ops import as_op

    @as_op([tensor.fmatrix], [tensor.fmatrix], lambda node, shapes: shapes)
    def picky(x):
        if len(x) == 4:
            raise ValueError("four rows")
        return x * 2

    first = keras.layers.Input(shape=(8,))
    model = keras.models.Model(first, keras.layers.Lambda(picky, (8,))(first), name="picky")
    assert_runs_unsplit(model, np.ones((13, 8)), whole(None, "picky", reach="The model"))
    with pytest.raises(ValueError, match="four rows"):
        model.predict_on_batch(np.ones((4, 8)))


@pytest.mark.parametrize("kind", ["function", "object"])
def test_training_function_of_the_users_own(keras, kind):
    graph_cases.check_training_function_of_ones_own(keras, "theano", kind)


def test_state_that_an_optimizer_does_not_list(keras):
    backend = registry.find("theano")
    graph_cases.check_state_that_an_optimizer_does_not_list(
        keras, backend, graph_cases.accumulating
    )


@slow
def test_prediction_in_the_learning_phase_of_training(keras):
    graph_cases.check_prediction_in_the_learning_phase_of_training(keras, registry.find("theano"))


def test_a_copy_of_a_function_says_what_is_lost(keras):
    """Keras before 2.2 copies a model with its functions, and pickles them."""
    model = compat.parallelize(initialise(dense(keras)))
    model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
    steps(model)
    with told() as said:
        copies = [copy.copy(model.train_function), copy.copy(model.predict_function)]
        assert copies == [None, None]
    assert said == [
        f"The copy of model {model.name!r} will train from the beginning of its optimizer's state "
        "(momentum, moments): a function that runs on several devices is not copied, and the one "
        "that Keras makes anew has none. Use model.save() and load_model(), which keep it."
    ]
