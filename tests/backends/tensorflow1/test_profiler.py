"""TensorFlow 1: which runs a timeline has, and on which devices."""

import threading
from _thread import get_ident

import numpy as np
import pytest
import tensorflow as tf

import compat
from compat import _api
from compat._backends._tensorflow.graph import v1_names
from compat._backends._tensorflow.profiler import operations_of
from compat._backends.tensorflow1.profiler import recorded
from compat._runtime import patching
from compat._runtime.operation_times import Operation
from compat.testing import DEVICES, keras_under_test, span

v1 = v1_names(tf)
ONES = np.ones((2, 2), "float32")


@pytest.fixture
def K():
    compat.configure_gpu(simulate=DEVICES)
    K = keras_under_test().backend
    yield K
    K.clear_session()


@span
def test_runs_of_functions_and_of_sessions_are_recorded(K):
    inputs = K.placeholder((2, 2))

    def function(name):
        with v1.device("/device:CPU:1"):
            return K.function([inputs], [v1.matmul(inputs, inputs, name=name)])

    before = function("before")
    before([ONES])
    backend, patches = _api.configured_backend(), patching.patches()
    options, metadata = v1.RunOptions(timeout_in_ms=60000), v1.RunMetadata()
    with backend.profiled() as operations:
        for _ in range(2):
            before([ONES])
        function("within")([ONES])
        product = v1.matmul(inputs, inputs, name="run")
        K.get_session().run(product, {inputs: ONES}, options, metadata)
        assert not operations
    products = [(each.device, each.name) for each in operations if "MatMul: " in each.name]
    assert products == [
        ("/device:CPU:1", "MatMul: before"),
        ("/device:CPU:1", "MatMul: before"),
        ("/device:CPU:1", "MatMul: within"),
        ("/device:CPU:0", "MatMul: run"),
    ]
    assert metadata.step_stats.dev_stats and options.trace_level == options.NO_TRACE
    assert patching.patches() == patches
    before([ONES])
    assert len([each for each in operations if "MatMul: " in each.name]) == 4
    assert getattr(before, "run_options", None) is None  # from Keras 2.2.3 on


def test_runs_of_one_thread_alone_are_recorded(K):
    """As where a step is verified while another model trains."""
    session, product = K.get_session(), v1.matmul(ONES, ONES)
    with recorded(v1, get_ident()) as runs:
        thread = threading.Thread(target=session.run, args=(product,))
        thread.start()
        thread.join()
        assert not runs
        session.run(product)
    assert len(runs) == 1


@span
def test_what_ran_before_an_error_is_recorded(K):
    with pytest.raises(KeyError):
        with _api.configured_backend().profiled() as operations:
            K.get_session().run(v1.matmul(ONES, ONES, name="run"))
            raise KeyError
    assert any(each.name.endswith(": run") for each in operations)


@span
def test_a_gpu_counts_what_it_ran_and_not_what_was_launched():
    """Records as TensorFlow makes them of GPUs: there is none here."""
    devices = ["/device:GPU:0", "/device:GPU:1"]

    def run(*names):
        statistics = v1.RunMetadata().step_stats
        for place, name in enumerate(names):
            node = statistics.dev_stats.add(device=name).node_stats.add(node_name=name[-9:])
            node.all_start_micros, node.op_start_rel_micros = 100 + place, 5
            node.op_end_rel_micros, node.all_end_rel_micros = 8, 9
            node.timeline_label = "" if "stream" in name else "a/MatMul = MatMul(x, y)"
        return [statistics]

    cpu, gpu = "/job:localhost/replica:0/task:0/device:CPU:0", "/job:localhost/device:GPU:{}"
    launched = [cpu, gpu.format(0), gpu.format(1)]
    of_gpus = ["/device:GPU:{}/stream:all".format(place) for place in range(2)]
    others = ["/device:GPU:0/memcpy", "/device:GPU:0/stream:13"]
    assert list(operations_of(run(*launched), devices)) == [
        Operation("/device:GPU:0", "MatMul: ice:GPU:0", 106.0, 3.0),
        Operation("/device:GPU:1", "MatMul: ice:GPU:1", 107.0, 3.0),
    ]
    assert list(operations_of(run(*launched + of_gpus + others), devices)) == [
        Operation("/device:GPU:0", "tream:all", 108.0, 3.0),
        Operation("/device:GPU:1", "tream:all", 109.0, 3.0),
    ]
    # An older TensorFlow: all that any GPU ran is recorded as the first one's.
    older = operations_of(run(*launched + of_gpus[:1]), devices)
    assert list(older) == list(operations_of(run(*launched), devices))
