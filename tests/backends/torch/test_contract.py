"""torch: Keras 3 on it, its own modules, and what is special to it."""

import collections
import copy
import io
import os
import pickle
import re
import subprocess
import sys
import types

import numpy as np
import pytest
import torch

import compat
from compat._backends.torch import Torch
from compat._backends.torch.timeline import products as placement
from compat._backends.torch.timeline import replica as replica_of
from compat._configuration import registry
from compat._configuration.device_choice import choose
from compat._configuration.gpu_selection import parse_gpus
from compat._configuration.settings import Memory, Settings
from compat.testing import CASES, DEVICES, largest_difference, slow

from ..shared_parts import KerasParts
from ..verification_cases import verified


def shard_sizes(step):
    """The rows of the first layer's products, forward, on each device."""
    sizes = collections.OrderedDict()
    with torch.profiler.profile(record_shapes=True) as profile:
        step()
    replicas = [e for e in profile.events() if e.name.startswith("replica on ")]
    for replica in replicas:
        products = [
            e for e in profile.events() if e.name in ("aten::addmm", "aten::mm")
            and "replica on {}".format(replica_of(e)) == replica.name
        ]  # fmt: skip
        sizes[replica.name] = next(s for s in products[0].input_shapes if len(s) == 2)[0]
    return list(sizes.values())


COMPILED = (
    "torch cannot run a model on several devices under jit_compile=True: torch.compile() makes one "
    "program for one device. Compile the model with jit_compile=False."
)


class TestTorch(KerasParts):
    product_in_timelines = "matmul"
    backend = "torch"
    extension = ".keras"

    def placement(self, model, inputs, targets):
        return placement(lambda: model.train_on_batch(inputs, targets))

    def shard_sizes(self, model, inputs, targets):
        if len(inputs) == 1:  # one device has it, until there was a batch that can be tried
            model.train_on_batch(np.repeat(inputs, 2, 0), np.repeat(targets, 2, 0))
        return shard_sizes(lambda: model.train_on_batch(inputs, targets))

    # What is special to Keras on torch --------------------------------------------------------

    def test_dropout_masks_of_replicas_differ(self, keras):
        layers = [keras.layers.Input((500,)), keras.layers.Dropout(0.5, seed=1)]
        model = keras.models.Sequential(layers)
        compat.parallelize(model)
        outputs = keras.ops.convert_to_numpy(model(np.ones((3, 500), "float32"), training=True))
        assert 0.3 < (outputs == 0).mean() < 0.7
        assert not (outputs[0] == outputs[1]).all() and not (outputs[1] == outputs[2]).all()

    def test_fixed_batches_stay_in_one_piece(self, keras):
        layers = [keras.layers.Input(batch_shape=(4, 3)), keras.layers.Dense(1)]
        with pytest.warns(compat.CompatWarning, match="its batch size is fixed to 4"):
            compat.parallelize(keras.Sequential(layers))

    def test_torch_compile_is_refused(self, keras):
        model = self.build(keras, "dense")
        model.compile("sgd", "mse", jit_compile=True)
        with pytest.raises(compat.UnsupportedError) as error:
            compat.parallelize(model)
        assert str(error.value) == COMPILED
        assert "call" not in vars(model)

    def test_torch_compile_is_left_alone(self, keras, automatic):
        model = self.build(keras, "dense")
        because = "it cannot run on several devices: " + COMPILED
        self.check_left_alone(model, because, jit_compile=True)
        assert "call" not in vars(model)

    def test_keras_distribution_is_said_to_do_nothing(self, keras):
        model = self.build(keras, "dense")
        distribution = keras.distribution.DataParallel(devices=["cpu:0", "cpu:1"])
        keras.distribution.set_distribution(distribution)
        try:
            with pytest.warns(compat.CompatWarning, match="on torch Keras accepts it and does no"):
                compat.parallelize(model)
        finally:
            keras.distribution.set_distribution(None)
        model.compile("sgd", "mse")
        assert len(self.placement(model, *CASES["dense"].data(61))) == DEVICES

    def test_verification_tells_why_batch_normalization_is_not_compared(self, keras):
        layers = [keras.layers.BatchNormalization(name="bn"), keras.layers.Dense(4)]
        model = compat.parallelize(keras.models.Sequential(layers))
        model.compile("sgd", "mse")
        record = self.verified(model)
        model.train_on_batch(*CASES["dense"].data(45))
        assert record.incomparable == {
            "the train step": "layer 'bn' normalises each replica's rows by their own statistics"
        }

    def test_parts_of_a_model_cannot_be_placed(self, keras):
        with pytest.raises(NotImplementedError) as caught:
            compat.device(1)
        assert str(caught.value) == (
            "torch cannot place parts of a model on a device of their own. Leave compat.device() "
            "out; parallelize() may run the whole model on several."
        )


# Models made with torch alone -----------------------------------------------------------------


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4)
    )


def train(model, rows=61, steps=3):
    """The user's loop, which knows nothing of devices."""
    inputs, targets = (torch.as_tensor(array) for array in CASES["dense"].data(rows))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets.argmax(1))
        loss.backward()
        optimizer.step()
    return [parameter.detach().numpy() for parameter in model.parameters()]


