"""The procedure of a verification: a step done three times from the same state, and compared.

It is done on all devices, on one device, and on one device again, with weights perturbed by a few
units in the last place and random numbers that continue those of the first time. The difference of
the last two shows how far the step amplifies rounding, and which of its results are random, so that
they cannot be compared. This is common to all backends, which have subclasses of ``Step``.
"""

import collections
import contextlib
import random
from typing import (
    Any,
    Callable,
    ContextManager,
    Counter,
    Dict,
    Iterator,
    List,
    Optional,
    Sequence,
    Set,
    Tuple,
    Union,
)

from .. import errors
from .._configuration.settings import Every
from .._runtime import patching, progress, work
from .._runtime.on_demand import numpy as np
from .._runtime.process import process
from .._runtime.within import Within
from . import reasons
from .comparison import EPS, Comparison, are_near, cause_of, is_random
from .report import STEPS, Record
from .steps import Step, Values

# Seeds of further perturbations, where a first comparison finds a difference.
_SEEDS = (1, 2, 3)
# How many of the numbers in a step's inputs are perturbed one by one.
_MOST_NUMBERS = 4
#: Within, no step is verified, as where a verification runs a model's own steps.
suspended = Within()


def random_numbers() -> "contextlib.ExitStack":
    """Return a context that restores Python's and numpy's present random states at its end."""
    afterwards = contextlib.ExitStack()
    afterwards.callback(random.setstate, random.getstate())
    afterwards.callback(np.random.set_state, np.random.get_state())
    return afterwards


