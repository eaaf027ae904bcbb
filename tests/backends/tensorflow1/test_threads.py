"""TensorFlow 1: first calls of several threads at once, and graphs that are finalized."""

import contextlib
import sys
import threading
import warnings

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat import _keras
from compat._backends._tensorflow.graph import v1_names
from compat._runtime.process import process
from compat.testing import CASES, DEVICES, in_span, keras_under_test, optimizer, span

v1 = v1_names(tf)
INPUTS, TARGETS = CASES["dense"].data(13)


@pytest.fixture
def keras(monkeypatch):
    monkeypatch.setattr(process, "unused", {})
    compat.configure_gpu(simulate=DEVICES)
    keras = keras_under_test()
    keras.backend.clear_session()
    yield keras
    keras.backend.clear_session()


def across_rows(keras):
    """Return a model with a cross-batch operation that no rule knows."""

    def centered(x):
        result = v1.py_func(lambda rows: rows - rows.mean(0), [x], tf.float32)
        result.set_shape(x.shape)
        return result

    rows = keras.layers.Input(shape=(8,))
    hidden = keras.layers.Dense(5)(rows)
    classes = keras.layers.Dense(4)(keras.layers.Lambda(centered)(hidden))
    return keras.models.Model(rows, classes, name="centered")


def expected(model, inputs):
    first, bias, second, other = model.get_weights()
    hidden = inputs.dot(first) + bias
    return (hidden - hidden.mean(0)).dot(second) + other


