"""Buckets of values that ranks sum up together, as in torch's DistributedDataParallel."""

from typing import Any, Dict, Iterable, List, Tuple

#: Bytes of the first bucket, and of the others.
SIZES = [2**20, 25 * 2**20]


def filled(items: Iterable[Tuple[Any, int, Any]]) -> List[Tuple[Any, List[Any]]]:
    """Return buckets of values: what the values of each have in common, and the values.

    Full ones come first.

    Arguments:
        items: of each value what it has in common with others, its bytes, and itself.
    """
    full: List[Tuple[Any, List[Any]]] = []
    being_filled: Dict[Any, Tuple[List[Any], int]] = {}
    for kind, size, value in items:
        values, before = being_filled.pop(kind, ([], 0))
        values.append(value)
        if before + size < SIZES[min(len(full), 1)]:
            being_filled[kind] = values, before + size
        else:
            full.append((kind, values))
    return full + [(kind, values) for kind, (values, _) in being_filled.items()]