class Verification:
    """The steps of one model that are yet to be verified.

    Arguments:
        model: its name.
        devices: their names.
        steps: how many training steps, or ``Every``; of evaluation and prediction the first step
            is verified, and the next one after each training step.
        ranks: whether the devices are those of ranks.

    Attributes:
        requested: ``steps``, for messages.
    """

    def __init__(
        self, model: str, devices: "Sequence[str]", steps: "Union[int, Every]", ranks: bool = False
    ) -> None:
        self.requested = steps
        self.ranks = ranks
        self._interval = getattr(steps, "interval", 0)
        count = steps if isinstance(steps, int) else 1  # ``Every`` begins with the first one
        self.left = {"train": count, "evaluate": min(1, count), "predict": min(1, count)}
        self._unverified = 0  # training steps since the last one that was verified
        self.record = Record(model, devices)

    def wants(self, kind: str) -> bool:
        """Return whether a step of this kind is to be verified, now or later."""
        return (self.left[kind] > 0 or self._interval > 0) and not suspended

    def is_due(self, kind: str) -> bool:
        """Return whether the step that begins now is to be verified; called once for each."""
        if suspended:
            return False
        if kind == "train" and self._interval and not self.left[kind]:
            self._unverified += 1
            self.left[kind] = int(self._unverified >= self._interval)
        return self.left[kind] > 0

    def shown(self, kind: str) -> "ContextManager[Any]":
        """Show a line on the terminal within a block, if verifying a step takes long."""
        return progress.shown(f"verifying a {STEPS[kind]} step of model {self.record.model!r}")

    def verify(self, kind: str, step: "Step") -> "Any":
        """Do a step on one device and on all, and return the result for its caller.

        Raises:
            ResultsDifferError: they differ; the state is that before the step.
        """
        if self.record not in process.verified:
            process.verified.append(self.record)
        self.left[kind] -= 1
        if kind == "train":
            self._unverified = 0
        runs = _Runs(step)
        with runs.undone_on_error():
            with suspended, self.shown(kind):
                runs.do()
                uncompared = self._compare(kind, runs)
                if process.records_operations and kind == "train" and not self.record.operations:
                    step.write(runs.start)
                    with _aside(step):
                        self.record.operations = step.operations()
            runs.leave_that_on_all_devices()
        if uncompared is None:
            self.record.steps[kind] += 1
        else:
            self.record.note_uncompared(kind, *uncompared)
        if kind == "train":  # what evaluates and predicts next may have kept the weights of before
            self.left.update(evaluate=1, predict=1)
        return step.finish(runs.returned, runs.start)

    def _compare(self, kind: str, runs: "_Runs") -> "Optional[Tuple[reasons.Incomparable, int]]":
        """Compare the step on all devices with that on one; or, failing that, in inference.

        Returns:
            None if the step was compared; else why not, and how many values of the model's outputs
            in inference were compared instead.

        Raises:
            ResultsDifferError: they differ.
        """
        step = runs.step
        reason = step.by_design(False, _changed(runs.start, runs.on_one))
        if reason is None:
            comparison = _compared(
                step, runs.start, runs.on_one, [runs.again()], runs.on_all, runs.again
            )
            if comparison.differing:
                raise self._difference(kind, step, runs.start, comparison)
            if not comparison.compared_nothing():
                self._note(comparison)
                self.record.compared += comparison.compared
                return None
            is_noise = is_random(step.dtype, runs.on_one, runs.again(None))
            random = reasons.random(step.part, step.random_rates())
            reason = random if is_noise else reasons.AMPLIFIED
        elif step.random_rates():
            reason = reasons.both(reason, reasons.random(step.part, step.random_rates()))
        with _aside(step):
            return reason, self._compare_in_inference(kind, step, runs.start, reason)

    def _note(self, comparison: "Comparison") -> None:
        self.record.largest = max(self.record.largest, comparison.largest)
        self.record.incomparable.update(comparison.incomparable)

    def _compare_in_inference(
        self, kind: str, step: "Step", start: "Values", reason: "reasons.Incomparable"
    ) -> int:
        """Compare the model's outputs in inference, where nothing is random.

        Returns:
            How many values were compared.
        """
        outputs = self._inferred(step, start)
        if outputs is not None:
            if outputs.differing:
                raise self._difference(kind, step, start, outputs)
            self._note(outputs)
        if outputs is not None and not outputs.compared_nothing():
            return outputs.compared
        remedy = f" To compare it, {reason.remedy}." if reason.remedy else ""
        errors.warn(
            f"compat could not verify a {STEPS[kind]} step of model {self.record.model!r}: "
            f"{reason.text}, and its outputs in inference cannot be compared either. Nothing was "
            f"compared.{remedy}"
        )
        return 0

    def _inferred(self, step: "Step", start: "Values") -> "Optional[Comparison]":
        """Return the comparison of the model's outputs in inference; None if it has none."""

        def outputs(values: "Values", is_unsplit: bool) -> "Any":
            step.write(values)
            return step.outputs(is_unsplit)

        expected = outputs(start, True)
        if expected is None or step.by_design(True, _changed(start, step.read())) is not None:
            return None

        def again(seed: "Optional[int]" = 0, number: "Optional[float]" = None) -> "Any":
            with inputs_perturbed(step, seed, number):
                return outputs(_perturbed(step, start, seed), True)

        return _compared(step, {}, expected, [again()], outputs(start, False), again)

    def _difference(
        self, kind: str, step: "Step", start: "Values", comparison: "Comparison"
    ) -> "errors.ResultsDifferError":
        """Return the error, with the first difference, its size and its likely cause."""
        label, difference, limit, ratio = comparison.differing[0]
        if kind == "train" and not label.startswith("output"):
            with contextlib.suppress(Exception):  # the error to come is the one that matters
                outputs = self._inferred(step, start)
                if outputs is not None and outputs.differing:
                    label, difference, limit, ratio = outputs.differing[0]
        devices = len(self.record.devices)
        several = f"on {devices} devices and on one"
        alone = "on one device: parallelize(model, gpus=1)"
        if self.ranks:
            several = f"as {devices} ranks and as one process"
            alone = "by one process: COMPAT_ALONE=1"
        error = errors.ResultsDifferError(
            f"The first thing that differs when model {self.record.model!r} does a "
            f"{STEPS[kind]} step {several} is {label}: by {difference:.3g}, where rounding "
            f"explains at most {limit:.1g}. {cause_of(label, ratio, devices)} The model is as it "
            f"was before the step. Change the model, or run it {alone}; verify=0 goes on without "
            "looking."
        )
        self.record.failure = str(error)
        return error


