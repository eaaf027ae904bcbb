"""Values with rows of the batch that a model keeps from one call to the next.

A hidden state, the previous output: what a call leaves in an attribute, a list or a closure is that
of the whole batch. In the next call of as many rows each replica finds its own rows there.
"""

import collections

import numpy as np
import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as tree

from ... import _rows
from ..._runtime.containers import MISSING, owners_of
from .arguments import rows_of
from .graph import is_sharded, tag, tag_of


class CutOtherwise(Exception):
    """A call has shown that a value it was given whole has rows."""


class FoundRows(collections.namedtuple("FoundRows", "place axis other")):
    """Values that a call finds in a place.

    Attributes:
        place: what describes it; elements of lists, and variables of closures, are alike.
        axis: that of the rows.
        other: None where there are as many as in the batch; or how many there are, which are as
            many as a replica has of the batch: what compares them sees what one device would not.
    """


class KeptRows:
    """The places in which calls of a model have left rows."""

    def __init__(self):
        self.axes = {}  # by place

    def found(self, effects, rows, sizes):
        """Return what the next call finds there, which decides how it runs.

        Arguments:
            effects: an ``Effects``, whose state is that before the call.
            rows, sizes: how many the batch has, and each replica.
        """
        found = set()
        for owner, key, value in effects.held() if self.axes else ():
            place = place_of(owner, key)
            axis = self.axes.get(place)
            for leaf in [] if axis is None else _leaves(value):
                size = leaf.shape[axis] if len(leaf.shape) > axis else None
                if size == rows or size in sizes:
                    found.add(FoundRows(place, axis, None if size == rows else size))
        return tuple(sorted(found, key=str))

    def note(self, owner, key, value, axis_of):
        """Note the places of rows in a value that a call has left.

        Arguments:
            axis_of: returns that of a tensor's or an array's rows, or None.
        """
        pending, seen = [(owner, key, value)], {}
        while pending:
            owner, key, value = pending.pop()
            for leaf in _leaves(value):
                axis = axis_of(leaf)
                if axis is not None:
                    self.axes[place_of(owner, key)] = axis
            for each in _parts(value):
                if not is_leaf(each) and id(each) not in seen:
                    seen[id(each)] = each
                    pending += [(o, k, v) for o in owners_of(each) for k, v in o.read().items()]

    def misled(self, changes):
        """Note the places where a replica has replaced a value by its rows."""
        for change in changes:
            if change.before is not MISSING and _leaves(change.before):
                self.note(change.owner, change.key, change.after, _axis_of_tag)


def _axis_of_tag(leaf):
    return tag_of(leaf).axis if is_sharded(leaf) and tag_of(leaf).copies == 1 else None


def place_of(owner, key):
    is_list = isinstance(owner.held, (list, collections.deque))
    return owner.described(None if is_list else key)


def is_leaf(value):
    return isinstance(value, (torch.Tensor, np.ndarray))


def _within(value):
    return not isinstance(value, tuple) or isinstance(value, PackedSequence)


def _parts(value):
    """List a value, or what nested tuples have."""
    return [value] if _within(value) else tree.tree_leaves(value, is_leaf=_within)


def _leaves(value):
    return [each for each in _parts(value) if is_leaf(each)]


class OwnRows:
    """One replica's rows of what its model has kept, in place of the whole.

    Arguments:
        kept_rows: a ``KeptRows``.
        layout: that of the call.
        device, rows: the replica's.
        watched: whether they are tagged.
    """

    def __init__(self, kept_rows, layout, device, rows, watched):
        self.kept_rows, self.total = kept_rows, layout.rows
        self.axes = {each.place: each.axis for each in layout.kept if each.other is None}
        self.device, self.rows, self.watched = device, rows, watched
        self.own = {}  # by id of the whole: it, the replica's rows, and the version of these
        self.put = []  # owner, key, the whole, the replica's rows

    def begin(self, effects):
        for owner, key, value in list(effects.held()) if self.axes else ():
            axis = self.axes.get(place_of(owner, key))
            if axis is not None and any(self._has_rows(each, axis) for each in _leaves(value)):
                own = tree.tree_map(lambda v, axis=axis: self._cut(v, axis), value, is_leaf=_within)
                self.put.append((owner, key, value, own))
                owner.write(key, own)

    def _has_rows(self, value, axis):
        return is_leaf(value) and len(value.shape) > axis and value.shape[axis] == self.total

    def _cut(self, value, axis):
        if not self._has_rows(value, axis):
            return value
        if id(value) not in self.own:
            if isinstance(value, np.ndarray):
                own = value.take(list(self.rows), axis)
                self.own[id(value)] = value, own, own.copy()
            else:
                own = rows_of(value, axis, self.rows).to(self.device, copy=True)
                self.own[id(value)] = value, own, own._version
                if self.watched:
                    tag(own, _rows.Sharded(axis))
        return self.own[id(value)][1]

    def end(self):
        """Put the whole back where the call has left it.

        Returns:
            What was changed in place, by key: pairs of the whole and the replica's.
        """
        for owner, key, value, own in self.put:
            if owner.read().get(key) is own:
                owner.write(key, value)
        return {
            ("effect", "in place", number): (whole, own)
            for number, (whole, own, was) in enumerate(self.own.values())
            if (own._version != was if isinstance(own, torch.Tensor) else (own != was).any())
        }


def set_whole(whole, value):
    """Set a tensor or an array that replicas have changed in place."""
    whole[...] = value
