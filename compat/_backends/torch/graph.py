"""Calls of torch's functions: their arguments, the tags of tensors, and their places in a script.

A tag describes how a tensor depends on the batch: a placement, or one of ``expressions``.
"""

import inspect
import os
import re
import sys
from typing import Any, Callable, Dict, Iterator, List, Sequence, Tuple

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


def name_of(function: Any) -> str:
    """Return torch's name of a function: "sum"; that of a property is its name."""
    name = getattr(function, "__name__", str(function))
    return getattr(function.__self__, "__name__", name) if name == "__get__" else name


def call_tensors(value: Any) -> "Iterator[torch.Tensor]":
    """Yield the tensors that one of torch's functions takes or returns."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, dict, slice)):
        parts: Any = value.values() if isinstance(value, dict) else value
        for part in (value.start, value.stop) if isinstance(value, slice) else parts:
            yield from call_tensors(part)


def is_in_place(name: str) -> bool:
    """Return whether a function of this name, such as ``add_``, changes its first argument."""
    if name.startswith("__"):
        return name == "__setitem__" or re.match("__i(?!nvert|ndex|nt_)[a-z]+__$", name) is not None
    return name.endswith("_") and not name.startswith("requires_grad")


def tag_of(value: Any) -> Any:
    """Return the tag of a tensor, or None."""
    return getattr(value, "_compat_rows", None)


def tag(tensor: torch.Tensor, new: Any) -> None:
    """Set the tag of a tensor."""
    tensor._compat_rows = new


def placement_of(tensor: torch.Tensor) -> _rows.Placement:
    """Return the placement of a tensor; one without is the same on all replicas."""
    kinds = (_rows.Sharded, _rows.Mixed, _rows.Unknown)
    return tag_of(tensor) if isinstance(tag_of(tensor), kinds) else _rows.REPLICATED


def is_sharded(value: Any) -> bool:
    """Return whether a value is a tensor with a dimension of rows."""
    return isinstance(value, torch.Tensor) and isinstance(tag_of(value), _rows.Sharded)


class Call:
    """A call of one of torch's functions, with the placements of its arguments.

    Arguments:
        func: the function.
        args: its arguments.
        kwargs: those by name.
        rows: how many rows the tensors have.
        counting: whether plain numbers may be numbers of rows, as ``len()`` gives them.

    Attributes:
        tensors: those among the arguments.
        tags: the tag of each of these, or None.
        present_tags: the tags of those that have one.
        results: the tensors that it returned.
        compute: the function that computes it by reductions, see ``ReducedFunction``; or None.
    """

    results: "Sequence[torch.Tensor]" = ()
    compute: Any = None

    def __init__(self, func, args, kwargs, rows, counting=False):
        self.name, self.func, self.args, self.kwargs = name_of(func), func, args, kwargs
        self.rows, self.counting = rows, counting
        # The first argument of torch's functions in C may be named, in any place.
        named = sorted(kwargs, key=lambda name: name != "input")
        self.tensors = list(call_tensors((*args, *map(kwargs.get, named))))
        self.tags = [tag_of(tensor) for tensor in self.tensors]
        self.present_tags = [present for present in self.tags if present is not None]
        self.in_place = is_in_place(self.name)

    def mapped(self, function: "Callable[[Any], Any]") -> "Tuple[Any, Any]":
        """Return the arguments, with ``function`` applied to all that is in them."""
        return tree.tree_map(function, self.args), tree.tree_map(function, self.kwargs)

    def described(self, value: Any) -> Any:
        """Return a key of an argument by which kinds of calls differ."""
        if isinstance(value, torch.Tensor):
            return value.dtype, self.value(value).shape, tag_of(value)
        return "rows" if isinstance(value, RowCount) else repr(value)

    def bound(self) -> "Dict[str, Any]":
        """Return the arguments by name, for one of torch's functions that is written in Python."""
        bound = inspect.signature(self.func).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)

    def get(self, at: int, *names: str, default: Any = None) -> Any:
        """Return the argument at a place, or by one of several names."""
        values = list(self.args[at : at + 1]) + [self.kwargs[n] for n in names if n in self.kwargs]
        return values[0] if values else default

    def value(self, tensor: torch.Tensor) -> _rows.Value:
        """Return a tensor as rules take it; of its shape the size that grows is unknown."""
        placement, shape = placement_of(tensor), list(tensor.shape)
        if isinstance(placement, _rows.Sharded):
            shape[placement.axis] = None
        return _rows.Value(placement, shape)

    @property
    def first(self) -> Any:
        """The first argument."""
        return self.args[0] if self.args else self.kwargs.get("input", self.kwargs.get("tensors"))

    @property
    def values(self) -> "List[_rows.Value]":
        """A ``Value`` for each of the tensors."""
        return list(map(self.value, self.tensors))

    def sizes(self, at: int = 1, *names: str) -> "List[int]":
        """Return sizes that are passed one by one, or as a tuple."""
        first = self.get(at, *names)
        if isinstance(first, (list, tuple)):
            return list(first)
        return [size for size in self.args[at:] or [first] if isinstance(size, int)]


def is_packing() -> bool:
    """Return whether torch is sorting sequences to pack them, or restoring their order."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_COMPAT, _OVERRIDES)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename in _PACKING


def fallback(model: Any, name: str, reason: Reason = Reason.CROSS_BATCH) -> _rows.Fallback:
    """Return the ``Fallback`` of the function that is called, with its module and its line."""
    frame: Any = sys._getframe(1)
    line = module = None
    while frame is not None and (line is None or module is None):
        file = frame.f_code.co_filename
        is_library = file.startswith((_TORCH, _COMPAT)) or _KERAS in file
        if line is None and not is_library and not file.startswith("<"):
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