class _Runs:
    """Runs of one step from the same state: on all devices, on one, and on one again.

    Made before the step: the state to begin from is that of now.

    Attributes:
        start: values before the step, by label.
        on_all: values and results after it, by label, on all devices.
        on_one: likewise on one device.
        returned: the result for the step's caller.
    """

    def __init__(self, step: "Step") -> None:
        self.step = step
        self.start = step.read()
        self._random_start = random_numbers()
        step.start_attributes = step.attributes()

    def do(self) -> None:
        """Do the step on all devices, and then on one."""
        step = self.step
        # On all devices first, so that the first step creates and traces the same as without.
        step.write(self.start)  # state that exists twice, for one device and for all, is the same
        self.returned, self._results = step.on_all_devices()
        self.on_all = {**self._results, **step.read()}
        self._random_end = random_numbers()
        step.write(self.start)
        self._random_start.close()
        with _aside(step):
            self.on_one = {**step.on_one_device(), **step.read()}

    def again(
        self, seed: "Optional[int]" = 0, number: "Optional[float]" = None
    ) -> "Dict[str, Any]":
        """Do the step on one device once more, with perturbed weights, and return its values.

        Arguments:
            seed: of the perturbation; None: there is none.
            number: as ``inputs_perturbed`` takes it.
        """
        step, perturbed = self.step, _perturbed(self.step, self.start, seed)
        step.write(perturbed)
        with _aside(step), inputs_perturbed(step, seed, number):
            after = {**step.on_one_device(), **step.read()}
        # Changes are relative to the perturbed values, unless the step changes the shape.
        for label, value in perturbed.items():
            if value is not self.start[label] and after[label].shape == value.shape:
                after[label] = after[label] - (value - self.start[label])
        return after

    def leave_that_on_all_devices(self) -> None:
        """Leave the model, and random numbers, as the step on all devices has left them."""
        state = {label: v for label, v in self.on_all.items() if label not in self._results}
        self.step.write(state)
        self._random_end.close()

    @contextlib.contextmanager
    def undone_on_error(self) -> "Iterator[None]":
        """Restore the model to before the step on an error in a block."""
        try:
            yield
        except BaseException:
            # The caller must get the step's own error.
            if self.step.start_attributes is not None:
                self.step.start_attributes.put_back()
            with contextlib.suppress(Exception):
                self.step.give_up(self.start)
            raise


def _compared(
    step: "Step",
    start: "Values",
    expected: "Values",
    others: "List[Values]",
    on_all: "Values",
    again: "Callable[..., Values]",
) -> "Comparison":
    """Return the ``Comparison``; where something differs, one with more perturbations.

    Arguments:
        step: the ``Step``.
        start: values before it.
        expected: values after it on one device.
        others: values after it on one device, done again.
        on_all: values after it on all devices.
        again: does it on one device once more, by a seed and a perturbed number.
    """
    comparison = Comparison(step, start, expected, others)
    comparison.compare(on_all)
    if comparison.differing:
        # Another look at how rounding is amplified: an alarm must never be false.
        others += map(again, _SEEDS)
        perturbed = [again(1, number) for number in _frequent_numbers(step)]
        others += [values for values in perturbed if are_near(expected, values)]
        is_noise = is_random(step.dtype, expected, again(None))
        comparison = Comparison(step, start, expected, others, is_noise)
        comparison.compare(on_all)
    return comparison


@contextlib.contextmanager
def _aside(step: "Step") -> "Iterator[None]":
    """Keep a step within a block, which is for verification alone, from counting."""
    with work.uncounted, step.attributes_kept():
        yield


def _changed(start: "Values", after: "Values") -> "Set[str]":
    """Return the labels of the values that a step has changed."""
    return {label for label in start if not np.array_equal(start[label], after.get(label))}


