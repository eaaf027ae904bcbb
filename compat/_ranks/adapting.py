"""A warning where a layer is adapted to this rank's shard of the data.

``adapt()`` computes statistics or a vocabulary of the rows that it gets, mostly before the ranks
have joined, so that they cannot be those of all ranks' rows.
"""

import contextlib
import functools
import weakref

from .. import errors
from .._runtime import nested, on_import, patching
from .._runtime.process import process
from .._runtime.within import Within
from . import batch_agreement, datasets, loaders

# Where each Keras defines layers that adapt.
_PACKAGES = ("keras.src", "keras", "tf_keras.src", "tensorflow.python.keras")
_MODULES = ("discretization", "feature_space", "index_lookup", "integer_lookup", "normalization",
            "string_lookup", "text_vectorization")  # fmt: skip
_REMEMBERED = 64  # arrays
_adapting = Within()


class ArrayPart:
    """An array that ``shard()`` has returned: its number of rows, and a reference to it."""

    def __init__(self, part, whole):
        self.rows, self.whole_rows = int(part.shape[0]), int(whole.shape[0])
        self.reference = None
        with contextlib.suppress(TypeError):  # a class may allow none
            self.reference = weakref.ref(part)

    def holds(self, array):
        """Return whether an array is this one, or a view of it."""
        part = self.reference and self.reference()
        if part is None:
            return False
        # A view of the whole array has that one for its base, as its other views have.
        is_copy = getattr(part, "base", part) is None
        return array is part or is_copy and getattr(array, "base", None) is part


def note(parts, whole):
    """Remember arrays that ``shard()`` has returned.

    Arguments:
        parts: a structure of these.
        whole: the same structure of the arrays that they are parts of.
    """
    pairs = zip(nested.leaves(parts), nested.leaves(whole))
    made = [ArrayPart(*pair) for pair in pairs if all(getattr(e, "shape", None) for e in pair)]
    process.array_parts = (process.array_parts + made)[-_REMEMBERED:]


def watch():
    """Warn from now on where a layer is adapted to what ``shard()`` has returned."""
    if process.watches_adapt:
        return
    process.watches_adapt = True
    for package in _PACKAGES:
        for module in _MODULES:
            on_import.call(_patch, f"{package}.layers.preprocessing.{module}")
        on_import.call(_patch, f"{package}.engine.base_preprocessing_layer")


def _patch(module):
    for owner in list(vars(module).values()):
        is_own = isinstance(owner, type) and owner.__module__ == module.__name__
        if is_own and "adapt" in vars(owner) and patching.find(owner, "adapt") is None:
            patching.WatchingPatch(owner, "adapt", _warning_before(owner.adapt))


def _warning_before(adapt):
    @functools.wraps(adapt)
    def adapt_with_warning(layer, *args, **kwargs):
        arguments = list(args) + list(kwargs.values())
        part = None if _adapting.here() or not arguments else _part_in(arguments[0])
        if part:
            kind, name = type(layer).__name__, getattr(layer, "name", None)
            errors.warn(
                f"adapt() of {kind} {name!r} was given {part}, so that its "
                "statistics or its vocabulary are those of one rank's rows. Call adapt() with the "
                "data of all ranks, those that shard() was given."
            )
        with _adapting:
            return adapt(layer, *args, **kwargs)

    return adapt_with_warning


def _part_in(data):
    """Return a phrase for data that are this rank's shard, or None."""
    if batch_agreement.part_in(data) is not None or loaders.is_part(data) or datasets.is_part(data):
        return "what shard() has returned"
    candidates = datasets.arrays_in(data) if datasets.takes(data) else [data]
    candidates = [array for array in candidates if getattr(array, "shape", None)]
    parts = process.array_parts
    if any(part.holds(array) for part in parts for array in candidates):
        return "what shard() has returned"
    whole = {part.rows: part.whole_rows for part in parts}
    for array in candidates:
        rows = int(array.shape[0])
        if rows in whole and rows not in whole.values():
            return f"{rows} rows, as many as shard() has returned of {whole[rows]}"
    return None
