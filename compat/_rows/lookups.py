"""Rules of what looks up and sorts in, of layers, of new values, of shapes and of branches."""

from .placements import REPLICATED, Count, Mixed, Partial, Replicated, Sharded, Unknown
from .values import have_own_rows, rule, shared, without_rows

# Looking up and sorting in ----------------------------------------------------------------------


@rule
def gathered(values, axis, batch_dims=0):
    """Elements of the first value along a dimension, by numbers in the second."""
    data, numbers = values
    if not have_own_rows(values):
        return Mixed()
    if any(value.rank is None for value in values):
        return Unknown("the number of dimensions of an input is not known")
    axis = int(axis) % data.rank
    if batch_dims:
        if not all(isinstance(value.placement, Sharded) for value in values):
            return Mixed()
        rows = shared([data.placement, numbers.placement])
        return rows if rows is not None and rows.axis < batch_dims else Mixed()
    if isinstance(data.placement, Replicated):
        return numbers.placement.replace(axis=axis + numbers.axis)
    if data.axis == axis or not isinstance(numbers.placement, Replicated):
        return Mixed()
    new = 0 if data.axis < axis else numbers.rank - 1
    return data.placement.replace(axis=data.axis + new)


@rule
def scattered(values, how="sum"):
    """Rows sorted into what has a fixed number of places, by numbers: segment sums, histograms.

    Arguments:
        values: the numbers, then what is sorted in by them, if anything is.
        how: "sum", "max" or "min".
    """
    alike = have_own_rows(values) and len({value.axis for value in values}) == 1
    return Partial(how) if alike and how in ("sum", "max", "min") else Mixed()


# Layers, random numbers, shapes -----------------------------------------------------------------


@rule
def by_row(values, axes, result=None):
    """A function of each row by itself, such as a convolution.

    Arguments:
        axes: for each value, the dimension where the function has its batch; None for what is the
            same for all rows, such as weights, as is all beyond ``axes``.
        result: the dimension where the result has it; by default that of the first with rows.
    """
    axes = list(axes) + [None] * (len(values) - len(axes))
    own = have_own_rows(values) and [value.axis for value in values] == axes[: len(values)]
    rows = [value.placement for value in values if value.axis is not None]
    if not rows or not own:
        return Mixed()
    axis = rows[0].axis if result is None else result
    return shared([each.replace(axis=axis) for each in rows]) or Mixed()


def made(sizes, rank):
    """New values of a shape, each of them drawn or filled in without looking at the others.

    Arguments:
        sizes: the placement of the shape.
        rank: how many dimensions it has, or None.
    """
    if isinstance(sizes, Count):
        if sizes.places is None or rank is None:
            return Unknown("where a new value has its rows is not known")
        axes = list(sizes.places)
        return Sharded(axes[0], inner=None) if len(axes) == 1 else Mixed()
    return without_rows([sizes]) or Mixed()


def shape_of(value):
    """The sizes of a value."""
    placement = value.placement
    if isinstance(placement, (Mixed, Unknown)):
        return placement
    if isinstance(placement, Sharded):
        return Count([placement.axis]) if placement.even else Mixed()
    # A vector of sizes is as long for any batch; what else depends on the rows' number may not be.
    fixed = not isinstance(placement, Count) or placement.places is not None or value.rank == 0
    return REPLICATED if fixed else Count()


def size_of(value):
    """The number of a value's elements."""
    return Partial("sum") if isinstance(value.placement, Sharded) else shape_of(value)


def counted(sizes, chosen):
    """Some elements of a vector of sizes, as a vector, or one of them, as a number."""
    if not isinstance(sizes, Count) or sizes.places is None:
        return sizes
    if not isinstance(chosen, (list, tuple)):
        return Count() if chosen in sizes.places else REPLICATED
    places = [place for place, old in enumerate(chosen) if old in sizes.places]
    return Count(places) if places else REPLICATED


def chosen(condition, branches):
    """What one of several branches gives, by a condition that is the same for all rows."""
    found = without_rows([condition] + list(branches))
    if found is not None and not isinstance(found, Count):
        return found
    if not isinstance(condition, Replicated):
        return Mixed()  # each device would choose for itself
    if all(isinstance(each, Sharded) for each in branches):
        return shared(branches) or Mixed()
    return branches[0] if len(set(branches)) == 1 else Mixed()