def in_threads(calls):
    """Return the results or errors of functions that eight threads call at the same time."""
    results, barrier = [None] * len(calls), threading.Barrier(len(calls))

    # Keras 2.3.0 sets no attribute of a model in a second thread: keras-team/keras#13338.
    tracking = getattr(sys.modules.get("keras.engine.base_layer"), "_DISABLE_TRACKING", None)

    def run(place):
        if tracking is not None:
            tracking.value = False
        barrier.wait()
        try:
            results[place] = calls[place]()
        except Exception as error:
            results[place] = error

    threads = [threading.Thread(target=run, args=(place,)) for place in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def make_functions(keras, model, *names):
    """As A3C has it before it finalizes the graph: functions are made, variables initialized."""
    for name in names:
        getattr(_keras.inner_model(model), f"_make_{name}_function")()
    keras.backend.get_session()


def sessions_of_all_threads(keras, within, session):
    """Yield the scopes in which a thread finds a graph and a session of this Keras."""
    scopes = contextlib.ExitStack()
    scopes.enter_context(within.as_default())
    scopes.enter_context(session.as_default())
    return scopes


@span
@pytest.mark.parametrize("made", [True, False], ids=["made before", "made by a thread"])
@pytest.mark.filterwarnings("ignore::compat.CompatWarning")
def test_eight_threads_call_a_model_for_the_first_time(keras, made):
    """Those that come while one tries the replicas wait for what it finds."""
    model = compat.parallelize(across_rows(keras))
    within, session = v1.get_default_graph(), keras.backend.get_session()
    if made:
        model._make_predict_function()

    def predict():
        with sessions_of_all_threads(keras, within, session):
            return model.predict(INPUTS)

    for found in in_threads([predict] * 8):
        assert isinstance(found, np.ndarray), found
        np.testing.assert_allclose(found, expected(model, INPUTS), atol=1e-5)


@span
@pytest.mark.filterwarnings("ignore::compat.CompatWarning")
def test_a_thread_whose_default_graph_is_another_one(keras):
    """The session is that of the model's graph: Keras needs no more."""
    with v1.Graph().as_default() as within, v1.Session(graph=within) as session:
        keras.backend.set_session(session)
        model = compat.parallelize(across_rows(keras))
        model.compile(optimizer(keras, "sgd"), "mse")
        values = model.get_weights()
        model._make_predict_function()

    def predict():
        with v1.Session(graph=within).as_default() as session:
            for variable, value in zip(model.weights, values):
                initializer = variable.initializer
                session.run(initializer, {initializer.inputs[1]: value})
            return model.predict_function([INPUTS])[0]

    first, bias, second, other = values
    hidden = INPUTS.dot(first) + bias
    wanted = (hidden - hidden.mean(0)).dot(second) + other
    for found in in_threads([predict] * 2):
        assert isinstance(found, np.ndarray), found
        np.testing.assert_allclose(found, wanted, atol=1e-5)


@span
@pytest.mark.filterwarnings("ignore::compat.CompatWarning")
def test_other_threads_find_a_function_while_it_is_made_anew(keras, monkeypatch):
    model = compat.parallelize(across_rows(keras))
    model._make_predict_function()
    plain, seen = type(model)._make_predict_function, []

    def make(model):
        reader = threading.Thread(target=lambda: seen.append(model.predict_function))
        reader.start()
        reader.join()
        plain(model)

    monkeypatch.setattr(type(model), "_make_predict_function", make)
    of_class, function = type(model), model.predict_function
    np.testing.assert_allclose(model.predict(INPUTS), expected(model, INPUTS), atol=1e-5)
    assert len(seen) > 1 and set(seen) == {function}
    assert type(model) is of_class and model.predict_function is function


def test_a_model_of_its_own_in_each_of_four_threads(keras):
    """Functions are made before, as A3C has it: Keras' scopes are those of all threads."""
    within, session = v1.get_default_graph(), keras.backend.get_session()
    plain, *models = [CASES["dense"].build(keras) for _ in range(5)]
    for model in models:
        model.set_weights(plain.get_weights())
        compat.parallelize(model)
    for model in [plain, *models]:
        model.compile(optimizer(keras, "sgd"), "mse")
        make_functions(keras, model, "train", "predict")

    def worker(model):
        def run():
            with sessions_of_all_threads(keras, within, session):
                model.train_on_batch(INPUTS, TARGETS)
                return model.predict(INPUTS)

        return run

    plain.train_on_batch(INPUTS, TARGETS)
    for found in in_threads(list(map(worker, models))):
        assert isinstance(found, np.ndarray), found
        np.testing.assert_allclose(found, plain.predict(INPUTS), atol=1e-5)
    assert not process.unused


# Finalized graphs -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "names, verify",
    in_span(
        [(names, verify) for names in (("predict",), ("train", "predict")) for verify in (0, 1)],
        [(("predict",), 0), (("train", "predict"), 1)],
    ),
)
def test_no_operation_is_added_to_a_finalized_graph(keras, names, verify, monkeypatch):
    monkeypatch.setattr(process.configuration.settings, "verify", verify)
    plain, model = CASES["dense"].build(keras), CASES["dense"].build(keras)
    model.set_weights(plain.get_weights())
    compat.parallelize(model)
    for each in (plain, model):
        each.compile(optimizer(keras, "sgd"), "mse")
        make_functions(keras, each, *names)
    v1.get_default_graph().finalize()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for each in (plain, model, plain, model):
            if "train" in names:
                each.train_on_batch(INPUTS, TARGETS)
        np.testing.assert_allclose(plain.predict(INPUTS), model.predict(INPUTS), atol=1e-5)
    texts = [str(each.message) for each in caught if each.category is compat.CompatWarning]
    assert texts == [
        "verify=1: the graph of model 'dense_model' is finalized, so that no operations can be "
        f"added that do its {kind} step on one device: it is not verified. Run a step before "
        "graph.finalize()."
        for kind in names * verify
    ]
    assert not process.unused


@span
def test_what_a_trial_finds_in_a_finalized_graph_is_an_error(keras):
    model = compat.parallelize(across_rows(keras))
    make_functions(keras, model, "predict")
    v1.get_default_graph().finalize()
    for _ in range(2):
        with pytest.raises(compat.UnsupportedError) as raised:
            model.predict(INPUTS)
        assert str(raised.value) == (
            "By a trial with rows of the first batch, model 'centered' needs the whole batch "
            "where its graph has only shards, and its graph is finalized, so that no operation "
            "can be added. Run each of its functions once before graph.finalize(), as by "
            "model.predict(), or use one device: parallelize(model, gpus=1)."
        )
