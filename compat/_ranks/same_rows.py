"""Detection of ranks that all train on the same rows, and so gain nothing.

The arrays that ``fit()`` is given are compared before it begins, and the first batch of each model
after its first step, by a checksum of some of their rows.
"""

import json

from .. import errors
from .._runtime.process import process
from . import checksum

#: The numbers of data that are not compared.
UNKNOWN = [0] * 4


def numbers(data):
    """Return the numbers that ranks gather to compare their data, or ``UNKNOWN``.

    Rows that are all equal, as of constant data, are the same on all ranks whoever has which.

    Arguments:
        data: a structure of arrays of any framework.
    """
    from . import data_samples  # imports numpy

    try:
        pairs = data_samples.sample(data)
    except Exception:  # of a framework's own array, whose shape has no numbers
        return UNKNOWN
    if not any(_has_different_rows(value) for _, value in pairs):
        return UNKNOWN
    shapes = json.dumps([shape for shape, _ in pairs])
    return checksum.of_arrays_and_text([value for _, value in pairs], shapes)


def _has_different_rows(sample):
    return sample.size > 0 and (len(sample) == 1 or bool((sample != sample[:1]).any()))


def note(engine, name, gathered):
    """Note whether the ranks train on the same rows, and warn of it on rank 0, once.

    Arguments:
        engine: that of the ranks.
        name: that of the model.
        gathered: the ``numbers()`` of all ranks.
    """
    if not checksum.same(gathered) or not any(gathered[0]) or name in process.same_rows:
        return
    text = (
        f"All {engine.place.size} ranks train {name!r} on the same rows, so that an epoch takes "
        "as long as in one process: call compat.shard(), as in x, y = compat.shard((x, y)), which "
        "gives each rank its own. (Ignore this if their batches are meant to be the same.)"
    )
    is_first = not process.same_rows
    process.same_rows[name] = text
    if is_first and engine.place.rank == 0:
        errors.warn(text)


class FirstBatch:
    """The first batch of a model that is one of several ranks', as far as ranks compare it."""

    def __init__(self, engine):
        self.engine = engine
        self.numbers = None
        self.is_compared = False

    def see(self, batch):
        """Keep the checksum of the first batch that is passed here."""
        if self.numbers is None:
            self.numbers = numbers(batch)

    def compare(self, name):
        """Compare the first batches, once. All ranks call it at the same step."""
        if not self.is_compared:
            self.is_compared = True
            note(self.engine, name, self.engine.gather(self.numbers or UNKNOWN))
