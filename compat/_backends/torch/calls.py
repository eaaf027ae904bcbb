"""A call of one of torch's functions, as the rules about rows need it: arguments and placements."""

import inspect
import os
import re
import sys

import torch

from ... import _rows

REPLICATED = _rows.REPLICATED

tree = torch.utils._pytree

_TORCH = os.path.dirname(torch.__file__) + os.sep
_COMPAT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_KERAS = os.path.join("-packages", "keras", "")
_OVERRIDES = torch.overrides.__file__
#: Where torch packs sequences, sorted by their lengths.
_PACKING = tuple(os.path.join(_TORCH, "nn", part, "rnn.py") for part in ("utils", "modules"))


def tag_of(value):
    """The tag of a tensor, or None."""
    return getattr(value, "_compat_rows", None)


def tag(value, as_what):
    value._compat_rows = as_what


def is_sharded(value):
    return isinstance(value, torch.Tensor) and isinstance(tag_of(value), _rows.Sharded)


def name_of(function):
    """What torch calls a function: "sum"; that of a property is its name."""
    name = getattr(function, "__name__", str(function))
    return getattr(function.__self__, "__name__", name) if name == "__get__" else name


def tensors_in(value):
    """The tensors that a function of torch's is given or returns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict, slice)):
        parts = value.values() if isinstance(value, dict) else value
        for part in (value.start, value.stop) if isinstance(value, slice) else parts:
            yield from tensors_in(part)


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

    constant = False  # as of a ``ComputedTotal``

    def __new__(cls, per, watch):
        self = super().__new__(cls, per * watch.rows)
        self.per, self.watch = per, watch
        return self

    def __mul__(self, other):
        return RowCount(self.per * other, self.watch) if _is_plain(other) else self.plain() * other

    __rmul__ = __mul__

    def __floordiv__(self, other):
        if _is_plain(other) and other > 0 and self.per % other == 0:
            return RowCount(self.per // other, self.watch)
        return self.plain() // other

    def plain(self):
        self.watch.count_given("size")
        return int(self)

    def __reduce__(self):
        return int, (int(self),)

    __hash__ = int.__hash__


def _is_plain(number):
    return isinstance(number, int) and not isinstance(number, RowCount)


def _given(name):
    return lambda self, other: getattr(self.plain(), name)(other)


def _compared(name):
    plain = getattr(int, name)

    def compared(self, other):
        if _is_plain(other):
            self.watch.compare(plain, self.per, other)
        return plain(self, other)

    return compared


for _name in "add radd sub rsub mod pow truediv rtruediv".split():
    setattr(RowCount, f"__{_name}__", _given(f"__{_name}__"))
for _name in "eq ne lt le gt ge".split():
    setattr(RowCount, f"__{_name}__", _compared(f"__{_name}__"))


def differs(operator, per, number, sizes, total):
    """Whether a comparison has another result for a part of the rows than for all of them."""
    return any(operator(per * size, number) != operator(per * total, number) for size in sizes)


def has_count(*values):
    return any(isinstance(leaf, RowCount) for leaf in tree.tree_leaves(values))


class Call:
    """A call, of which the rules ask for placements.

    Arguments:
        rows: how many rows the tensors have.
        counting: whether plain numbers may be numbers of rows, as ``len()`` gives them.

    Attributes:
        given, tags: the tensors among the arguments, and what is known of them, or None.
        known: the tags of those that have one.
        results: the tensors it returned.
    """

    results = ()

    def __init__(self, func, args, kwargs, rows, counting=False):
        self.name, self.func, self.args, self.kwargs = name_of(func), func, args, kwargs
        self.rows, self.counting = rows, counting
        self.given = list(tensors_in((*args, *kwargs.values())))
        self.tags = [tag_of(tensor) for tensor in self.given]
        self.known = [each for each in self.tags if each is not None]
        self.in_place = is_in_place(self.name)

    def mapped(self, function):
        """The arguments, with ``function`` applied to all that is in them."""
        return tree.tree_map(function, self.args), tree.tree_map(function, self.kwargs)

    def described(self, value):
        """What of an argument tells one kind of call from another."""
        if isinstance(value, torch.Tensor):
            return value.dtype, self.value(value).shape, tag_of(value)
        return "rows" if isinstance(value, RowCount) else repr(value)

    def bound(self):
        """The arguments by their names, of one of torch's functions in Python."""
        bound = inspect.signature(self.func).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def get(self, at, *names, default=None):
        given = list(self.args[at : at + 1]) + [self.kwargs[n] for n in names if n in self.kwargs]
        return given[0] if given else default

    def value(self, tensor):
        """The placement and the sizes; those that grow with the batch are not known."""
        placement, shape = tag_of(tensor), list(tensor.shape)
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

    def sizes(self, at=1, *names):
        """Sizes that are given one by one, or as a tuple."""
        given = self.get(at, *names)
        if isinstance(given, (list, tuple)):
            return list(given)
        return [size for size in self.args[at:] or [given] if isinstance(size, int)]


def counted(sizes):
    """The place of the one size that grows with the batch, or None."""
    places = [place for place, size in enumerate(sizes) if isinstance(size, RowCount)]
    return places[0] if len(places) == 1 else None


