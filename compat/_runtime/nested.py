"""Nested tuples, lists and dictionaries of values."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterator


def leaves(structure: "Any") -> "Iterator[Any]":
    """Yield the values in nested tuples, lists and dictionaries, without None."""
    if isinstance(structure, (tuple, list, dict)):
        for part in structure.values() if isinstance(structure, dict) else structure:
            yield from leaves(part)
    elif structure is not None:
        yield structure
