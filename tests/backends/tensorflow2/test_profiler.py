"""TensorFlow 2: on which device a timeline shows what the profiler recorded."""

import collections
import json

import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.eager import context

import compat
from compat import _api
from compat._backends.tensorflow2 import profiler
from compat._backends.tensorflow2.configuration import short_name
from compat._runtime.operation_times import Operation
from compat.testing import DEVICES, initialise, keras_under_test, slow, span

keras_ = keras_under_test()
layers = keras_.layers


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_


@tf.function
def product(matrix):
    return tf.matmul(matrix, matrix, name="product")


@span
def test_what_ran_before_an_error_is_recorded(keras):
    with pytest.raises(KeyError):
        with _api.configured_backend().profiled() as operations:
            for _ in range(2):
                product(tf.ones((2, 2)))
            raise KeyError
    found = [each.device for each in operations if each.name.endswith("MatMul: product")]
    assert found == ["/cpu:0"] * 2


if hasattr(tf, "profiler"):
    start, stop = tf.profiler.experimental.start, tf.profiler.experimental.stop
    STOP = "tf.profiler.experimental.stop()"
elif not hasattr(context.context(), "add_post_execution_callback"):  # TensorFlow 2.1
    STOP = "tf.summary.trace_export()"

    def start(directory):
        tf.summary.trace_on(graph=False, profiler=True)

    def stop():
        tf.summary.trace_off()


if "start" in globals():  # TensorFlow 2.0 records by other means

    @span
    def test_a_profile_of_the_script_is_in_the_way(keras, tmp_path):
        start(str(tmp_path))
        path = tmp_path / "timeline.json"
        with pytest.raises(compat.InvalidArgumentError) as caught:
            with compat.timeline(str(path)):
                pass  # pragma: no cover
        assert str(caught.value) == (
            "timeline(): TensorFlow's profiler is running already, and it records one profile at a "
            "time. End that one first: {}, or a fit() whose TensorBoard callback has "
            "profile_batch.".format(STOP)
        )
        assert not path.exists()
        stop()
        with compat.timeline(str(path)):
            product(tf.ones((2, 2)))
        events = json.loads(path.read_text())["traceEvents"]
        assert "product" in str([event["name"] for event in events])


if hasattr(tf, "profiler"):

    @span
    def test_a_gpu_is_found_by_its_number_in_cuda(monkeypatch):
        """A profile as TensorFlow makes it of GPUs: there is none here."""
        kind = collections.namedtuple("Device", "name")
        shown = [kind("/physical_device:GPU:2"), kind("/physical_device:GPU:0")]
        monkeypatch.setattr(tf.config.experimental, "get_visible_devices", lambda kind: shown)
        try:
            from tensorflow.tsl.profiler.protobuf import xplane_pb2
        except ImportError:
            from tensorflow.core.profiler.protobuf import xplane_pb2
        space = xplane_pb2.XSpace()
        for number, line in ((2, "Stream #7(Kernel)"), (2, "XLA Modules"), (1, "Stream #7")):
            plane = space.planes.add(name="/device:GPU:{}".format(number))
            plane.event_metadata[3].name = "gemm"
            events = plane.lines.add(name=line, timestamp_ns=5000).events
            events.add(metadata_id=3, offset_ps=2500000, duration_ps=1500000)
        found = profiler.operations(space.planes, ["/gpu:0", "/gpu:1"])
        assert list(found) == [Operation("/gpu:0", "gemm", 7.5, 1.5)]


def recurrent():
    return [layers.Input((3, 4)), layers.LSTM(4), layers.Dense(1)]


def convolutional():
    return [
        layers.Input((16, 16, 3)),
        layers.Conv2D(8, 3, activation="relu"),
        layers.BatchNormalization(),
        layers.Flatten(),
        layers.Dense(1),
    ]


if hasattr(context.context(), "list_function_names"):  # not 2.3, which records no callers

    @pytest.mark.parametrize(
        "parts, traced_before",
        [pytest.param(*each, marks=slow) for each in ((recurrent, False), (convolutional, True))],
    )
    def test_every_kernel_is_shown_where_it_ran(keras, monkeypatch, parts, traced_before):
        """TensorFlow's own word is in the keys of what one device sends to another."""
        model = compat.parallelize(initialise(keras.models.Sequential(parts())))
        model.compile("adam", "mse")
        inputs, targets = np.ones((12,) + model.input_shape[1:]), np.ones((12, 1))
        if traced_before:
            model.fit(inputs, targets, batch_size=12, verbose=0)
        read, kept = profiler._planes, []
        monkeypatch.setattr(profiler, "_planes", lambda path: kept.extend(read(path)) or kept)
        with _api.configured_backend().profiled() as operations:
            model.fit(inputs, targets, batch_size=12, epochs=3, verbose=0)
        shown = {(each.start, each.name): each.device for each in operations}
        (host,) = [each for each in kept if each.name == "/host:CPU"]
        senders = devices_that_sent(host)
        assert {device for found in senders.values() for device in found} == set(shown.values())
        of_values, compared, products = 0, 0, collections.Counter()
        for event, (node, kind), run in profiler.kernels(host)[0]:
            device = shown.get((event.start, "{}: {}".format(kind, node)))
            of_values += "VariableOp" not in kind
            if device is not None and run in senders:
                assert senders[run] == {device}, event.name
                compared += 1
            if "MatMul" in kind or "Conv2D" in kind:
                products[device, "grad" in node] += 1
        assert compared > 100
        # The rest is on variables, and a few of the input pipeline's eager operations.
        assert len(shown) > 0.9 * of_values
        devices = _api.configured_backend().devices()
        assert set(products) == {(device, back) for device in devices for back in (False, True)}
        assert len(set(products[device, False] for device in devices)) == 1
        assert len(set(products[device, True] for device in devices)) == 1


def devices_that_sent(plane):
    """Return the devices of each run of a graph that sent something, by the key of that."""
    found = {}
    for line in plane.lines:
        enclosing = []
        for event in profiler._events(plane, line):
            while enclosing and enclosing[-1][0] <= event.start:
                enclosing.pop()
            if event.name == "ExecutorState::Process":
                enclosing.append((event.start + event.duration, event.statistics["_c"]))
            elif event.name.endswith(":_Send") and event.statistics["key"].startswith("/job:"):
                sender = short_name(event.statistics["key"].split(";")[0])
                found.setdefault(enclosing[-1][1], set()).add(sender)
    return found
