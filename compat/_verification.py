"""Whether several devices do what one does: first steps of a model, done both ways and compared.

A step is done three times from the same state: on one device, on one device again, and on all.
The second time its weights are off by a few units in the last place, and random numbers go on
from where the first one left them. What the two differ by shows how far the step amplifies
rounding, and which of its results are random, so cannot be compared. Here is what all backends
have in common; a ``Step`` of each knows how to do it.
"""

import contextlib
import os

from . import errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

# Sums in another order differ by some units in the last place (eps) for each factor of rows; 2^10
# leaves room for sums over some millions of numbers, whose error grows with the square root.
_UNITS = 2.0**10
# A difference that rounding makes by the model's own doing may come out so many times larger.
_MARGIN = 16.0
# What one device repeats no better than this, relative to its size, cannot be compared.
_RANDOM = 2e-3

_EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# Types of fewer digits sum in a wider one, and round each result once.
_UNITS_OF = {"float16": 2.0**4, "bfloat16": 2.0**3}

KINDS = ("train", "evaluate", "predict")

_records = []  # type: List[Record]
_recording = []  # type: List[bool]


class Record:
    """What was verified of one model: shown by ``compat test script.py``.

    Attributes:
        model: its name.
        devices: their names.
        steps: verified, for each of ``KINDS``.
        largest: the largest difference, relative to the size of what differs, and its label.
        incomparable: labels, and why.
        operations: for each device, how many matrix products and convolutions it ran in the forward
            and in the backward pass, as the framework recorded them; empty where that was not
            asked for.
        failure: what differed, as the error says it; or None.
    """

    def __init__(self, model, devices):
        self.model = model
        self.devices = list(devices)
        self.steps = dict.fromkeys(KINDS, 0)
        self.compared = 0
        self.largest = (0.0, "")
        self.incomparable = {}
        self.operations = {}
        self.failure = None

    def as_dict(self):
        return dict(vars(self))


def records():
    """What was verified in this process, a ``Record`` for each model."""
    return list(_records)


def record_operations():
    """Have each model's first training step tell where its operations ran."""
    _recording.append(True)


def report_at_exit(environ: "Mapping[str, str]") -> None:
    """Leave this process's records in the folder ``COMPAT_VERIFY_REPORT``, if that is set."""
    folder = environ.get("COMPAT_VERIFY_REPORT")
    if folder and not _recording:
        import atexit

        record_operations()
        atexit.register(_write, os.path.join(folder, "{}.json".format(os.getpid())))


def _write(path):
    import json

    with open(path, "w") as file:
        json.dump([record.as_dict() for record in _records], file)


_STEPS = {"train": "training", "evaluate": "test", "predict": "prediction"}


def shown(record: "Mapping[str, Any]") -> "List[str]":
    """A record (``Record.as_dict``) for a person, in lines."""
    steps = [
        "{} {} step{}".format(count, _STEPS[kind], "s" if count > 1 else "")
        for kind, count in record["steps"].items()
        if count
    ]
    difference, label = record["largest"]
    lines = ["model {!r} on {}".format(record["model"], ", ".join(record["devices"]))]
    lines.append("  verified: {}".format(", ".join(steps) or "no step"))
    if record["compared"]:
        lines[-1] += "; {} values".format(record["compared"])
        lines.append(
            "  largest difference: {:.1e} of its size{}".format(
                difference, " ({})".format(label) if label else ""
            )
        )
    if record["operations"] and not _has_products(record):
        lines.append("  no products were seen on any device")
    elif record["operations"]:
        places = [
            "{} {} + {}".format(device, *counts)
            for device, counts in sorted(record["operations"].items())
        ]
        lines.append("  products ran, forward + backward: {}".format(", ".join(places)))
        if not _on_several(record):
            lines.append("  only {} of its devices worked".format(len(_working(record))))
    by_reason = {}  # type: Dict[str, List[str]]
    for label, reason in sorted(record["incomparable"].items()):
        by_reason.setdefault(reason, []).append(label)
    for reason, labels in sorted(by_reason.items()):
        more = " and {} more".format(len(labels) - 3) if len(labels) > 3 else ""
        lines.append("  not compared: {}{} ({})".format(", ".join(labels[:3]), more, reason))
    if record["failure"]:
        lines.append("  " + record["failure"])
    return lines


def is_good(record: "Mapping[str, Any]") -> bool:
    """Whether nothing differed, and more than one device worked."""
    return not record["failure"] and (not _has_products(record) or _on_several(record))


def _has_products(record):
    """Models may have none, and XLA makes none of one row for each device."""
    return any(map(any, record["operations"].values()))


def _working(record):
    return [d for d, (forward, backward) in record["operations"].items() if forward and backward]


def _on_several(record):
    return len(_working(record)) == len(record["devices"])


