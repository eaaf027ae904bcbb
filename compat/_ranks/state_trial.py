"""A trial of how a step's variables are merged: it runs on some rows together and in parts.

The step starts from several values of the variables: from those that they have, and from others
around those that a step leaves. A sum with a constant part, such as ``0.9 * n + 0.1 * sum(rows)``,
has another constant for each, and no maximum is hidden by an earlier one.
"""

import collections
from typing import Any, List

import numpy as np

from .._rows.placements import REPLICATED, Mixed
from . import merging
from .merging import MAX, MEAN, MIN, SUM, Merge

# Rows at most.
_MOST = 32
# How far apart values may be by rounding, relative to the change that a step makes, and in digits.
_ROUNDING, _DIGITS = 1e-4, 8
_EPSILON = {"float16": 1e-3, "bfloat16": 8e-3, "float64": 2.3e-16}  # others: float32's

_Place = collections.namedtuple("_Place", "rank size")


class Sample:
    """Values of one variable after steps on several rows that began with one value.

    Arguments:
        before: that value.
        whole: the value after a step on all rows.
        again: the value after another such step.
        splits: pairs: the sizes of two parts of the rows, and the values after a step on each.
        dtype: the name of the variable's type.
    """

    def __init__(self, before, whole, again, splits, dtype):
        kind = "float64" if "float" in dtype else np.asarray(whole).dtype
        self.before, self.whole, self.again = [np.asarray(v, kind) for v in (before, whole, again)]
        self.splits = [(sizes, [np.asarray(v, kind) for v in parts]) for sizes, parts in splits]
        self.tolerance = 0.0
        if "float" in dtype:
            digits = _DIGITS * _EPSILON.get(dtype, 1.2e-7)
            values = [self.whole] + [v for _, parts in self.splits for v in parts]
            self.is_finite = all(np.isfinite(value).all() for value in values)
            change = max(_largest(value - self.before) for value in values)
            self.tolerance = max(_ROUNDING, digits) * change + digits * _largest(self.whole)
        else:
            self.is_finite = True

    def fits(self, merge):
        """Return whether two ranks, each with a part of the rows, get the value of all rows."""
        return self._is_near(self.again, self.whole) and all(
            all(self._is_near(value, self.whole) for value in self._merged(merge, sizes, parts))
            for sizes, parts in self.splits
        )

    def _merged(self, merge, sizes, values):
        if not merge.is_exchanged:
            return values
        parts = [
            merge.parts(merging.NUMPY, self.before, value, size / sum(sizes), _Place(rank, 2))
            for rank, (size, value) in enumerate(zip(sizes, values))
        ]
        return [merge.merged(merging.NUMPY, self.before, [a + b for a, b in zip(*parts)])]

    def _is_near(self, value, other):
        if value.shape != other.shape:
            return False
        return np.allclose(value, other, rtol=0, atol=self.tolerance, equal_nan=True)


def samples_of(run, rows, values, dtypes):
    """Return the samples of each variable, a list of lists.

    Arguments:
        run: a function of numbers of rows, and of values of the variables, that returns the values
            after a step on these rows that began with those. It has no side effects.
        rows: how many the batch has.
        values: those of the variables.
        dtypes: the names of the variables' types.
    """
    count = max(3, min(rows, _MOST))
    whole, cut = tuple(place % rows for place in range(count)), count // 3
    runs: List[Any] = []
    after = values
    changes = [_start, _above, _below] + [_far] * any("int" in dtype for dtype in dtypes)
    for change in changes:
        starts = list(map(change, values, after, dtypes))
        try:
            of_whole, again = run(whole, starts), run(whole, starts)
            splits = [
                ((len(first), len(last)), [run(first, starts), run(last, starts)])
                for first, last in ((whole[:cut], whole[cut:]), (whole[:-cut], whole[-cut:]))
            ]
        except Exception:
            if not runs:
                raise
            continue  # values that the step cannot begin with
        after = of_whole if not runs else after
        runs.append((starts, of_whole, again, splits))
    return [
        [
            Sample(
                starts[place],
                of_whole[place],
                again[place],
                [(sizes, [part[place] for part in parts]) for sizes, parts in splits],
                dtype,
            )
            for starts, of_whole, again, splits in runs
        ]
        for place, dtype in enumerate(dtypes)
    ]


def usable(samples):
    """Return those samples whose values are finite, or all where the first one's are not."""
    return [sample for sample in samples if sample.is_finite] if samples[0].is_finite else samples


def merge_of(samples, dtype):
    """Return the merge of a variable that fits its samples; with ``Mixed`` where none fits."""
    is_float = "float" in dtype
    samples = usable(samples)
    placements = [REPLICATED, MEAN, SUM, MAX, MIN] if is_float else [REPLICATED, SUM, MAX, MIN]
    for placement in placements if dtype != "bool" else [REPLICATED]:
        merge = Merge(placement, is_float, _decay(samples, is_float) if placement == SUM else 1)
        if all(sample.fits(merge) for sample in samples):
            return merge
    return Merge(Mixed(), is_float)


def _decay(samples, is_float):
    """Return the multiple of the old value that a sum contains, by which the constants differ."""
    pairs = [
        (sample.before.astype("float64"), (first + last - sample.whole).astype("float64"))
        for sample in samples
        for _, (first, last) in sample.splits
    ]
    before, constant = [np.concatenate(list(map(np.ravel, side))) for side in zip(*pairs)]
    finite = np.isfinite(before) & np.isfinite(constant)
    before, constant = before[finite], constant[finite]
    norm = float(before @ before)
    decay = float(before @ constant) / norm if norm else 0.0
    near = round(decay, 0 if not is_float else 6)
    if abs(decay - near) < 2e-7 or not is_float:
        decay = near
    return int(decay) if decay == int(decay) else decay


def _start(value, after, dtype):
    return np.array(value)


def _far(value, after, dtype):
    """Return whole numbers by which a step that counts modulo a number is detected."""
    if "int" not in dtype:
        return after
    return np.asarray(after) + min(1000003, np.iinfo(dtype).max // 2)


def _above(value, after, dtype):
    return _moved(value, after, dtype, 1)


def _below(value, after, dtype):
    return _moved(value, after, dtype, -1)


def _moved(value, after, dtype, sign):
    """Return a value that a variable may have later on, all of whose elements differ."""
    after = np.asarray(after)
    if "float" not in dtype:
        return after + 2 if "int" in dtype and sign > 0 else after
    finite = np.asarray(after, "float64")
    size = max(_largest(finite), _largest(np.asarray(value, "float64"))) or 1.0
    ramp = np.linspace(0.5, 1.0, finite.size).reshape(finite.shape)
    finite = np.where(np.isfinite(finite), finite, 0.0)
    return (finite + sign * size * ramp).astype(after.dtype)


def _largest(array):
    """Return the largest finite absolute value of an array's elements, or 0."""
    finite = np.abs(array[np.isfinite(array)])
    return float(finite.max()) if finite.size else 0.0
