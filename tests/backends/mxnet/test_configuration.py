"""Configuring MXNet, most of it in a process each: contexts, memory, and what is too late."""

import os
import sys

import pytest

from compat._backends.mxnet import configuration
from compat._configuration import registry
from compat._configuration.device_choice import Devices, choose
from compat._configuration.gpu_selection import parse_gpus
from compat._configuration.settings import Settings, parse_memory
from compat.testing import span


@pytest.fixture
def alone(run, tmp_path, monkeypatch):
    """Run a program in a process that has nothing of what this one has configured, nor its home."""
    for name in list(os.environ):
        if name.startswith(("CUDA_", "MXNET_", "DMLC_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("KERAS_HOME", str(tmp_path / "keras"))
    return run


@span
def test_configured_before_mxnet_is_imported(alone):
    printed = alone(
        """
        import os, sys
        import numpy as np
        import compat

        report = compat.configure_gpu(simulate=3, memory=0.75, floatx="float64")
        assert os.environ["MXNET_GPU_MEM_POOL_RESERVE"] == "25"
        assert os.environ["CUDA_VISIBLE_DEVICES"] == "-1"
        print(report)
        import keras
        from compat.testing import CASES, initialise, largest_difference, optimizer
        from compat.testing.models import fit_in_order

        models = [initialise(CASES["dense"].build(keras)) for _ in range(2)]
        compat.parallelize(models[1])
        for model in models:
            model.compile(optimizer(keras, "adam"), "categorical_crossentropy")
            inputs, targets = CASES["dense"].data(61)
            fit_in_order(model, inputs, targets, epochs=3)
            assert all(w.dtype == "float64" for w in model.get_weights())
        assert largest_difference(*[model.get_weights() for model in models]) < 1e-13
        """
    )
    applied = [
        "models not parallelized run on cpu(0)",
        "memory: cached memory is given back while less than 25% of a GPU is free",
        "keras-mxnet fixed: weights are read and set for every model, not only for the one "
        "compiled last,",
        "and for RNN layers not unrolled, which keep all of their states if they are stateful;",
        "the optimizer's state is saved with its model",
    ]
    assert "applied    " + "\n           ".join(applied) + "\n" in printed
    assert "keras.backend.set_floatx('float64')" in printed


def test_configured_after_mxnet_was_imported(alone, tmp_path):
    """Devices still can be chosen then; what MXNet read at its import cannot."""
    alone(
        """
        import keras, mxnet
        import pytest
        import compat

        def built():
            return keras.models.Sequential([keras.layers.Dense(2, input_shape=(3,))])

        before = built()
        with pytest.raises(compat.TooLateError) as error:
            compat.configure_gpu(simulate=3, memory=0.5)
        assert str(error.value) == (
            "configure_gpu() came too late for mxnet: it reads MXNET_GPU_MEM_POOL_RESERVE=50 only "
            "when it is imported, and is imported already.\\n"
            "Call it before the first `import mxnet` or `import keras`."
        )
        configured = compat.configure_gpu(simulate=3, memory="grow")
        assert configured.devices == ["cpu(0)", "cpu(1)", "cpu(2)"]
        assert "memory: MXNet takes it as it is needed, always" in configured.applied

        # Models built later run on the first device, also loaded and cloned; others are moved.
        backend = compat._configuration.registry.load("mxnet")
        backend.kept["names"] = ["cpu(1)", "cpu(2)"]
        after = built()
        after.compile("sgd", "mse")
        after.save("model.h5")
        models = [after, keras.models.load_model("model.h5"), keras.models.clone_model(after)]
        assert [str(m._context) for m in models] == ["[cpu(1)]"] * 3
        assert str(before._context) == "[cpu(0)]"
        assert str(compat.parallelize(before, gpus=1)._context) == "[cpu(1)]"
        with keras.backend.Context("cpu"):
            assert str(built()._context) == "[cpu(0)]"
        """.replace("model.h5", str(tmp_path / "model.h5"))
    )


def test_gpus_that_this_mxnet_cannot_use(alone, tmp_path):
    """Noticed at once, not by "simple_bind error" in the first fit; the driver lists two GPUs."""
    driver = tmp_path / "nvidia-smi"
    driver.write_text('#!/bin/sh\nfor i in 0 1; do echo "$i, GPU-$i, A100, 40000, 0, 0"; done\n')
    driver.chmod(0o755)
    printed = alone(
        """
        import warnings
        import numpy as np
        import pytest
        import compat

        with pytest.raises(compat.DevicesNotFoundError, match="mxnet sees cpu"):
            compat.configure_gpu(gpus=2, strict=True)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            print(compat.configure_gpu(gpus=2, memory="4GiB"))
        for warning in caught:
            if warning.category is compat.CompatWarning:
                print("warning:", warning.message)
        import keras

        model = keras.models.Sequential([keras.layers.Dense(2, input_shape=(3,))])
        assert compat.parallelize(model) is model
        model.compile("sgd", "mse")
        model.fit(np.ones((4, 3)), np.ones((4, 2)), verbose=0)
        """,
        PATH=str(tmp_path) + os.pathsep + os.environ["PATH"],
    )
    assert [line for line in printed.splitlines() if line.startswith("warning: ")] == [
        "warning: memory=4096 MiB per GPU was asked for, but mxnet limits GPU memory by no size. "
        "It takes memory as it is needed; memory=0.5 makes it give cached memory back while less "
        "than half of a GPU is free.",
        "warning: GPU 0,1 was asked for, but mxnet sees cpu(0). Going on with cpu(0).",
    ]
    assert (
        "           this mxnet was built without CUDA: install the mxnet-cu package for your CUDA\n"
    ) in printed
    assert "memory: no limit (MXNet has none by size)" in printed


@pytest.mark.parametrize(
    "gpus, applied",
    [
        (0, "mxnet was built with CUDA, but finds no GPU: look at the driver and its version"),
        (2, "other GPUs stay visible: mxnet was imported before"),
    ],
)
def test_a_build_for_gpus_that_was_imported_before(imitate, monkeypatch, gpus, applied):
    """As if of this one: what it finds of the driver's two GPUs."""
    import mxnet as mx
    import mxnet.runtime

    backend = registry.load("mxnet")
    monkeypatch.setitem(backend.kept, "names", [])
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    imitate(mx.runtime.Features, "is_enabled", lambda self, feature_name: True)
    imitate(mx.context, "num_gpus", lambda: gpus)
    lines, _ = backend.configure(Settings(Devices(["1"], [1])))
    assert applied in lines


def test_environ_says_only_what_changes():
    backend = registry.load("mxnet")
    settings = Settings(Devices(["3", "1"], [3, 1]), parse_memory(0.9))
    expected = {
        "CUDA_VISIBLE_DEVICES": "3,1",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "MXNET_GPU_MEM_POOL_RESERVE": "10",
    }
    assert backend.environ(settings, {}) == expected
    assert backend.environ(settings, expected) == {}


def test_problems_of_an_environment(tmp_path, monkeypatch):
    problems = registry.load("mxnet").problems
    assert problems({}) == []
    (tmp_path / "h5py-3.1.0.dist-info").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert problems({}) == [
        "h5py 3.1.0 is installed, but load_model() of keras-mxnet needs an older one: pip install "
        '"h5py<3"'
    ]


@pytest.mark.parametrize(
    "gpus, contexts",
    [(None, ["gpu(0)", "gpu(1)"]), (1, ["gpu(0)"]), ([1, 0], ["gpu(1)", "gpu(0)"])],
)
def test_gpus_that_only_mxnet_lists(gpus, contexts, imitate):
    import mxnet as mx

    imitate(mx.context, "num_gpus", lambda: 2)
    devices = choose(parse_gpus(gpus), None, {}, discover=list)
    assert configuration.contexts(mx, devices) == contexts
    assert devices.positions == tuple(int(name[4]) for name in contexts)


@pytest.mark.parametrize("listed, usable", [(0, 0), (2, 0), (2, 1), (2, 2)])
def test_gpus_are_tried_before_mxnet_1_3(listed, usable, imitate, monkeypatch):
    import mxnet as mx

    def gpu(index):
        if index >= usable:
            raise mx.base.MXNetError("no such GPU")
        return mx.cpu()

    monkeypatch.delattr(mx.context, "num_gpus", raising=False)
    monkeypatch.setattr(mx, "gpu", gpu)
    imitate(mx.test_utils, "list_gpus", lambda: range(listed))
    assert configuration.visible_gpus(mx) == usable


def test_a_version_that_does_not_report_how_it_was_built(monkeypatch):
    """MXNet before 1.5 has no mxnet.runtime."""
    import mxnet as mx

    monkeypatch.setitem(sys.modules, "mxnet.runtime", None)
    lines, _ = configuration.report_lines(mx, Settings(Devices(["0"], [0])), "cpu(0)")
    assert (
        lines[1] == "mxnet finds no GPU: look at the driver, and that this is an mxnet-cu package"
    )
