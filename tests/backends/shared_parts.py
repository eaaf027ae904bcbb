"""What is the same whatever the backend, tested with those that compat brings.

The contracts of ``compat.testing`` are what a backend must pass. These tests are of compat's own
parts: the command line, the plugin for pytest, patches, verification and reports.
"""

import contextlib
import functools
import os
import re
import sys

import numpy as np
import pytest
from terminals import terminal

import compat
from compat import _verification
from compat._commands import saved_files
from compat._commands.pytest_plugin.twins import Twins
from compat._configuration.settings import Every
from compat._runtime import on_import, patching
from compat._verification import inputs_perturbed
from compat.backend import Verification
from compat.testing import (
    CASES,
    DEVICES,
    NativeContract,
    ParallelContract,
    any_backend,
    initialise,
    slow,
)
from compat.testing.automatic import compiled_on_all_devices
from compat.testing.several import SeveralDevicesContract

from . import hooks


class SharedParts(SeveralDevicesContract):
    """Tests of one model, of whatever kind."""

    @any_backend
    def test_how_far_inputs_amplify_rounding_is_seen(self, configuration, monkeypatch):
        """Verified steps are done with inputs that are off by rounding where that is asked for."""
        verify, moves = Verification.verify, {}

        def results(step, seed):
            with _verification.suspended, inputs_perturbed(step, seed):
                found = step.on_one_device()
            found.update(step.read())
            labels = sorted(label for label in found if not step.is_random(label))
            return [np.float64(found[label]) for label in labels]

        def look(verification, kind, step):
            start = step.read()
            both = []
            for seed in (0, 1):
                both.append(results(step, seed))
                step.write(start)
            moves[kind] = _verification.largest_difference(*both)
            return verify(verification, kind, step)

        monkeypatch.setattr(Verification, "verify", look)
        model, (inputs, targets) = self.parallel(), self.data(14)
        self.verified(model)
        self.train(model, inputs, targets)
        self.predict(model, inputs)
        assert 0 < moves["train"] < 1e-4 and 0 < moves["predict"] < 1e-4, moves


