"""Calls of torch's functions: their arguments, the tags of tensors, and where they are in a script.

A tag is what is known of a tensor: a placement, or one of ``expressions``.
"""

import inspect
import os
import re
import sys

import torch
from torch.utils import _pytree as tree

from ... import _rows
from ..._rows import Fallback, Reason
from .row_counts import RowCount

_TORCH = os.path.dirname(torch.__file__) + os.sep
_COMPAT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_KERAS = os.path.join("-packages", "keras", "")
_OVERRIDES = torch.overrides.__file__
#: Where torch packs sequences, sorted by their lengths.
_PACKING = tuple(os.path.join(_TORCH, "nn", part, "rnn.py") for part in ("utils", "modules"))


def name_of(function):
    """Return torch's name of a function: "sum"; that of a property is its name."""
    name = getattr(function, "__name__", str(function))
    return getattr(function.__self__, "__name__", name) if name == "__get__" else name


def call_tensors(value):
    """Yield the tensors that one of torch's functions takes or returns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict, slice)):
        parts = value.values() if isinstance(value, dict) else value
        for part in (value.start, value.stop) if isinstance(value, slice) else parts:
            yield from call_tensors(part)


def is_in_place(name):
    """Return whether torch's name says so: ``add_``, ``__iadd__``, ``__setitem__``."""
    if name.startswith("__"):
        return name == "__setitem__" or re.match("__i(?!nvert|ndex|nt_)[a-z]+__$", name) is not None
    return name.endswith("_") and not name.startswith("requires_grad")


def tag_of(value):
    """Return the tag of a tensor, or None."""
    return getattr(value, "_compat_rows", None)


def tag(value, as_what):
    value._compat_rows = as_what


def placement_of(tensor):
    """Return the placement of a tensor; one without is the same on all replicas."""
    found = tag_of(tensor)
    kinds = (_rows.Sharded, _rows.Mixed, _rows.Unknown)
    return found if isinstance(found, kinds) else _rows.REPLICATED


def is_sharded(value):
    return isinstance(value, torch.Tensor) and isinstance(tag_of(value), _rows.Sharded)


class Call:
    """A call of one of torch's functions, with the placements of its arguments.

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
        # The first argument of torch's functions in C may be named, in any place.
        named = sorted(kwargs, key=lambda name: name != "input")
        self.given = list(call_tensors((*args, *map(kwargs.get, named))))
        self.tags = [tag_of(tensor) for tensor in self.given]
        self.known = [each for each in self.tags if each is not None]
        self.in_place = is_in_place(self.name)

    def mapped(self, function):
        """Return the arguments, with ``function`` applied to all that is in them."""
        return tree.tree_map(function, self.args), tree.tree_map(function, self.kwargs)

    def described(self, value):
        """Return what of an argument distinguishes one kind of call from another."""
        if isinstance(value, torch.Tensor):
            return value.dtype, self.value(value).shape, tag_of(value)
        return "rows" if isinstance(value, RowCount) else repr(value)

    def bound(self):
        """Return the arguments by their names, of one of torch's functions in Python."""
        bound = inspect.signature(self.func).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def get(self, at, *names, default=None):
        given = list(self.args[at : at + 1]) + [self.kwargs[n] for n in names if n in self.kwargs]
        return given[0] if given else default

    def value(self, tensor):
        """Return the placement and the sizes; those that grow with the batch are not known."""
        placement, shape = placement_of(tensor), list(tensor.shape)
        if isinstance(placement, _rows.Sharded):
            shape[placement.axis] = None
        return _rows.Value(placement, shape)

    @property
    def first(self):
        return self.args[0] if self.args else self.kwargs.get("input", self.kwargs.get("tensors"))

    @property
    def values(self):
        return list(map(self.value, self.given))

    def sizes(self, at=1, *names):
        """Return sizes that are passed one by one, or as a tuple."""
        given = self.get(at, *names)
        if isinstance(given, (list, tuple)):
            return list(given)
        return [size for size in self.args[at:] or [given] if isinstance(size, int)]


def is_packing():
    """Return whether torch sorts the rows to pack them, and will put them back."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_COMPAT, _OVERRIDES)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename in _PACKING


def fallback(model, name, reason=Reason.CROSS_BATCH):
    """Return where a function is called: in which module, and by which line of the user's."""
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
    return Fallback(reason, name, _described(model, module), line)


def _described(model, module):
    if module is None or module is model:
        return None
    if hasattr(module, "get_config") and hasattr(module, "name"):
        return f"layer {module.name!r}"
    kind = type(module).__name__
    path = next((path for path, part in model.named_modules() if part is module), None)
    return kind if path is None else f"{path} ({kind})"


# These may compute across rows on the way back, whatever they did on the way there. A call that has
# one is tried with its gradients, too: those of three rows together, against those of its parts.
