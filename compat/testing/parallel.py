"""What a backend must pass besides that runs a Keras model on several devices in one process."""

import re

import pytest

import compat

from .._commands import selftest
from .._pytest_plugin.twins import Twins
from .automatic import AutomaticContract
from .models import CASES, DEVICES, SHARDS, optimizer
from .reporting import ReportContract
from .saving import SavingContract
from .spans import in_span, span
from .training import TrainingContract
from .verification import VerificationContract


class ParallelContract(
    TrainingContract, VerificationContract, SavingContract, AutomaticContract, ReportContract
):
    """Subclass this in the test file of a backend, and set the attributes of its bases."""

    def test_test_command_compares_step_by_step(self):
        status, out = self.command(
            self.prelude
            + "import sys\n"
            "from compat import __main__\n"
            "from compat._commands import selftest\n"
            "assert __main__.main(['test', '--devices', '{}', '--simulate']) == 0\n"
            "selftest.BATCHES, selftest.TOLERANCE = (13,), -1.0\n"
            "sys.exit(__main__.main(['test', '--devices', '{}', '--simulate']))\n".format(
                DEVICES, DEVICES
            )
        )
        assert status == 1, out
        assert "{} simulated on the CPU".format(DEVICES) in out
        steps = [line.split()[:2] for line in out.splitlines() if line.startswith("   ")]
        rows = [[str(step), str(rows)] for step, rows in enumerate(selftest.BATCHES, 1)]
        rows += [["1", "13"]]  # of one row for each device XLA makes no products
        assert [step for step in steps if step in rows] == rows
        assert "\nThe same: no weight ever differs by more than 1e-05.\n" in out
        assert "\nNOT the same: a weight differs by more than -1.\n" in out
        ran = re.findall(r"^  \S+: (\d+) \+ (\d+)$", out, re.MULTILINE)
        assert len(ran) == 2 * DEVICES and len(set(ran)) == 1 and "0" not in ran[0], ran

    def test_test_command_fails_where_one_device_worked(self):
        status, out = self.command(
            self.prelude
            + "import sys\n"
            "from compat import _registry\n"
            "from compat._commands import selftest\n"
            "from compat import __main__\n"
            "selftest.BATCHES = (13,)\n"
            "backend = _registry.find({!r})\n"
            "type(backend).parallelize = lambda self, model, devices: model\n"
            "sys.exit(__main__.main(['test', '--devices', '{}', '--simulate']))\n".format(
                self.instance().name, DEVICES
            )
        )
        assert status == 1, out
        assert "\nThe same: no weight ever differs" in out
        assert re.search(r"\nNOT on all devices: [01] of {} worked.\n$".format(DEVICES), out), out

    def test_twins_of_the_pytest_plugin(self, keras, configuration):
        inputs, targets = CASES["dense"].data(61)
        twins = Twins(lambda: self.compiled(keras, "dense"))
        twins.fit(inputs, targets, batch_size=61)
        assert sorted(twins.worked) == sorted(configuration.devices)
        with pytest.raises(pytest.fail.Exception) as caught:
            twins.train(lambda m: m.train_on_batch(inputs, targets[:: 1 if m is twins.one else -1]))
        assert re.search(r"\n  weight .*hidden\S*kernel.*: differs by ", str(caught.value))

    # Really on three devices ------------------------------------------------------------------

    @span
    @pytest.mark.parametrize("name", sorted(CASES))
    def test_forward_and_backward_run_on_every_device(self, keras, configuration, name):
        model = self.compiled(keras, name, parallel=True)
        inputs, targets = CASES[name].data(61)
        placement = self.placement(model, inputs, targets)
        assert sorted(placement) == sorted(configuration.devices)
        for device, (forward, backward) in placement.items():
            assert forward > 0, (device, placement)
            assert backward > 0, (device, placement)
        # No device runs more than its replica: nothing was computed undivided.
        assert len(set(placement.values())) == 1, placement

    @pytest.mark.parametrize("samples", in_span(sorted(SHARDS), [14, 2]))
    def test_batch_is_split_evenly(self, keras, samples):
        model = self.compiled(keras, "dense", parallel=True)
        inputs, targets = CASES["dense"].data(samples)
        assert list(self.shard_sizes(model, inputs, targets)) == SHARDS[samples]

    # The same object --------------------------------------------------------------------------

    @span
    def test_object_and_its_face_stay(self, keras):
        model = self.build(keras, "multi")
        before = list(model.layers), list(model.weights), list(model.output_names)
        summary = self.summary(model)
        assert compat.parallelize(model) is model
        assert (list(model.layers), list(model.output_names)) == (before[0], before[2])
        assert [id(w) for w in model.weights] == [id(w) for w in before[1]]
        assert (
            model.get_layer("shared")
            is before[0][[layer.name for layer in before[0]].index("shared")]
        )
        assert self.summary(model) == summary

    def summary(self, model):
        lines = []
        model.summary(print_fn=lambda line, **_: lines.append(line))
        return lines

    def test_moves_to_other_devices_and_back_to_one(self, keras, configuration):
        inputs, targets = CASES["dense"].data(61)
        plain = self.compiled(keras, "dense")
        model = self.compiled(keras, "dense", parallel=True)
        for devices in ([2, 0], [0, 1, 2], [1], [1, 2], [0]):
            assert compat.parallelize(model, gpus=devices) is model
            for each in (plain, model):
                each.fit(inputs, targets, batch_size=16, epochs=1, shuffle=False, verbose=0)
            self.close(plain.get_weights(), model.get_weights())
            if len(devices) > 1:
                names = sorted(configuration.devices[i] for i in devices)
                assert sorted(self.placement(model, inputs, targets)) == names
                # The step that was recorded has trained, too.
                plain.train_on_batch(inputs, targets)

    @span
    def test_already_compiled_and_fitted(self, keras):
        inputs, targets = CASES["dense"].data(61)
        plain, model = self.compiled(keras, "dense"), self.compiled(keras, "dense")
        for epoch in range(3):
            for each in (plain, model):
                each.fit(inputs, targets, batch_size=16, epochs=1, shuffle=False, verbose=0)
            if epoch == 0:  # the optimizer has its momentum by now, and must keep it
                assert compat.parallelize(model) is model
        self.close(plain.get_weights(), model.get_weights())
        assert len(self.placement(model, inputs, targets)) == DEVICES

    def test_function_that_builds_the_model(self, keras):
        model = compat.parallelize(lambda: self.build(keras, "dense"))
        model.compile(optimizer(keras, "sgd"), CASES["dense"].loss)
        assert len(self.placement(model, *CASES["dense"].data(61))) == DEVICES
