"""Side effects of the calls of a Gluon block, merged to those of one context.

Attributes, lists, dictionaries, closures: all objects that a call can reach and change, by itself
or in the hooks of blocks. Each replica begins with the same state, its changes are reverted, and
the merged changes are written once: arrays and numbers are merged as results are.
"""

import collections
import numbers
from typing import Any, Dict, List, NamedTuple

import mxnet as mx
import numpy as np

from ..._rows import REPLICATED, Fallback, Partial, Placement, Reason, Sharded, trial
from ..._rows.merging import NUMBERS, merge
from ..._runtime import containers
from ..._runtime.effects import Effects
from . import merging
from .arrays import are_equal, on_context
from .state import blocks

# Attributes in which Gluon keeps blocks, parameters, hooks and compiled graphs: names in its code.
_GLUON = {"_compat_replicas", "_compat_watched", "forward"}
_GLUON.update(
    name
    for kind in (mx.gluon.Block, mx.gluon.HybridBlock)
    for function in vars(kind).values()
    for name in getattr(getattr(function, "__code__", None), "co_names", ())
    if name.startswith("_")
)


# How many containers that calls change are numbered.
_MOST_PLACES = 1000


class _Attributes(containers.Owner):
    """The attributes of a block that are not Gluon's."""

    def read(self):
        return {name: value for name, value in self.held.items() if name not in _GLUON}

    def restore(self, before):
        for name in set(self.read()).difference(before):
            del self.held[name]
        self.held.update(before)


class _Followed(Effects):
    """The ``Effects`` of calls of a block, on objects of it, of blocks within, and their hooks."""

    def __init__(self, block):
        super().__init__(roots_of(block), _is_value)

    def follow(self, values):
        super().follow(values)
        for place, owner in self._owners.items():
            if isinstance(owner.of, mx.gluon.Block) and not isinstance(owner, _Attributes):
                self._owners[place] = _Attributes(owner.held, owner.of)


class BlockState(_Followed):
    """The state of all objects that calls of a block can reach, arrays included, at one time."""

    def __init__(self, block):
        super().__init__(block)
        self.note()

    def note(self):
        """Take the current state as that before a call."""
        super().note()
        contents = (value for values in self._before.values() for value in values.values())
        held = {id(value): value for value in contents if isinstance(value, mx.nd.NDArray)}
        self._arrays = [(array, array.copy()) for array in held.values()]

    def put_back(self):
        """Restore the state; return the arrays that were changed in place."""
        self.restore(randoms=True)
        changed = []
        with mx.autograd.pause():
            for array, before in self._arrays:
                if not trial.close(array.asnumpy(), before.asnumpy()):
                    changed.append(array)
                    before.copyto(array)
        return changed


def roots_of(block):
    """Return the user-defined blocks within a block, and the functions of hooks."""
    parts = list(dict.fromkeys(blocks(block)))
    roots = [part for part in parts if not type(part).__module__.startswith("mxnet.")]
    for part in parts:
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            roots += hooks.values()
    return roots


def _is_value(value):
    kinds = mx.nd.NDArray, mx.sym.Symbol, mx.gluon.Parameter, mx.gluon.ParameterDict
    return isinstance(value, kinds) or type(value).__module__.startswith("mxnet.")


class ChangeRule(NamedTuple):
    """How the replicas' values of a number or an array are merged.

    Attributes:
        is_added: whether the differences from the value before are merged, in place of the values.
        placement: of these.
    """

    is_added: bool
    placement: Placement


