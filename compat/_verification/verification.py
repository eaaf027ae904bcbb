"""The steps of a model that are yet to be verified, each done on one device and on all."""

import contextlib

from .. import _work, errors
from . import report
from .comparison import EPS, Comparison, cause_of, is_random

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Sequence

    from .steps import Step

# Where a verification runs a model's own steps, another one does not begin.
_suspended = []  # type: list


@contextlib.contextmanager
def suspended():
    """Within, no step is verified."""
    _suspended.append(True)
    try:
        yield
    finally:
        _suspended.pop()


class Verification:
    """The steps of one model that are yet to be verified.

    Arguments:
        model: its name.
        devices: their names.
        steps: how many training steps; of evaluation and prediction the first one is.
    """

    def __init__(self, model: str, devices: "Sequence[str]", steps: int) -> None:
        self.left = {"train": steps, "evaluate": min(1, steps), "predict": min(1, steps)}
        self.record = report.Record(model, devices)

    def wants(self, kind: str) -> bool:
        return self.left[kind] > 0 and not _suspended

    def verify(self, kind: str, step: "Step") -> "Any":
        """Do a step, on one device and on all, and return what its caller is to get.

        Raises:
            ResultsDifferError: after it has put back the state from before the step.
        """
        report.add(self.record)
        self.left[kind] -= 1
        start = step.read()
        try:
            with suspended():
                step.write(start)  # what is kept twice, for one device and for all, is the same
                with _work.uncounted():
                    expected = _after(step, step.on_one_device())
                again = self._again(step, start)
                step.write(start)
                given, results = step.on_all_devices()
                found = _after(step, results)
                by_design = step.by_design if kind == "train" else None
                comparison = Comparison(step, start, expected, [again])
                if by_design is None:
                    comparison.compare(found)
                if comparison.differing:
                    # Another look at how rounding is amplified: an alarm must never be false.
                    for seed in (1, 2, 3):
                        comparison.others.append(self._again(step, start, seed))
                    random = is_random(step.dtype, expected, self._again(step, start, None))
                    comparison = Comparison(step, start, expected, comparison.others, random)
                    comparison.compare(found)
                if comparison.differing:
                    raise self._difference(kind, step, start, comparison)
                if by_design is not None or comparison.compared_nothing():
                    with _work.uncounted():
                        self._compare_in_inference(kind, step, start, by_design, comparison)
                else:
                    self._note(comparison)
                if report.is_recording() and kind == "train" and not self.record.operations:
                    step.write(start)
                    with _work.uncounted():
                        self.record.operations = step.operations()
        except BaseException:
            step.give_up(start)
            raise
        step.write({label: value for label, value in found.items() if label not in results})
        self.record.steps[kind] += 1
        if kind == "train":  # what evaluates and predicts next may have kept the weights of before
            self.left.update(evaluate=1, predict=1)
        return step.finish(given, start)

    def _again(self, step, start, seed=0):
        """The step on one device once more, where its weights are off by rounding.

        Arguments:
            seed: of how they are off; None: they are as before.
        """
        import numpy as np

        random = np.random.RandomState(seed)
        # What weights of 64 bits are rounded to, where the step computes in 32.
        coarse = min(EPS[step.dtype], EPS["float32"])
        moved = {}
        for label, value in start.items():
            if step.is_random(label):
                continue  # goes on from the step before
            moved[label] = value
            if seed is not None and step.is_weight(label) and value.dtype.kind == "f":
                unit = max(EPS.get(str(value.dtype), 2.0**-7), coarse)
                signs = random.choice([-4.0, 4.0], size=value.shape) * unit
                moved[label] = (value * (1.0 + signs)).astype(value.dtype)
        step.write(moved)
        with _work.uncounted():
            after = _after(step, step.on_one_device())
        # Changes count from where this one began.
        for label in start:
            if label in moved and moved[label] is not start[label]:
                after[label] = after[label] - (moved[label] - start[label])
        return after

    def _note(self, comparison):
        self.record.compared += comparison.compared
        self.record.largest = max(self.record.largest, comparison.largest)
        self.record.incomparable.update(comparison.incomparable)

    def _compare_in_inference(self, kind, step, start, by_design, comparison):
        """Compare what can be: the model's outputs where nothing is random."""
        step.write(start)
        expected = step.outputs(undivided=True)
        if expected is not None:
            again = step.outputs(undivided=True)
            found = step.outputs(undivided=False)
            outputs = Comparison(step, {}, expected, [again])
            outputs.compare(found)
            if outputs.differing:
                raise self._difference(kind, step, start, outputs)
            self._note(outputs)
        why = by_design or "it is random"
        self.record.incomparable["the {} step".format(kind)] = why
        if expected is None or outputs.compared_nothing():
            errors.warn(
                "compat could not verify the {} step of model {!r}: {}, and its outputs in "
                "inference cannot be compared either. Nothing was compared.".format(
                    kind, self.record.model, why
                )
            )

    def _difference(self, kind, step, start, comparison):
        """The error: what differs first, by how much, and why that may be."""
        label, difference, limit, ratio = comparison.differing[0]
        if kind == "train" and not label.startswith("output"):
            step.write(start)
            with contextlib.suppress(Exception):  # the error to come is the one that matters
                expected = step.outputs(undivided=True)
                outputs = Comparison(step, {}, expected, [step.outputs(undivided=True)])
                outputs.compare(step.outputs(undivided=False))
                if outputs.differing:
                    label, difference, limit, ratio = outputs.differing[0]
        devices = len(self.record.devices)
        error = errors.ResultsDifferError(
            "The first thing that differs when model {!r} does a {} step on {} devices and on one "
            "is {}: by {:.3g}, where rounding explains at most {:.1g}. {} The model is as it was "
            "before the step. Change the model, or run it on one device: parallelize(model, "
            "gpus=1); verify=0 goes on without looking.".format(
                self.record.model, report.STEPS[kind], devices, label, difference, limit,
                cause_of(label, ratio, devices),
            )
        )  # fmt: skip
        self.record.failure = str(error)
        return error


def _after(step, results):
    """Results and state after a step, by label."""
    after = dict(results)
    after.update(step.read())
    return after