class Step:
    """One kind of step of one model; a subclass for each way in which a backend does steps.

    A *value* is an array of numbers with a label that a person understands: "the loss", "output 2
    (classes)", "weight dense_1/kernel", "state bn_1/moving_mean".
    """

    #: The type in which the model computes.
    dtype = "float32"
    #: Why training differs by design, such as batch normalization, a phrase; or None.
    by_design = None  # type: Optional[str]

    def read(self) -> "Dict[str, Any]":
        """All that the step may change, by label, as arrays."""
        raise NotImplementedError

    def write(self, values: "Mapping[str, Any]") -> None:
        """Set what ``read`` gave."""
        raise NotImplementedError

    def give_up(self, values: "Mapping[str, Any]") -> None:
        """Leave the model with these values, where the step's caller will get an error."""
        self.write(values)

    def is_weight(self, label: str) -> bool:
        """Whether this is a value of floats that a gradient changes."""
        return label.startswith("weight ")

    def is_random(self, label: str) -> bool:
        """Whether this is the state of a random number generator."""
        return False

    def on_one_device(self) -> "Dict[str, Any]":
        """Do the step undivided, and return its results by label."""
        raise NotImplementedError

    def on_all_devices(self) -> "Tuple[Any, Dict[str, Any]]":
        """Do the step as it is, and return what its caller gets, and its results by label."""
        raise NotImplementedError

    def operations(self) -> "Dict[str, Tuple[int, int]]":
        """Do the step on all devices once more, and tell what ran where: see ``Record``."""
        raise NotImplementedError

    def outputs(self, undivided: bool) -> "Optional[Dict[str, Any]]":
        """What the model computes of the step's batch, in inference; None: that cannot be had."""
        return None


