"""configure_gpu() and parallelize() with a whole, small backend; no framework."""

import ast
import contextlib
import os
import re
import sys
import threading
import types
import warnings

import pytest
from conftest import ROOT, TOY_FRAMEWORK, Toy, refusal

import compat
from compat import _keras, _rows
from compat._api import batch_norm
from compat._configuration import registry, tested_versions
from compat._runtime import synchronized
from compat._runtime.process import process
from compat.backend import Backend

pytestmark = pytest.mark.usefixtures("process")


def configure(*args, **kwargs):
    """configure_gpu(), which must not warn."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return compat.configure_gpu(*args, **kwargs)


def warned(call, *args, **kwargs):
    """Return a call's result, and the texts of its warnings, which must have the caller's line.

    Those of configure_gpu() are the configuration's, too.
    """
    with pytest.warns(compat.CompatWarning) as caught:
        result = call(*args, **kwargs)
    assert {(w.category, w.filename) for w in caught} == {(compat.CompatWarning, __file__)}
    texts = [str(w.message) for w in caught]
    assert call is not compat.configure_gpu or result.warnings == texts
    return result, texts


def refused(kind, *args, **kwargs):
    return refusal(kind, compat.configure_gpu, *args, **kwargs)


FEWER = "Ask for fewer, or drop strict=True to go on with what there is."


def contradiction(first, second):
    """Return the text of the error for two calls with different devices or backends."""
    return (
        "configure_gpu() was called before in this process, with other settings.\n"
        "first:  {}\n"
        "second: {}\n"
        "Devices are fixed once per process: make both calls the same, or drop one."
    ).format(first, second)


# One call -------------------------------------------------------------------------------------


def test_variables_are_set_before_the_framework_is_imported(toy, machine):
    machine.plug(3)
    configuration = configure([2, 0], memory="grow", toy_seed=7)
    import toyframework

    assert (toyframework.visible, toyframework.flags) == ("2,0", "memory=grow")
    assert str(configuration) == (
        "backend    toy (the only backend installed)\n"
        "versions   toyframework 1.2\n"
        "asked      gpus=[2, 0], memory: grow, toy_seed=7\n"
        "chosen     GPU 2,0\n"
        "devices    gpu:0, gpu:1\n"
        "variables  CUDA_DEVICE_ORDER=PCI_BUS_ID\n"
        "           CUDA_VISIBLE_DEVICES=2,0\n"
        "           TOY_FLAGS=memory=grow\n"
        "applied    toyframework.seed = 7\n"
        "warnings   none"
    )
    assert isinstance(configuration, compat.Configuration)


def test_without_a_gpu_nothing_is_hidden_and_the_report_says_why(toy):
    configuration = configure()
    assert "CUDA_VISIBLE_DEVICES" not in os.environ
    assert str(configuration) == (
        "backend    toy (the only backend installed)\n"
        "versions   toyframework 1.2\n"
        "asked      gpus=None\n"
        "chosen     CPU: no GPU was found (amd-smi and rocm-smi are not installed; nvidia-smi "
        "lists none); the framework lists none\n"
        "devices    cpu:0\n"
        "variables  none set\n"
        "applied    toyframework.seed = None\n"
        "warnings   none"
    )


@pytest.fixture
def metal(toy, site):
    """Have the toy's framework see two GPUs that no command of a driver knows."""
    own = (
        "\n\ndef devices():\n    return ['cpu:0'] if visible == '-1' else ['metal:0', 'metal:1']\n"
    )
    (site.folder / "toyframework.py").write_text(TOY_FRAMEWORK + own)


@pytest.mark.parametrize("gpus", [None, 2])
def test_gpus_that_only_the_framework_lists_are_used(metal, gpus):
    configuration = configure(gpus)
    assert configuration.devices == ["metal:0", "metal:1"]
    assert configuration.environ == {}
    assert "asked      gpus={}\n".format(gpus) in str(configuration)
    assert "chosen     GPU 0,1 of the 2 that the framework lists\n" in str(configuration)
    assert configure(-1) is configure("0,1") is configuration


def test_fewer_gpus_than_asked_for_of_those_that_the_framework_lists(metal):
    start = "gpus=3 was asked for, but 2 GPUs are visible. "
    assert refused(compat.DevicesNotFoundError, 3, strict=True) == start + FEWER
    del sys.modules["toyframework"]
    assert warned(compat.configure_gpu, 3)[1] == [start + "Going on with GPU 0,1."]


def test_gpus_that_only_the_framework_lists_can_be_declined(metal):
    configuration = configure(0)
    assert configuration.devices == ["cpu:0"]
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1"
    assert "asked      gpus=0\nchosen     CPU, as asked\n" in str(configuration)


def test_a_driver_that_does_not_work_is_a_warning(toy, machine):
    machine.plug(status=9)
    assert warned(compat.configure_gpu)[1] == [
        "gpus=None was asked for, but no GPU is visible: nvidia-smi fails (exit status 9). Going "
        "on with CPU."
    ]


