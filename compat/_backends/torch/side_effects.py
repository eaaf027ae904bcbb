"""What calls leave outside of their results, which replicas must leave as one device does.

Attributes, lists, dictionaries, closures: all that a call reaches and changes there, by itself or
in its hooks. Each replica begins with the same, its changes are taken back, and what they make
together is written once: the values are put together as results are. So are tensors that are no
buffers and are changed in place.
"""

import collections
import contextlib
import types

import torch

from ... import _rows, errors
from ..._runtime.containers import MISSING
from ..._runtime.effects import Effects
from . import batches
from .batches import are_same
from .calls import NotMergeable, State, is_number, tag, tag_of

#: Where modules keep what ``register_forward_hook()`` and its like are given.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Attributes of any module in which torch keeps parts, weights and hooks: they have rules.
_INTERNALS = [name for name, value in vars(torch.nn.Module()).items() if isinstance(value, dict)]
_CACHE = "_compat_side_effects"  # in the model, to which it refers
# So many elements of tensors are copied in each call; more, where a call changes them.
_FEW = 1 << 20


def internals_of(module):
    """The containers in which torch keeps parts, weights and hooks of a module."""
    return [vars(part)[name] for part in module.modules() for name in _INTERNALS]


def roots_of(module):
    """What the calls of a module begin with: the user's modules within it, and hooks."""
    parts = list(module.modules())
    hooks = [each for part in parts for name in HOOKS for each in vars(part)[name].values()]
    return list(filter(batches.is_users, parts)) + hooks


class Reach:
    """What the calls of one model reach; found again only where that has changed.

    Arguments:
        model: the model.
        roots: what its calls begin with.
        inside: containers that are not looked into.
    """

    def __init__(self, model, roots, inside):
        self.model, self.roots, self.inside = model, roots, {id(each): each for each in inside}
        self.effects = Effects(roots, self.is_value)
        self.numbers = {}  # of owners of values, by identity: the same from call to call
        self.changing = torch.utils.weak.WeakIdKeyDictionary()  # tensors that are, in place

    def __reduce__(self):
        return dict, ()  # copies of the model find their own

    @classmethod
    def of(cls, model, roots, inside):
        """That of a model as it is now.

        Arguments:
            roots: what its calls begin with.
            inside: a function that returns containers which are not looked into.
        """
        found = vars(model).get(_CACHE)
        if type(found) is not cls or found.model is not model or not are_same(found.roots, roots):
            found = vars(model)[_CACHE] = cls(model, roots, inside())
        return found

    def is_value(self, value):
        return isinstance(value, torch.Tensor) or id(value) in self.inside


