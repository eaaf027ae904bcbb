"""Parallelized models that do not split their batches, or not in all of their operations."""

from _weakref import ref  # weakref costs an import

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Callable, Dict, List, Tuple


class UnsplitModels:
    """Records of models by identity: two of one name, such as a torch class's, have two records."""

    def __init__(self) -> None:
        #: Of each model: a weak reference, its name, and how far it is split.
        self._records: "List[Tuple[Callable[[], Any], str, str]]" = []

    def __contains__(self, model: "Any") -> bool:
        return any(reference() is model for reference, _, _ in self._records)

    def record(self, model: "Any", name: str, extent: str) -> None:
        """Record a model, in place of any earlier record of it.

        A record does not keep its model alive, and outlives it, until another model of that name is
        recorded: a script that makes models in a loop does not fill the report.

        Arguments:
            model: the model.
            name: its name.
            extent: how far it is split, such as "unsplit, because its layer is stateful".
        """
        self.discard(model)
        self._records = [
            record for record in self._records if record[1] != name or record[0]() is not None
        ]
        try:
            reference: "Callable[[], Any]" = ref(model)
        except TypeError:  # a class with __slots__, say
            reference = lambda: model  # noqa: E731
        self._records.append((reference, name, extent))

    def discard(self, model: "Any") -> None:
        """Drop the record of a model, as where it is parallelized again."""
        self._records = [record for record in self._records if record[0]() is not model]

    def by_name(self) -> "Dict[str, str]":
        """Return how far each model is split, for reports: a second "net" is "net (2)"."""
        extents: "Dict[str, str]" = {}
        for _, name, extent in self._records:
            number, unique = 1, name
            while unique in extents:
                number += 1
                unique = f"{name} ({number})"
            extents[unique] = extent
        return extents
