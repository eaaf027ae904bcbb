"""TensorFlow 1: what a session's configuration has, of GPUs that this machine need not have."""

import gc

import pytest
import tensorflow as tf

import compat
from compat._backends import tensorflow1
from compat._backends._tensorflow.graph import v1_names
from compat._backends.tensorflow1 import configuration
from compat.testing import DEVICES, keras_under_test, span

from .test_contract import run

v1 = v1_names(tf)


def test_a_script_can_be_forked_where_there_is_no_gpu():
    """A process that has made a session hangs then, with plain TensorFlow, too."""
    printed = run(
        """
        import multiprocessing
        import numpy as np
        keras = keras_under_test()
        fork = multiprocessing.get_context("fork")

        def train():
            model = keras.models.Sequential([keras.layers.Dense(2, input_shape=(3,))])
            compat.parallelize(model).compile("sgd", "mse")
            model.train_on_batch(np.ones((7, 3)), np.ones((7, 2)))
            return compat.report().as_dict()["devices"]

        def script(simulate):
            configuration = compat.configure_gpu(simulate=simulate)
            with fork.Pool(1) as pool:
                devices = pool.apply_async(train).get(120)
            assert [each["device"] for each in devices] == configuration.devices
            print([each["training_rows"] for each in devices], flush=True)

        for simulate in (None, 3):
            process = fork.Process(target=script, args=(simulate,))
            process.start()
            process.join()
            assert process.exitcode == 0
        """
    )
    assert printed.splitlines()[-2:] == ["[0]", "[2, 2, 3]"]  # one device does as ever, uncounted


def session_config(late=None, **settings):
    from compat._configuration import settings as _settings
    from compat._configuration.device_choice import Devices

    memory = _settings.parse_memory(settings.pop("memory", None))
    devices = Devices(["2", "3"], [0, 1])
    asked = _settings.Settings(devices, memory, options=settings)
    return configuration.session_config(v1, asked, late)


@span
def test_gpu_options(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3,5")
    assert session_config(memory="grow").gpu_options.allow_growth
    assert session_config(memory=0.5).gpu_options.per_process_gpu_memory_fraction == 0.5
    assert session_config().gpu_options.visible_device_list == ""
    assert session_config(late="imported").gpu_options.visible_device_list == "0,1"
    config = session_config(device_count={"GPU": 1, "CPU": 56}, log_device_placement=True)
    assert dict(config.device_count) == {"GPU": 1, "CPU": 56}
    assert config.log_device_placement and config.allow_soft_placement
    assert not session_config(allow_soft_placement=False).allow_soft_placement


@span
def test_a_session_of_the_users_has_fixed_the_memory_of_gpus(monkeypatch):
    from tensorflow.python.client import session

    v1.Session().close()
    monkeypatch.setattr(v1.test, "is_built_with_cuda", lambda: True)
    monkeypatch.setattr(configuration, "imported_keras_packages", list)
    monkeypatch.setattr(configuration, "_defaults", None)  # as before compat was configured
    config = session_config(memory="grow")
    if not hasattr(session, "_python_session_create_counter"):
        return configuration.ensure_no_other_session(v1, config)  # before 1.13 nothing tells
    with pytest.raises(compat.TooLateError) as raised:
        configuration.ensure_no_other_session(v1, config)
    assert str(raised.value) == (
        "configure_gpu() came too late for tensorflow: a session was made in this process, which "
        "fixed GPUs and their memory; they cannot become allow_growth: true.\n"
        "Call it before the first tf.Session()."
    )


@span
def test_memory_size_is_a_fraction_of_the_largest_gpu(monkeypatch):
    from compat._configuration import device_choice

    gpus = [
        device_choice.GPU(2, memory_total=8 * 2**30),
        device_choice.GPU(3, memory_total=16 * 2**30),
    ]
    monkeypatch.setattr(device_choice, "discover", lambda: gpus)
    config = session_config(memory="4GiB")
    assert config.gpu_options.per_process_gpu_memory_fraction == 0.25
    monkeypatch.setattr(device_choice, "discover", lambda: [])
    with pytest.raises(compat.UnsupportedError) as raised:
        session_config(memory="4GiB")
    assert str(raised.value) == (
        "tensorflow1 cannot limit memory to 4096 MiB per GPU: it takes a fraction of each GPU "
        "only, and nvidia-smi does not tell how much memory the GPUs have. Use a fraction such "
        'as memory=0.5, or memory="grow".'
    )


@span
def test_gpus_that_only_tensorflow_lists(monkeypatch):
    from compat._configuration import device_choice, gpu_selection
    from compat._configuration import settings as _settings

    def configured(gpus, listed, memory=None):
        backend = tensorflow1.TensorFlow1()
        devices = device_choice.choose(gpu_selection.parse_gpus(gpus), None, {}, discover=list)
        settings = _settings.Settings(devices, _settings.parse_memory(memory))
        configs = []
        names = ["/device:GPU:{}".format(index) for index in range(listed)] or ["/device:CPU:0"]
        monkeypatch.setattr(configuration, "ensure_no_other_session", lambda *arguments: None)
        monkeypatch.setattr(configuration, "set_session_defaults", configs.append)
        monkeypatch.setattr(backend, "initialised", lambda: None)
        monkeypatch.setattr(backend, "devices", lambda: names)
        backend.configure(settings)
        return configs[0](), devices

    config, devices = configured(None, 2, "grow")
    assert not config.device_count and config.gpu_options.allow_growth
    assert devices.gpus == ("0", "1") and not devices.shortage
    config, devices = configured(3, 2)
    assert dict(config.device_count) == {"GPU": 3}  # at most
    assert devices.shortage == ("gpus=3", "2 GPUs are visible")
    config, _ = configured([2, 1], 2)
    assert config.gpu_options.visible_device_list == "2,1"
    config, devices = configured(2, 0, "grow")
    assert dict(config.device_count) == {"GPU": 0} and not config.gpu_options.allow_growth
    assert configured(None, 0, "4GiB")[1].gpus == devices.gpus == ()
    with pytest.raises(compat.UnsupportedError, match="it takes a fraction of each GPU only"):
        configured(None, 1, "4GiB")


@span
def test_a_function_is_released_after_its_session():
    """Python collects the two in any order: without a mend, TensorFlow 1.8 ends the process."""
    compat.configure_gpu(simulate=DEVICES)
    K = keras_under_test().backend
    function = K.function([], [K.constant(1.0)])
    function([])
    if getattr(function, "_callable_fn", None) is not None:
        function._session.__del__()
    K.clear_session()
    del function
    gc.collect()
