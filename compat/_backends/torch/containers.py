"""Nested values, flattened and nested again in the very containers that held them."""

import functools
import inspect
import itertools
from collections.abc import MutableMapping

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as tree

#: What an object that can be looked into may have in its attributes, besides others of its kind.
PLAIN = (torch.Tensor, PackedSequence, bool, int, float, complex, str, bytes, type(None), type,
         torch.dtype, torch.device)  # fmt: skip


def _is_leaf(value):
    return type(value) in (list, dict, torch.Size) or isinstance(value, PackedSequence)


def _contents(value, visited=None):
    """Return what is in a container that keeps its identity, by name; None: it is hidden.

    A container is a list, a mapping, a dataclass, or any object of a class written in Python that
    has nothing but numbers, tensors and such containers in its attributes, as caches do.
    """
    if type(value) is list:
        return dict(enumerate(value))
    if isinstance(value, MutableMapping):
        return dict(value)
    if hasattr(type(value), "__dataclass_fields__"):
        own = {name: getattr(value, name) for name in _slots(value) if hasattr(value, name)}
        return {**own, **getattr(value, "__dict__", {})}
    if not is_object(value):
        return None
    visited = {} if visited is None else visited
    if id(value) not in visited:
        visited[id(value)] = value
        for leaf in tree.tree_leaves(vars(value)):
            if not isinstance(leaf, PLAIN) and _contents(leaf, visited) is None:
                return None
    return dict(vars(value))


def _slots(value):
    """List the fields of a dataclass that are not in its ``__dict__``, even where it has one."""
    kind = type(value)
    fields = getattr(kind, "__dataclass_fields__", ())
    return [name for name in fields if inspect.ismemberdescriptor(getattr(kind, name, None))]


def is_object(value):
    """Return whether all that a value has is in its ``__dict__``, by its class."""
    kind = type(value)
    return (
        kind.__new__ is object.__new__
        and bool(getattr(value, "__dict__", None))
        and not any(getattr(each, "__slots__", ()) for each in kind.__mro__)
        and not isinstance(value, torch.nn.Module)
    )


def set_contents(value, contents):
    """Let a container have these contents, and no others."""
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


def flatten(value, seen=None):
    """Return the leaves of a nested value, a function that nests others, and a description.

    That function sets the contents of the containers that ``seen`` lists, with what was in them,
    rather than copy them.
    """
    seen = {} if seen is None else seen
    leaves, spec = tree.tree_flatten(value, is_leaf=_is_leaf)
    flat, makers, inside = [], [], []  # of each leaf: what takes it from an iterator of new ones
    for leaf in leaves:
        contents = None if isinstance(leaf, PLAIN) else _contents(leaf)
        if isinstance(leaf, torch.Size):
            flat += leaf
            makers.append(functools.partial(_sizes, len(leaf)))
            inside.append((torch.Size, len(leaf)))
        elif contents is None:
            flat.append(leaf)
            makers.append(next)
        elif id(leaf) in seen:
            makers.append(lambda values, same=leaf: same)
            inside.append(type(leaf))
        else:
            seen[id(leaf)] = leaf, contents
            names = list(contents)
            found, rebuild, described = flatten(tuple(contents.values()), seen)
            flat += found
            makers.append(functools.partial(_refilled, leaf, names, rebuild))
            inside.append((type(leaf), names, described))

    def unflatten(values):
        values = iter(values)
        return tree.tree_unflatten([make(values) for make in makers], spec)

    return flat, unflatten, (spec, inside)


def _sizes(count, values):
    return torch.Size([int(size) for size in itertools.islice(values, count)])


def _refilled(value, names, rebuild, values):
    return set_contents(value, dict(zip(names, rebuild(values))))
