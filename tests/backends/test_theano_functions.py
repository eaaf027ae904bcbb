"""How the functions of Keras models on Theano are made, of whatever kind the model is."""

import numpy as np
import pytest

import compat
from compat import _keras
from compat.testing import DEVICES, initialise, keras_under_test, span

from . import hooks, test_theano

profiles_not_printed = test_theano.profiles_not_printed


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    with pytest.MonkeyPatch.context() as patch:
        test_theano.few_streams(patch)
        yield keras_under_test()


INPUTS = np.random.RandomState(0).normal(size=(11, 4)).astype("float32")
TARGETS = np.random.RandomState(1).normal(size=(11, 2)).astype("float32")


def dense(keras):
    layers = [keras.layers.Dense(3, activation="tanh", input_shape=(4,)), keras.layers.Dense(2)]
    return keras.models.Sequential(layers)


def old_sequential(keras):
    """A Sequential as it was before Keras 2.2: another model inside does the work."""
    built = dense(keras)
    if _keras.wraps_a_model(built):
        return built

    class Sequential(keras.models.Model):
        def build(self, input_shape=None):
            vars(self)["model"] = keras.models.Model(self.inputs, self.outputs)

        def compile(self, *args, **kwargs):
            self.build()
            self.model.compile(*args, **kwargs)

        def train_on_batch(self, *args):
            return self.model.train_on_batch(*args)

        def test_on_batch(self, *args):
            return self.model.test_on_batch(*args)

        def predict_on_batch(self, *args):
            return self.model.predict_on_batch(*args)

    model = Sequential(built.inputs, built.outputs)
    vars(model)["model"] = None
    return model


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
        forward = getattr(_keras.inner_model(model).train_function, "forward", ())
        assert len(forward) == (0 if when == "never" else DEVICES)
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
        assert not hasattr(_keras.inner_model(model).train_function, "forward")
        assert "_compat_functions" not in vars(model) and "build" not in vars(model)
        steps(model)
    assert plain <= set(vars(model))


# Modes ----------------------------------------------------------------------------------------


def modes():
    """Arguments of ``compile()``, which Keras hands to ``theano.function``, by name."""
    import theano
    from theano.compile import debugmode, monitormode, nanguardmode

    def is_seen(number, node, function):
        pass

    return {
        "monitor": {"mode": monitormode.MonitorMode(pre_func=is_seen, post_func=is_seen)},
        "debug": {"mode": debugmode.DebugMode(), "profile": False},  # it refuses to profile
        "guard": {"mode": nanguardmode.NanGuardMode()},
        "callback": {"mode": theano.Mode(theano.gof.vm.VM_Linker(callback=lambda **given: None))},
        "python": {"mode": theano.Mode("py")},
        "fast": {"mode": "FAST_RUN"},
        "profile": {"profile": True},
    }


@pytest.mark.parametrize("name", ["monitor", "debug", "guard", "callback", "python", "profile"])
def test_modes_run_on_all_devices(keras, name):
    """Also one that comes after another one."""
    found = []
    for parallel in (False, True):
        model, results = initialise(dense(keras)), []
        if parallel:
            compat.parallelize(model)
        for mode in ("fast", name):
            model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", **modes()[mode])
            results += steps(model)
        found.append(results)
    for one, other in zip(*found):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
    for function in (model.train_function, model.test_function, model.predict_function):
        assert len(function.forward) == DEVICES
        kinds = {type(made.maker.mode) for made in function.forward + [function.head]}
        assert kinds == {type(modes()[name].get("mode", function.head.maker.mode))}


def test_a_monitor_sees_what_each_device_computes(keras):
    from theano.compile.monitormode import MonitorMode

    seen = []

    def see(number, node, function):
        if "Dot" in str(node.op):
            seen.append(function.inputs[0][0].shape[0])

    model = compat.parallelize(initialise(dense(keras)))
    model.compile("sgd", "mse", mode=MonitorMode(pre_func=see))
    model.predict_on_batch(INPUTS)  # with a trial
    del seen[:]
    model.predict_on_batch(INPUTS)
    assert seen == [3, 3, 4, 4, 4, 4]
