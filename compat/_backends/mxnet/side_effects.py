"""Side effects of the calls of a Gluon block, as one context leaves them.

Attributes, lists, dictionaries, closures: all that a call reaches and changes besides its results,
by itself or in the hooks of blocks. Each replica begins with the same, its changes are taken back,
and what they make together is written once: arrays and numbers are merged as results are.
"""

import collections
import numbers

import mxnet as mx
import numpy as np

from ..._rows import REPLICATED, Fallback, Partial, Reason, Sharded, trial
from ..._rows.merging import NUMBERS, merge
from ..._runtime import containers
from ..._runtime.effects import Effects
from . import merging
from .arrays import are_equal, on_context
from .state import blocks

# Where Gluon keeps parts, parameters, hooks and what it has compiled: the names in its code.
_GLUON = {"_compat_replicas", "_compat_watched", "forward"}
_GLUON.update(
    name
    for kind in (mx.gluon.Block, mx.gluon.HybridBlock)
    for function in vars(kind).values()
    for name in getattr(getattr(function, "__code__", None), "co_names", ())
    if name.startswith("_")
)


# So many containers that calls change are known by number.
_MOST_PLACES = 1000


class _Attributes(containers.Owner):
    """The attributes of a block that are its own, and not Gluon's."""

    def read(self):
        return {name: value for name, value in self.held.items() if name not in _GLUON}

    def restore(self, before):
        for name in set(self.read()).difference(before):
            del self.held[name]
        self.held.update(before)


class _Followed(Effects):
    """The ``Effects`` of calls of a block: of what it, those within, and their hooks hold."""

    def __init__(self, block):
        super().__init__(roots_of(block), _is_value)

    def follow(self, values):
        super().follow(values)
        for place, owner in self._owners.items():
            if isinstance(owner.of, mx.gluon.Block) and not isinstance(owner, _Attributes):
                self._owners[place] = _Attributes(owner.held, owner.of)


class BlockState(_Followed):
    """All that calls of a block can reach, and the arrays there, at one time."""

    def __init__(self, block):
        super().__init__(block)
        self.note()

    def note(self):
        super().note()
        found = (each for values in self._before.values() for each in values.values())
        held = {id(each): each for each in found if isinstance(each, mx.nd.NDArray)}
        self._arrays = [(array, array.copy()) for array in held.values()]

    def put_back(self):
        """Put all back, also arrays that were changed in place, which are returned."""
        self.restore(randoms=True)
        changed = []
        with mx.autograd.pause():
            for array, before in self._arrays:
                if not trial.close(array.asnumpy(), before.asnumpy()):
                    changed.append(array)
                    before.copyto(array)
        return changed


def roots_of(block):
    """Return the user-defined blocks within a block, and what hooks call."""
    parts = list(dict.fromkeys(blocks(block)))
    roots = [part for part in parts if not type(part).__module__.startswith("mxnet.")]
    for part in parts:
        for hooks in (part._forward_hooks, part._forward_pre_hooks):
            roots += hooks.values()
    return roots


def _is_value(value):
    kinds = mx.nd.NDArray, mx.sym.Symbol, mx.gluon.Parameter, mx.gluon.ParameterDict
    return isinstance(value, kinds) or type(value).__module__.startswith("mxnet.")