def test_a_variable_can_be_removed(toy, monkeypatch):
    monkeypatch.setenv("TOY_FLAGS", "old")
    monkeypatch.setattr(
        toy, "environ", lambda settings, environ: {"TOY_FLAGS": None}, raising=False
    )
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")
    assert "TOY_FLAGS removed" in str(configure())
    assert "TOY_FLAGS" not in os.environ


# Shortages ------------------------------------------------------------------------------------


def test_fewer_gpus_than_asked_for_are_an_error_under_strict_and_else_a_warning(toy, machine):
    machine.plug(1)
    start = "gpus=2 was asked for, but 1 GPU is visible. "
    before = dict(os.environ)
    assert refused(compat.DevicesNotFoundError, 2, strict=True) == start + FEWER
    assert dict(os.environ) == before
    assert "toyframework" not in sys.modules  # nothing stays behind
    configuration, texts = warned(compat.configure_gpu, 2)
    assert texts == [start + "Going on with GPU 0."]
    assert configuration.devices == ["gpu:0"]


@pytest.mark.parametrize("devices", ["gpu:0", "cpu:0", "/device:CPU:0"])
def test_gpus_that_the_framework_does_not_bring_up(toy, machine, monkeypatch, devices):
    """Some, or all; the CPU is known under any name."""
    machine.plug(2)
    monkeypatch.setattr(toy, "devices", lambda: [devices], raising=False)
    before = dict(os.environ)
    start = "GPU 0,1 was asked for, but toyframework sees {}. ".format(devices)
    assert refused(compat.DevicesNotFoundError, strict=True) == start + FEWER
    assert dict(os.environ) == before
    del sys.modules["toyframework"]
    assert warned(compat.configure_gpu)[1] == ["{}Going on with {}.".format(start, devices)]