class Verification:
    """The steps of one model that are yet to be verified.

    Arguments:
        model: its name.
        devices: their names.
        steps: how many training steps; of evaluation and prediction the first one is.
    """

    def __init__(self, model: str, devices: "Sequence[str]", steps: int) -> None:
        self.left = {"train": steps, "evaluate": min(1, steps), "predict": min(1, steps)}
        self.record = Record(model, devices)

    def wants(self, kind: str) -> bool:
        return self.left[kind] > 0 and not _suspended

    def verify(self, kind: str, step: "Step") -> "Any":
        """Do a step, on one device and on all, and return what its caller is to get.

        Raises:
            ResultsDifferError: after it has put back the state from before the step.
        """
        if self.record not in _records:
            _records.append(self.record)
        self.left[kind] -= 1
        start = step.read()
        try:
            with suspended():
                step.write(start)  # what is kept twice, for one device and for all, is the same
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
                    comparison = Comparison(step, start, expected, comparison.others)
                    comparison.compare(found)
                if comparison.differing:
                    raise self._difference(kind, step, start, comparison)
                if by_design is not None or comparison.compared_nothing():
                    self._compare_in_inference(kind, step, start, by_design, comparison)
                else:
                    self._note(comparison)
                if _recording and kind == "train" and not self.record.operations:
                    step.write(start)
                    self.record.operations = step.operations()
        except BaseException:
            step.give_up(start)
            raise
        step.write({label: value for label, value in found.items() if label not in results})
        self.record.steps[kind] += 1
        if kind == "train":  # what evaluates and predicts next may have kept the weights of before
            self.left.update(evaluate=1, predict=1)
        return given

    def _again(self, step, start, seed=0):
        """The step on one device once more, where its weights are off by rounding."""
        import numpy as np

        random = np.random.RandomState(seed)
        # What weights of 64 bits are rounded to, where the step computes in 32.
        coarse = min(_EPS[step.dtype], _EPS["float32"])
        moved = {}
        for label, value in start.items():
            if step.is_random(label):
                continue  # goes on from the step before
            moved[label] = value
            if step.is_weight(label) and value.dtype.kind == "f":
                unit = max(_EPS.get(str(value.dtype), 2.0**-7), coarse)
                signs = random.choice([-4.0, 4.0], size=value.shape) * unit
                moved[label] = (value * (1.0 + signs)).astype(value.dtype)
        step.write(moved)
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
            _warn(
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
        error = errors.results_differ(
            self.record.model, _STEPS[kind], devices, label, difference, limit,
            cause_of(label, ratio, devices),
        )  # fmt: skip
        self.record.failure = str(error)
        return error


def _after(step, results):
    """Results and state after a step, by label."""
    after = dict(results)
    after.update(step.read())
    return after


# Where a verification runs a model's own steps, another one does not begin.
_suspended = []  # type: List[bool]


@contextlib.contextmanager
def suspended():
    """Within, no step is verified."""
    _suspended.append(True)
    try:
        yield
    finally:
        _suspended.pop()


def rounding(dtype: str) -> float:
    """How far results of a step may be apart by rounding alone, relative to their size."""
    return _EPS.get(dtype, 2.0**-23) * _UNITS_OF.get(dtype, _UNITS)


class Comparison:
    """What one device and several make of the same step.

    Arguments:
        step: the ``Step``.
        start: values before it; those that are there as well afterwards are compared by how they
            changed.
        expected: values after it on one device.
        others: values after it on one device, done again.
    """

    def __init__(self, step, start, expected, others):
        self.step = step
        self.start = start
        self.expected = expected
        self.others = others
        self.differing = []  # type: List[Tuple[str, float, float, Optional[float]]]
        self.incomparable = {}  # type: Dict[str, str]
        self.compared = 0
        self.telling = 0  # those compared that would tell of a wrong gradient or output
        self.telling_weights = 0
        self.largest = (0.0, "")

    def compare(self, found):
        for label in sorted(self.expected, key=_order):
            if not self.step.is_random(label):
                self._compare(label, found.get(label))

    def _compare(self, label, found):
        import numpy as np

        expected, before = self.expected[label], self.start.get(label)
        if found is None or np.shape(found) != np.shape(expected):
            self.differing.append((label, float("inf"), 0.0, None))
            return
        others = [other.get(label) for other in self.others]
        if any(other is None or np.shape(other) != np.shape(expected) for other in others):
            self.incomparable[label] = "its shape changes from run to run"
            return
        exact = (
            np.asarray(expected).dtype.kind not in "fc"
            and str(getattr(expected, "dtype", "")) not in _EPS
        )
        base = _as_float(before) if before is not None else 0.0
        expected, found = _as_float(expected) - base, _as_float(found) - base
        others = [_as_float(other) - base for other in others]
        same = np.isfinite(expected) & np.isfinite(found)
        odd = ~same & ~((expected == found) | (np.isnan(expected) & np.isnan(found)))
        if not np.size(expected):
            return
        largest = _largest(expected[same]) if np.ndim(expected) else _largest(expected)
        spread = max([_largest(other - expected) for other in others] or [0.0])
        limit, size = 0.0, largest
        if not exact:
            stored = 0.0
            if before is not None:
                stored = 4 * _EPS.get(str(before.dtype), _EPS["bfloat16"]) * _largest(base)
            limit = rounding(self.step.dtype) * largest + stored + _MARGIN * spread
            if spread > max(_RANDOM, 4 * rounding(self.step.dtype)) * largest + stored:
                self.incomparable[label] = "one device does not repeat it"
                return
        elif spread:
            self.incomparable[label] = "one device does not repeat it"
            return
        self.compared += 1
        if label.startswith(_TELLING) and (before is None or largest):
            self.telling += 1
            self.telling_weights += label.startswith("weight")
        difference = _largest(np.where(same, found - expected, 0.0))
        if np.any(odd):
            difference = float("inf")
        if difference > limit:
            self.differing.append((label, difference, limit, _ratio(expected, found)))
        elif size:
            self.largest = max(self.largest, (difference / size, label))

    def compared_nothing(self):
        """Whether no output, no loss, or none of the weights that change could be compared."""
        weights = [label for label in self.incomparable if label.startswith("weight")]
        return (
            not self.telling
            or any(label.startswith(("output", "the loss")) for label in self.incomparable)
            or (weights and not self.telling_weights)
        )


_ORDER = ("output", "the loss", "metric", "state", "gradient", "weight", "slot")
_TELLING = ("output", "the loss", "gradient", "weight")


def _order(label):
    place = next((i for i, word in enumerate(_ORDER) if label.startswith(word)), len(_ORDER))
    return place, label


def _as_float(value):
    import numpy as np

    value = np.asarray(value)
    return value.astype("complex128" if value.dtype.kind == "c" else "float64")


def _largest(values):
    import numpy as np

    values = np.abs(np.asarray(values))
    values = values[np.isfinite(values)]
    return float(values.max()) if values.size else 0.0


def _ratio(expected, found):
    """The factor by which ``found`` is too large or too small, where it is one; else None."""
    import numpy as np

    expected, found = np.ravel(expected).astype("float64"), np.ravel(found).astype("float64")
    norm = float(expected.dot(expected))
    if not np.isfinite(norm) or not norm:
        return None
    ratio = float(expected.dot(found)) / norm
    fits = _largest(found - ratio * expected) <= 0.05 * _largest(ratio * expected)
    return ratio if fits else None


def cause_of(label, ratio, devices):
    """The likely cause of a difference, a sentence."""
    if ratio is not None and abs(ratio * devices - 1) < 0.1:
        if label.startswith("state"):
            return "It adds up over the batch, and was averaged over the replicas."
        return "It is 1/{} of it: a loss that is a sum over the rows was averaged.".format(devices)
    if ratio is not None and abs(ratio / devices - 1) < 0.1:
        return "It is {} times as much: each replica counted all of it.".format(devices)
    if label.startswith("output"):
        return (
            "An operation that reads several rows of the batch at once (a mean or softmax over "
            "axis 0, x @ x.T), or an input whose first dimension is not the batch (time-major)."
        )
    if label.startswith(("state", "metric")):
        return "State that is neither a mean over the rows, nor a sum, nor a count of steps."
    return (
        "A loss or an operation that is no mean over the rows of the batch: a sum, a mean over "
        "masked rows only, or one that compares rows with one another."
    )


def _warn(text):
    import warnings

    warnings.warn(text, errors.CompatWarning, stacklevel=2)
