"""TensorFlow 1: whether the first steps ran on all devices, by where its sessions place them."""

import types
import warnings

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat import _keras
from compat._backends._tensorflow.graph import v1_names
from compat._backends.tensorflow1 import ranks
from compat._ranks import keras2
from compat._runtime import patching
from compat._runtime.process import process
from compat._runtime.unsplit_models import UnsplitModels
from compat.testing import CASES, DEVICES, keras_under_test, optimizer, span

from .. import hooks, tensorflow1_hooks

v1 = v1_names(tf)
INPUTS, TARGETS = CASES["dense"].data(13)


@pytest.fixture
def keras(monkeypatch):
    compat.configure_gpu(simulate=DEVICES)
    for name in ("batches", "unused"):
        monkeypatch.setattr(process, name, {})
    monkeypatch.setattr(process, "idle_devices", set())
    monkeypatch.setattr(process, "unsplit", UnsplitModels())
    keras = keras_under_test()
    yield keras
    keras.backend.clear_session()


def parallel(keras):
    """Return a compiled model on all devices, and the one that makes its functions."""
    model = compat.parallelize(CASES["dense"].build(keras))
    model.compile(optimizer(keras, "sgd"), "mse")
    return model, _keras.inner_model(model)


def warned(call, *args, **kwargs):
    """Return the texts of compat's warnings in a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call(*args, **kwargs)
    return [str(each.message) for each in caught if each.category is compat.CompatWarning]


@span
def test_a_session_of_fewer_devices_is_found_at_the_first_step(keras):
    config = v1.ConfigProto(device_count={"CPU": DEVICES - 1})
    keras.backend.set_session(v1.Session(config=config))
    model, _ = parallel(keras)
    assert warned(model.fit, INPUTS, TARGETS, verbose=0) == [
        "In the first training step of model 'dense_model' (fit()) the framework executed no "
        "operation on /device:CPU:2, to which rows were given. The session, context or mesh in "
        "use has fewer devices than configure_gpu() has set up, or places operations elsewhere. "
        "Let compat configure it: leave out device_count, visible_device_list and the like."
    ]
    report = compat.report()
    assert not report.all_worked
    assert [bool(each.rows) for each in report.devices] == [True, True, False]
    assert not warned(model.fit, INPUTS, TARGETS, verbose=0)


@span
def test_only_the_first_step_is_recorded(keras):
    patches, seen = patching.patches(), []
    model, _ = parallel(keras)

    class Watch(keras.callbacks.Callback):
        def on_batch_begin(self, batch, logs=None):
            seen.append(patching.patches() == patches)

    options = {"batch_size": 4, "epochs": 1, "callbacks": [Watch()], "verbose": 0}
    assert not warned(model.fit, INPUTS, TARGETS, **options)
    assert seen == [False] + [True] * 3
    assert compat.report().all_worked


@span
def test_a_callback_that_runs_another_model_hides_no_step(keras):
    model, other = parallel(keras)[0], parallel(keras)[0]

    class Predict(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            for _ in range(2):
                other.predict(INPUTS, verbose=0)

    assert not warned(model.fit, INPUTS, TARGETS, callbacks=[Predict()], verbose=0)
    assert set(process.batches) and not process.unused


@span
def test_hooks_of_a_model_that_is_not_built_are_never_silent(keras):
    """Each is left out once; the steps are those of a training loop."""

    def program():
        model = keras.models.Sequential([keras.layers.Dense(4, input_shape=(8,))])
        compat.parallelize(model).compile(optimizer(keras, "sgd"), "mse")
        model.train_on_batch(INPUTS, TARGETS)
        model.test_on_batch(INPUTS, TARGETS)
        model.predict_on_batch(INPUTS)

    exempt = tensorflow1_hooks.exempt(keras)
    for function in _keras.OF_EPOCHS.values():  # of tf.keras 1.13
        if hasattr(keras.models.Model, _keras.maker_of(function)):
            exempt[f"model.{_keras.maker_of(function)}"] = "fit() and evaluate() call it"
    found = hooks.left_out_one_by_one(program, exempt)
    assert {"model._make_train_function", "SGD.get_updates"} < set(found)
    assert not [name for name, text in found.items() if text is None]


def replaced_step(keras, inner):
    """Return a training function that does more in a step, as libraries make it."""
    K = keras.backend
    feeds = inner._feed_inputs + inner._feed_targets + inner._feed_sample_weights
    phase = getattr(K, "symbolic_learning_phase", K.learning_phase)()
    loss = inner.total_loss
    updates = inner.optimizer.get_updates(params=inner._collected_trainable_weights, loss=loss)
    function = K.function(feeds + [phase] * (not isinstance(phase, int)), [loss], updates)
    return lambda inputs: function(inputs[: len(function.inputs)])


def step_in_a_session(keras, inner):
    """Return a training function that runs a session by itself."""
    session = keras.backend.get_session()
    output = v1.reduce_sum(inner.outputs[0])
    return lambda inputs: session.run([output], {inner.inputs[0]: inputs[0]})


@span
@pytest.mark.parametrize("make", [replaced_step, step_in_a_session])
def test_a_training_function_that_another_library_has_replaced(keras, make):
    """Nothing of it is split; the functions that are not trained stay as they are."""
    model, inner = parallel(keras)
    inner.train_function = make(keras, inner)
    found = warned(model.train_on_batch, INPUTS, TARGETS)
    assert len(found) == 1 and found[0].startswith(
        "In the first training step of model 'dense_model' (train_on_batch()) no batch was split "
        "over /device:CPU:0, /device:CPU:1, /device:CPU:2."
    )
    assert not warned(model.predict, INPUTS)
    assert not compat.report().all_worked
    process.configuration.settings.strict = True
    try:
        inner.train_function = make(keras, inner)
        with pytest.raises(compat.DevicesNotUsedError):
            model.train_on_batch(INPUTS, TARGETS)
    finally:
        process.configuration.settings.strict = False


@span
def test_gradients_that_no_device_computes_by_itself_are_warned_of(keras):
    """As where a library has put another method in place of the optimizer's."""
    text = (
        "The gradients of model 'dense_model' are computed unsplit on /device:CPU:0: its training "
        "function was made without a call of model.optimizer.get_updates(), from which "
        "parallelize() has each device compute its own. Another library has replaced it: call "
        "parallelize() after such libraries have changed the model."
    )
    model, inner = parallel(keras)
    kind = type(inner)
    make = kind._make_train_function

    def make_with_another_method(model):
        get_updates = model.optimizer.get_updates
        plain = type(model.optimizer).get_updates.__get__(model.optimizer)
        vars(model.optimizer)["get_updates"] = plain
        make(model)
        vars(model.optimizer)["get_updates"] = get_updates

    kind._make_train_function = make_with_another_method
    try:
        assert warned(model.train_on_batch, INPUTS, TARGETS) == [text]
        assert process.unused == {"dense_model": text}
        inner.train_function = None
        process.configuration.settings.strict = True
        with pytest.raises(compat.DevicesNotUsedError) as raised:
            model.train_on_batch(INPUTS, TARGETS)
        assert str(raised.value) == text
    finally:
        process.configuration.settings.strict = False
        kind._make_train_function = make