def _perturbed(step: "Step", start: "Values", seed: "Optional[int]") -> "Dict[str, Any]":
    """Return values before a step with perturbations, without states of random generators.

    Frozen weights and other state amplify rounding as well as those that are trained; but a whole
    number may be a count, on which a step depends.

    Arguments:
        step: the ``Step``.
        start: values before it.
        seed: of the perturbation; None: there is none.
    """
    generator = np.random.RandomState(seed)
    perturbed = {}
    for label in sorted(start):
        value = start[label]
        if step.is_random(label):
            continue  # continues from the step before
        perturbed[label] = value
        is_weight = step.is_weight(label)
        if seed is None or value.dtype.kind != "f" or not (is_weight or label[:6] == "state "):
            continue
        unit = _unit(step, value.dtype) or EPS["bfloat16"]
        # Sums of a fused kernel may be off by tens of units, which a model with kinks, such as
        # ReLUs, shows only where one is crossed.
        factor = 1.0 + generator.choice([-1, 1], size=value.shape) * 4.0 ** max(seed, 1) * unit
        changes = np.ones(value.shape, bool) if is_weight else value != np.round(value)
        perturbed[label] = np.where(changes, value * factor, value).astype(value.dtype)
    return perturbed


def _unit(step: "Step", dtype: "Any") -> "Optional[float]":
    """Return the unit in the last place of a type of floats, relative to 1.

    None for any other type.
    """
    units = [EPS[name] for name in EPS if name in str(dtype)]
    # The unit of weights of 64 bits where the step computes in 32.
    coarse = min(EPS[step.dtype], EPS["float32"])
    return max(units + [coarse]) if units else None


def inputs_perturbed(
    step: "Step", seed: "Optional[int]", number: "Optional[float]" = None
) -> "ContextManager[Any]":
    """Return a context in which a step's inputs are perturbed, if ``seed`` is odd.

    A model may amplify rounding by constants, before any weight. Whole numbers, halves and the like
    stay as they are: they may be classes, padding or masks. An infinite number would become NaN, so
    every second time the weights alone are perturbed.

    Arguments:
        step: the ``Step``.
        seed: of the perturbation.
        number: the only number to perturb, with a random sign in each place.
    """
    if seed is None or seed % 2 == 0:
        return contextlib.ExitStack()
    signs, units = np.random.RandomState(seed), 4 * seed

    def perturbed(value: "Any") -> "Any":
        unit = _unit(step, getattr(value, "dtype", None))
        if not unit:
            return value
        with contextlib.suppress(Exception):  # an array without such arithmetic: a sparse one, say
            if number is None:
                changes = value * 1024 % 1
            else:
                array = np.asarray(value)
                changes = signs.choice([-1, 1], array.shape) * (array == number)
                changes = changes.astype(array.dtype)
            return value + value * (changes * (units * unit))
        return value

    inputs = {name: getattr(step, name) for name in step.input_attributes}
    return patching.replaced(
        step, **{name: _mapped(value, perturbed) for name, value in inputs.items()}
    )


def _frequent_numbers(step: "Step") -> "List[float]":
    """Return the most frequent whole numbers, halves and the like in a step's inputs, but for zero.

    A column of ones would not be perturbed otherwise, and normalising it divides rounding errors by
    a deviation of zero.
    """
    frequencies: "Counter[float]" = collections.Counter()

    def count(value: "Any") -> None:
        if _unit(step, getattr(value, "dtype", None)):
            with contextlib.suppress(Exception), np.errstate(invalid="ignore"):
                array = np.asarray(value, "float64")
                numbers, counts = np.unique(array[array * 1024 % 1 == 0], return_counts=True)
                frequencies.update(dict(zip(numbers.tolist(), counts.tolist())))

    for name in step.input_attributes:
        _mapped(getattr(step, name), count)
    frequencies.pop(0.0, None)  # is not perturbed by a factor
    return [number for number, _ in frequencies.most_common(_MOST_NUMBERS)]


def _mapped(value: "Any", function: "Callable[[Any], Any]") -> "Any":
    """Return nested containers with a function applied to each of their leaves."""
    if isinstance(value, dict):
        return {name: _mapped(part, function) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_mapped(part, function) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return function(value)
