"""A call of one of torch's functions, as the rules about rows need it: arguments and placements."""

import inspect
import re

import torch

from ... import _rows

REPLICATED = _rows.REPLICATED

tree = torch.utils._pytree


def tag_of(value):
    """The tag of a tensor, or None."""
    return getattr(value, "_compat_rows", None)


def tag(value, as_what):
    value._compat_rows = as_what


def is_rows(placement):
    return isinstance(placement, _rows.Sharded)


def is_sharded(value):
    return isinstance(value, torch.Tensor) and is_rows(tag_of(value))


def name_of(function):
    """What torch calls a function: "sum"; that of a property is its name."""
    name = getattr(function, "__name__", str(function))
    return getattr(function.__self__, "__name__", name) if name == "__get__" else name


def tensors_in(values):
    for leaf in tree.tree_leaves(values):
        for part in (leaf.start, leaf.stop) if isinstance(leaf, slice) else (leaf,):
            if isinstance(part, torch.Tensor):
                yield part


def is_in_place(name):
    """By torch's names: ``add_``, ``__iadd__``, ``__setitem__``."""
    if name.startswith("__"):
        return name == "__setitem__" or re.match("__i(?!nvert|ndex|nt_)[a-z]+__$", name) is not None
    return name.endswith("_") and not name.startswith("requires_grad")


class RowCount(int):
    """A size that grows with the batch: the placement ``Count``, as a number.

    Arguments:
        per: its part for each row.
        watch: has ``rows``, and takes note of comparisons.
    """

    constant = False  # as of a ``Step``

    def __new__(cls, per, watch):
        self = super().__new__(cls, per * watch.rows)
        self.per, self.watch = per, watch
        return self

    def __mul__(self, other):
        if isinstance(other, int) and not isinstance(other, RowCount):
            return RowCount(self.per * other, self.watch)
        return self.plain() * other

    __rmul__ = __mul__

    def __floordiv__(self, other):
        if isinstance(other, int) and not isinstance(other, RowCount) and other > 0:
            if self.per % other == 0:
                return RowCount(self.per // other, self.watch)
        return self.plain() // other

    def plain(self):
        self.watch.count_given("size")
        return int(self)

    def __reduce__(self):
        return int, (int(self),)

    def __deepcopy__(self, memo):
        return int(self)

    __hash__ = int.__hash__


def _compared(name):
    plain = getattr(int, name)

    def compared(self, other):
        if isinstance(other, int) and not isinstance(other, RowCount):
            self.watch.compare(plain, self.per, other)
        return plain(self, other)

    return compared


def _plain(name):
    return lambda self, other: getattr(self.plain(), name)(other)


for _name in ("__add__", "__radd__", "__sub__", "__rsub__", "__mod__", "__pow__", "__truediv__",
              "__rtruediv__"):  # fmt: skip
    setattr(RowCount, _name, _plain(_name))
for _name in ("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"):
    setattr(RowCount, _name, _compared(_name))


def has_count(*values):
    return any(isinstance(leaf, RowCount) for leaf in tree.tree_leaves(values))


class Call:
    """A call, of which the rules ask for placements.

    Arguments:
        rows: how many rows the tensors have.
        counting: whether plain numbers may be numbers of rows, as ``len()`` gives them.

    Attributes:
        given, tags: the tensors among the arguments, and what is known of them.
        results: the tensors it returned.
    """

    results = ()

    def __init__(self, func, args, kwargs, rows, name=None, counting=False):
        self.name, self.func, self.args, self.kwargs = name or name_of(func), func, args, kwargs
        self.rows, self.counting = rows, counting
        self.given = list(tensors_in((args, kwargs)))
        self.tags = [tag_of(tensor) for tensor in self.given]
        self.in_place = is_in_place(self.name)

    def mapped(self, function):
        """The arguments, with ``function`` applied to all that is in them."""
        return tree.tree_map(function, self.args), tree.tree_map(function, self.kwargs)

    def bound(self):
        """The arguments by their names, of one of torch's functions in Python."""
        bound = inspect.signature(self.func).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def get(self, at, *names, default=None):
        if len(self.args) > at:
            return self.args[at]
        for name in names:
            if name in self.kwargs:
                return self.kwargs[name]
        return default

    def value(self, tensor):
        """The placement and the sizes; those that grow with the batch are not known."""
        placement = tag_of(tensor)
        shape = list(tensor.shape)
        if isinstance(placement, _rows.Sharded):
            shape[placement.axis] = None
        elif not isinstance(placement, (_rows.Mixed, _rows.Unknown)):
            placement = REPLICATED
        return _rows.Value(placement, shape)

    @property
    def first(self):
        return self.args[0] if self.args else self.kwargs.get("input", self.kwargs.get("tensors"))

    @property
    def values(self):
        return list(map(self.value, self.given))

    def axes(self, at=1, names=("dim", "axis"), default=None):
        """The dimensions that are given, or None for all of them."""
        axes = self.get(at, *names, default=default)
        if isinstance(axes, (torch.Tensor, torch.dtype, bool, str)) or axes == ():
            return default
        return axes

    def sizes(self, at=1, *names):
        """Sizes that are given one by one, or as a tuple."""
        given = self.get(at, *names)
        if isinstance(given, (list, tuple)):
            return list(given)
        return [size for size in self.args[at:] if isinstance(size, int)]


def counted(sizes):
    """The place of the one size that grows with the batch, or None."""
    places = [place for place, size in enumerate(sizes) if isinstance(size, RowCount)]
    return places[0] if len(places) == 1 else None


def permuted(call):
    """The order in which a function of ``transpose``'s kind has the dimensions: it is asked."""
    primes = [2, 3, 5, 7, 11, 13, 17, 19, 23, 29][: call.first.dim()]
    stand_in = torch.empty(primes, device="meta")
    shape = call.func(stand_in, *call.args[1:], **call.kwargs).shape
    return [primes.index(size) for size in shape]


def index_of(call):
    """``tensor[index]``: a slice for each dimension of the tensor, and where new ones are.

    Returns:
        A list of (part of the index, dimension of the tensor or None for a new one, how many).
    """
    tensor, index = call.args[:2]
    parts = list(index) if isinstance(index, tuple) else [index]
    parts = [torch.as_tensor(part) if isinstance(part, list) else part for part in parts]

    def taken(part):
        if part is None or part is Ellipsis or isinstance(part, bool):
            return 0
        return part.dim() if is_mask(part) else 1

    if not any(part is Ellipsis for part in parts):
        parts.append(Ellipsis)
    place = [part is Ellipsis for part in parts].index(True)
    parts[place : place + 1] = [slice(None)] * (tensor.dim() - sum(map(taken, parts)))
    found, dim = [], 0
    for part in parts:
        count = taken(part)
        found.append((part, dim if count else None, count))
        dim += count
    return found


def is_mask(part):
    return isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)