class SideEffects:
    """Those of the calls of one block."""

    def __init__(self, block):
        self.block = block
        self._effects, self._numbers = None, {}
        self.rules = {}  # by place: a rule for each number or array that is found there

    def begin(self):
        """Take the present state as that before the calls of replicas."""
        if self._effects is None or self._effects.roots != roots_of(self.block):
            self._effects = _Followed(self.block)
        self._effects.note()
        self._compiled = self._cached()

    def _cached(self):
        return [vars(part).get("_cached_op") for part in blocks(self.block)]

    def restore(self):
        self._effects.restore()

    def taken(self):
        """Put back the changes of a call since ``begin()``, and return them by place."""
        return {self._place(change): change for change in self._effects.take()}

    def _place(self, change):
        """Return what identifies the place of a change in each replica and in later calls."""
        if len(self._numbers) > _MOST_PLACES:
            self._numbers.clear()
            self.rules.clear()
        owner, key = change.owner, change.key
        if change.before is containers.MISSING and isinstance(
            owner.held, (list, collections.deque)
        ):
            key = "added", key - len(owner.held)
        # With what is there, so that nothing else gets its identity.
        number, _ = self._numbers.setdefault(owner.identity, (len(self._numbers), owner.held))
        return number, key

    def lack_rules(self, found):
        """Return whether values have changed of which no trial was made."""
        return any(
            place not in self.rules and _leaves(change.after)
            for changes in found
            for place, change in changes.items()
        )

    # Trials ---------------------------------------------------------------------------------------

    def decide(self, found, placements):
        """Find rules for the values that a trial has found.

        Arguments:
            found: the changes of the trial, by place.
            placements: those of ``arrays_of`` them.

        Returns:
            What cannot be put together, or None.
        """
        placements = iter(placements)
        for place, change in found.items():
            rules = []
            for _ in _leaves(change.after):
                value, added = next(placements), next(placements)
                if _fits(value):
                    rules.append((False, value))
                elif added == Partial("sum"):
                    rules.append((True, added))
                else:
                    return fallback(change)
            self.rules[place] = rules
        return None

    # Replicas -------------------------------------------------------------------------------------

    def write(self, found, sizes, context):
        """Write what the replicas make together.

        Arguments:
            found: the changes of each replica, as ``taken()`` returns them.
            sizes: the replicas' numbers of rows.
            context: where the arrays go.

        Returns:
            What cannot be put together, or None.
        """
        written = []
        first = found[0]
        if self._cached() != self._compiled:
            # Compiling has called it with symbols, in the first replica alone.
            once = {place for place in first if any(place not in each for each in found)}
            written += [first[place] for place in first if place in once]
            first = {place: first[place] for place in first if place not in once}
            found = [{place: each[place] for place in each if place not in once} for each in found]
        change = differing(found)
        if change is not None:
            return fallback(change)
        for place, change in first.items():
            changes = [each[place] for each in found]
            leaves = zip(*[_leaves(each.after) for each in changes])
            before = _leaves(change.before)
            rules = self.rules.get(place, [])
            values = []
            for number, parts in enumerate(leaves):
                rule = rules[number] if number < len(rules) else (False, REPLICATED)
                start = before[number] if rule[0] and number < len(before) else None
                value = _merged(rule, parts, start, sizes, context)
                if value is None:
                    return fallback(change)
                values.append(value)
            values = iter(values)
            written.append(change._replace(after=_mapped(lambda leaf: next(values), change.after)))  # noqa: B023
        self._effects.write(written)
        return None


def fallback(change):
    return Fallback(Reason.CROSS_BATCH, f"that changes {change}")


def arrays_of(found):
    """Return the numbers and arrays that changes have, as arrays, and what was added to them."""
    arrays = []
    for change in found.values():
        before, after = _leaves(change.before), _leaves(change.after)
        for number, leaf in enumerate(after):
            start = before[number] if len(before) == len(after) else None
            arrays += [_as_numpy(leaf), _difference(leaf, start)]
    return arrays


def _difference(leaf, start):
    """Return what was added to a number or an array, if there was one of its shape before."""
    leaf, start = _as_numpy(leaf), None if start is None else _as_numpy(start)
    if start is None or leaf.shape != start.shape or leaf.dtype != start.dtype:
        return np.zeros(())  # the same for any rows: no sum
    return leaf - start


def differing(found):
    """Return a change that only some calls make, or to another structure; or None."""
    for changes in found[1:]:
        for place in list(changes) + list(found[0]):
            pair = [each.get(place) for each in (found[0], changes)]
            if None in pair or len({_without_leaves(each.after) for each in pair}) > 1:
                return pair[0] or pair[1]
    return None


def _without_leaves(value):
    return repr(_mapped(lambda leaf: None, value))


def _fits(placement):
    return isinstance(placement, (Partial, Sharded, type(REPLICATED))) and (
        merging.can_be_merged(placement)
    )


def _merged(rule, parts, before, sizes, context):
    """Return the value of the whole batch; None if the parts are not what the rule expects."""
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
    found = []
    _mapped(found.append, value)
    return found


def _mapped(function, value):
    """Nested containers with what a function makes of each number and array in them."""
    if isinstance(value, dict):
        return {key: _mapped(function, each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_mapped(function, each) for each in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    return function(value) if _is_leaf(value) else value


def _as_numpy(leaf):
    if isinstance(leaf, float):  # was computed by the block, in fewer bits
        return np.asarray(leaf, "float32")
    return leaf.asnumpy() if isinstance(leaf, mx.nd.NDArray) else np.asarray(leaf)
