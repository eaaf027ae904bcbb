"""Calls of torch's functions, as the rules about rows need them: arguments, and what is known.

That is a tag of each tensor: a placement, or what tells how replicas' values are put together.
"""

import collections
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


# Tags -----------------------------------------------------------------------------------------

# A replica sees some rows only, so what it computes from all its rows at once is not what one
# device computes. ``watch`` follows torch's functions and tags such tensors: ``Total`` is a total
# over the rows, ``State`` is from before, ``ComputedTotal`` is a function of these.


def tag_of(value):
    """The tag of a tensor, or None."""
    return getattr(value, "_compat_rows", None)


def tag(value, as_what):
    value._compat_rows = as_what


def is_sharded(value):
    return isinstance(value, torch.Tensor) and isinstance(tag_of(value), _rows.Sharded)


class Total:
    """A tensor that ``merging`` can put together from those of the replicas.

    ``weight`` is what a mean is weighted by: a number, or a tensor of one element. ``regular`` is
    whether it is always in proportion to the rows.
    """

    constant = False

    def __init__(self, kind, value, weight=None, regular=False):
        self.kind, self.value, self.weight, self.regular = kind, value, weight, regular


class State:
    """The value of a buffer from before."""

    constant = True

    def __init__(self, value):
        self.value = value


class ComputedTotal:
    """What a function computed from totals: tagged arguments are replaced by their tags.

    It is constant where it depends on state from before alone.
    """

    def __init__(self, function, args, kwargs, in_place, pick, dtype):
        self.function, self.args, self.kwargs = function, args, kwargs
        self.in_place = in_place
        self.pick = pick  # which element of the function's result
        self.dtype = dtype  # autocast may make it another one
        self.grad = torch.is_grad_enabled()
        leaves = tree.tree_leaves((args, kwargs))
        self.constant = all(getattr(leaf, "constant", True) for leaf in leaves)

    def path(self):
        """The functions that led here, and the types of what they were given, in their order.

        A call that comes by another path may have numbers that depend on the rows.
        """
        found, seen, waiting = [], set(), [self]
        while waiting:
            each = waiting.pop()
            found.append(type(each).__name__)
            if isinstance(each, ComputedTotal) and id(each) not in seen:
                seen.add(id(each))
                found.append(name_of(each.function))
                waiting += tree.tree_leaves((each.args, each.kwargs))
        return tuple(found)


class Constant:
    """A tensor that does not depend on the batch, as long as it is not changed in place."""

    def __init__(self, value):
        self.value = value
        self.version = value._version


#: A number that a replica's rows have given to Python, which may choose its way by it: where, an
#: ``Across``; its tag, an expression or ``Mixed``; and the number.
Escape = collections.namedtuple("Escape", "across tag value")

EXPRESSIONS = (Total, State, ComputedTotal)


class NotMergeable(Exception):
    """Values of the replicas cannot be put together.

    Attributes:
        across: where the reason is, an ``Across``.
    """

    def __init__(self, across=None):
        self.across = across or _rows.Across(None, why="diverged")
        super().__init__(self.across)


# Calls ----------------------------------------------------------------------------------------


#: The comparison by which any two numbers of rows differ: Python was given one of them as any
#: other number, and what it does by it is not seen.
AS_ANY = int.__sub__


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
        self.watch.compare(AS_ANY, 1, 0)
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


def is_number(value):
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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


# Gradients of the user's own: autograd functions, and hooks on what comes back --------------------

# These may compute across rows on the way back, whatever they did on the way there. A call that has
# one is tried with its gradients, too: those of three rows together, against those of its parts.

#: What computes gradients as autograd would: compat, and torch's checkpoints.
_LIBRARIES = (__name__.partition(".")[0] + ".", "torch.utils.checkpoint")


def own_gradient(outcome, arguments):
    """The first gradient of the user's own that leads to a replica's values, or None.

    Arguments:
        arguments: tensors that the call was given; what is before them is not the call's.

    Returns:
        An ``Across``.
    """
    if outcome.watch.hooks:
        return outcome.watch.hooks[0]
    given = {None, *(value.grad_fn for value in arguments)}

    def is_own(node):
        function = getattr(type(node), "_forward_cls", None)
        return function is not None and not function.__module__.startswith(_LIBRARIES)

    def inputs(node):
        return [each for each, _ in node.next_functions if each not in given]

    results = [getattr(value, "grad_fn", None) for value in outcome.values.values()]
    found = _rows.nearest([each for each in results if each not in given], is_own, inputs)
    return _rows.Across(type(found[0])._forward_cls.__name__, why="gradient") if found else None
