"""Side effects of a call on Python objects: attributes, lists, dictionaries, closures, counters.

Each replica's call begins with the state before the first one. Its changes are undone, and are made
once for all replicas: tensors become those of the whole batch, any other value is the one that all
replicas have set. A trace has no side effects.

Keras changes its own objects when a layer is first called, and these changes stay: variables,
``built``, and attributes whose name begins with an underscore.
"""

import contextlib
import random
import types
from typing import (
    Any,
    Callable,
    Dict,
    FrozenSet,
    Iterable,
    Iterator,
    List,
    Sequence,
    Set,
    Tuple,
)

import numpy as np
import tensorflow as tf

from ... import _keras
from ..._runtime import containers, effects
from .native_kinds import is_variable

_TREES = (dict, list, tuple)


def _leaves(value):
    """Return the leaves of a value: tensors and others."""
    if isinstance(value, _TREES) or hasattr(value, "_type_spec"):
        with contextlib.suppress(TypeError, ValueError):  # keys without an order
            return tf.nest.flatten(value, expand_composites=True)
    return [value]


def tensors(changes: "Iterable[Any]") -> "List[tf.Tensor]":
    """Return all tensors that changes set, in a fixed order."""
    return [
        leaf
        for change in changes
        if change.after is not containers.MISSING
        for leaf in _leaves(change.after)
        if tf.is_tensor(leaf)
    ]


def _is_any_variable(value):
    return is_variable(value) or isinstance(value, tf.Variable) or hasattr(value, "assign")


def _is_value(value):
    is_graph = isinstance(value, (tf.Graph, tf.Operation))
    is_keras = not (isinstance(value, _TREES) or isinstance(value, type)) and not _keras.is_users(
        type(value)
    )
    return is_keras or tf.is_tensor(value) or is_graph or _is_any_variable(value)


def roots_of(model: "Any") -> "Iterator[Any]":
    """Yield the user-defined layers and functions of a Keras model."""
    for layer in _keras.all_layers(model):
        if _keras.is_users(type(layer)):
            yield layer
        else:  # a Lambda's, or an activation
            values = vars(layer).values()
            yield from (value for value in values if isinstance(value, types.FunctionType))


def _is_effect(change):
    """Return whether a change is one of the user's code, which is made once, as on one device."""
    leaves = _leaves(change.before if change.after is containers.MISSING else change.after)
    if any(map(_is_any_variable, leaves)):
        return False
    if any(map(tf.is_tensor, leaves)):
        return True
    if not all(type(leaf) in containers.ATOMS or isinstance(leaf, np.ndarray) for leaf in leaves):
        return False
    return _is_of_users(change.owner, change.key)


def _is_of_users(owner, key):
    """Return whether a value that an ``Owner`` holds is the user's, and not Keras' own."""
    held_by = getattr(owner, "of", None)
    if held_by is None:
        return True
    if not _keras.is_users(type(held_by)):
        return False
    is_keras = str(key).startswith("_") or key == "built"
    return not (_keras.is_layer(held_by) and is_keras)


def _order(key):
    return (key, "") if isinstance(key, int) else (0, str(key))


