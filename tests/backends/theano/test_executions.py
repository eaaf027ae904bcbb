"""Operations that each device executes in a first step, as compat counts them."""

import threading

import compat
from compat._configuration import registry
from compat._runtime import patching
from compat.testing import initialise

from . import test_contract, test_replicas
from .test_replicas import INPUTS, TARGETS, dense

keras, profiles_not_printed = test_replicas.keras, test_contract.profiles_not_printed


def test_operations_are_counted_by_device_in_the_first_step_alone(keras):
    """By the functions that Theano calls, and not those of other threads."""
    from theano.compile.function_module import Function

    class Callback(keras.callbacks.Callback):
        recording = []

        def on_batch_end(self, batch, logs=None):
            self.recording.append(patching.find(Function, "__call__") is not None)

    backend, plain = registry.load("theano"), Function.__call__
    model = compat.parallelize(initialise(dense(keras)))
    model.compile("sgd", "mse")
    with backend.executed(model) as executed:
        model.fit(INPUTS, TARGETS, batch_size=3, callbacks=[Callback()], verbose=0)
    assert Callback.recording == [True, False, False, False]
    assert Function.__call__ is plain

    def operations(functions):
        return sum(len(made.maker.fgraph.apply_nodes) for made in functions)

    made = model.train_function
    for device, functions in list(test_contract.functions(model).items())[1:]:
        assert executed[device] == operations(functions)
    first = operations([made.plan.head] + made.plan.programs[0].functions())
    assert executed["cpu:0"] > first  # which some rows are tried on
    with backend.executed(model) as executed:
        thread = threading.Thread(target=model.train_on_batch, args=(INPUTS, TARGETS))
        thread.start()
        thread.join()
    assert executed == {"cpu:0": 0, "cpu:1": 0, "cpu:2": 0}
    assert Function.__call__ is plain