def have_functions_for_epochs(kind, monkeypatch):
    """Give a class of models what TensorFlow 1.13's tf.keras has."""

    def maker(attribute):
        of_batches = {"_fit_function": "train_function", "_eval_function": "test_function"}
        name = of_batches[attribute]

        def make(model):
            if getattr(model, attribute, None) is None:
                before = getattr(model, name)
                setattr(model, name, None)
                getattr(kind, "_make_" + name)(model)
                setattr(model, attribute, getattr(model, name))
                setattr(model, name, before)

        return make

    for attribute in ("_fit_function", "_eval_function"):
        if not hasattr(kind, "_make" + attribute):
            monkeypatch.setattr(kind, "_make" + attribute, maker(attribute), raising=False)
            monkeypatch.setattr(kind, attribute, None, raising=False)


@span
def test_functions_for_epochs_run_on_all_devices(keras, monkeypatch):
    """As TensorFlow 1.13's tf.keras makes them, beside those for batches."""
    have_functions_for_epochs(type(_keras.inner_model(parallel(keras)[0])), monkeypatch)
    model, inner = parallel(keras)
    arrays = [INPUTS, TARGETS, np.ones(len(INPUTS), "float32")]
    if getattr(inner, "_feed_sample_weights", None) == []:
        del arrays[-1]
    for name, training in (("_fit_function", True), ("_eval_function", False)):
        getattr(inner, "_make" + name)()
        function = getattr(inner, name)
        phase = [1.0] * (len(function.inputs) - len(arrays))
        process.batches.clear()
        function(arrays + phase)
        assert list(process.batches) == [
            (tuple(process.configuration.devices), (4, 4, 5), training)
        ]
    before = patching.InstanceMethod.all_of(inner)
    compat.parallelize(model, gpus=1)
    assert "_make_eval_function" in before
    assert "_make_eval_function" not in patching.InstanceMethod.all_of(inner)


@span
def test_functions_for_epochs_are_those_of_a_rank(keras, monkeypatch):
    model = CASES["dense"].build(keras)
    model.compile(optimizer(keras, "sgd"), "mse")
    inner = _keras.inner_model(model)
    before = set(patching.InstanceMethod.all_of(inner))
    have_functions_for_epochs(type(inner), monkeypatch)
    keras2.install(model, types.SimpleNamespace(place=None), ranks._KINDS)
    made = set(patching.InstanceMethod.all_of(inner)) - before
    assert {"_make_fit_function", "_make_train_function"} < made
    assert {"_make_eval_function", "_make_test_function"} < made
