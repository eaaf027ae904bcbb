"""A search in the graph of any framework."""

from typing import Any, Callable, Iterable, List, Sequence


def nearest(
    wanted: "Sequence[Any]",
    is_found: "Callable[[Any], bool]",
    inputs_of: "Callable[[Any], Iterable[Any]]",
) -> "List[Any]":
    """Return the nearest ancestors that satisfy a predicate, each once, in order.

    Arguments:
        wanted: where the search begins; those that satisfy the predicate are returned themselves.
        is_found: the predicate.
        inputs_of: what something in the graph is computed from; nothing for leaves.
    """
    ancestors, seen, stack = [], set(), list(reversed(wanted))
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        if is_found(node):
            ancestors.append(node)
        else:
            stack += reversed(list(inputs_of(node)))
    return ancestors
