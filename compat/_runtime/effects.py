"""Side effects of a call on the Python objects that it can reach: noted, listed and undone.

A call reaches the attributes of objects, dictionaries, lists, sets, the variables of closures,
attributes of the user's classes, and the globals that the user's functions name. ``Effects`` finds
those once; a snapshot of them costs a shallow copy of each. Tensors and a framework's own objects
are values: they are not traversed.
"""

import functools
import random
import sys
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Set, Tuple

from .containers import ATOMS, MISSING, Owner, is_same, owners_of, reached


class Change(NamedTuple):
    """One value that a call has set, added or removed.

    Attributes:
        owner: the ``Owner`` of the value; see ``Effects.write``.
        key: the attribute's name, the item's key, or the element's index; None for a set, a
            variable of a closure, and an array as a whole.
        before, after: the value, or ``MISSING``.
    """

    owner: "Owner"
    key: Any
    before: Any
    after: Any

    @property
    def place(self) -> "Any":
        """The identity of the changed place, the same for each replica's call."""
        return self.owner.identity, self.key

    def __str__(self) -> str:
        return self.owner.described(self.key)


class Effects:
    """The changes of calls since ``note()``.

    Arguments:
        roots: the objects that the calls begin with: models, functions.
        is_value: returns whether a value, such as a tensor, is not traversed.
        hidden: returns the names of those attributes of an object that are ignored.
    """

    def __init__(
        self,
        roots: "Sequence[Any]",
        is_value: "Callable[[Any], bool]" = lambda value: False,
        hidden: "Callable[[Any], Any]" = lambda value: (),
    ) -> None:
        self.roots, self.is_value, self.hidden = list(roots), is_value, hidden
        self._before: "Dict[Any, Any]" = {}
        self._states: "List[Any]" = []
        self._begin()

    def _begin(self) -> None:
        self._owners: "Dict[Any, Owner]" = {}  # by identity
        self._randoms: "List[Any]" = []
        self._seen: "Dict[int, Any]" = {}
        # Of each owner: the ids of its values, those that were traversed, and keys of the others.
        self._looks: "Dict[Any, Tuple[Any, Set[int], List[Any]]]" = {}
        self.follow(self.roots)

    def follow(self, values: "Sequence[Any]") -> None:
        """Traverse values, and those that they hold, at any depth."""
        for value in reached(values, self.is_value, self._seen, self._owners_of):
            if self.is_value(value):
                del self._seen[id(value)]  # a tensor, say, which would stay in memory
                continue
            state = _random_state(value)
            self._randoms += [] if state is None else [state]
            for owner in self._owners_of(value):
                self._owners.setdefault(owner.identity, owner)

    def _owners_of(self, value: "Any") -> "Iterator[Owner]":
        for owner in owners_of(value):
            owner.hidden = self.hidden(value) if owner.of is value else ()
            yield owner

    def note(self) -> None:
        """Take the present state as that before the next call.

        Values that are new since the last one are traversed, and those that are gone are dropped.
        """
        self._before = {}
        pending = list(self._owners.values())
        while pending:
            for owner in pending:
                self._before[owner.identity] = values = owner.read()
                if not owner.is_compared and not self._follow_new(owner, values):
                    self._begin()
                    self._before = {}
                    break
            pending = [owner for place, owner in self._owners.items() if place not in self._before]
        self._states = [get() for get, _ in self._randoms]

    def _follow_new(self, owner: "Owner", values: "Dict[Any, Any]") -> bool:
        """Traverse an owner's new values; return whether all previous ones remain."""
        look = list(map(id, values.values())), list(map(type, values.values()))
        previous, inside, _ = self._looks.get(owner.identity, (None, set(), []))
        if look == previous:
            return True
        new = {
            id(value): value
            for value in values.values()
            if type(value) not in ATOMS and not self.is_value(value)
        }
        leaves = [key for key, value in values.items() if self.is_value(value)]
        self._looks[owner.identity] = look, set(new), leaves
        self.follow([value for key, value in new.items() if key not in inside])
        return inside <= set(new)

    def values(self) -> "List[Any]":
        """Return the values at ``note()`` that are not traversed."""
        values_of_owners = (
            (self._before[place], leaves) for place, (_, _, leaves) in self._looks.items()
        )
        return [values[key] for values, leaves in values_of_owners for key in leaves]

    def held(self) -> "Iterator[Any]":
        """Iterate over all values at ``note()``: triples of owner, key and value."""
        for place, values in self._before.items():
            for key, value in values.items():
                yield self._owners[place], key, value

    def reached(self) -> "List[Any]":
        """Return all objects that are traversed."""
        return list(self._seen.values())

    def random_numbers(self) -> "List[Any]":
        """Return pairs of functions that get and set the states of reachable generators."""
        return list(self._randoms)

    def forget(self) -> None:
        """Release the state at ``note()``."""
        self._before, self._states = {}, []

    def _changed(self) -> "Iterator[Tuple[Owner, Dict[Any, Any], Dict[Any, Any]]]":
        """Yield each owner whose values have changed since ``note()``, with both values."""
        for place, before in self._before.items():
            owner = self._owners[place]
            after = owner.read()
            if not (after == before if owner.is_compared else _are_same(before, after)):
                yield owner, before, after

    def changes(self) -> "List[Change]":
        """Return the changes since ``note()``, in a fixed order."""
        return [
            change for values_of_owner in self._changed() for change in _changes(*values_of_owner)
        ]

    def take(self) -> "List[Change]":
        """Undo the ``changes()``, but for generators of random numbers, and return them."""
        changes: "List[Change]" = []
        for owner, before, after in list(self._changed()):
            changes += _changes(owner, before, after)
            owner.restore(before)
        return changes

    def suspended(self) -> "Callable[[], None]":
        """Undo the changes; return a function that makes them again."""
        changed = list(self._changed())
        for owner, before, _ in changed:
            owner.restore(before)

        def put_back() -> None:
            for owner, _, after in changed:
                owner.restore(after)

        return put_back

    def restore(self, randoms: bool = False) -> None:
        """Restore the state at ``note()``.

        Arguments:
            randoms: whether generators of random numbers are restored, too.
        """
        for owner, before, _ in list(self._changed()):
            owner.restore(before)
        for (_, put), state in zip(self._randoms, self._states) if randoms else ():
            put(state)

    def has_drawn(self) -> bool:
        """Return whether a generator of random numbers was used since ``note()``."""
        pairs = zip(self._randoms, self._states)
        return any(not _is_same_state(get(), state) for (get, _), state in pairs)

    def write(self, changes: "Sequence[Change]") -> None:
        """Make changes: each sets its ``after`` where ``before`` was at ``note()``."""
        for change in changes:
            change.owner.write(change.key, change.after)
        self.follow([change.after for change in changes if change.after is not MISSING])


