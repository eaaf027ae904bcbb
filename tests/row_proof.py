"""Proof of rules about rows by brute force: the real operation, on a batch and on its parts.

For all placements of an operation's inputs, the operation is computed of the whole inputs, and of
the parts that three rows are split into. What a rule claims of the result is *wrong* if the parts
do not make up the whole in that way; a placement that is true and not claimed is *missing*, which
is slower and never wrong. (After torch's ``torch/distributed/tensor/_ops/strategy_validation.py``.)
"""

import itertools

import numpy as np

from compat._rows import REPLICATED, Count, Mixed, Partial, Sharded, Unknown, trial

#: The length of a dimension along which inputs are split.
ROWS = sum(trial.SIZES)


class Found:
    """What the proof of one case found.

    Attributes:
        wrong, missing: texts, one for each placement of the inputs.
        claimed: how many claims were right, so that a test can tell that there were any.
    """

    def __init__(self):
        self.wrong, self.missing, self.claimed = [], [], 0


def prove(name, inputs, compute, claim, placements=None, found=None):
    """Compare what a rule claims with what the operation computes.

    Arguments:
        name: of the case, for the texts.
        inputs: arrays of numpy's. Each is split along each dimension of ``ROWS`` elements, or of a
            multiple of them.
        compute: takes arrays, returns a list of arrays; raises where an operation refuses them.
        claim: takes the placements of the inputs, returns a list of those of the results.
        placements: for each input, the placements to try; default: all that it can have.
        found: a ``Found`` to add to.

    Returns:
        A ``Found``.
    """
    found = Found() if found is None else found
    try:
        whole = compute(inputs)
    except Exception as error:
        raise AssertionError(f"{name} cannot be computed: {error}") from error
    choices = placements or [placements_of(each) for each in inputs]
    for given in itertools.product(*choices):
        parts = list(zip(*[split(*pair) for pair in zip(inputs, given)]))
        try:
            computed = list(zip(*[compute(list(part)) for part in parts]))
        except Exception:  # shapes that do not fit each other
            computed = []
        claimed = claim(list(given))
        for place, placement in enumerate(claimed):
            values = computed[place] if computed else None
            true = trial.placements(values, whole[place]) if values else []
            text = f"{name}{list(given)}: result {place}"
            if isinstance(placement, (Mixed, Unknown)):
                if true:
                    found.missing.append(f"{text} is {true[0]}")
            elif isinstance(placement, Count):
                pass  # not a matter of values
            elif not any(agree(placement, each) for each in true):
                found.wrong.append(f"{text} was said to be {placement}, and is {true}")
            else:
                found.claimed += 1
    return found


def agree(claimed, true):
    """Whether two placements say the same, as far as the first one says anything."""
    if isinstance(claimed, Sharded) and isinstance(true, Sharded):
        inner = claimed.inner in (None, true.inner)
        evenly = inner and claimed.copies == true.copies and true.even
        return claimed.axis == true.axis and (evenly or not claimed.even)
    return claimed == true


def placements_of(array):
    """Return the placements that an input can have."""
    found = [REPLICATED]  # type: list
    found += [Sharded(axis, n // ROWS) for axis, n in enumerate(array.shape) if n % ROWS == 0]
    if array.dtype.kind == "f":
        found += [Partial("sum"), Partial("mean"), Partial("max"), Partial("min")]
    return found


def split(array, placement):
    """Return the parts of an array that two devices have by a placement."""
    if isinstance(placement, Sharded):
        return trial.cut(array, placement)
    if isinstance(placement, Partial):
        random = np.random.RandomState(0)
        apart = (random.uniform(0.5, 1.5, array.shape)).astype(array.dtype)
        if placement.how == "sum":
            return [array - apart, apart]
        if placement.how == "mean":
            first, second = trial.SIZES
            return [array + apart / first, array - apart / second]
        which = random.rand(*array.shape) < 0.5
        other = array - apart if placement.how == "max" else array + apart
        return [np.where(which, array, other), np.where(which, other, array)]
    return [array for _ in trial.SIZES]
