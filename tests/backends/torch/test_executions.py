"""torch: which operations count as a device's, and until when they are recorded."""

import os

import numpy as np
import pytest
import torch

import compat
from compat._backends.torch import executions
from compat.testing import CASES

from .test_contract import devices as three_devices
from .test_merging import rows
from .test_usage import ROWS, forgotten, keras, keras_model, modes, network, told  # noqa: F401

pytestmark = pytest.mark.usefixtures("devices", "forgotten")
devices = three_devices


def test_the_operations_of_each_replica_are_those_that_the_dispatcher_reports(devices):
    model = compat.parallelize(network())
    with executions.executed(devices) as counts:
        model(rows(ROWS, 8).float())
    assert sorted(counts) == devices and min(counts.values()) >= 5, counts
    assert counts["cpu:1"] == counts["cpu:2"]
    assert modes() == 0


def test_operations_count_where_their_results_lie(devices):
    """As on GPUs: nothing that a replica says of itself is looked at."""
    recorder = executions.OperationCounter(["cuda:0", "cuda:1"])
    for device in ("cuda:1", "cuda:1", "cpu"):
        recorder._count(torch.device(device))
    assert recorder.counts == {"cuda:0": 0, "cuda:1": 2}


def test_only_the_first_step_is_recorded(keras, keras_model, monkeypatch):  # noqa: F811
    """And a device of which it has shown nothing: as where the first batch has one row."""
    calls = []
    dispatch = executions.OperationCounter.__torch_dispatch__

    def counting(recorder, func, *args, **kwargs):
        calls.append(func)
        return dispatch(recorder, func, *args, **kwargs)

    monkeypatch.setattr(executions.OperationCounter, "__torch_dispatch__", counting)
    steps = [0]
    note = keras.callbacks.LambdaCallback(
        on_train_batch_end=lambda batch, logs: steps.append(len(calls))
    )
    inputs, targets = CASES["dense"].data(11)
    sizes = (1, 1, 1, 11, 11, 11)
    batches = ((inputs[:size], targets[:size]) for size in sizes)
    assert told(lambda: keras_model.fit(batches, verbose=0, callbacks=[note])) == []
    # The first step ends where the second one calls the model.
    is_recorded = (np.diff(steps) > 0).tolist()
    assert is_recorded[:1] + is_recorded[2:] == [True, False, True, False, False]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no such system call")
def test_a_process_that_is_forked_records_nothing(devices):
    with executions.executed(devices):
        child = os.fork()
        if not child:
            os._exit(modes())
        assert os.waitpid(child, 0)[1] == 0 and modes() == 1
    assert modes() == 0


def test_another_mode_may_begin_before_the_first_step_ends(devices):
    class Other(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    with executions.executed(devices):
        with Other():
            for _ in range(2):
                executions.begin_call()
            assert modes() == 1
    assert modes() == 0
