"""Values of the whole batch that operations need, and shards of values that are of all of it.

This is what DTensor calls ``redistribute``:

- ``Partial`` to ``Replicated``: a mean of the batch, say, is added up over the devices, and each
  goes on with its own rows and the mean of all of them.
- ``Sharded`` to ``Replicated``: a factor of a product of all rows with all rows, say, is gathered
  from the devices, and each multiplies its own rows by all of them.
- ``Replicated`` to ``Sharded``: where one device has computed something of the whole batch that
  again has a row for each row, each device goes on with its own ones.
"""

from typing import Callable, List, Mapping, Optional, Sequence, Tuple

from .placements import REPLICATED, Mixed, Partial, Placement, Replicated, Sharded, Unknown, Value

#: Elements of the largest value that is reduced or gathered. Each device sends and receives it, so
#: that a larger one costs more than it saves.
LARGEST = 2**20

#: Numbers of rows for which the sizes of a value show how they depend on the rows. Most sizes of
#: groups of rows divide the large ones.
SAMPLES = (3, 40320, 80640)


def redistributed(
    rule: "Callable[[Sequence[Value]], Placement]", values: "Sequence[Value]"
) -> "Tuple[Placement, List[int]]":
    """Return the placement of an operation's result, and the inputs to reduce over devices first.

    Arguments:
        rule: the operation's rule, of all its inputs.
        values: these inputs.

    Returns:
        The placement that the rule gives, with the positions of inputs that are ``Partial`` if it
        is right only where these are the same on every device; else without any.
    """
    result = rule(values)
    partial = [n for n, value in enumerate(values) if isinstance(value.placement, Partial)]
    if not isinstance(result, Mixed) or not partial:
        return result, []
    whole = [Value(REPLICATED, v.shape) if n in partial else v for n, v in enumerate(values)]
    reduced = rule(whole)
    return (result, []) if isinstance(reduced, (Mixed, Unknown)) else (reduced, partial)


def gathering(
    rule: "Callable[[Sequence[Value]], Placement]", values: "Sequence[Value]"
) -> "Tuple[Placement, Optional[int]]":
    """Return the placement of an operation's result, and the input to gather from devices first.

    Arguments:
        rule: the operation's rule, of all its inputs.
        values: these inputs.

    Returns:
        The placement that the rule gives, and None. Or, if it gives none that devices can go on
        with, but does so where one of several inputs with rows is the same on every device: that
        placement, along the first dimension, and the position of that input.
    """
    result = rule(values)
    rows = [n for n, value in enumerate(values) if isinstance(value.placement, Sharded)]
    are_plain = all(isinstance(value.placement, (Replicated, Sharded)) for value in values)
    if not isinstance(result, Mixed) or len(rows) < 2 or not are_plain:
        return result, None
    for place in reversed(rows):
        whole = [Value(REPLICATED, v.shape) if n == place else v for n, v in enumerate(values)]
        placement = rule(whole)
        if isinstance(placement, Sharded) and (placement.axis, placement.copies) == (0, 1):
            return placement, place
    return result, None


def resharding(
    shapes: "Mapping[int, Optional[Sequence[Optional[int]]]]",
) -> "Optional[Placement]":
    """Return the placement with which devices can go on from a value of the whole batch, or None.

    Arguments:
        shapes: the sizes of the value for each of ``SAMPLES``, as far as they are known.
    """
    known = {rows: list(shape) for rows, shape in shapes.items() if shape is not None}
    if any(rows not in known for rows in SAMPLES[1:]):
        return None
    if all(shape[:1] == [rows] for rows, shape in known.items()):
        return Sharded(0)
    first, *others = known.values()
    is_same = all(shape == first for shape in others) and None not in first
    return REPLICATED if is_same else None
