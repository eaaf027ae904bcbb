"""The results of a step on one device and on several, compared, and the causes of differences."""

from typing import Any, Dict, List, Optional, Sequence, Tuple

from .._runtime.on_demand import numpy as np
from .steps import Step, Values

# Sums in another order differ by some units in the last place (eps) for each factor of rows; 2^10
# leaves room for sums over some millions of numbers, whose error grows with the square root.
_UNITS = 2.0**10
# Amplified rounding may differ from run to run by this factor.
_MARGIN = 16.0
# Values that one device repeats no better than this, relative to their size, are incomparable.
_RANDOM = 2e-3
# Units in the last place that one device repeats its outputs to, where sums are in any order.
_REPEATED = 2.0**6
_NOT_REPEATED = "one device does not repeat it"

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# Types of fewer digits sum in a wider one, and round each result once.
_UNITS_OF = {"float16": 2.0**4, "bfloat16": 2.0**3}


class Comparison:
    """The results of a step on one device and on several.

    Arguments:
        step: the ``Step``.
        start: values before it; those that exist afterwards, too, are compared by their changes.
        expected: values after it on one device.
        others: values after it on one device, done again.
        is_random: whether the step is. Metrics and updates may then be repeated by chance: an
            accuracy over a few samples, or Adam's first update, of which only the sign varies.
    """

    def __init__(
        self,
        step: "Step",
        start: "Values",
        expected: "Values",
        others: "Sequence[Values]",
        is_random: bool = False,
    ) -> None:
        self.step = step
        self.start = start
        self.expected = expected
        self.others = others
        self.is_random = is_random
        self.differing: "List[Tuple[str, float, float, Optional[float]]]" = []
        self.incomparable: "Dict[str, str]" = {}  # label -> why
        self.compared = 0
        self.telling = 0  # compared values that would show a wrong gradient or output
        self.telling_weights = 0
        self.largest = (0.0, "")

    def compare(self, on_all: "Values") -> None:
        """Compare all values after the step on all devices, by label."""
        for label in sorted(self.expected, key=_order):
            if self.is_random and label.startswith(_AFTER_THE_LOSS):
                self.incomparable[label] = _NOT_REPEATED
            elif not self.step.is_random(label):
                self._compare(label, on_all.get(label))

    def _compare(self, label: str, value: "Any") -> None:
        expected, before = self.expected[label], self.start.get(label)
        if value is None or np.shape(value) != np.shape(expected):
            self.differing.append((label, float("inf"), 0.0, None))
            return
        others = [other.get(label) for other in self.others]
        if any(other is None or np.shape(other) != np.shape(expected) for other in others):
            self.incomparable[label] = "its shape changes from run to run"
            return
        dtype = np.asarray(expected).dtype
        is_exact = dtype.kind not in "fc" and str(getattr(expected, "dtype", "")) not in EPS
        if np.shape(before) != np.shape(expected):  # a state that has grown
            before = None
        expected, value = _change(expected, before), _change(value, before)
        if not np.size(expected):
            return
        apart = value - expected
        finite = np.isfinite(apart)
        alike = finite | (expected == value) | (np.isnan(expected) & np.isnan(value))
        largest = _largest(expected)
        spread = max([_largest(_change(other, before) - expected) for other in others] or [0.0])
        limit = (None if spread else 0.0) if is_exact else self._limit(largest, spread, before)
        if limit is None:
            self.incomparable[label] = _NOT_REPEATED
            return
        self.compared += 1
        if label.startswith(_TELLING) and (before is None or largest):
            self.telling += 1
            self.telling_weights += label.startswith("weight")
        difference = _largest(apart) if np.all(alike) else float("inf")
        if difference > limit:
            self.differing.append((label, difference, limit, _ratio(expected, value)))
        elif largest:
            self.largest = max(self.largest, (difference / largest, label))

    def _limit(self, largest: float, spread: float, before: "Any") -> "Optional[float]":
        """Return the largest difference that rounding explains.

        None: one device does not repeat its own values.

        Arguments:
            largest: the largest change on one device.
            spread: the largest difference between runs on one device.
            before: the value before, if the changes are compared.
        """
        stored = 0.0
        if before is not None:
            stored = 4 * EPS.get(str(before.dtype), EPS["bfloat16"]) * _largest(_change(before))
        # Differences by rounding alone, relative to the size of results.
        eps = EPS.get(self.step.dtype, EPS["float32"])
        unit = eps * _UNITS_OF.get(self.step.dtype, _UNITS)
        if spread > max(_RANDOM, 4 * unit) * largest + stored:
            return None
        # No float is exact: a loss of what fits is the square of rounding, and a sum that cancels
        # is rounding alone.
        return max(unit * largest + stored + _MARGIN * spread, eps**2 if largest else eps)

    def compared_nothing(self) -> bool:
        """Return whether no output, no loss or no changed weight could be compared."""
        weights = [label for label in self.incomparable if label.startswith("weight")]
        results = [x for x in self.incomparable if x.startswith(("output ", "the loss"))]
        return bool(not self.telling or results or (weights and not self.telling_weights))


