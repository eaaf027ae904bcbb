"""Functions compiled for each device, in all of Theano's modes."""

import numpy as np
import pytest

import compat
from compat.testing import DEVICES, initialise, slow

from . import test_contract, test_replicas
from .test_replicas import INPUTS, dense, steps

keras, profiles_not_printed = test_replicas.keras, test_contract.profiles_not_printed
theano_process = test_contract.theano_process

TRAIN_BOTH = """
    import compat
    configuration = compat.configure_gpu(simulate={devices})
    import keras, numpy
    from compat.testing import initialise, largest_difference

    def train(*layers):
        data = numpy.random.RandomState(0).normal(size=(13,) + layers[0].batch_input_shape[1:])
        weights = []
        for parallel in (False, True):
            model = keras.models.Sequential([type(l).from_config(l.get_config()) for l in layers])
            start = initialise(model).get_weights()
            if parallel:
                compat.parallelize(model)
            model.compile("sgd", "mse")
            for rows in (13, 13, 11):
                model.train_on_batch(data[:rows], numpy.ones((rows, 2)))
            weights.append(model.get_weights())
        differences.append([largest_difference(start, weights[0]), largest_difference(*weights)])
        return model.train_function

    differences, layers = [], keras.layers
"""


def assert_the_same(differences):
    for trained, difference in differences:
        assert trained > 0.01 and difference < 1e-5


def test_compiled_functions_do_the_same(theano_process):
    """Of few different operations, and no weights by Theano's generator: each takes a second."""
    program = """
    zeros = {"kernel_initializer": "zeros", "use_bias": False}
    plan = train(layers.Dense(5, input_shape=(4,), **zeros), layers.Dense(2, **zeros)).plan
    made = [stage.function for program in plan.programs for stage in program.backward]
    thunks = [list(zip(f.fn.nodes, f.fn.thunks)) for f in made]
    in_python = [n.op for each in thunks for n, thunk in each if not hasattr(thunk, "cthunk")]
    show(
        devices=configuration.devices,
        differences=differences,
        operations=[len(each) for each in thunks],
        in_python=[type(op).__name__ for op in in_python],
    )
    """
    shown = theano_process(
        TRAIN_BOTH.format(devices=3) + program, flags=test_contract.COMPILING, OMP_NUM_THREADS="1"
    )
    assert shown["devices"] == ["cpu:0", "cpu:1", "cpu:2"]
    assert_the_same(shown["differences"])
    assert min(shown["operations"]) > 5
    assert set(shown["in_python"]) <= {"Dot22"}  # which is in C where there is a BLAS


@slow
def test_optimized_functions_do_the_same(theano_process):
    """With all of Theano's optimizations, as users have it: operations overwrite their inputs."""
    program = """
    train(layers.SimpleRNN(4, input_shape=(5, 3)), layers.Dense(2))
    show(differences=differences)
    """
    shown = theano_process(
        TRAIN_BOTH.format(devices=2) + program,
        optimizer="fast_run",
        OMP_NUM_THREADS="1",
    )
    assert_the_same(shown["differences"])


def modes():
    """Arguments of ``compile()``, which Keras hands to ``theano.function``, by name."""
    import theano
    from theano.compile import debugmode, monitormode, nanguardmode

    def is_seen(number, node, function):
        pass

    # The debug mode refuses to profile, and optimizes each graph ten times by default.
    return {
        "monitor": {"mode": monitormode.MonitorMode(pre_func=is_seen, post_func=is_seen)},
        "debug": {"mode": debugmode.DebugMode(stability_patience=1), "profile": False},
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
        assert len(function.plan.programs) == DEVICES
        made = [f for program in function.plan.programs for f in program.functions()]
        kinds = {type(each.maker.mode) for each in made + [function.plan.head]}
        assert kinds == {type(modes()[name].get("mode", function.plan.head.maker.mode))}


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
