"""Flags of Theano's for what configure_gpu() is asked for, before its import and after it."""

import os

import pytest

import compat
from compat._backends.theano import configuration
from compat._configuration import packages, registry
from compat._configuration.device_choice import Devices, choose
from compat._configuration.gpu_selection import parse_gpus
from compat._configuration.settings import Memory, Settings
from compat.testing import slow, span

from ..messages import refusal
from . import test_contract

theano, theano_process = test_contract.theano, test_contract.theano_process


@span
def test_flags_before_the_import(theano_process, tmp_path):
    """The user's flags are kept, ours go before them, and Keras and Theano agree on floatX."""
    shown = theano_process(
        """
        import compat
        configuration = compat.configure_gpu(gpus=0, floatx="float64", memory=0.5)
        import theano, keras, numpy
        config = theano.config
        model = keras.models.Sequential([keras.layers.Dense(2, input_shape=(3,))])
        model.compile("sgd", "mse")
        loss = model.train_on_batch(numpy.ones((4, 3)), numpy.zeros((4, 2)))
        show(
            config=[config.device, config.floatX, config.gcc.cxxflags, config.contexts],
            keras=[keras.backend.floatx(), str(keras.backend.get_value(model.weights[0]).dtype)],
            finite=bool(numpy.isfinite(loss)),
            variables=configuration.environ,
            again=compat.configure_gpu(gpus=0, floatx="float64", memory=0.5) is configuration,
            reason=configuration.reason,
            devices=configuration.devices,
            report=str(configuration).splitlines(),
        )
        """,
        flags=r"device=gpu0,gcc.cxxflags='-DA=\"1,2\"',floatX=float32,contexts=a->cuda0,linker=py,cxx=",
    )
    flags = (
        r"device=cpu,gcc.cxxflags=-DA=\\\"1\,2\\\",floatX=float64,contexts=,"
        "linker=py,cxx=,base_compiledir={},optimizer=fast_compile".format(test_contract.COMPILED)
    )
    assert shown["config"] == ["cpu", "float64", r"-DA=\"1,2\"", ""]
    assert shown["keras"] == ["float64", "float64"] and shown["finite"] and shown["again"]
    assert shown["variables"] == {"CUDA_VISIBLE_DEVICES": "-1", "THEANO_FLAGS": flags}
    assert shown["reason"] == "KERAS_BACKEND=theano"
    assert shown["devices"] == ["cpu"]
    keras = packages.version("keras")
    assert shown["report"] == [
        "backend    theano (KERAS_BACKEND=theano)",
        "versions   theano {}, keras {}".format(packages.version("theano"), keras),
        "asked      gpus=0, memory: 0.5 of each GPU, floatx: float64",
        "chosen     CPU, as asked",
        "devices    cpu",
        "variables  CUDA_VISIBLE_DEVICES=-1",
        "           THEANO_FLAGS=" + flags,
        "applied    theano.config.device = cpu",
        "           theano.config.floatX = float64",
        "           memory=0.5 of each GPU: there is no GPU to reserve it on",
        "           keras.backend.set_floatx('float64')",
        "warnings   none",
    ]


def plugged(machine, gpus):
    """PATH with these GPUs in nvidia-smi, and all else that is on it."""
    path = os.environ["PATH"]
    machine.plug(gpus)
    return os.environ["PATH"] + os.pathsep + path


@slow
def test_a_gpu_in_the_flags_is_not_given_up_in_silence(theano_process, machine):
    shown = theano_process(
        """
        configuration, warned = configured()
        import theano
        show(
            device=theano.config.device,
            warned=[str(w.message) for w in warned],
            reported=configuration.warnings,
        )
        """,
        flags="device=cuda1,FloatX=float32,bogus=1,cxx=",
        PATH=plugged(machine, 0),
    )
    assert shown["device"] == "cpu"
    assert (
        shown["warned"]
        == shown["reported"]
        == [
            "Theano's flags say device=cuda1, but compat chose CPU, so device=cpu was set. `compat "
            "env` tells which GPUs are visible.",
            "FloatX=float32: Theano 1.0.5 has no flag FloatX, and ignores it. Did you mean floatX?",
        ]
    )


def test_a_device_that_is_no_cuda_gpu_is_not_given_up_in_silence(theano, machine):
    machine.plug(1)
    hidden = choose(parse_gpus(None), None, {"CUDA_VISIBLE_DEVICES": ""})
    assert theano.overruled(Settings(hidden), {"THEANO_FLAGS": "device=opencl0:0"}) == [
        "Theano's flags say device=opencl0:0, but compat chose CPU, so device=cpu was set. For "
        'a device that is no CUDA GPU pass theano_flags={"device": "opencl0:0"}.'
    ]


@pytest.mark.parametrize("flags", ["device=opencl0:0", "contexts=a->opencl0:0;b->opencl0:1"])
def test_opencls_gpus_in_the_flags_are_kept_unless_declined(flags):
    def environ(gpus, memory=None):
        devices = choose(parse_gpus(gpus), None, {}, discover=list)
        settings = Settings(devices, memory)
        before, backend = {"THEANO_FLAGS": flags}, registry.load("theano")
        assert backend.overruled(settings, before) == []
        return backend.environ(settings, before)

    assert environ(None) == {}
    assert environ(None, Memory(fraction=0.5)) == {
        "THEANO_FLAGS": flags + ",gpuarray.preallocate=0.5"
    }
    assert "device=cpu" in environ(0)["THEANO_FLAGS"]


