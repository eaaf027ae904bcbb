"""Arguments of a Gluon block: which arrays among them are split, and their shards."""

from typing import Any, Dict, Tuple

from .arrays import leaves, mapped, on_context


class Arguments:
    """The array arguments of a block, by their places in its calls.

    Attributes:
        split: by the place of an array, a tuple of keys: whether it is split.
    """

    def __init__(self) -> None:
        self.split: "Dict[Tuple[Any, ...], bool]" = {}

    def kind(self, args: "Any") -> "Tuple[bool, Tuple[Any, ...]]":
        """Decide which arrays are split.

        Returns:
            Whether those that were split before still can be; and the kind of these arguments,
            which is the same for all arguments that are split alike.
        """
        rows, can_be_split = next(leaves(args)).shape[0], True
        arrays: "Dict[Tuple[Any, ...], Any]" = {}
        mapped(arrays.__setitem__, args)
        for place, array in arrays.items():
            # Arrays with as many rows as the first one; those that were whole before stay whole.
            has_rows = array.shape[:1] == (rows,)
            can_be_split = can_be_split and (has_rows or not self.split.get(place, False))
            self.split.setdefault(place, has_rows)
        kind = tuple((place, self.split[place], array.ndim) for place, array in arrays.items())
        return can_be_split, kind

    def shard(self, args, rows, context):
        """Return the arguments of a replica.

        Arguments:
            args: those of the whole batch.
            rows: a function that returns a replica's shard of an array.
            context: the replica's.
        """

        def part(place, array):
            # Not the array itself: gradients from another context would not be added to its own.
            return on_context(
                context, rows(array) if self.split[place] else array.reshape(array.shape)
            )

        return mapped(part, args)