class SideEffects:
    """Side effects of the calls of one block.

    Attributes:
        rules: by place, a rule for each number or array there.
    """

    def __init__(self, block):
        self.block = block
        self._effects, self._numbers = None, {}
        self.rules: "Dict[Any, List[ChangeRule]]" = {}

    def begin(self):
        """Take the current state as that before the calls of replicas."""
        if self._effects is None or self._effects.roots != roots_of(self.block):
            self._effects = _Followed(self.block)
        self._effects.note()
        self._compiled = self._cached()

    def _cached(self):
        return [vars(part).get("_cached_op") for part in blocks(self.block)]

    def restore(self):
        """Restore the state before the calls."""
        self._effects.restore()

    def suspended(self):
        """Undo the changes of a call since ``begin()``; return a function that redoes them."""
        return self._effects.suspended()

    def taken(self):
        """Revert the changes of a call since ``begin()``, and return them by place."""
        return {self._place(change): change for change in self._effects.take()}

    def _place(self, change):
        """Return a key of a change's place, the same for each replica and for later calls."""
        if len(self._numbers) > _MOST_PLACES:
            self._numbers.clear()
            self.rules.clear()
        owner, key = change.owner, change.key
        if change.before is containers.MISSING and isinstance(
            owner.held, (list, collections.deque)
        ):
            key = "added", key - len(owner.held)
        # The container is kept, so that no other object gets its identity.
        number, _ = self._numbers.setdefault(owner.identity, (len(self._numbers), owner.held))
        return number, key

    def lack_rules(self, calls):
        """Return whether values have changed of which no trial was made."""
        return any(
            place not in self.rules and _leaves(change.after)
            for changes in calls
            for place, change in changes.items()
        )

    # Trials ---------------------------------------------------------------------------------------

    def decide(self, changes, placements):
        """Set rules for the values that a trial has changed.

        Arguments:
            changes: of the trial, by place.
            placements: those of ``arrays_of`` them.

        Returns:
            A ``Fallback`` if values cannot be merged, or None.
        """
        placements = iter(placements)
        for place, change in changes.items():
            rules = []
            for _ in _leaves(change.after):
                value, added = next(placements), next(placements)
                if _fits(value):
                    rules.append(ChangeRule(False, value))
                elif added == Partial("sum"):
                    rules.append(ChangeRule(True, added))
                else:
                    return fallback(change)
            self.rules[place] = rules
        return None

    # Replicas -------------------------------------------------------------------------------------

    def write(self, calls, sizes, context):
        """Merge the changes of the replicas, and write them.

        Arguments:
            calls: the changes of each replica, as ``taken()`` returns them.
            sizes: the replicas' shard sizes.
            context: where merged arrays are.

        Returns:
            A ``Fallback`` if they cannot be merged, or None.
        """
        written = []
        first = calls[0]
        if self._cached() != self._compiled:
            # Compiling has called it with symbols, in the first replica alone.
            once = {place for place in first if any(place not in changes for changes in calls)}
            written += [first[place] for place in first if place in once]
            calls = [
                {place: changes[place] for place in changes if place not in once}
                for changes in calls
            ]
            first = calls[0]
        change = differing(calls)
        if change is not None:
            return fallback(change)
        for place, change in first.items():
            leaves = zip(*[_leaves(changes[place].after) for changes in calls])
            before = _leaves(change.before)
            rules = self.rules.get(place, [])
            values = []
            for number, parts in enumerate(leaves):
                rule = rules[number] if number < len(rules) else ChangeRule(False, REPLICATED)
                start = before[number] if rule.is_added and number < len(before) else None
                value = _merged(rule, parts, start, sizes, context)
                if value is None:
                    return fallback(change)
                values.append(value)
            values = iter(values)
            written.append(change._replace(after=_mapped(lambda leaf: next(values), change.after)))  # noqa: B023
        self._effects.write(written)
        return None


def fallback(change):
    """Return the ``Fallback`` of a change that cannot be merged."""
    return Fallback(Reason.CROSS_BATCH, f"that changes {change}")


def arrays_of(changes):
    """Return the numbers and arrays of changes as arrays, each followed by what was added to it."""
    arrays = []
    for change in changes.values():
        before, after = _leaves(change.before), _leaves(change.after)
        for number, leaf in enumerate(after):
            start = before[number] if len(before) == len(after) else None
            arrays += [_as_numpy(leaf), _difference(leaf, start)]
    return arrays


def _difference(leaf, start):
    """Return what was added to a number or an array; 0 if there was none of its shape before."""
    leaf, start = _as_numpy(leaf), None if start is None else _as_numpy(start)
    if start is None or leaf.shape != start.shape or leaf.dtype != start.dtype:
        return np.zeros(())  # the same for any rows, so no sum
    return leaf - start


def differing(calls):
    """Return a change that only some calls make, or make to another structure; or None."""
    for changes in calls[1:]:
        for place in list(changes) + list(calls[0]):
            one, other = calls[0].get(place), changes.get(place)
            if one is None or other is None:
                return one or other
            if _without_leaves(one.after) != _without_leaves(other.after):
                return one
    return None


def _without_leaves(value):
    return repr(_mapped(lambda leaf: None, value))


def _fits(placement):
    return isinstance(placement, (Partial, Sharded, type(REPLICATED))) and (
        merging.can_be_merged(placement)
    )


def _merged(rule, parts, before, sizes, context):
    """Return the value of the whole batch; None if the parts contradict the rule."""
    is_added, placement = rule
    if isinstance(parts[0], mx.nd.NDArray):
        parts = [on_context(context, part) for part in parts]
        if before is not None:
            parts = [part - before for part in parts]
        if not merging.are_of([placement], parts, sizes):
            return None
        if placement == REPLICATED and not are_equal(parts):
            return None
        value = merging.merged([placement], parts, sizes, context)
    else:
        if before is not None:
            parts = [part - before for part in parts]
        if placement == REPLICATED:
            if not all(trial.close(_as_numpy(part), _as_numpy(parts[0])) for part in parts):
                return None
            value = parts[0]
        elif isinstance(placement, Partial):
            value = merge(placement, parts, sizes, NUMBERS)
        else:
            return None
    return value if before is None else before + value


def _is_leaf(value):
    is_number = isinstance(value, numbers.Number) and not isinstance(value, bool)
    return is_number or isinstance(value, (mx.nd.NDArray, np.ndarray))


def _leaves(value):
    leaves = []
    _mapped(leaves.append, value)
    return leaves


def _mapped(function, value):
    """Return nested containers with ``function(leaf)`` in place of each number and array."""
    if isinstance(value, dict):
        return {key: _mapped(function, part) for key, part in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_mapped(function, part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return function(value) if _is_leaf(value) else value


def _as_numpy(leaf):
    if isinstance(leaf, float):  # the block has computed it with fewer bits
        return np.asarray(leaf, "float32")
    return leaf.asnumpy() if isinstance(leaf, mx.nd.NDArray) else np.asarray(leaf)
