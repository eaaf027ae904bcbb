"""What one device and several make of the same step: whether it differs, and why it may."""

from typing import Dict, List, Optional, Tuple

from .._runtime.on_demand import numpy as np

# Sums in another order differ by some units in the last place (eps) for each factor of rows; 2^10
# leaves room for sums over some millions of numbers, whose error grows with the square root.
_UNITS = 2.0**10
# A difference that rounding makes by the model's own doing may come out so many times larger.
_MARGIN = 16.0
# What one device repeats no better than this, relative to its size, cannot be compared.
_RANDOM = 2e-3
# Units in the last place that one device repeats its outputs to, where sums are in any order.
_REPEATED = 2.0**6
_NOT_REPEATED = "one device does not repeat it"

EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}
# Types of fewer digits sum in a wider one, and round each result once.
_UNITS_OF = {"float16": 2.0**4, "bfloat16": 2.0**3}


class Comparison:
    """What one device and several make of the same step.

    Arguments:
        step: the ``Step``.
        start: values before it; those that are there as well afterwards are compared by how they
            changed.
        expected: values after it on one device.
        others: values after it on one device, done again.
        is_random: whether the step is. Metrics and updates may then repeat themselves by chance:
            an accuracy over a few rows, or Adam's first update, of which only the sign varies.
    """

    def __init__(self, step, start, expected, others, is_random=False):
        self.step = step
        self.start = start
        self.expected = expected
        self.others = others
        self.is_random = is_random
        self.differing: "List[Tuple[str, float, float, Optional[float]]]" = []
        self.incomparable: "Dict[str, str]" = {}  # label -> why
        self.compared = 0
        self.telling = 0  # those compared that would tell of a wrong gradient or output
        self.telling_weights = 0
        self.largest = (0.0, "")

    def compare(self, found):
        for label in sorted(self.expected, key=_order):
            if self.is_random and label.startswith(_AFTER_THE_LOSS):
                self.incomparable[label] = _NOT_REPEATED
            elif not self.step.is_random(label):
                self._compare(label, found.get(label))

    def _compare(self, label, found):
        expected, before = self.expected[label], self.start.get(label)
        if found is None or np.shape(found) != np.shape(expected):
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
        expected, found = _change(expected, before), _change(found, before)
        if not np.size(expected):
            return
        apart = found - expected
        finite = np.isfinite(apart)
        alike = finite | (expected == found) | (np.isnan(expected) & np.isnan(found))
        largest = _largest(np.where(finite, expected, 0.0))
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
            self.differing.append((label, difference, limit, _ratio(expected, found)))
        elif largest:
            self.largest = max(self.largest, (difference / largest, label))

    def _limit(self, largest, spread, before):
        """Return how far apart rounding may leave two values.

        None: one device does not repeat its own.

        Arguments:
            largest: how much changed on one device.
            spread: how far apart are the values that one device repeats.
            before: what was there, if it is the change that is compared.
        """
        stored = 0.0
        if before is not None:
            stored = 4 * EPS.get(str(before.dtype), EPS["bfloat16"]) * _largest(_change(before))
        # How far results may be apart by rounding alone, relative to their size.
        eps = EPS.get(self.step.dtype, EPS["float32"])
        unit = eps * _UNITS_OF.get(self.step.dtype, _UNITS)
        if spread > max(_RANDOM, 4 * unit) * largest + stored:
            return None
        # No float is exact: a loss of what fits is the square of rounding, and a sum that cancels
        # is rounding alone.
        return max(unit * largest + stored + _MARGIN * spread, eps**2 if largest else eps)

    def compared_nothing(self):
        """Return whether no output, no loss or no changed weight could be compared."""
        weights = [label for label in self.incomparable if label.startswith("weight")]
        results = [x for x in self.incomparable if x.startswith(("output ", "the loss"))]
        return not self.telling or results or (weights and not self.telling_weights)


_ORDER = ("output", "the loss", "metric", "state", "gradient", "weight", "slot")
_TELLING = ("output", "the loss", "gradient", "weight")
_AFTER_THE_LOSS = ("metric", "gradient", "weight", "slot")


def is_random(dtype, expected, again):
    """Return whether one device comes to other outputs or another loss from the same weights."""
    return not are_near(expected, again, _REPEATED * EPS.get(dtype, EPS["float32"]))


def are_near(expected, again, limit=_RANDOM):
    """Return whether outputs and losses differ by no more than a relative limit."""
    for label in expected:
        if label.startswith(("output", "the loss")):
            first, second = _change(expected[label]), _change(again[label])
            if first.shape != second.shape or _largest(second - first) > limit * _largest(first):
                return False
    return True


def _order(label):
    place = next((i for i, word in enumerate(_ORDER) if label.startswith(word)), len(_ORDER))
    return place, label


def _change(value, before=None):
    """By how much a value has changed, in 64 bits; the value, where there is none before it."""
    dtype = "complex128" if np.asarray(value).dtype.kind == "c" else "float64"
    # Without copies of both in 64 bits, which take longer than the difference.
    before = np.zeros((), dtype) if before is None else before
    return np.subtract(value, before, dtype=dtype, casting="unsafe")


def _largest(values):
    """Return the largest of the absolute values that are finite."""
    values = np.asarray(values)
    if values.size and values.dtype.kind == "f":
        largest = float(max(values.max(), -values.min()))
        if np.isfinite(largest):
            return largest
    values = np.abs(values)
    values = values[np.isfinite(values)]
    return float(values.max()) if values.size else 0.0


def _ratio(expected, found):
    """Return the factor by which ``found`` is too large or too small, where it is one.

    Else None.
    """
    expected, found = np.ravel(expected).astype("float64"), np.ravel(found).astype("float64")
    norm = float(expected.dot(expected))
    if not np.isfinite(norm) or not norm:
        return None
    ratio = float(expected.dot(found)) / norm
    fits = _largest(found - ratio * expected) <= 0.05 * _largest(ratio * expected)
    return ratio if fits else None


def largest_difference(first, second):
    """Return the largest absolute difference between two lists of arrays."""
    assert len(first) == len(second)
    return max(float(np.abs(a - b).max()) for a, b in zip(first, second) if np.size(a))


def cause_of(label, ratio, devices):
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
        "A loss or an operation that is no mean over the rows of the batch: a sum, a mean over "
        "masked rows only, or one that compares rows with one another."
    )