def is_whole(part, size):
    """Whether a slice takes all of a dimension, for any number of rows."""
    if not isinstance(part, slice) or part.start not in (None, 0) or part.step not in (None, 1):
        return False
    stop = part.stop
    return stop is None or isinstance(stop, RowCount) and int(stop) == size or stop >= 2**62


def indexed(call):
    """The placement of ``tensor[index]``."""
    tensor = call.args[0]
    value = call.value(tensor)
    axis, advanced = value.axis, []
    # Where in the result the dimensions of the tensor lie, and what is looked up.
    places, at, place = {}, set(), 0
    for part, dim, count in index_of(call):
        if isinstance(part, slice):
            places[dim] = place
        if isinstance(part, slice) or not count:
            place += 1
        else:  # next to tensors a number is one, too
            at.add(place)
        if isinstance(part, torch.Tensor) and count:
            advanced.append((part, dim, count))
        elif axis is not None and dim == axis and not is_whole(part, tensor.shape[dim]):
            return _rows.Mixed()
    first, found, width = at.pop() if len(at) == 1 else 0, REPLICATED, 0
    if any(is_mask(part) for part, _, _ in advanced):
        found, width = _masked(call, advanced, axis), 1
    elif advanced:
        found, width = _looked_up(call, advanced, value), max(part.dim() for part, _, _ in advanced)
    if axis not in places:
        return found.replace(axis=found.axis + first) if is_rows(found) else found
    if not isinstance(found, _rows.Replicated):
        return _rows.Mixed()
    after = places[axis]
    return value.placement.replace(axis=after + width if width and after >= first else after)


def _looked_up(call, numbers, value):
    """How the results for tensors of numbers depend on these."""
    width = max(part.dim() for part, _, _ in numbers)
    values = []
    for part, dim, _ in numbers:
        found = call.value(part)
        if dim == value.axis:  # x[range(rows), numbers]
            rows, flat = value.placement, part.reshape(-1)
            if len(flat) != call.rows or not rows.even or (rows.inner, rows.copies) != (1, 1):
                return _rows.Mixed()
            if not torch.equal(flat.cpu(), torch.arange(call.rows)):
                return _rows.Mixed()
            # Of one row any dimension may be that of the rows.
            axis = width - part.dim() + max(range(part.dim()), key=part.shape.__getitem__)
            shape = [None if place == axis else 1 for place in range(width)]
            found = _rows.Value(_rows.Sharded(axis), shape)
        values.append(found)
    return _rows.pointwise(values)


def _masked(call, masks, axis):
    """``tensor[mask]``, which leaves another number of elements to each row."""
    mask, dim, count = masks[0]
    given = call.value(mask)
    if len(masks) == 1 and axis is not None and dim <= axis < dim + count:
        is_of_rows = given.axis == 0 and axis == dim
        return _rows.Sharded(0, inner=None, even=False) if is_of_rows else _rows.Mixed()
    is_same = len(masks) == 1 and isinstance(given.placement, _rows.Replicated)
    return REPLICATED if is_same else _rows.Mixed()