class PythonEffects:
    """The changes of Python objects that calls of one model make.

    Arguments:
        roots: the objects from which others are reached: the model, functions.
    """

    def __init__(self, *roots: "Any") -> None:
        generators = [random._inst, np.random.mtrand._rand]
        self._effects = effects.Effects(list(roots) + generators, _is_value)
        self._randoms: "List[Tuple[Callable[[Any], None], Any]]" = []
        self._changing: "Set[Any]" = set()  # classes and names of attributes that calls change

    def begin(self) -> None:
        """Record the state of objects, and of generators of random numbers, before the calls."""
        self._effects.note()
        self._randoms = [(put, get()) for get, put in self._effects.random_numbers()]

    def settings(self) -> "FrozenSet[Any]":
        """Return the attributes of the user's objects at ``begin()``, by which a call may choose.

        Plain values count by value, and variables by identity. Objects count by their classes: a
        call that makes a new one each time has the same settings.
        """
        attributes = (
            (_attribute(owner, key), type(value), _setting(value))
            for owner, key, value in self._effects.held()
            if owner.of is not None and _is_of_users(owner, key)
        )
        return frozenset(each for each in attributes if each[2] is not None)

    def lasting(self, settings: "FrozenSet[Any]") -> "FrozenSet[Any]":
        """Return the settings that calls have not changed so far, unlike a counter."""
        return frozenset(each for each in settings if each[0] not in self._changing)

    def restart(self) -> None:
        """Restore the generators of random numbers of Python and NumPy."""
        for put, state in self._randoms:
            put(state)

    def changes(self) -> "List[Any]":
        """Return the changes of the user's code since ``begin()``."""
        # Those of one owner are ordered by name, since Keras sets attributes anew.
        changes = list(filter(_is_effect, self._effects.changes()))
        owners: "Dict[Any, int]" = {}
        attributes = (c for c in changes if getattr(c.owner, "of", None) is not None)
        self._changing.update(_attribute(change.owner, change.key) for change in attributes)
        for change in changes:
            owners.setdefault(change.owner.identity, len(owners))
        return sorted(changes, key=lambda c: (owners[c.owner.identity], _order(c.key)))

    def undo(self) -> bool:
        """Undo the changes of the user's code since ``begin()``; return whether there were any."""
        changes = self.changes()
        if changes:
            _undo(changes)
            self.restart()
        return bool(changes)

    @contextlib.contextmanager
    def isolated(self) -> "Iterator[List[Any]]":
        """Undo the changes that a call makes within; yield a list, to which they are added.

        Random numbers go on.
        """
        changes: "List[Any]" = []
        self._effects.note()
        try:
            yield changes
        finally:
            changes += self.changes()
            _undo(changes)
            self._effects.forget()

    def suspended(self) -> "Callable[[], None]":
        """Undo the changes of a call, as another one is to run; return a function to go on."""
        changes = self.changes()
        _undo(changes)
        states = [(put, get()) for get, put in self._effects.random_numbers()]

        def put_back() -> None:
            self._effects.note()
            for change in changes:
                change.owner.write(change.key, change.after)
            for put, state in states:
                put(state)

        return put_back

    def make(self, changes: "Iterable[Any]", values: "Iterable[tf.Tensor]") -> None:
        """Make the changes of a replica, once for all, with these values for its ``tensors``."""
        values = iter(values)
        for change in changes:
            after = change.after
            if after is not containers.MISSING:
                leaves = [next(values) if tf.is_tensor(old) else old for old in _leaves(after)]
                after = _packed(after, leaves)
            change.owner.write(change.key, after)


def _attribute(owner, key):
    return type(owner.of).__qualname__, key


def _setting(value):
    """Return what stands for a value in ``PythonEffects.settings``, or None."""
    if type(value) in containers.ATOMS:
        return repr(value)
    return id(value) if _is_any_variable(value) else None


def _undo(changes):
    for change in reversed(changes):
        change.owner.write(change.key, change.before)


class Snapshot:
    """The state of Python objects that a step may change, to restore it in verification.

    Arguments:
        attributes: the attributes with numbers.
        roots: as those of ``PythonEffects``.
    """

    def __init__(self, attributes: "Any", *roots: "Any") -> None:
        self.attributes, self.effects = attributes, PythonEffects(*roots)
        self.effects.begin()
        self.have_changed = attributes.have_changed

    def put_back(self) -> None:
        """Restore the state."""
        self.attributes.put_back()
        _undo(self.effects.changes())
        self.effects.restart()


def _packed(value, leaves):
    if isinstance(value, _TREES) or hasattr(value, "_type_spec"):
        return tf.nest.pack_sequence_as(value, leaves, expand_composites=True)
    return leaves[0]


def are_equal(changes: "Sequence[Sequence[Any]]") -> bool:
    """Return whether replicas have made the same changes, except for the tensors in them.

    Arguments:
        changes: a list for each replica.
    """
    first, *others = changes
    return all(len(first) == len(other) and all(map(_agree, first, other)) for other in others)


def _agree(change, other):
    leaves, others = _leaves(change.after), _leaves(other.after)
    same = change.place == other.place and len(leaves) == len(others)
    return same and all(map(_are_equal, leaves, others))


def _are_equal(value, other):
    if tf.is_tensor(value):
        return tf.is_tensor(other)
    if isinstance(value, np.ndarray):
        return isinstance(other, np.ndarray) and np.array_equal(value, other)
    return containers.is_same(value, other)