@pytest.fixture
def devices():
    return compat.configure_gpu(simulate=DEVICES).devices


@pytest.mark.row("torch nn.Module")
class TestModule:
    def test_buffers_are_set_once_to_the_mean_of_the_replicas(self, devices):
        plain, module = network(), compat.parallelize(network())
        inputs = torch.as_tensor(CASES["dense"].data(61)[0])
        for each in (plain, module):
            each(inputs)
        names = [name for name, _ in plain.named_buffers()]
        assert names == ["2.running_mean", "2.running_var", "2.num_batches_tracked"]
        buffers = [dict(each.named_buffers()) for each in (plain, module)]
        torch.testing.assert_close(buffers[0][names[0]], buffers[1][names[0]])
        assert buffers[1][names[2]].item() == 1
        for each in (plain, module):
            each.eval()
        torch.testing.assert_close(plain(inputs), module(inputs), rtol=0.1, atol=0.1)
        assert module(inputs).shape == (61, 4)

    def test_saving_copying_and_moving(self, devices):
        module = compat.parallelize(network())
        assert list(module.state_dict()) == list(network().state_dict())
        assert str(module) == str(network())
        file = io.BytesIO()
        torch.save(module, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        assert placement(lambda: train(loaded, steps=1)) == {}  # a plain module
        clone = copy.deepcopy(module)
        assert len(placement(lambda: train(clone, steps=1))) == DEVICES
        assert largest_difference(train(module, steps=0), train(network(), steps=0)) == 0
        assert module.to(torch.float64)(torch.zeros(5, 8, dtype=torch.float64)).shape == (5, 4)

    def test_a_copy_of_a_loaded_module_has_weights_of_its_own(self, devices):
        """Pickle leaves the class's method in the instance, bound to it."""
        loaded = compat.parallelize(pickle.loads(pickle.dumps(compat.parallelize(network()))))
        clone = copy.deepcopy(loaded)
        before = [parameter.detach().clone() for parameter in loaded.parameters()]
        train(clone, steps=1)
        assert all(parameter.grad is not None for parameter in clone.parameters())
        assert all(parameter.grad is None for parameter in loaded.parameters())
        assert all(map(torch.equal, before, loaded.parameters()))
        assert compat.parallelize(clone, gpus=1).forward.__self__ is clone

    @pytest.mark.parametrize("rows", [5, 3, 2])
    def test_batch_normalization_of_small_batches(self, devices, rows):
        """torch refuses to normalise one row, so fewer replicas take two and more."""
        counts = placement(lambda: train(compat.parallelize(network()), rows, steps=1))
        assert sorted(counts) == devices[: rows // 2 if rows > 3 else 1]

    def test_verification_tells_why_batch_normalization_is_not_compared(self, devices):
        module = compat.parallelize(network())
        record = verified(registry.load("torch"), module)
        train(module, steps=1)
        assert record.incomparable == {
            "the train step": "module '2' normalises each replica's rows by their own statistics"
        }

    def test_no_gradient_where_none_is_wanted(self, devices):
        module = compat.parallelize(network())
        with torch.no_grad():
            assert not module(torch.zeros(5, 8)).requires_grad
        module[0].weight.requires_grad_(False)
        before = module[0].weight.clone()
        train(module, steps=1)
        assert torch.equal(before, module[0].weight)


# GPUs of others than NVIDIA, which are not here -------------------------------------------------


@pytest.fixture
def machine_of(monkeypatch, imitate):
    """Have torch list a ROCm machine's GPUs, or Apple's; returns what configures a new backend."""

    def machine_of(cuda=0, metal=False):
        imitate(torch.cuda, "device_count", lambda: cuda)
        imitate(torch.backends.mps, "is_available", lambda: metal)
        imitate(torch.cuda, "set_device", lambda device: None)
        # Set afterwards, too: both are the process's.
        monkeypatch.setenv("KERAS_TORCH_DEVICE", "cpu")
        monkeypatch.delenv("KERAS_TORCH_DEVICE")
        return configured

    def configured(gpus=None, **settings):
        backend = Torch()
        devices = choose(parse_gpus(gpus), None, os.environ, discover=list)
        settings = Settings(devices, **settings)
        assert backend.environ(settings, {"KERAS_TORCH_DEVICE": "cuda"}) == {}
        applied, _ = backend.configure(settings)
        return backend.devices(), applied, devices.shortage and devices.shortage[1]

    return machine_of


def test_gpus_of_a_rocm_machine(machine_of):
    configured = machine_of(cuda=3)
    assert configured() == (["cuda:0", "cuda:1", "cuda:2"], [], None)
    assert configured(2) == (["cuda:0", "cuda:1"], [], None)
    assert configured([2, 0]) == (
        ["cuda:2", "cuda:0"],
        ["torch.cuda.set_device('cuda:2')", "KERAS_TORCH_DEVICE=cuda:2"],
        None,
    )
    assert os.environ["KERAS_TORCH_DEVICE"] == "cuda:2"


def test_none_of_the_gpus_asked_for_is_there(machine_of):
    assert machine_of(cuda=1)([4]) == (
        ["cpu"],
        ["KERAS_TORCH_DEVICE=cpu"],
        "there is no GPU 4: 1 GPU is visible",
    )


def test_memory_is_limited_by_a_fraction_of_each_gpu(machine_of, imitate):
    limits, total = [], types.SimpleNamespace(total_memory=2**33)
    imitate(torch.cuda, "get_device_properties", lambda device=None: total)
    imitate(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda fraction, device=None: limits.append((fraction, device)),
    )
    assert machine_of(cuda=2)(memory=Memory(size=2**31))[1] == [
        "torch.cuda.set_per_process_memory_fraction(0.25, 0)",
        "torch.cuda.set_per_process_memory_fraction(0.25, 1)",
    ]
    assert limits == [(0.25, 0), (0.25, 1)]


def test_the_gpu_of_a_metal_machine(machine_of, imitate):
    configured = machine_of(metal=True)
    assert configured() == configured(1) == (["mps"], [], None)
    assert configured(2)[::2] == (["mps"], "1 GPU is visible")
    imitate(torch.mps, "set_per_process_memory_fraction", lambda fraction: None)
    imitate(torch.mps, "recommended_max_memory", lambda: 2**33)
    for memory in (Memory(fraction=0.25), Memory(size=2**31)):
        assert configured(memory=memory)[1] == ["torch.mps.set_per_process_memory_fraction(0.25)"]


def test_a_metal_gpu_is_declined_before_keras_is_imported(machine_of):
    import keras  # noqa: F401

    machine_of(metal=True)
    declined = Settings(choose(parse_gpus(0), None, {}))
    assert Torch().environ(declined, {})["KERAS_TORCH_DEVICE"] == "cpu"
    with pytest.raises(compat.TooLateError) as error:
        Torch().configure(declined)
    assert str(error.value) == (
        "configure_gpu() came too late for torch: keras was imported, which asks torch for GPUs; "
        "it shows 1 GPUs, and CPU was asked for.\n"
        "Call it before the first `import keras`, and before anything runs on a GPU."
    )


# Configuring, a process each ------------------------------------------------------------------


@slow
def test_a_cpu_build_goes_on_with_the_cpu_and_says_so(run):
    out = run(
        """
        import warnings, compat
        settings = dict(gpus=2, backend="torch", floatx="bfloat16", memory="grow")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            configuration = compat.configure_gpu(**settings)
        import torch, keras, os  # after which it is late, but nothing would change
        assert compat.configure_gpu(**settings) is configuration
        assert os.environ["KERAS_TORCH_DEVICE"] == "cpu"
        assert torch.get_default_dtype() is torch.bfloat16
        assert keras.backend.floatx() == "bfloat16" and keras.backend.backend() == "torch"
        print(configuration.devices, configuration.applied)
        print([str(w.message) for w in caught])
        """
    )
    configured, told = out.splitlines()
    assert configured.startswith("['cpu'] ['torch.set_default_dtype(torch.bfloat16)'")
    assert "gpus=2 was asked for, but" in told and "Going on with" in told


SCRIPT_THAT_CONFIGURES = """\
import sys, warnings
import beside, compat

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    configuration = compat.configure_gpu(gpus=2)
print("TOLD", [str(w.message) for w in caught if w.category is compat.CompatWarning])
print(configuration)
print(__name__, sys.argv[1:])
"""


@pytest.mark.parametrize("as_module", [False, pytest.param(True, marks=slow)])
def test_a_script_that_configures_is_told_what_took_precedence(tmp_path, as_module):
    """And it runs as Python runs one: its name, its arguments, its folder."""
    (tmp_path / "beside.py").write_text("")
    script = tmp_path / "script.py"
    script.write_text(SCRIPT_THAT_CONFIGURES)
    command = [sys.executable, "-m", "compat", "run", "--parallelize", "--simulate", "3"]
    output = subprocess.check_output(
        command + (["-m", "script"] if as_module else [str(script)]) + ["--gpus", "7"],
        cwd=str(tmp_path),
        env=dict(os.environ, PYTHONPATH=os.getcwd()),
        universal_newlines=True,
    )
    told = (
        "configure_gpu() of the script changes nothing: compat run --parallelize has configured "
        "this process (gpus=None, COMPAT_SIMULATE=3, parallelize). Start the script without it for "
        "the script's own settings (gpus=2, COMPAT_SIMULATE=3)."
    )
    assert "TOLD {!r}\n".format([told]) in output
    assert re.search("^models +no model has been compiled yet$", output, re.MULTILINE)
    assert output.endswith("__main__ ['--gpus', '7']\n")


@pytest.mark.row("compat.timeline()")
def test_timelines_do_not_need_numpy(tmp_path):
    script = "import sys; sys.modules['numpy'] = None; import compat, torch"
    script += "\nwith compat.timeline(sys.argv[1]): torch.ones(3).sum()"
    subprocess.check_call([sys.executable, "-c", script, str(tmp_path / "timeline.json")])
