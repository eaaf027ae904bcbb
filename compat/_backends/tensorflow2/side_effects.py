"""What a call changes in Python objects: attributes, lists, dictionaries, closures, counters.

Each replica's call begins with what there was before the first one. Its changes are taken back,
and are made once for all: of tensors those of the whole batch, of anything else what all replicas
have set. Nothing is left of a trace.

Keras changes its own objects when a layer is first called, which is to stay: variables, ``built``,
and whatever has a name that begins with an underscore.
"""

import contextlib
import random
import types

import numpy as np
import tensorflow as tf

from ... import _keras
from ..._runtime import containers, effects
from .native_kinds import is_variable

_TREES = (dict, list, tuple)


def _leaves(value):
    """Return what a value consists of: tensors and others."""
    if isinstance(value, _TREES) or hasattr(value, "_type_spec"):
        with contextlib.suppress(TypeError, ValueError):  # keys that have no order
            return tf.nest.flatten(value, expand_composites=True)
    return [value]


def tensors(changes):
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


def roots_of(model):
    """What the calls of a Keras model begin with: layers and functions of the user's."""
    for layer in _keras.all_layers(model):
        if _keras.is_users(type(layer)):
            yield layer
        else:  # a Lambda's, or an activation
            values = vars(layer).values()
            yield from (each for each in values if isinstance(each, types.FunctionType))


def _is_effect(change):
    """Return whether a change is one of the user's: it is made once, as on one device."""
    leaves = _leaves(change.before if change.after is containers.MISSING else change.after)
    if any(map(_is_any_variable, leaves)):
        return False
    if any(map(tf.is_tensor, leaves)):
        return True
    if not all(type(each) in containers.ATOMS or isinstance(each, np.ndarray) for each in leaves):
        return False
    of = getattr(change.owner, "of", None)
    if of is None:
        return True
    if not _keras.is_users(type(of)):
        return False
    return not (_keras.is_layer(of) and (str(change.key).startswith("_") or change.key == "built"))


def _order(key):
    return (key, "") if isinstance(key, int) else (0, str(key))


class PythonEffects:
    """The changes that calls of one model make.

    Arguments:
        roots: what the calls begin with: the model, functions.
    """

    def __init__(self, *roots):
        generators = [random._inst, np.random.mtrand._rand]
        self._effects = effects.Effects(list(roots) + generators, _is_value)
        self._randoms = []

    def begin(self):
        """Take the present random numbers as those before the calls."""
        self._effects.note()
        self._randoms = [(put, get()) for get, put in self._effects.random_numbers()]

    def restart(self):
        """Have random numbers of Python's and numpy's begin as before the calls."""
        for put, state in self._randoms:
            put(state)

    def changes(self):
        """Return the user's changes since ``begin()``."""
        # Of one owner in the order of their names: Keras sets attributes anew.
        found, owners = list(filter(_is_effect, self._effects.changes())), {}
        for change in found:
            owners.setdefault(change.owner.identity, len(owners))
        return sorted(found, key=lambda c: (owners[c.owner.identity], _order(c.key)))

    def undo(self):
        """Undo the user's changes since ``begin()``; return whether there were any."""
        found = self.changes()
        if found:
            _take_back(found)
            self.restart()
        return bool(found)

    @contextlib.contextmanager
    def taken(self):
        """Within, a call changes objects; it yields a list, to which these changes are added.

        Afterwards they are taken back, but for random numbers.
        """
        found = []
        self._effects.note()
        try:
            yield found
        finally:
            found += self.changes()
            _take_back(found)
            self._effects.forget()

    def make(self, changes, values):
        """Make the changes of a replica, once for all, with these values for its ``tensors``."""
        values = iter(values)
        for change in changes:
            after = change.after
            if after is not containers.MISSING:
                leaves = [next(values) if tf.is_tensor(e) else e for e in _leaves(after)]
                after = _packed(after, leaves)
            change.owner.write(change.key, after)


def _take_back(changes):
    for change in reversed(changes):
        change.owner.write(change.key, change.before)


class Snapshot:
    """What a step may change in Python objects, as it is now, for its verification.

    Arguments:
        attributes: the numbers among it.
        roots: as of ``PythonEffects``.
    """

    def __init__(self, attributes, *roots):
        self.attributes, self.effects = attributes, PythonEffects(*roots)
        self.effects.begin()
        self.have_changed = attributes.have_changed

    def put_back(self):
        self.attributes.put_back()
        _take_back(self.effects.changes())
        self.effects.restart()


def _packed(value, leaves):
    if isinstance(value, _TREES) or hasattr(value, "_type_spec"):
        return tf.nest.pack_sequence_as(value, leaves, expand_composites=True)
    return leaves[0]


def are_equal(changes):
    """Return whether replicas have made the same changes, but for the tensors in them.

    Arguments:
        changes: a list for each replica.
    """
    return all(
        len(changes[0]) == len(each) and all(map(_agree, changes[0], each)) for each in changes[1:]
    )


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