class KerasParts(SharedParts, ParallelContract):
    """Subclass this in place of ``ParallelContract``."""

    #: Hooks that no step depends on, by name (see ``hooks``), each with the reason.
    exempt_hooks = {}  # type: Dict[str, str]

    def test_a_hook_that_is_not_reached_is_never_silent(self, keras, configuration):
        """Each of them is left out once, as if the framework did not call it."""
        inputs, targets = CASES["dense"].data(11)

        def program():
            model = self.parallel()
            self.fit(model, 11, 4)
            model.evaluate(inputs, targets, verbose=0)
            self.predict(model, inputs)

        found = hooks.left_out_one_by_one(program, self.exempt_hooks)
        print("\n".join(f"{name}: {text}" for name, text in found.items()))
        silent = [name for name, text in found.items() if text is None]
        assert found and not silent, silent

    # Automatic parallelization ----------------------------------------------------------------

    @any_backend
    @pytest.mark.parametrize("first", [pytest.param("compat", marks=slow), "the other one"])
    def test_another_library_wraps_the_same_methods(self, keras, configuration, monkeypatch, first):
        """As one that logs experiments does, for as long as a script has it do so."""
        inputs, targets = CASES["dense"].data(61)
        kind, called = keras.models.Model, set()

        def logged(name, method):
            @functools.wraps(method)
            def wrapper(*args, **kwargs):
                called.add(name)
                return method(*args, **kwargs)

            return wrapper

        with contextlib.ExitStack() as automatic:
            if first == "compat":
                automatic.enter_context(compiled_on_all_devices(self.instance()))
            with monkeypatch.context() as other:
                for name in ("compile", "fit", "predict"):
                    other.setattr(kind, name, logged(name, getattr(kind, name)))
                if first != "compat":
                    automatic.enter_context(compiled_on_all_devices(self.instance()))
                rows = keras.layers.Input(shape=(8,))
                classes = keras.layers.Dense(4, activation="softmax")(rows)
                model = self.ready(keras, kind(rows, classes), parallel=False)
                model.fit(inputs, targets, batch_size=61, verbose=0)
                model.predict(inputs, verbose=0)
                assert called == {"compile", "fit", "predict"}
                if first != "compat":
                    automatic.close()
        called.clear()
        model.fit(inputs, targets, batch_size=61, verbose=0)
        assert not called
        self.check_on_all_devices(model)

    @any_backend
    def test_a_tracer_sees_what_runs_and_changes_nothing(self, keras, configuration):
        """As that of a debugger, or of what measures coverage."""
        inputs, targets = CASES["dense"].data(13)
        expected = self.compiled(keras, "dense").train_on_batch(inputs, targets)
        folder, lines, before = os.path.dirname(compat.__file__), set(), sys.gettrace()

        def trace(frame, event, argument):
            if not frame.f_code.co_filename.startswith(folder):
                return None
            lines.add((frame.f_code.co_filename, frame.f_lineno))
            return trace

        with compiled_on_all_devices(self.instance()):
            sys.settrace(trace)
            try:
                model = self.compiled(keras, "dense")
                found = model.train_on_batch(inputs, targets)
            finally:
                sys.settrace(before)
        self.close([expected], [found])
        assert any("_backends" in name for name, _ in lines)

    def check_left_alone(self, model, because, **arguments):
        """Compile a model whose devices the script has chosen, and find that it was told."""
        with pytest.warns(compat.CompatWarning) as warned:
            model.compile("sgd", "mse", **arguments)
        text = "parallelize=True leaves the model {!r} as it is, because {}"
        found = [str(each.message) for each in warned if each.category is compat.CompatWarning]
        assert found == [text.format(model.name, because)]

    @any_backend
    @pytest.mark.parametrize("raised", [compat.UnsupportedError, KeyError])
    def test_what_cannot_be_prepared_is_left_alone(
        self, keras, automatic, configuration, monkeypatch, raised
    ):
        """Also where it fails halfway; under ``strict=True``, and on ranks, that is an error."""
        backend, asked = self.instance(), []
        parallelize = backend.parallelize

        def fails(model, devices):
            asked.append(list(devices))
            model = parallelize(model, devices)
            if len(devices) > 1:
                raise raised("the reason")
            return model

        monkeypatch.setattr(backend, "parallelize", fails)
        inputs, targets = CASES["dense"].data(61)
        model = initialise(CASES["dense"].build(keras))
        because = "it cannot run on several devices: the reason"
        if raised is KeyError:
            because = "preparing it failed: KeyError: 'the reason'"
        self.check_left_alone(model, because)
        assert asked == [configuration.devices, configuration.devices[:1]]
        model.train_on_batch(inputs, targets)
        for owner, name in ((configuration.settings, "strict"), (configuration, "place")):
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, True)
                with pytest.raises(raised, match="the reason"):
                    model.compile("sgd", "mse")

    @any_backend
    def test_a_variable_set_too_late_is_told(self, keras, automatic, monkeypatch):
        before = os.environ.get("CUDA_VISIBLE_DEVICES", "not set")
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
        with pytest.warns(compat.CompatWarning) as warned:
            self.compiled(keras, "dense")
        text = (
            "CUDA_VISIBLE_DEVICES=7 was set after configure_gpu() had chosen the devices (then it "
            f"was {before}), which stay as they are. Set it before, or leave it out."
        )
        assert text in [str(warning.message) for warning in warned]

    # The command line, the plugin and the report ----------------------------------------------

    @any_backend
    def test_test_command_compares_step_by_step(self):
        """And says where weights differ, or where one device did all the work."""
        program = (
            self.prelude + "import sys\n"
            "from compat._configuration import registry; from compat import __main__\n"
            "from compat._commands import device_comparison as test\n"
            f"command = ['test', '--devices', '{DEVICES}', '--simulate']\n"
            f"kind = type(registry.find({self.instance().name!r}))\n"
            "parallelize, tolerance = kind.parallelize, test.TOLERANCE\n"
            "test.BATCHES, test.TOLERANCE = (13, 2), -1.0\n"
            "kind.parallelize = lambda self, model, devices: model\n"
            "assert __main__.main(command) == 1\n"
            "kind.parallelize, test.TOLERANCE = parallelize, tolerance\n"
            "sys.exit(__main__.main(command))\n"
        )
        completed = self.python("-c", program)
        out = completed.stdout
        assert completed.returncode == 0, out
        alone, same = re.split("^backend ", out, flags=re.MULTILINE)[1:]
        for report in (alone, same):
            assert f"{DEVICES} simulated on the CPU" in report
            steps = [line.split()[:2] for line in report.splitlines() if line.startswith("   ")]
            assert [step for step in steps if step in [["1", "13"], ["2", "2"]]] == steps[-2:]
        assert "\nThe same: no weight ever differs by more than 1e-05.\n" in same
        ran = re.findall(r"^  \S+: (\d+) \+ (\d+)$", same, re.MULTILINE)
        # Of one row for each device XLA makes no products.
        assert len(ran) == DEVICES and len(set(ran)) == 1 and "0" not in ran[0], ran
        assert "\nNOT the same: a weight differs by more than -1.\n" in alone
        assert "\nNOT on all devices: " in alone
        assert re.search(rf": [01] of {DEVICES} worked.\n$", alone), out

    @any_backend
    def test_twins_of_the_pytest_plugin(self, keras, configuration):
        inputs, targets = CASES["dense"].data(61)
        twins = Twins(lambda: self.compiled(keras, "dense"))
        twins.fit(inputs, targets, batch_size=61)
        assert sorted(twins.worked) == sorted(configuration.devices)
        with pytest.raises(pytest.fail.Exception) as caught:
            twins.train(lambda m: m.train_on_batch(inputs, targets[:: 1 if m is twins.one else -1]))
        assert re.search(r"\n  weight .*hidden\S*kernel.*: differs by ", str(caught.value))

    @any_backend
    def test_report_says_which_device_got_no_rows(self, keras, configuration, counted_anew):
        model, inputs, targets = self.parallel_and_data(keras, "dense", 2)
        model.train_on_batch(inputs, targets)
        report = compat.report()
        sizes = self.sizes_of(2)
        assert [each.rows for each in report.devices] == sizes
        assert [each.steps for each in report.devices] == sizes
        assert report.verdict == (
            f"Only 2 of 3 devices worked. {configuration.devices[sizes.index(0)]} got no rows: no "
            "batch had more than 2 rows, too few for 3 devices."
        )

    def test_files_to_which_models_are_saved_are_noted(self, keras, tmp_path):
        """Of Keras' classes; all is as before afterwards."""
        paths, before = set(), patching.patches()
        model = self.compiled(keras, "dense")
        saved_files.note(paths)
        try:
            made = [tmp_path / "net.h5", tmp_path / "net.weights.h5"]
            model.save(str(made[0]))
            model.save_weights(filepath=str(made[1]))
            assert all(path.exists() for path in made)
            assert paths == set(map(os.path.realpath, made))
        finally:
            on_import.forget()
            for patch in [each for each in patching.patches() if each not in before]:
                patch.take_back()

    # Verification -----------------------------------------------------------------------------

    @any_backend
    def test_a_step_that_takes_long_is_shown_on_a_terminal(self, keras, monkeypatch):
        """And leaves Keras' own progress bar as it is."""
        model, inputs, targets = self.parallel_and_data(keras, "dense", 16)
        self.verified(model)
        with terminal(monkeypatch) as printed:
            model.fit(inputs, targets, batch_size=16, epochs=1, validation_data=(inputs, targets))
        kinds = "training", "test"
        lines = [f"verifying a {kind} step of model {model.name!r}" for kind in kinds]
        assert [line for line in printed[:-1] if line.startswith("verifying")] == lines
        bar = printed[-1]
        assert " - loss: " in bar and " - val_loss: " in bar and "compat: " not in bar

    @any_backend
    def test_one_step_in_so_many_is_verified(self, keras):
        """Also where the first one was right."""
        model, inputs, targets = self.parallel_and_data(keras, "dense", 64)
        record = self.verified(model, Every(3))
        model.fit(inputs, targets, batch_size=16, epochs=2, verbose=0)
        assert record.steps["train"] == 3  # of 8


class NativeParts(SharedParts, NativeContract):
    """Subclass this in place of ``NativeContract``."""

    def test_a_step_that_takes_long_is_shown_on_a_terminal(self, configuration, monkeypatch):
        model = self.parallel()
        record = self.verified(model)
        with terminal(monkeypatch) as printed:
            self.fit(model, 16, 16)
        assert printed == [f"verifying a training step of model {record.model!r}", ""]


# Costs ----------------------------------------------------------------------------------------


def keras_step(keras, rows, parallel):
    """Return a training step of a model with a kernel, statistics and products; and the model."""
    layers = keras.layers
    model = keras.models.Sequential(
        [
            layers.Conv2D(3, 3, activation="relu", input_shape=(6, 6, 2)),
            layers.BatchNormalization(),
            layers.Flatten(),
            layers.Dense(4, activation="relu"),
            layers.Dense(1),
        ]
    )
    if parallel:
        compat.parallelize(model)
    model.compile("sgd", "mse")
    inputs = np.ones((rows, 6, 6, 2), "float32")
    return functools.partial(model.train_on_batch, inputs, inputs[:, 0, 0, :1]), model