def test_the_importer_may_have_parts_of_theano_alone(theano_process, tmp_path):
    (tmp_path / "imports_parts.py").write_text("from theano import function, shared\n")
    shown = theano_process(
        """
        import sys
        sys.path.insert(0, {!r})
        import imports_parts
        from compat._backends.theano import backend
        show(said=backend.initialised())
        """.format(str(tmp_path))
    )
    assert shown["said"] == "theano was imported (by imports_parts)"


@span
def test_after_the_import_what_theano_allows_is_set(theano_process):
    shown = theano_process(
        """
        import keras
        import compat, theano
        def operations():
            x = theano.tensor.vector()
            made = theano.function([x], theano.tensor.exp(x) * 2 + 1)
            return [type(n.op).__name__ + str(n.op) for n in made.maker.fgraph.toposort()]
        config = theano.config
        before = config.floatX, operations()
        late = refusal(
            gpus=0, floatx="float64",
            theano_flags={"base_compiledir": "/tmp/other", "compiledir": "/tmp/third"},
        )
        untouched = [config.floatX, keras.backend.floatx()]
        configuration = compat.configure_gpu(
            gpus=0, floatx="float64",
            theano_flags={"optimizer": "fast_run", "openmp": False, "linker": "py"},
        )
        show(
            late=late, before=before, untouched=untouched, applied=configuration.applied,
            config=[config.floatX, config.optimizer, config.openmp, config.linker],
            keras=keras.backend.floatx(), operations=operations(),
            variables=configuration.environ,
        )
        """,
        flags="linker=py,cxx=",
    )
    assert shown["late"] == (
        "TooLateError: configure_gpu() came too late for theano: base_compiledir and compiledir "
        "were fixed when theano was imported{}.\n"
        "Call it before the first `import theano` or `import keras`."
    ).format(" (by keras.backend.theano_backend)" if test_contract.ORDERED else "")
    assert shown["untouched"] == ["float32", "float32"] and shown["before"][0] == "float32"
    assert shown["config"] == ["float64", "fast_run", False, "py"]
    assert shown["keras"] == "float64"
    assert not any("Composite" in name for name in shown["before"][1])
    assert any("Composite" in name for name in shown["operations"])
    assert shown["variables"] == {}
    assert shown["applied"] == [
        "theano.config.device = cpu",
        "theano.config.floatX = float64 (set at run time)",
        "theano.config.optimizer = fast_run (set at run time)",
        "theano.config.openmp = False",
        "theano.config.linker = py",
        "keras.backend.set_floatx('float64')",
    ]


@pytest.mark.parametrize(
    "memory, megabytes",
    [
        (Memory(grow=True), "0"),
        (Memory(fraction=0.25), "0.25"),
        (Memory(fraction=1.0), "0.95"),
        (Memory(size=4 * 2**30), "4096"),
        (Memory(size=3 * 10**9), "2861.02294921875"),
        (Memory(size=2**20), "2"),  # 1 would be a fraction: all of it
    ],
)
def test_memory(tmp_path, memory, megabytes):
    settings = Settings(Devices(["5"], [5]), memory)
    flags = configuration.requested_flags(settings, {"HOME": str(tmp_path)}, [2])
    assert flags == {"device": "cuda2", "gpuarray.preallocate": megabytes}


@span
def test_the_environment_before_the_import(theano, tmp_path):
    (tmp_path / ".theanorc").write_text("[global]\ninit_gpu_device = cuda1\nfloatX = float32\n")
    home = {"HOME": str(tmp_path), "THEANO_FLAGS": "openmp"}  # which Theano warns that it ignores
    assert theano.environ(Settings(Devices(["3", "1"], [1, 0])), home) == {
        "CUDA_VISIBLE_DEVICES": "3,1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "THEANO_FLAGS": "openmp,device=cuda0,contexts=dev0->cuda0;dev1->cuda1,init_gpu_device=",
    }
    one = dict(home, CUDA_VISIBLE_DEVICES="3", THEANO_FLAGS="device=cuda0,init_gpu_device=")
    assert theano.environ(Settings(Devices(["3"], [0])), one) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


@pytest.mark.parametrize(
    "flags, problem",
    [
        ("optimizer=None", "it is a str"),
        ({"floatX": "float32"}, "floatX is set by floatx="),
        ({"a b": "1"}, "'a b' is no name of a flag"),
        ({"mode": None}, "None is neither a number, True, False, nor one line of text"),
        ({"mode": "a\nb"}, "'a\\nb' is neither a number, True, False, nor one line of text"),
    ],
)
def test_wrong_forms_of_theano_flags(theano, tmp_path, flags, problem):
    settings = Settings(Devices(), options={"theano_flags": flags})
    home = {"HOME": str(tmp_path)}
    assert refusal(compat.InvalidArgumentError, theano.environ, settings, home) == (
        "theano_flags={!r} is not understood: {}. Use a dictionary of Theano's flags, such as "
        '{{"optimizer": "fast_compile", "openmp": True}}.'.format(flags, problem)
    )