def _changes(owner: "Any", before: "Dict[Any, Any]", after: "Dict[Any, Any]") -> "Iterator[Change]":
    for key in list(before) + [key for key in after if key not in before]:
        old, new = before.get(key, MISSING), after.get(key, MISSING)
        if not (old == new if owner.is_compared else is_same(old, new)):
            yield Change(owner, key, old, new)


def _are_same(values: "Dict[Any, Any]", others: "Dict[Any, Any]") -> bool:
    if len(values) != len(others):
        return False
    if list(map(id, values.values())) == list(map(id, others.values())):
        return list(values) == list(others)  # as nearly always
    return all(is_same(value, others.get(key, MISSING)) for key, value in values.items())


def _is_same_state(state: "Any", other: "Any") -> bool:
    if isinstance(state, dict):
        return all(_is_same_state(state[key], other[key]) for key in state)
    if isinstance(state, tuple):
        return all(map(_is_same_state, state, other))
    return bool(state.tobytes() == other.tobytes() if hasattr(state, "tobytes") else state == other)


def _random_state(value: "Any") -> "Optional[Tuple[Callable[[], Any], Callable[[Any], None]]]":
    """Return functions that get and set the state of a generator of random numbers, or None."""
    if isinstance(value, random.Random):
        return value.getstate, value.setstate
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.random.RandomState):
        return value.get_state, value.set_state
    generator = getattr(getattr(numpy, "random", None), "Generator", None)
    if generator is not None and isinstance(value, generator):
        bits = value.bit_generator
        return (lambda: bits.state), functools.partial(setattr, bits, "state")
    return None
