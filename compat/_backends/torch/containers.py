"""Nested values, flattened and nested again in the very containers that held them."""

import functools
import inspect
import itertools
from collections.abc import MutableMapping
from typing import Any, Callable, Dict, List, Optional, Tuple

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as tree

#: Types of attributes that a traversed object may have, besides objects of its kind.
PLAIN = (torch.Tensor, PackedSequence, bool, int, float, complex, str, bytes, type(None), type,
         torch.dtype, torch.device)  # fmt: skip


def _is_leaf(value):
    return type(value) in (list, dict, torch.Size) or isinstance(value, PackedSequence)


def contents_of(
    value: Any, visited: "Optional[Dict[int, Any]]" = None
) -> "Optional[Dict[Any, Any]]":
    """Return the contents of a container that keeps its identity, by name; None: it has none.

    A container is a list, a mapping, a dataclass, or any object of a class written in Python that
    has nothing but numbers, tensors and such containers in its attributes, as caches do.
    """
    if type(value) is list:
        return dict(enumerate(value))
    if isinstance(value, MutableMapping):
        return dict(value)
    if hasattr(type(value), "__dataclass_fields__"):
        slots = {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}
        return {**slots, **getattr(value, "__dict__", {})}
    if not is_object(value):
        return None
    visited = {} if visited is None else visited
    if id(value) not in visited:
        visited[id(value)] = value
        for leaf in tree.tree_leaves(vars(value)):
            if not isinstance(leaf, PLAIN) and contents_of(leaf, visited) is None:
                return None
    return dict(vars(value))


def _slots(value):
    """List the fields of a dataclass that are not in its ``__dict__``, even where it has one."""
    kind = type(value)
    fields = getattr(kind, "__dataclass_fields__", ())
    return [name for name in fields if inspect.ismemberdescriptor(getattr(kind, name, None))]


def is_object(value: Any) -> bool:
    """Return whether a value is of a class in Python, with all attributes in its ``__dict__``."""
    kind = type(value)
    return (
        kind.__new__ is object.__new__
        and bool(getattr(value, "__dict__", None))
        and not any(getattr(base, "__slots__", ()) for base in kind.__mro__)
        and not isinstance(value, torch.nn.Module)
    )


def set_contents(value: Any, contents: "Dict[Any, Any]") -> Any:
    """Replace the contents of a container, and return it."""
    if type(value) is list:
        value[:] = contents.values()
    elif isinstance(value, MutableMapping):
        for key in set(value).difference(contents):
            del value[key]
        for key, content in contents.items():
            value[key] = content
    else:  # frozen dataclasses, too
        contents = dict(contents)
        for name in _slots(value):
            if name in contents:
                object.__setattr__(value, name, contents.pop(name))
        if hasattr(value, "__dict__"):
            vars(value).clear()
            vars(value).update(contents)
    return value


def flatten(
    value: Any, seen: "Optional[Dict[int, Any]]" = None
) -> "Tuple[List[Any], Callable[[Any], Any], Any]":
    """Return the leaves of a nested value, a function that nests others, and a description.

    That function sets the contents of the very containers, rather than copy them.

    Arguments:
        value: the nested value.
        seen: a dictionary to which the containers and their contents are added, by id.
    """
    seen = {} if seen is None else seen
    leaves, spec = tree.tree_flatten(value, is_leaf=_is_leaf)
    # Makers take what stands for a leaf from an iterator of new leaves.
    flat: "List[Any]" = []
    makers: "List[Callable[[Any], Any]]" = []
    inside: "List[Any]" = []
    for leaf in leaves:
        contents = None if isinstance(leaf, PLAIN) else contents_of(leaf)
        if isinstance(leaf, torch.Size):
            flat += leaf
            makers.append(functools.partial(_sizes, len(leaf)))
            inside.append((torch.Size, len(leaf)))
        elif contents is None:
            flat.append(leaf)
            makers.append(next)
        elif id(leaf) in seen:
            makers.append(functools.partial(_same, leaf))
            inside.append(type(leaf))
        else:
            seen[id(leaf)] = leaf, contents
            names = list(contents)
            nested, rebuild, described = flatten(tuple(contents.values()), seen)
            flat += nested
            makers.append(functools.partial(_refilled, leaf, names, rebuild))
            inside.append((type(leaf), names, described))

    def unflatten(values):
        values = iter(values)
        return tree.tree_unflatten([make(values) for make in makers], spec)

    return flat, unflatten, (spec, inside)


def _same(leaf, values):
    return leaf


def _sizes(count, values):
    return torch.Size([int(size) for size in itertools.islice(values, count)])


def _refilled(value, names, rebuild, values):
    return set_contents(value, dict(zip(names, rebuild(values))))