def viewed(call):
    """The placement of a view that takes the rows as they are, or takes some of them."""
    value = call.value(call.first)
    if value.axis is None:
        return value.placement
    stand_in = _stand_in(call.first.shape, value.axis)
    return _moved(value.placement, call.func(stand_in, *call.args[1:], **call.kwargs))


#: How many rows stand-ins have, which are shapes without memory: no index asks for so many.
MANY = 2**31 - 1


def indexed(call):
    """The placement of ``tensor[index]``: torch is asked where stand-ins have their rows then."""
    tensor, index = call.args[:2]
    value = call.value(tensor)
    parts = list(index) if isinstance(index, tuple) else [index]
    parts = [torch.as_tensor(part) if isinstance(part, list) else part for part in parts]
    rest = tensor.dim() - sum(map(_dimensions, parts))
    axis, dim, looked_up, given = value.axis, 0, [], []
    for part in parts:
        count = rest if part is Ellipsis else _dimensions(part)
        is_of_rows = value.axis in range(dim, dim + count)
        if isinstance(part, torch.Tensor):
            looked_up.append(_looked_up(call, part, value, dim if is_of_rows else None))
            axis = None if is_of_rows else axis  # they are in what is looked up
        elif is_of_rows and isinstance(part, slice) and isinstance(part.stop, RowCount):
            if int(part.stop) == tensor.shape[dim]:
                part = slice(part.start, MANY, part.step)
        given.append(part)
        dim += count
    found = _rows.pointwise(looked_up)
    if axis is None and not isinstance(found, _rows.Sharded):
        return found
    if axis is not None and found != REPLICATED:
        return _rows.Mixed()
    if any(is_mask(part) and not part.dim() for part in given):
        return _rows.Mixed()  # a new dimension, of one element or of none
    rank = max([each.rank for each in looked_up], default=0)
    numbers = _stand_in([1] * rank, getattr(found, "axis", None)) if rank else 0
    index = []
    for part in given:
        index += [numbers] * _dimensions(part) if isinstance(part, torch.Tensor) else [part]
    placement = found if axis is None else value.placement
    return _moved(placement, _stand_in(tensor.shape, axis)[tuple(index)])


def indexed_and_set(call):
    """The placement of a tensor after ``tensor[index] = value``."""
    tensor, index, given = call.args
    whole = call.value(tensor).placement
    part = indexed(Call(torch.Tensor.__getitem__, (tensor, index), {}, call.rows))
    value = call.value(given) if isinstance(given, torch.Tensor) else _rows.Value(REPLICATED, [])
    found = _rows.pointwise([_rows.Value(part, tensor[index].shape), value])
    return whole if found == part and isinstance(part, type(whole)) else _rows.Mixed()


def _moved(placement, stand_in):
    """The placement of rows that are where a view of a stand-in has them, if it has all of them."""
    sizes = list(stand_in.shape)
    return placement.replace(axis=sizes.index(MANY)) if MANY in sizes else _rows.Mixed()


def _stand_in(shape, axis):
    sizes = [MANY if place == axis else size for place, size in enumerate(shape)]
    return torch.empty(sizes, dtype=torch.int64, device="meta")


def _dimensions(part):
    """How many dimensions a part of an index is for; the rest is for an ellipsis."""
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    return part.dim() if is_mask(part) else 1


def is_mask(part):
    return isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)


def _looked_up(call, part, value, dim):
    """The numbers that a tensor in an index stands for.

    Arguments:
        dim: where it begins, if it is for the dimension of the rows; else None.
    """
    given, found, shape = call.value(part), _rows.Mixed(), list(part.shape)
    if is_mask(part):  # it leaves another number of elements to each row
        shape = [None]
        if dim is None and given.placement == REPLICATED:
            found = REPLICATED
        elif dim is not None and dim == value.axis and given.axis == 0:
            found = _rows.Sharded(0, inner=None, even=False)
    elif dim is None:
        return given
    elif shape and value.placement == _rows.Sharded(value.axis):
        # x[range(rows), numbers]; of one row any dimension may be that of the rows.
        if part.numel() == call.rows and part.flatten().tolist() == list(range(call.rows)):
            found = _rows.Sharded(shape.index(max(shape)))
    return _rows.Value(found, shape)


# Where a function is called ---------------------------------------------------------------------


def is_packing():
    """Whether torch sorts the rows to pack them, and will put them back."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_COMPAT, _OVERRIDES)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename in _PACKING


def across(model, name, why="mixed"):
    """Where a function is called: in which module, and by which line of the user's."""
    frame, line, module = sys._getframe(1), None, None
    while frame is not None and (line is None or module is None):
        file = frame.f_code.co_filename
        own = file.startswith((_TORCH, _COMPAT)) or _KERAS in file
        if line is None and not own and not file.startswith("<"):
            line = f"{os.path.basename(file)}, line {frame.f_lineno}"
        part = frame.f_locals.get("self")
        if module is None and frame.f_code.co_name in ("forward", "call"):
            module = part if hasattr(part, "named_modules") else None
        frame = frame.f_back
    return _rows.Across(name, _described(model, module), line, why)


def _described(model, module):
    if module is None or module is model:
        return None
    if hasattr(module, "get_config") and hasattr(module, "name"):
        return f"layer {module.name!r}"
    kind = type(module).__name__
    path = next((path for path, part in model.named_modules() if part is module), None)
    return kind if path is None else f"{path} ({kind})"