def test_a_broken_value_of_cuda_visible_devices_is_corrected_with_a_warning(
    toy, machine, monkeypatch
):
    machine.plug(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1, 0")
    configuration, texts = warned(compat.configure_gpu)
    assert texts == [
        'CUDA_VISIBLE_DEVICES="1, 0" contains a space, where CUDA stops reading; compat reads it '
        'as "1,0". Corrected: export CUDA_VISIBLE_DEVICES=1,0'
    ]
    assert configuration.environ["CUDA_VISIBLE_DEVICES"] == "1,0"
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"


def test_warnings_made_errors_leave_nothing_half_done(toy):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(compat.CompatWarning):
            compat.configure_gpu(2)
        assert compat.configure_gpu(2).devices == ["cpu:0"]  # it is configured


# Options --------------------------------------------------------------------------------------


class Other(Toy):
    name = framework = extra = "other"
    distributions = ("other",)
    options = ("other_option",)


@pytest.fixture
def other(toy, register, site):
    """Return a second backend, installed as the first one."""
    register(toy, Other())
    site.install("other", "1.0", "other", TOY_FRAMEWORK)


def test_an_option_that_no_backend_knows(other):
    assert refused(compat.UnknownOptionError, toy_sed=1) == (
        "configure_gpu() has no argument 'toy_sed', and no backend has an option of that name. Did "
        "you mean toy_seed=1? Its arguments: gpus, backend, memory, floatx, simulate, verify, "
        "persist, strict, parallelize, sync_batch_norm. Options of single backends: other_option, "
        "toy_seed."
    )


@pytest.mark.parametrize(
    "name, value, meant",
    [
        ("memmory", "grow", "memory='grow'"),
        ("gpu", 2, "gpus=2"),
        ("num_gpus", 2, "gpus=2"),
        ("n_gpus", 2, "gpus=2"),
        ("devices", ["GPU-" + "f" * 40], "gpus=..."),
        ("gpu_ids", [0], "gpus=[0]"),
        ("allow_growth", True, 'memory="grow"'),
        ("gpu_memory_fraction", 0.3, "memory=0.3"),
        ("per_process_gpu_memory_fraction", None, "memory=0.5"),
        ("memory_limit", 4096, 'memory="4096MiB"'),
        ("float", "float32", "floatx='float32'"),
        ("floatX", "float32", "floatx='float32'"),
        ("epochs", 3, None),
    ],
)
def test_what_a_name_of_others_means(toy, name, value, meant):
    text = refused(compat.UnknownOptionError, **{name: value})
    said = re.search(r"name\. Did you mean (.*)\? Its", text)
    assert (said and said.group(1)) == meant


def test_an_option_of_another_backend_is_said(toy, register):
    register(toy, Other())  # which is not installed
    assert warned(compat.configure_gpu, other_option=1)[1] == [
        "The option 'other_option' is for other backends: toy ignores it."
    ]


def test_persist_where_there_is_no_file_is_said(toy, monkeypatch):
    assert warned(compat.configure_gpu, persist=True)[1] == [
        "persist=True writes nothing: toy reads no configuration file."
    ]
    process.start_afresh()
    monkeypatch.setattr(toy, "configuration_file", "~/.toyrc", raising=False)
    assert configure(persist=True).warnings == []


@pytest.mark.parametrize("name", ["persist", "strict", "parallelize", "sync_batch_norm"])
def test_switches_are_read_from_texts_too(toy, name):
    """As argparse and configuration files have them, where Python takes "no" for true."""
    for value in ("no", "False", " off", "0", 0, False, None):
        assert not getattr(configure(**{name: value}).settings, name)
    process.start_afresh()
    for value in (True, "yes", "TRUE", "on", "1", 1) if name == "strict" else ():
        assert configure(strict=value).settings.strict is True
    problem = refused(compat.InvalidArgumentError, **{name: "maybe"})
    assert problem == (
        '{}=\'maybe\' is not understood. Use True or False, or one of the texts "yes", "no", '
        '"true", "false", "on", "off", "1", "0".'.format(name)
    )


# The second call ------------------------------------------------------------------------------


def test_another_call_with_the_same_result_does_nothing(toy, machine):
    machine.plug(2)
    first = configure(2, memory="1GiB", toy_seed=1)
    del sys.modules["toyframework"]  # the framework is not asked again
    for same in (2, None, -1, [0, 1], "0,1", (0, 1), "all"):
        assert configure(same, memory="1024MiB", backend="toy", toy_seed=1) is first
    assert "toyframework" not in sys.modules


def test_ids_of_a_second_call_count_as_in_the_first(toy, machine):
    machine.plug(4)
    first = configure([2, 3])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert configure("2,3") is first
    assert refused(compat.AlreadyConfiguredError, [0, 1]) == contradiction(
        "toy, devices: GPU 2,3", "toy, devices: GPU 0,1"
    )


@pytest.mark.parametrize(
    "arguments, line",
    [
        ({"gpus": 0}, "devices: CPU"),
        (
            {"strict": True, "persist": True, "floatx": "float32", "memory": "grow"},
            "devices: GPU 0,1, memory: grow, floatx: float32, persist, strict",
        ),
        ({"gpus": [1]}, "devices: GPU 1"),
        ({"simulate": 2}, "devices: 2 simulated on the CPU"),
        ({"memory": "grow"}, "devices: GPU 0,1, memory: grow"),
        ({"floatx": "float16"}, "devices: GPU 0,1, floatx: float16"),
        ({"strict": True}, "devices: GPU 0,1, strict"),
        ({"persist": True}, "devices: GPU 0,1, persist"),
        ({"toy_seed": 2}, "devices: GPU 0,1, toy_seed=2"),
    ],
)
def test_a_call_that_contradicts_the_first(toy, machine, arguments, line):
    machine.plug(2)
    first = configure()
    before = dict(os.environ)
    assert refused(compat.AlreadyConfiguredError, **arguments) == contradiction(
        "toy, devices: GPU 0,1", "toy, " + line
    )
    assert dict(os.environ) == before
    assert configure() is first


def test_a_call_for_another_backend_contradicts_the_first(toy, other):
    configure(backend="toy")
    assert refused(compat.AlreadyConfiguredError, backend="other") == contradiction(
        "toy, devices: CPU", "other, devices: CPU"
    )


def test_of_two_threads_that_contradict_each_other_one_gets_the_error(toy, machine, monkeypatch):
    machine.plug(2)
    both = threading.Barrier(2)
    plain = toy.configure

    def configure_slowly(settings):
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)  # where both threads are configuring, they meet here
        return plain(settings)

    monkeypatch.setattr(toy, "configure", configure_slowly, raising=False)
    results = []

    def thread(gpus):
        try:
            results.append(compat.configure_gpu(gpus).devices)
        except compat.AlreadyConfiguredError as error:
            results.append(type(error))

    threads = [threading.Thread(target=thread, args=([index],)) for index in range(2)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert results == [["gpu:0"], compat.AlreadyConfiguredError]


def test_an_idle_gpu_stays_chosen(toy, machine):
    machine.plug(2)
    first = configure("free:1")
    assert configure("free:1") is first
    assert configure("free:1", backend="toy") is first


# Failures leave nothing behind ----------------------------------------------------------------


@pytest.fixture
def imported(toy, machine, monkeypatch):
    """Import the framework, which sees the second of two GPUs."""
    machine.plug(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    import toyframework  # noqa: F401


def test_too_late(imported):
    before = dict(os.environ)
    assert refused(compat.TooLateError, 0) == (
        "configure_gpu() came too late for toyframework: it shows 1.\nCall first."
    )
    assert dict(os.environ) == before


RESTART = " In this notebook: restart the kernel, and run the cell with configure_gpu() first."


@pytest.fixture
def kernel(monkeypatch):
    """As in a notebook's kernel; tests/test_notebook.py has a real one."""
    monkeypatch.setitem(sys.modules, "ipykernel", types.ModuleType("ipykernel"))


def test_in_a_notebook_the_kernel_is_to_be_restarted(kernel, imported):
    assert refused(compat.TooLateError, 0).endswith(" it shows 1.\nCall first." + RESTART)
    configure()
    assert refused(compat.AlreadyConfiguredError, 0).endswith(" or drop one." + RESTART)


def test_imported_before_with_the_same_settings_is_not_too_late(imported):
    configuration = configure(1)
    assert configuration.devices == ["gpu:0"]
    assert configuration.environ == {}  # they would come too late, so none is set


@pytest.mark.parametrize("method", ["configure", "devices"])
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()])
def test_the_environment_is_restored_when_the_backend_fails(
    toy, machine, monkeypatch, method, error
):
    machine.plug(2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    before = dict(os.environ)

    def fail(*args):
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(toy, method, fail, raising=False)
        with pytest.raises(type(error)):
            compat.configure_gpu([1], memory=0.5)
    assert dict(os.environ) == before
    sys.modules.pop("toyframework", None)
    assert configure([0]).devices == ["gpu:0"]  # as if the first call had never been


def test_the_base_class_can_nothing(register, site):
    class Empty(Backend):
        name = framework = extra = "empty"
        distributions = ("empty",)

    register(Empty())
    site.install("empty", "1.0")
    for call, text in (
        (compat.configure_gpu, "empty cannot be configured. Use another backend."),
        (Empty().devices, "empty cannot list its devices. Use another backend."),
        (
            lambda: Empty().parallelize(None, ["a", "b"]),
            "empty cannot run one model on several devices. Use one device: gpus=1.",
        ),
    ):
        assert refusal(compat.UnsupportedError, call) == text
    assert Empty().problems({}) == []


# parallelize() --------------------------------------------------------------------------------


# A Keras in the form of the oldest supported, as far as compat looks at it.
KERAS_TRAINING = """\
class Container(object):
    pass

class Model(Container):
    layers = ()
    def __init__(self):
        self.devices = None
"""
KERAS = """\
from types import SimpleNamespace
from keras_engine_training import Model
_floatx = "float32"
def _set(floatx):
    global _floatx
    _floatx = floatx
backend = SimpleNamespace(
    backend=lambda: "toyframework", floatx=lambda: _floatx, set_floatx=_set)
Model.__module__ = "keras.engine.training"
"""


@pytest.fixture
def keras_installed(toy, site):
    site.install("Keras", "2.2.4", "keras", KERAS)
    (site.folder / "keras_engine_training.py").write_text(KERAS_TRAINING)


@pytest.fixture
def keras(keras_installed):
    os.environ["KERAS_BACKEND"] = "toyframework"
    import keras

    return keras


def test_a_model_that_is_parallelized_again_is_split_until_it_shows_otherwise(keras):
    configure(simulate=3)
    model = compat.parallelize(keras.Model())
    with pytest.warns(compat.CompatWarning):
        fallback = _rows.Fallback(_rows.Reason.CROSS_BATCH, "Mean")
        _rows.warn_unsplit(model, "Model", fallback, "cpu:0")
    assert list(compat.report().unsplit) == ["Model"]
    compat.parallelize(model)
    assert compat.report().unsplit == {}


def test_a_framework_that_trains_wrong_is_refused_on_several_devices(keras, monkeypatch):
    monkeypatch.setitem(tested_versions.FAULTS, "toyframework==1.2", "sums get lost; use 1.3")
    text = (
        "toy cannot train on several devices with toyframework 1.2: sums get lost. Use 1.3, or one "
        "device: gpus=1."
    )
    before = dict(os.environ)
    assert refused(compat.UnsupportedError, simulate=2) == text
    assert process.configuration is None and dict(os.environ) == before
    sys.modules["toyframework"].simulated = 2  # now there are two without configure_gpu()
    assert refusal(compat.UnsupportedError, compat.parallelize, keras.Model()) == text
    compat.parallelize(keras.Model(), gpus=1)
    sys.modules["toyframework"].simulated = 0
    compat.parallelize(keras.Model())
    configure()


def test_a_model_that_was_parallelized_before_is_told_of(keras, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "-1")  # the framework reads it now
    model = keras.Model()
    compat.parallelize(model)
    configuration, texts = warned(compat.configure_gpu, simulate=3)
    assert texts == [
        "parallelize() put the model 'Model' on cpu:0 before configure_gpu() was called, and there "
        "it stays; configured now: cpu:0, cpu:1, cpu:2. Call configure_gpu() at the top of the "
        "script, or parallelize() the model again after it."
    ]
    assert configure(simulate=3) is configuration  # once


def test_a_model_that_was_parallelized_before_on_the_same_devices_is_no_matter(keras):
    compat.parallelize(keras.Model())
    assert configure().warnings == []


def test_a_method_that_builds_the_model(keras):
    configure(simulate=2)

    class Factory:
        def build(self):
            return keras.Model()

    assert compat.parallelize(Factory().build).devices == ["cpu:0", "cpu:1"]


@pytest.mark.parametrize(
    "gpus, expected",
    [
        (None, [0, 1, 2]),
        (-1, [0, 1, 2]),
        ("free", [0, 1, 2]),
        (2, [0, 1]),
        ("free:2", [0, 1]),
        ([2, 0], [2, 0]),
        ("1", [1]),
        (1, [0]),
        (0, [0]),
    ],
)
def test_which_of_the_configured_devices(keras, gpus, expected):
    configure(simulate=3)
    model = keras.Model()
    assert compat.parallelize(model, gpus) is model
    assert model.devices == ["cpu:{}".format(i) for i in expected]


def test_names_of_configured_gpus(keras, machine):
    machine.plug(3)
    first, second, third = machine.uuids
    configure([third, second])
    assert compat.parallelize(keras.Model(), [0]).devices == ["gpu:0"]
    assert compat.parallelize(keras.Model(), second).devices == ["gpu:1"]
    assert compat.parallelize(keras.Model(), [second[:12], third]).devices == ["gpu:1", "gpu:0"]
    assert warned(compat.parallelize, keras.Model(), [second, first])[1] == [
        "gpus=['{}', '{}'] was asked for, but these are configured: gpu:0, gpu:1. Going on with "
        "gpu:1.".format(second, first)
    ]


def test_names_of_configured_mig_instances(keras, machine):
    machine.plug(1)
    configure("MIG-c7384736,MIG-d5f15b44")
    assert compat.parallelize(keras.Model(), "MIG-d5f15b44").devices == ["gpu:1"]


@pytest.mark.parametrize(
    "gpus, asked, devices",
    [
        (3, "gpus=3", "cpu:0, cpu:1"),
        ([1, 5], "gpus=[1, 5]", "cpu:1"),
        ([5], "gpus=[5]", "cpu:0"),
        ("GPU-aa", "gpus=['GPU-aa']", "cpu:0"),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_more_than_is_configured(keras, gpus, asked, devices, strict):
    configure(simulate=2, strict=strict)
    start = "{} was asked for, but these are configured: cpu:0, cpu:1. ".format(asked)
    call = compat.parallelize, keras.Model(), gpus
    if strict:
        assert refusal(compat.DevicesNotFoundError, *call) == start + FEWER
    else:
        model, texts = warned(*call)
        assert texts == ["{}Going on with {}.".format(start, devices)]
        assert ", ".join(model.devices) == devices


def test_wrong_arguments_of_parallelize(keras):
    configure()
    model = keras.Model()
    with pytest.raises(compat.InvalidArgumentError):
        compat.parallelize(model, "two")
    assert " it was given 'keras.engine.training.Model'. Put " in refusal(
        compat.NotAModelError, compat.parallelize, model, strategy="mirrored"
    )


# Batch normalization of the whole batch ---------------------------------------------------------


class BatchNormalization:
    def __init__(self, name, synchronized=False):
        self.name, self.synchronized = name, synchronized


class SyncBatchNormalization(BatchNormalization):
    pass


@pytest.fixture
def normalizing(keras):
    model = keras.Model()
    model.layers = [BatchNormalization("first"), BatchNormalization("second")]
    return model


def not_synchronized(layers, why="sync_batch_norm=True"):
    return (
        "Model 'Model' is to normalize by the statistics of the whole batch ({}), which toy cannot "
        "do on several devices: each device uses those of its own samples in {}."
    ).format(why, layers)


def test_batch_norm_that_cannot_be_synchronized_is_said(normalizing):
    configure(simulate=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.parallelize(normalizing)
        compat.parallelize(normalizing, gpus=1, sync_batch_norm=True)
        compat.parallelize(normalizing, sync_batch_norm=False)
    _, texts = warned(compat.parallelize, normalizing, sync_batch_norm=True)
    assert texts == [not_synchronized("layers 'first', 'second'")]


@pytest.mark.parametrize(
    "layer",
    [BatchNormalization("third", synchronized=True), SyncBatchNormalization("third")],
    ids=["argument", "class"],
)
def test_a_layer_that_asks_for_it_by_itself_is_never_silently_without(normalizing, layer):
    configure(simulate=3)
    normalizing.layers.append(layer)
    _, texts = warned(compat.parallelize, normalizing)
    assert texts == [not_synchronized("layer 'third'", "as some of its layers do by themselves")]


@pytest.mark.parametrize("where", ["configured", "variable", "configured by variable"])
def test_batch_norm_is_synchronized_as_configured(normalizing, monkeypatch, toy, where):
    if where != "configured":
        monkeypatch.setenv("COMPAT_SYNC_BATCH_NORM", "yes")
    if where != "variable":
        settings = configure(simulate=3, sync_batch_norm=where == "configured" or None).settings
        assert settings.sync_batch_norm
    else:
        toy.import_framework().simulated = 3
    assert (
        not_synchronized("layers 'first', 'second'") in warned(compat.parallelize, normalizing)[1]
    )
    toy.synchronizes = ("devices",)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compat.parallelize(normalizing)
        assert synchronized.is_asked(normalizing)
        compat.parallelize(normalizing, sync_batch_norm=False)
    assert not synchronized.is_asked(normalizing)


def test_batch_norm_that_cannot_be_synchronized_is_an_error_under_strict(normalizing):
    configure(simulate=3, strict=True)
    call = compat.parallelize, normalizing
    assert refusal(compat.UnsupportedError, *call, sync_batch_norm=True) == not_synchronized(
        "layers 'first', 'second'"
    ) + (
        " strict=True makes that an error: run the model on one device, with parallelize(model, "
        "gpus=1); leave out what asks for it; or drop strict=True."
    )
    assert normalizing.devices is None


def test_on_ranks_layers_are_named_but_those_that_communicate_by_themselves(normalizing, toy):
    class Horovods(SyncBatchNormalization):
        __module__ = "horovod.tensorflow.sync_batch_norm"

    configure()
    call = batch_norm.check_ranks, toy, normalizing, "Model", types.SimpleNamespace(size=2)
    normalizing.layers.append(Horovods("third"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call[0](*call[1:])
    normalizing.layers.append(SyncBatchNormalization("fourth"))
    with pytest.warns(compat.CompatWarning) as caught:
        call[0](*call[1:])
    assert [str(each.message) for each in caught] == [
        "Model 'Model' is to normalize by the statistics of the whole batch (as some of its layers "
        "do by themselves), which toy cannot do on several ranks: each rank uses those of its own "
        "samples in layer 'fourth'."
    ]


def test_a_model_that_a_strategy_builds_has_its_own_layers(normalizing, toy, monkeypatch):
    monkeypatch.setattr(toy, "build", lambda strategy, build, devices: build(), raising=False)
    configure(simulate=2)
    normalizing.name = "net"
    normalizing.layers += [SyncBatchNormalization("third")]
    call = compat.parallelize, lambda: normalizing
    _, texts = warned(*call, strategy="mirrored", sync_batch_norm=True)
    assert texts == [
        "sync_batch_norm=True does not change a model that is built under a strategy of the "
        "framework: each device uses the statistics of its own samples in layers 'first', 'second' "
        "of model 'net'. Build them with synchronized=True, or as SyncBatchNormalization."
    ]


SYMBOLIC = (
    "() takes a Keras model with symbolic inputs, functional or Sequential with an input shape, "
    "to make another one around it; it was given {}. compat.parallelize() takes any Keras model."
)


@pytest.mark.parametrize(
    "call, text",
    [
        (
            compat.parallelize,
            "parallelize() takes a Keras model, a model of the backend's own kind, or a function "
            "that builds one; it was given {}.",
        ),
        (
            lambda given: compat.parallelize(given, strategy="mirrored"),
            "strategy='mirrored' takes a function that builds the model, since its variables must "
            "be made under the strategy; it was given {}. Put the lines that build the model into "
            "a function, and pass that.",
        ),
        (
            lambda given: compat.parallelize(lambda: given),
            "parallelize() was given the function <lambda>.<locals>.<lambda>, which returned {}, "
            "not a model.",
        ),
        (lambda given: compat.multi_gpu_model(given, 2), "multi_gpu_model" + SYMBOLIC),
        (lambda given: compat.make_parallel(given, 2), "make_parallel" + SYMBOLIC),
        (
            compat.unwrap,
            "unwrap() takes a Keras model; it was given {}. For a file there is the command compat "
            "unwrap.",
        ),
    ],
)
def test_what_is_in_a_model_s_place_is_named(keras, call, text):
    configure(simulate=2)
    for given, name in (
        (keras.Model, "the class 'Model' itself"),
        (3, "'builtins.int'"),
        (None, "'builtins.NoneType'"),
    ):
        assert refusal(compat.NotAModelError, call, given) == text.format(name)


def test_a_model_of_another_backend_than_configured(keras, other):
    with pytest.warns(compat.CompatWarning, match="keras is imported and runs on toyframework"):
        compat.configure_gpu(backend="other", gpus=0)
    assert refusal(compat.InvalidArgumentError, compat.parallelize, keras.Model()) == (
        "The model runs on toy, but configure_gpu() set up other. Build the model with the Keras "
        "that was configured, or pass backend='toy' to configure_gpu()."
    )


# Models of the backend's own kind, strategies, devices -----------------------------------------


class Native(list):
    """What the framework calls a model."""


class Able(Toy):
    """The toy backend, with all that a backend may do besides."""

    def is_native(self, model):
        return type(model) is Native

    def parallelize(self, model, devices):
        model.devices = list(devices)
        return model

    def build(self, strategy, function, devices):
        model = function()
        model.devices = [strategy] + list(devices)
        return model

    def device(self, device):
        return contextlib.closing(Native([device]))


Native.close = Native.clear


@pytest.fixture
def able(site, register, toy):
    register(Able())


def test_a_model_of_the_backends_own_kind(able):
    configure(simulate=3)
    model = Native()
    assert compat.parallelize(model, 2) is model
    assert model.devices == ["cpu:0", "cpu:1"]
    assert compat.parallelize(lambda: Native()).devices == ["cpu:0", "cpu:1", "cpu:2"]
    with pytest.raises(compat.NotAModelError):
        compat.parallelize([])


def test_a_strategy_builds_the_model(able):
    configure(simulate=3)
    model = compat.parallelize(lambda: Native(), gpus=[2, 0], strategy="mirrored")
    assert model.devices == ["mirrored", "cpu:2", "cpu:0"]


def test_a_strategy_that_the_backend_does_not_have(toy):
    configure(simulate=2)
    call = compat.parallelize, lambda: Native()
    assert refusal(compat.UnsupportedError, *call, strategy="mirrored") == (
        "toy cannot build a model with strategy='mirrored'. Leave strategy out: parallelize() "
        "then runs the replicas in this process by itself."
    )


@pytest.mark.parametrize(
    "which, device", [(0, "cpu:0"), (2, "cpu:2"), ("cpu:1", "cpu:1"), ("cpu", "cpu")]
)
def test_device(able, which, device):
    configure(simulate=3)
    with compat.device(which) as placed:
        assert placed == [device]
    assert placed == []


@pytest.mark.parametrize("strict", [False, True])
def test_device_of_which_there_are_fewer(able, strict):
    configure(simulate=2, strict=strict)
    start = "device(3) was asked for, but these are configured: cpu:0, cpu:1. "
    if strict:
        assert refusal(compat.DevicesNotFoundError, compat.device, 3) == start + FEWER
    else:
        device, texts = warned(compat.device, 3)
        assert texts == [start + "Going on with cpu:1."]
        with device as placed:
            assert placed == ["cpu:1"]


def test_very_many_devices_are_named_in_short(able):
    configuration = configure(simulate=999)
    short = "cpu:0, cpu:1, cpu:2, ..., cpu:998 (999 devices)"
    compat.parallelize(Native())
    assert "\nmodels     Native on {}\n".format(short) in str(configuration)
    assert compat.report().verdict == (
        "No batch was split: model 'Native' was given {}, and was never trained or called, or ran "
        "in one piece.".format(short)
    )
    assert refusal(compat.InvalidArgumentError, compat.device, "x") == (
        "device('x') is not understood. Use a number, counted among the configured devices from "
        '0, one of their names ({}), or "cpu".'.format(short)
    )
    text = "{} was asked for, but these are configured: {}. Going on with {}."
    for call, given, asked, device in (
        (compat.parallelize, [Native(), 1000], "gpus=1000", short),
        (compat.device, [999], "device(999)", "cpu:0"),
    ):
        assert warned(call, *given)[1] == [text.format(asked, short, device)]


def test_that_nothing_used_the_devices_is_known(able):
    for use in (lambda: compat.parallelize(Native()), lambda: compat.device(0)):
        process.start_afresh()
        configure(simulate=2)
        assert not process.uses_devices
        use()
        assert process.uses_devices


def test_device_on_a_machine_with_one(toy):
    """The toy backend cannot place anything, and on one device need not."""
    configure()
    with compat.device(0), compat.device("cpu"):
        pass
    with pytest.warns(compat.CompatWarning, match="Going on with cpu:0"):
        compat.device(1)


def test_device_of_a_backend_that_cannot_place(toy):
    configure(simulate=2)
    assert refusal(compat.UnsupportedError, compat.device, 0) == (
        "toy cannot place parts of a model on a device of their own. Leave compat.device() out; "
        "parallelize() may run the whole model on several."
    )


@pytest.mark.parametrize("which", [-1, True, None, "gpu:7", 1.0, [0]])
def test_wrong_devices(able, which):
    configure(simulate=2)
    assert refusal(compat.InvalidArgumentError, compat.device, which) == (
        "device({!r}) is not understood. Use a number, counted among the configured devices from "
        '0, one of their names (cpu:0, cpu:1), or "cpu".'.format(which)
    )


# Keras' own choice ----------------------------------------------------------------------------


def test_keras_is_told_the_backend_that_was_asked_for(keras_installed):
    configuration = configure(backend="toy")  # Keras' default is another one
    assert configuration.environ["KERAS_BACKEND"] == "toyframework"
    import keras

    assert compat.parallelize(keras.Model()).devices == ["cpu:0"]


@pytest.mark.parametrize("chosen, version", [("toyframework", "2.2.4"), (None, "2.10.0")])
def test_keras_is_not_told_what_it_knows_or_does_not_read(toy, site, monkeypatch, chosen, version):
    site.install("Keras", version)
    if chosen:
        monkeypatch.setenv("KERAS_BACKEND", chosen)
    assert "KERAS_BACKEND" not in configure(backend="toy").environ


def test_an_unreadable_file_of_keras_does_not_decide(toy, site, tmp_path):
    site.install("Keras", "2.2.4")
    (tmp_path / ".keras").mkdir()
    (tmp_path / ".keras" / "keras.json").write_text("{")
    assert configure(backend="toy").environ["KERAS_BACKEND"] == "toyframework"


def test_a_keras_imported_on_another_backend_is_said(keras, other):
    configuration, texts = warned(compat.configure_gpu, backend="other")
    assert texts == [
        "keras is imported and runs on toyframework, but other was configured: models of this "
        "keras will not use it. Call configure_gpu() before keras is imported."
    ]
    assert "KERAS_BACKEND" not in configuration.environ


def test_in_a_notebook_where_keras_was_imported_too(kernel, keras, other):
    _, (text,) = warned(compat.configure_gpu, backend="other")
    assert text.endswith(" keras is imported." + RESTART)


# floatx ---------------------------------------------------------------------------------------


def test_floatx_is_set_for_keras(keras, machine):
    machine.plug(2)  # which simulated devices hide
    configuration = configure(2, floatx="float16", memory=0.5, simulate=3)
    assert keras.backend.floatx() == "float16"
    assert str(configuration) == (
        "backend    toy (the imported keras runs on toyframework)\n"
        "versions   toyframework 1.2, keras 2.2.4\n"
        "asked      gpus=2, simulate=3, memory: 0.5 of each GPU, floatx: float16\n"
        "chosen     2 simulated on the CPU\n"
        "devices    cpu:0, cpu:1\n"
        "variables  CUDA_VISIBLE_DEVICES=-1\n"
        "           TOY_FLAGS=memory=0.5 of each GPU\n"
        "applied    toyframework.seed = None\n"
        "           keras.backend.set_floatx('float16')\n"
        "warnings   none"
    )
    assert repr(configuration) == "<Configuration toy on cpu:0, cpu:1>"


def test_a_float_type_that_this_keras_does_not_know(keras):
    assert refused(compat.InvalidArgumentError, floatx="bfloat16") == (
        "floatx='bfloat16' was asked for, which Keras 3 knows, and keras here is Keras 2. Use "
        '"float16" or "float32", or install Keras 3.'
    )
    assert keras.backend.floatx() == "float32"


def test_no_keras_for_this_backend(toy):
    assert refusal(compat.NotInstalledError, _keras.import_keras, toy) == (
        "No Keras that runs on toy is installed, or KERAS_BACKEND and keras.json choose another "
        'backend for it. Install one: pip install "keras-gpu-compat[toy]".'
    )


def test_a_broken_keras_is_told_from_one_that_is_missing(toy, site):
    site.install("Keras", "2.2.4", "keras", "raise OSError('no such library')")
    os.environ["KERAS_BACKEND"] = "toyframework"
    before = dict(os.environ)
    assert refused(compat.BrokenInstallError, floatx="float16") == (
        "keras is installed, but importing it fails: no such library. Run `python -c 'import "
        "keras'` to see all of it."
    )
    assert dict(os.environ) == before


def test_devices_simulated_from_outside_stand_in_for_those_of_the_script(toy):
    os.environ["COMPAT_SIMULATE"] = "2"
    configuration = configure([1])
    assert configuration.devices == ["cpu:0", "cpu:1"]
    assert configuration.applied == [
        "toyframework.seed = None",
        "COMPAT_SIMULATE=2: simulated devices stand in for gpus=[1]",
    ]
    process.start_afresh()
    text = "COMPAT_SIMULATE=2: simulated devices stand in for the GPUs"
    assert configure(None).applied[-1] == text


def test_a_backend_that_cannot_verify_says_so(keras):
    configure(simulate=2, verify=3)
    assert warned(compat.parallelize, keras.Model())[1] == [
        "verify=3: the backend toy cannot compare several devices with one, so nothing is verified."
    ]


def test_a_distribution_of_keras_that_does_nothing_is_told(keras):
    model = keras.Model()
    keras.distribution = types.SimpleNamespace(distribution=lambda: None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _keras.warn_of_distribution(model)
    keras.distribution.distribution = object
    assert warned(_keras.warn_of_distribution, model)[1] == [
        "A keras.distribution is set: on toyframework Keras accepts it and does nothing with it. "
        "Remove keras.distribution.set_distribution(); parallelize() splits the batches by itself."
    ]


def test_a_strategy_that_no_backend_has():
    call = compat.parallelize, Native
    assert refusal(compat.InvalidArgumentError, *call, strategy="mirror") == (
        "strategy='mirror' is not understood. Use None (the model's replicas run in this process, "
        'split by compat) or "mirrored" (TensorFlow 2\'s MirroredStrategy, for a function that '
        "builds the model)."
    )


def test_type_checkers_see_each_public_name():
    """`tox run -e lint` has them read that script."""
    with open(os.path.join(ROOT, "tests", "typed_script.py")) as file:
        named = set(re.findall(r"compat\.(\w+)", file.read()))
    assert set(compat.__all__) <= named


def test_type_checkers_know_the_options_of_all_backends():
    with open(os.path.join(ROOT, "compat", "_configuration", "typing.pyi")) as file:
        tree = ast.parse(file.read())
    (options,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Options"]
    names = [n.target.id for n in options.body if isinstance(n, ast.AnnAssign)]
    assert names == registry.options([])
