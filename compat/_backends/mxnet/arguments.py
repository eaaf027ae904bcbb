"""Arguments of a Gluon block: which arrays among them are split, and their shards."""

from .arrays import leaves, mapped, on_context


class Arguments:
    """The arrays that a block takes, by their places, as its calls have had them.

    Attributes:
        split: by the place of an array: whether it is split.
    """

    def __init__(self):
        self.split = {}  # type: dict

    def kind(self, args):
        """Note which arrays are split.

        Returns:
            Whether those that were split before still can be; and what the arguments have in common
            with others of which the same is split.
        """
        rows, kept, places = next(leaves(args)).shape[0], True, {}  # type: int, bool, dict
        mapped(places.__setitem__, args)
        for place, array in places.items():
            # Arrays with as many rows as the first; what was whole before stays whole.
            has_rows = array.shape[:1] == (rows,)
            kept = kept and (has_rows or not self.split.get(place, False))
            self.split.setdefault(place, has_rows)
        return kept, tuple(
            (place, self.split[place], array.ndim) for place, array in places.items()
        )

    def shard(self, args, rows, context):
        """Return the arguments of a replica.

        Arguments:
            rows: takes a replica's part out of an array that is split.
        """

        def part(place, array):
            # Not the array itself: gradients that come back from another context are not added.
            return on_context(
                context, rows(array) if self.split[place] else array.reshape(array.shape)
            )

        return mapped(part, args)
