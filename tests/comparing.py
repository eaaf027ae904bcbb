"""What several devices compute, compared with one device: numbers, and the verdict on a run."""

import collections
import warnings

import numpy as np

from compat import errors
from compat._runtime import work
from compat._runtime.process import process

# How far a number may be from one device's, relative to its size or, for a weight, to how far it
# moved: rounding, of sums in another order, some steps long.
TOLERANCES = {"float64": 1e-9, "float32": 2e-4}

#: What can become of a program. The same numbers, each device with a part of the rows ("split") or
#: with a warning ("unsplit"); a CompatError ("refused"). Defects are in capitals: other numbers,
#: without a warning or with one; the same numbers, on one device alone and without a warning; an
#: error that is not compat's.
SPLIT, UNSPLIT, REFUSED = "split", "unsplit", "refused"
SILENT, WARNED, ALONE, CRASH = "SILENT", "WARNED, DIFFERENT", "ALONE, NO WARNING", "CRASH"
#: Of the program itself: one device cannot run it, or does not get the same numbers twice.
UNUSABLE, UNREPEATABLE = "n/a", "unrepeatable"

Verdict = collections.namedtuple("Verdict", "kind reason")


class Different(Exception):
    """A number on several devices that one device does not have."""


def compare(expected, found, tolerance):
    """Raise ``Different`` where what was observed is not what one device does.

    An observation is a name and arrays. Those named "weights" are judged by how far they moved.
    """
    if [what for what, _ in expected] != [what for what, _ in found]:
        raise Different("{} was observed, {} on one device".format(found, expected))
    first = None
    for place, ((what, right), (_, values)) in enumerate(zip(expected, found)):
        shapes = [[np.shape(array) for array in arrays] for arrays in (values, right)]
        if shapes[0] != shapes[1]:
            raise Different(
                "{} at step {}: shapes {}, {} on one device".format(what, place, *shapes)
            )
        scale = [np.abs(r) for r in right]
        if what == "weights":
            first = first or right
            moved = [np.abs(r - f).max() if np.size(r) else 0 for r, f in zip(right, first)]
            # Of a weight that hardly moves, such as a bias before a softmax, rounding is more.
            scale = [m + 0.1 * max(moved) + 1e-3 * s for m, s in zip(moved, scale)]
        for index, (r, v, s) in enumerate(zip(right, values, scale)):
            if not np.isfinite(r).all():
                raise ValueError("one device itself gives {} in {}".format(r, what))
            worst = np.abs(r - v) - tolerance * (s + 1e-2)
            if not (worst <= 0).all():
                raise Different(
                    "{} [{}] at step {}: {} on several devices, {} on one".format(
                        what, index, place, np.ravel(v)[:4], np.ravel(r)[:4]
                    )
                )


def verdict(run, tolerance):
    """Return the outcome of ``run(parallel)``, which returns what was observed."""
    try:
        expected = run(False)
        compare(expected, expected, tolerance)
    except Exception as error:
        return Verdict(UNUSABLE, _text(error))
    process.batches, process.graph_counters = {}, {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", errors.CompatWarning)
        try:
            found = run(True)
        except errors.CompatError as error:
            return Verdict(REFUSED, _text(error))
        except Exception as error:
            return Verdict(CRASH, _text(error))
    texts = [str(w.message) for w in caught if isinstance(w.message, errors.CompatWarning)]
    try:
        compare(expected, found, tolerance)
    except Different as error:
        try:
            compare(expected, run(False), tolerance)
        except Different:
            return Verdict(UNREPEATABLE, str(error))
        return Verdict(WARNED if texts else SILENT, "; ".join(texts + [str(error)]))
    if texts:
        return Verdict(UNSPLIT, "; ".join(texts))
    return Verdict(SPLIT if _shared() else ALONE, "")


def _shared():
    """Return whether several devices computed a batch that has rows for them.

    One row cannot be shared. Where the sizes of shards are not known, it is taken for granted.
    """
    batches = [sizes for _, sizes, _ in work.batches()]
    if batches and all(sizes is not None and sum(sizes) <= 1 for sizes in batches):
        return True
    return any(sizes is None or sum(map(bool, sizes)) > 1 for sizes in batches)


def _text(error):
    return "{}: {}".format(type(error).__name__, str(error)[:1000])
