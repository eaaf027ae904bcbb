"""TensorFlow 2: devices, memory and options, of machines that this one need not be."""

import functools
import types

import pytest
import tensorflow as tf

import compat
from compat._backends.tensorflow1 import configuration as v1_configuration
from compat._backends.tensorflow2 import TensorFlow2, backend
from compat._backends.tensorflow2.configuration import chosen_gpus
from compat._configuration.device_choice import Devices, choose
from compat._configuration.gpu_selection import parse_gpus
from compat._configuration.settings import Memory, Settings
from compat._ranks.place import Place
from compat.testing import (
    DEVICES,
    keras_under_test,
    span,
)

from ..messages import refusal
from .test_contract import KERAS3


@pytest.fixture(scope="module")
def keras():
    compat.configure_gpu(simulate=DEVICES)
    return keras_under_test()


def test_environ():
    def environ(devices, memory=None, given=None):
        return backend.environ(Settings(devices, memory), given or {})

    assert environ(Devices()) == {"CUDA_VISIBLE_DEVICES": "-1"}
    gpus = Devices(["2", "0"], [2, 0])
    order = {"CUDA_VISIBLE_DEVICES": "2,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert environ(gpus) == order
    assert environ(gpus, Memory(size=2**30)) == order
    grow = Memory(grow=True)
    growth = {"TF_FORCE_GPU_ALLOW_GROWTH": "true"}
    assert environ(gpus, grow) == dict(order, **growth)
    assert environ(gpus, grow, dict(order, TF_FORCE_GPU_ALLOW_GROWTH="false")) == growth
    assert environ(gpus, grow, dict(order, **growth)) == {}
    assert environ(Devices(simulated=2), grow) == {"CUDA_VISIBLE_DEVICES": "-1"}


def test_chosen_gpus_count_inside_what_tensorflow_listed(monkeypatch):
    """Stand-ins for GPUs: there is none here."""
    listed = ["GPU:0", "GPU:1", "GPU:2"]
    stand_in = types.SimpleNamespace(
        config=types.SimpleNamespace(
            experimental=types.SimpleNamespace(list_physical_devices=lambda kind: listed)
        )
    )
    chosen = functools.partial(chosen_gpus, stand_in)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert chosen(Devices()) == []
    assert chosen(Devices(["2", "0"], [2, 0])) == ["GPU:2", "GPU:0"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7,3")  # as it was at import
    assert chosen(Devices(["7"], [1])) == ["GPU:1"]
    assert chosen(Devices(["5", "7", "3"], [0, 1, 2])) == listed
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert refusal(compat.TooLateError, chosen, Devices(["1"], [0])) == (
        "configure_gpu() came too late for tensorflow: CUDA_VISIBLE_DEVICES=1 was set after "
        "TensorFlow had listed 3 GPUs.\nSet it before the first `import tensorflow` or `import "
        "keras`."
    )


@pytest.fixture
def machine_of(monkeypatch, imitate):
    """Have TensorFlow list GPUs that are not here, as its plug-ins do: of the type "GPU"."""
    experimental = tf.config.experimental
    real = experimental.list_physical_devices("CPU")[0]
    setter = tf.config if hasattr(tf.config, "set_visible_devices") else experimental

    def machine_of(number):
        names = ["/physical_device:GPU:{}".format(index) for index in range(number)]
        gpus = [type(real)(name, "GPU") for name in names]
        shown = {"GPU": gpus, "CPU": [real]}

        def list_physical_devices(device_type=None):
            return {"GPU": gpus, "CPU": [real]}[device_type]

        def get_visible_devices(device_type=None):
            return shown[device_type]

        def set_visible_devices(devices, device_type=None):
            shown[device_type] = devices

        imitate(experimental, "list_physical_devices", list_physical_devices)
        imitate(experimental, "get_visible_devices", get_visible_devices)
        imitate(setter, "set_visible_devices", set_visible_devices)
        imitate(experimental, "get_virtual_device_configuration", lambda device: None)
        for name in ("set_session_defaults", "ensure_no_other_session"):
            monkeypatch.setattr(v1_configuration, name, lambda *arguments: None)
        return configured

    def configured(gpus=None, memory=None):
        devices = choose(parse_gpus(gpus), None, {}, discover=list)
        backend = TensorFlow2()
        settings = Settings(devices, memory)
        assert backend.environ(settings, {}) == (
            {"CUDA_VISIBLE_DEVICES": "-1"} if gpus == 0 else {}
        )
        applied, _ = backend.configure(settings)
        return backend.devices(), applied[0], devices.shortage and devices.shortage[1]

    return machine_of


@span
def test_the_gpu_of_a_metal_machine(machine_of):
    configured = machine_of(1)
    visible = "tf.{}set_visible_devices([{}], 'GPU')".format
    prefix = "config." if hasattr(tf.config, "set_visible_devices") else "config.experimental."
    one = visible(prefix, "/physical_device:GPU:0")
    assert configured() == configured(1) == configured([0]) == (["/gpu:0"], one, None)
    assert configured(2) == (["/gpu:0"], one, "1 GPU is visible")
    assert configured(0) == (["/cpu:0"], visible(prefix, ""), None)


def test_a_fraction_of_a_gpu_of_unknown_size_is_refused(machine_of):
    with pytest.raises(compat.UnsupportedError) as error:
        machine_of(1)(memory=Memory(fraction=0.5))
    assert str(error.value) == (
        "tensorflow2 cannot take a fraction of a GPU whose size the driver does not tell. Give a "
        'size, such as memory="4GiB".'
    )


def test_gpus_of_a_rocm_machine(machine_of):
    configured = machine_of(3)
    assert configured()[::2] == (["/gpu:0", "/gpu:1", "/gpu:2"], None)
    assert configured([2, 0])[::2] == (["/gpu:1", "/gpu:0"], None)  # numbered as TensorFlow does
    assert "[/physical_device:GPU:2, /physical_device:GPU:0]" in configured([2, 0])[1]
    assert configured(4)[::2] == (["/gpu:0", "/gpu:1", "/gpu:2"], "3 GPUs are visible")


def test_options_and_memory_on_a_machine_without_gpu(run):
    """Everything is set before the runtime starts, which configure_gpu() itself does not do."""
    printed = run(
        """
        import tensorflow as tf  # not too late
        import compat
        from tensorflow.python.eager import context

        report = compat.configure_gpu(
            0, memory="grow", inter_op_parallelism_threads=3, intra_op_parallelism_threads=1,
            log_device_placement=False, floatx="float64",
        )
        assert getattr(context._context, "_context_handle", None) is None
        assert compat.configure_gpu(
            "cpu", memory="grow", inter_op_parallelism_threads=3, intra_op_parallelism_threads=1,
            log_device_placement=False, floatx="float64",
        ) is report
        print(tf.config.threading.get_inter_op_parallelism_threads(), report.devices)
        print("\\n".join(report.applied))
        from compat.testing import keras_under_test

        print(keras_under_test().backend.floatx())
        """
    )
    lines = printed.splitlines()
    assert lines[:4] == [
        "3 ['/cpu:0']",
        "tf.config.threading.set_inter_op_parallelism_threads(3)",
        "tf.config.threading.set_intra_op_parallelism_threads(1)",
        "tf.debugging.set_log_device_placement(False)",
    ]
    assert lines[-1] == "float64"


if not KERAS3:  # of which nothing is in it

    def test_too_late_says_why(run):
        printed = run(
            """
            import tensorflow as tf
            tf.constant(1.0)
            import compat

            try:
                compat.configure_gpu(simulate=3)
            except compat.TooLateError as error:
                print(error)
            compat.configure_gpu("cpu")  # nothing that has to change
            """
        )
        assert printed.rstrip() == (
            "configure_gpu() came too late for tensorflow: TensorFlow started with its first "
            "operation (it was imported by `import tensorflow`), and "
            "tf.config.{} then says: Virtual devices cannot be modified "
            "after being initialized.\nCall it before the first model, variable or tensor is made, "
            "best before the first `import tensorflow` or `import keras`.".format(
                "set_logical_device_configuration"
                if hasattr(tf.config, "set_logical_device_configuration")
                else "experimental.set_virtual_device_configuration"
            )
        )


@span
def test_a_version_without_workers_trains_no_ranks_of_tf_config(keras):
    model = keras.Sequential([keras.layers.Dense(1, input_shape=(3,))])
    with pytest.raises(compat.UnsupportedError) as raised:
        backend.distribute(model, Place(1, 2, 1, 2, "TF_CONFIG"))
    assert str(raised.value) == (
        "tensorflow2 cannot train as rank 1 of 2 (TF_CONFIG) with TensorFlow {}. Use TensorFlow "
        "2.4 or later, or install Horovod and start the script with horovodrun."
    ).format(tf.__version__)


if hasattr(tf.distribute, "MultiWorkerMirroredStrategy"):
    del test_a_version_without_workers_trains_no_ranks_of_tf_config