class SideEffects:
    """Those of one call.

    Arguments:
        reach: a ``Reach``, whose present state is that before the call.
        known: the ids of tensors that have rules of their own, such as weights.

    Attributes:
        before: what values were before the call, by the keys of those after it.
        found_more: whether a tensor was changed in place of which that was not known.
    """

    def __init__(self, reach, known):
        self.reach, self.effects = reach, reach.effects
        self.effects.note()
        found = {id(v): v for v in self.effects.values() if isinstance(v, torch.Tensor)}
        self.tensors = [v for key, v in found.items() if key not in known and not v.is_meta]
        self.before, self.changed, self.changes = {}, {}, {}
        self.saved = []  # what the tensors were, where they may change
        self.found_more = False

    def random_numbers(self):
        """A context after which all random numbers are those from now on."""
        afterwards = batches.random_numbers()
        for get, put in self.effects.random_numbers():
            afterwards.callback(put, get())
        for each in self.effects.reached():
            if isinstance(each, torch.Generator):
                afterwards.callback(each.set_state, each.get_state())
        return afterwards

    @contextlib.contextmanager
    def replica(self, is_watched, found):
        """Within, a replica runs; its changes are taken back, and added to ``found`` by key."""
        few = sum(each.numel() for each in self.tensors) <= _FEW
        if not self.saved and (is_watched or len(self.reach.changing) or few):
            self.saved = [each.detach().clone() for each in self.tensors]
        versions = [version_of(each) for each in self.tensors]
        for tensor, saved in zip(self.tensors, self.saved if is_watched else ()):
            if tensor in self.reach.changing:
                tag(tensor, State(saved))
        try:
            yield
        finally:
            values = self._values()  # first: all is taken back
            found.update(self._tensors(versions))
            found.update(values)

    def _tensors(self, versions):
        """Those that were changed in place."""
        found = {}
        for number, (tensor, version) in enumerate(zip(self.tensors, versions)):
            now, key = version_of(tensor), ("state", f"tensor {number}")
            if now != version:
                if not self.saved:
                    raise errors.UnsupportedError(
                        f"{type(self.reach.model).__name__} changes a tensor of {tensor.numel()} "
                        "elements in place, which it left alone in its first call, and which is "
                        "neither a parameter nor a buffer, so that its value of before is not "
                        "known any more. Use register_buffer() for it."
                    )
                found[key] = copy_of(tensor)
                saved = self.saved[number]
                self.before[key], self.changed[key] = saved, tensor
                if now[1] != version[1]:
                    tensor.data = saved.clone()
                tensor.data.copy_(saved)
                self.found_more = self.found_more or tensor not in self.reach.changing
                self.reach.changing[tensor] = True
            if tag_of(tensor) is not None:
                del tensor._compat_rows
        return found

    def _values(self):
        """Those that were set, added or removed."""
        found = {}
        for change in self.effects.take():
            place = self._place(change)
            leaves, unflatten = self._leaves(change.after)
            keys = [("effect", place, index) for index in range(len(leaves))]
            earlier = self._leaves(change.before)[0]
            if len(earlier) == len(leaves):
                self.before.update((k, v) for k, v in zip(keys, earlier) if is_number(v))
            self.changes[place] = change, unflatten, keys
            found.update(zip(keys, leaves))
        return found

    def _place(self, change):
        """What identifies the place of a change, the same in each replica and in later calls."""
        if change.key is MISSING:  # of a list so long that its elements are not followed
            raise NotMergeable(_rows.Across(f"that changes {change}", why="unknown"))
        numbers, owner, key = self.reach.numbers, change.owner, change.key
        if change.before is MISSING and isinstance(owner.held, (list, collections.deque)):
            key = "added", key - len(owner.held)
        return numbers.setdefault(owner.identity, len(numbers)), key

    def _leaves(self, value):
        # What was there before the call is put in place as it is.
        known = dict.fromkeys(map(id, self.effects.reached()))
        leaves, unflatten, _ = batches.flatten(value, known)
        return [_Same(v) if isinstance(v, _Same.KINDS) else v for v in leaves], unflatten

    def finish(self, merged):
        """Write what the replicas have made together, by key."""
        with torch.no_grad():
            for key, tensor in self.changed.items():
                if key in merged:
                    tensor.copy_(merged[key])
        changes = []
        for change, unflatten, keys in self.changes.values():
            if all(key in merged for key in keys):
                leaves = [v.value if isinstance(v, _Same) else v for v in map(merged.get, keys)]
                changes.append(change._replace(after=unflatten(leaves)))
        self.effects.write(changes)
        self.effects.forget()


def version_of(tensor):
    """What changes where a tensor is changed: in place, or by its ``data``."""
    return tensor._version, tensor.data_ptr()


def copy_of(tensor):
    """A tensor's present value, with its tag."""
    value = tensor.detach().clone()
    if tag_of(tensor) is not None:
        tag(value, tag_of(tensor))
    return value


class _Same:
    """A function or a handle that each replica makes anew, equal to others of the same code."""

    KINDS = types.FunctionType, torch.utils.hooks.RemovableHandle

    def __init__(self, value):
        self.value = value
        cells = getattr(value, "__closure__", None) or ()
        self.key = (
            type(value),
            getattr(value, "__code__", None),
            [id(c.cell_contents) for c in cells],
        )

    def __eq__(self, other):
        return isinstance(other, _Same) and self.key == other.key

    __hash__ = None