_ORDER = ("output", "the loss", "metric", "state", "gradient", "weight", "slot")
_TELLING = ("output", "the loss", "gradient", "weight")
_AFTER_THE_LOSS = ("metric", "gradient", "weight", "slot")


def is_random(dtype: str, expected: "Values", again: "Values") -> bool:
    """Return whether one device computes other outputs or losses from the same weights."""
    return not are_near(expected, again, _REPEATED * EPS.get(dtype, EPS["float32"]))


def are_near(expected: "Values", again: "Values", limit: float = _RANDOM) -> bool:
    """Return whether outputs and losses differ by no more than a relative limit."""
    for label in expected:
        if label.startswith(("output", "the loss")):
            first, second = _change(expected[label]), _change(again[label])
            if first.shape != second.shape or _largest(second - first) > limit * _largest(first):
                return False
    return True


def _order(label: str) -> "Tuple[int, str]":
    place = next((i for i, word in enumerate(_ORDER) if label.startswith(word)), len(_ORDER))
    return place, label


def _change(value: "Any", before: "Any" = None) -> "Any":
    """Return the change of a value, in 64 bits; the value itself if there is none before it."""
    dtype = "complex128" if np.asarray(value).dtype.kind == "c" else "float64"
    # Without copies of both in 64 bits, which take longer than the difference.
    before = np.zeros((), dtype) if before is None else before
    return np.subtract(value, before, dtype=dtype, casting="unsafe")


def _largest(values: "Any") -> float:
    """Return the largest of the absolute values that are finite."""
    values = np.asarray(values)
    if values.size and values.dtype.kind == "f":
        largest = float(max(values.max(), -values.min()))
        if np.isfinite(largest):
            return largest
    values = np.abs(values)
    values = values[np.isfinite(values)]
    return float(values.max()) if values.size else 0.0


def _ratio(expected: "Any", value: "Any") -> "Optional[float]":
    """Return the factor by which all of a value is too large or too small, or None."""
    expected, value = np.ravel(expected).astype("float64"), np.ravel(value).astype("float64")
    norm = float(expected.dot(expected))
    if not np.isfinite(norm) or not norm:
        return None
    ratio = float(expected.dot(value)) / norm
    fits = _largest(value - ratio * expected) <= 0.05 * _largest(ratio * expected)
    return ratio if fits else None


def largest_difference(first: "Sequence[Any]", second: "Sequence[Any]") -> float:
    """Return the largest absolute difference between two lists of arrays."""
    assert len(first) == len(second)
    return max(float(np.abs(a - b).max()) for a, b in zip(first, second) if np.size(a))


def cause_of(label: str, ratio: "Optional[float]", devices: int) -> str:
    """Return the likely cause of a difference, a sentence."""
    if ratio is not None and abs(ratio * devices - 1) < 0.1:
        if label.startswith("state"):
            return "It adds up over the batch, and was averaged over the replicas."
        return f"It is 1/{devices} of it: a loss that is a sum over the rows was averaged."
    if ratio is not None and abs(ratio / devices - 1) < 0.1:
        return f"It is {devices} times as much: each replica counted all of it."
    if label.startswith("output"):
        return (
            "An operation that reads several rows of the batch at once (a mean or softmax over "
            "axis 0, x @ x.T), or an input whose first dimension is not the batch (time-major)."
        )
    if label.startswith(("state", "metric")):
        return "State that is neither a mean over the rows, nor a sum, nor a count of steps."
    return (
        "A loss or an operation that is not a mean over the rows of the batch: a sum, a mean over "
        "masked rows only, or one that compares rows with one another."
    )
