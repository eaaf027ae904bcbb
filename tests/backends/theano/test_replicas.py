"""Replicas of Keras models on Theano, of whatever kind the model is."""

import threading

import numpy as np
import pytest

import compat
from compat import _keras
from compat.testing import DEVICES, initialise, keras_under_test, span

from .. import hooks
from ..messages import told
from ..wrapped_models import old_sequential
from . import test_contract

profiles_not_printed = test_contract.profiles_not_printed


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    with pytest.MonkeyPatch.context() as patch:
        test_contract.few_streams(patch)
        yield keras_under_test()


INPUTS = np.random.RandomState(0).normal(size=(11, 4)).astype("float32")
TARGETS = np.random.RandomState(1).normal(size=(11, 2)).astype("float32")


def dense(keras):
    layers = [keras.layers.Dense(3, activation="tanh", input_shape=(4,)), keras.layers.Dense(2)]
    return keras.models.Sequential(layers)


def steps(model):
    """Results of a step of each kind, and of training."""
    results = [model.train_on_batch(INPUTS, TARGETS) for _ in range(3)]
    return [np.array(results), model.predict_on_batch(INPUTS), model.test_on_batch(INPUTS, TARGETS)]


@span
@pytest.mark.parametrize("build", [dense, old_sequential])
def test_a_model_parallelized_before_or_after_it_is_compiled(keras, build):
    found = []
    for when in ("never", "before", "after"):
        model = initialise(build(keras))
        if when == "before":
            compat.parallelize(model)
        for _ in range(2):  # an old Sequential makes another model inside
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        if when == "after":
            compat.parallelize(model)
        found.append(steps(model))
        plan = getattr(_keras.inner_model(model).train_function, "plan", None)
        assert len(plan.programs if plan else ()) == (0 if when == "never" else DEVICES)
    for several in found[1:]:
        for one, other in zip(found[0], several):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)


@span
@pytest.mark.parametrize("build", [dense, old_sequential])
def test_a_hook_that_is_not_reached_is_never_silent(keras, build):
    """Nor where steps are a loop of one's own, and the model is parallelized first."""

    def program():
        model = compat.parallelize(build(keras))
        model.compile("sgd", "mse")
        steps(model)

    found = hooks.left_out_one_by_one(program, {})
    assert [name for name, text in found.items() if text is None] == []
    assert {"keras.backend.function", "keras.backend.gradients"} < set(found)
    assert ("model.build" in found) == (
        build is old_sequential or _keras.wraps_a_model(build(keras))
    )


def test_a_plain_model_again(keras):
    model = old_sequential(keras)
    plain = set(vars(model))
    for _ in range(2):
        compat.parallelize(model)
        model.compile("sgd", "mse")
        steps(model)
        compat.parallelize(model, gpus=1)
        assert not hasattr(_keras.inner_model(model).train_function, "plan")
        assert "_compat_replicas" not in vars(model) and "build" not in vars(model)
        steps(model)
    assert plain <= set(vars(model))


def lookahead(keras, model):
    """Weights that every second step takes half the way back to where they were, as a library has.

    It makes Keras' training function by itself.
    """
    K = keras.backend
    model._check_trainable_weights_consistency()
    weights = model._collected_trainable_weights
    inputs = model._feed_inputs + model._feed_targets + model._feed_sample_weights
    updates = model.optimizer.get_updates(params=weights, loss=model.total_loss)
    train = K.function(inputs, [model.total_loss], updates=model.updates + updates)
    kept = K.batch_get_value(weights)
    steps = []

    def function(inputs):
        steps.append(train(inputs))
        if len(steps) % 2 == 0:
            kept[:] = [old + 0.5 * (new - old) for old, new in zip(kept, map(K.get_value, weights))]
            K.batch_set_value(list(zip(weights, kept)))
        return steps[-1]

    model.train_function = function


@pytest.mark.parametrize("first", ["compat", "the other one"])
def test_a_library_that_makes_the_training_function_itself_is_warned_of(keras, first):
    """It trains on one device, with the numbers of that library."""
    found = []
    for parallel in (False, True):
        model = initialise(dense(keras))
        if parallel and first == "compat":
            compat.parallelize(model)
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse")
        lookahead(keras, model)
        if parallel and first != "compat":
            compat.parallelize(model)
        with told() as said:
            found.append([model.fit(INPUTS, TARGETS, 4, 2, shuffle=False, verbose=0).history])
            found[-1] += model.get_weights()
    assert found[0][0] == found[1][0]
    for one, other in zip(*found):
        np.testing.assert_array_equal(one, other)
    assert said == [
        f"In the first training step of model {model.name!r} (fit()) no batch was split over "
        "cpu:0, cpu:1, cpu:2. What parallelize() put in place of model._make_test_function(), "
        "model._make_predict_function() was not called. Another library has replaced it, or this "
        "version of the framework takes another way: call parallelize() after such libraries have "
        "changed the model, and report it with the output of `python -m compat env` if there is "
        "none."
    ]


def in_threads(function, count=8):
    """Return a function's results for numbers, in threads that begin at once."""
    barrier, results = threading.Barrier(count), {}

    def call(number):
        barrier.wait()
        try:
            results[number] = function(number)
        except Exception as error:
            results[number] = error

    threads = [threading.Thread(target=call, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[number] for number in range(count)]


def test_first_calls_of_eight_threads_at_once(keras):
    batches = [np.random.RandomState(n).normal(size=(5 + n % 2, 4)) for n in range(8)]
    model = initialise(dense(keras))
    expected = [model.predict(batch) for batch in batches]
    compat.parallelize(model)
    found = in_threads(lambda number: [model.predict(batches[number]) for _ in range(3)])
    for one, several in zip(expected, found):
        for other in several:
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.fixture
def traces_are_kept(monkeypatch):
    """Theano turns the traces of variables off while it compiles, for all threads.

    Where Keras compiles plain models in two threads at once, the later one may "restore" that.
    """
    from theano import config

    monkeypatch.setattr(config.traceback, "limit", config.traceback.limit)


def test_models_of_eight_threads_are_made_at_once(keras, traces_are_kept):
    """Keras' functions that make those of a model are replaced in one thread at a time."""
    models = [[initialise(dense(keras)) for _ in range(8)] for _ in range(2)]
    for plain, parallel in zip(*models):
        if models[0].index(plain) % 2:  # every other one is plain
            compat.parallelize(parallel)
        for model in (plain, parallel):
            model.compile("sgd", "mse")
    expected = [steps(model) for model in models[0]]
    found = in_threads(lambda number: steps(models[1][number]))
    for one, several in zip(expected, found):
        for value, other in zip(one, several):
            np.testing.assert_allclose(value, other, rtol=1e-4, atol=1e-6)
    for number, model in enumerate(models[1]):
        assert hasattr(model.train_function, "plan") == bool(number % 2)
