"""How each number that a model computes depends on the rows of the batch, read off its graph.

Devices compute their own rows. A number for all rows (a loss added within the call, a scalar
output, a counter) has to be put together from theirs, and how cannot be told from the numbers: on
an even split a counter of rows and a counter of steps look alike. So the plain call is traced once
more, with an unknown number of rows, and its operations are followed from the batch to the
results, in the order in which they were made. A tensor is

- ``Rows``: it has the batch along an axis;
- ``Sizes``: a shape, some of whose numbers are the number of rows;
- ``Reduced``: linear in sums and means over the rows and in what does not depend on them; or
- ``Whole``: computed from the whole batch in some other way, such as the square of a mean.
"""

from collections import namedtuple

# A tensor with the batch along `axis`, None where that is not known. `even`: it has as many
# elements for each row. `per`: the Denominator that it was divided by. `mixed`: a statistic of the
# whole batch went into each row.
Rows = namedtuple("Rows", "axis even per mixed")
Sizes = namedtuple("Sizes", "places")
Reduced = namedtuple("Reduced", "parts")
# `mixes`: rows are compared with each other.
Whole = namedtuple("Whole", "why mixes")
Handle = namedtuple("Handle", "key")

# What a Reduced consists of. A mean has its weight; None is the number of rows.
Part = namedtuple("Part", "name weight")
# A tensor that is computed from a sum alone: both by name.
Denominator = namedtuple("Denominator", "tensor sum")

OLD, FIXED = Part("old", None), Part("fixed", None)  # a variable's old value; what has no rows
COUNT, SUM, MEAN = Part("count", None), Part("sum", None), Part("mean", None)
MIXED_MEAN = Part("mixed mean", None)  # a mean of rows with a statistic of the batch in each

OLD_VALUE, FIXED_VALUE = Reduced(frozenset([OLD])), Reduced(frozenset([FIXED]))
ROW_COUNT, ROW_SUM = Reduced(frozenset([COUNT])), Reduced(frozenset([SUM]))
BATCH = Rows(0, True, None, False)


def is_fixed(kind):
    """Whether this is the same on each replica."""
    return isinstance(kind, Reduced) and kind.parts <= {OLD, FIXED}


def scaled(kind):
    """Times something, after which nothing is a variable's old value any more."""
    if isinstance(kind, Reduced) and OLD in kind.parts:
        return Reduced(kind.parts - {OLD} | {FIXED})
    return kind


def mean_of(by):
    return MEAN if by.tensor is None else Part("mean", by)


def free_axes(tensor):
    """The axes whose lengths are unknown."""
    if tensor.shape.rank is None:
        return []
    return [axis for axis, length in enumerate(tensor.shape.as_list()) if length is None]
