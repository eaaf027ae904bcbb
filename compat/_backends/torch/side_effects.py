"""What calls leave outside of their results, which replicas must leave as one device does.

Attributes, lists, dictionaries, closures: all that a call reaches and changes there, by itself or
in its hooks. Each replica begins with the same, its changes are taken back, and what they make
together is written once: the values are merged as results are. So are tensors that are not buffers
and are changed in place.
"""

import collections
import contextlib
import types

import torch

from ... import _keras
from ..._rows import Fallback, Reason
from ..._runtime import patching
from ..._runtime.containers import MISSING
from ..._runtime.effects import Effects
from . import kept_rows
from .containers import flatten
from .expressions import State
from .graph import tag, tag_of
from .merging import NotMergeable
from .state import copy_of, moved_late, random_numbers, version_of
from .tensors import are_same, is_number

#: Where modules keep what ``register_forward_hook()`` and its like are given.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Attributes of any module in which torch keeps parts, weights and hooks: they have rules.
_INTERNALS = [name for name, value in vars(torch.nn.Module()).items() if isinstance(value, dict)]
_CACHE = "_compat_side_effects"  # in the model, to which it refers
#: Types of attributes by which a call may choose its way.
FLAGS = (bool, str, type(None), int)
#: So many elements of tensors are copied in each call; more, where a call changes them.
FEW = 1 << 20


class Reach:
    """Values that the calls of one model reach; found again only where its parts have changed.

    Subclasses say where calls begin, and what is not looked into.
    """

    def __init__(self, model, parts):
        self.model, self.parts = model, parts
        self.numbers = {}  # of owners of values, by identity: the same from call to call
        self.changing = torch.utils.weak.WeakIdKeyDictionary()  # tensors that are, in place
        self.effects = Effects(self.roots(), self.is_value, self.hidden)

    def __reduce__(self):
        return dict, ()  # copies of the model find their own

    @classmethod
    def of(cls, model, *inside):
        """Return that of a model as it is now.

        Arguments:
            inside: for ``parts_of``, if that is known.
        """
        found, parts = vars(model).get(_CACHE), cls.parts_of(model, *inside)
        is_own = type(found) is cls and found.model is model
        if not is_own or not are_same(found.parts, parts):
            found = cls(model, parts)
            patching.attach(model, _CACHE, found)
        return found

    def switches(self):
        """Return what a script may set between calls to change what they do: flags, and hooks.

        A hook counts as another one of the same code, which is registered for each call.

        Returns:
            What calls have in common that are alike; and whole numbers, which may be counters.
        """
        modules = [each for each in self.parts if isinstance(each, torch.nn.Module)]
        hooks = [each for each in self.parts if not isinstance(each, torch.nn.Module)]
        flags = [
            (number, name, value)
            for number, module in enumerate(modules)
            if is_user_defined(module) and not type(module).__module__.startswith("keras.")
            for name, value in vars(module).items()
            if type(value) in FLAGS and name not in self.hidden(module)
        ]
        numbers = [each for each in flags if type(each[2]) is int]
        codes = tuple(getattr(hook, "__code__", type(hook)) for hook in hooks)
        return (tuple(each for each in flags if type(each[2]) is not int), codes), numbers


class ModuleReach(Reach):
    """Values that calls of a torch module reach: the user's modules within it, and hooks."""

    @classmethod
    def parts_of(cls, module, parts=None):
        parts = list(module.modules()) if parts is None else parts
        held = [vars(part).get(name) for part in parts for name in HOOKS]
        return parts + [hook for hooks in held if hooks for hook in hooks.values()]

    def roots(self):
        modules = [each for each in self.parts if isinstance(each, torch.nn.Module)]
        self.inside = {id(vars(part).get(name)) for part in modules for name in _INTERNALS}
        return [each for each in self.parts if is_user_defined(each)]

    def is_value(self, value):
        return isinstance(value, torch.Tensor) or id(value) in self.inside

    def hidden(self, value):
        return (_CACHE,) if value is self.model else ()


class KerasReach(Reach):
    """Values that calls of a Keras model reach: layers and functions of the user's."""

    @classmethod
    def parts_of(cls, model):
        layers = _keras.all_layers(model)
        wrapped = [vars(layer).get("module") for layer in layers]
        modules = [each for each in wrapped if isinstance(each, torch.nn.Module)]
        return layers + [each for module in modules for each in ModuleReach.parts_of(module)]

    def roots(self):
        keras = _keras.keras_of(self.model)
        bare = keras.Layer(name="layer"), keras.Model(name="model")
        self.internals = {name for each in bare for name in vars(each)} | {_CACHE}
        kinds = types.FunctionType, types.MethodType
        roots = [each for each in self.parts if not self.is_value(each)]
        others = [each for each in self.parts if self.is_value(each)]
        held = [value for each in others for value in vars(each).values()]
        return roots + [each for each in held if isinstance(each, kinds) and _keras.is_users(each)]

    def is_value(self, value):
        is_own = type(value).__module__.partition(".")[0] == "keras"
        is_container = isinstance(value, (list, dict, set))
        return isinstance(value, torch.Tensor) or is_own and not is_container

    def hidden(self, value):
        return self.internals if isinstance(value, _keras.keras_of(self.model).Layer) else ()


class CallEffects:
    """Side effects of one call.

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
        self.own_rows = None  # an ``OwnRows``, of the replica that runs
        self.axes = {}  # of the rows of what is written, by key
        self.in_place = {}  # values of rows that replicas have changed, by key
        self.found_more = False

    def random_numbers(self):
        """Return a context after which all random numbers are those from now on."""
        afterwards = random_numbers()
        for get, put in self.effects.random_numbers():
            afterwards.callback(put, get())
        for each in self.effects.reached():
            if isinstance(each, torch.Generator):
                afterwards.callback(each.set_state, each.get_state())
        return afterwards

    @contextlib.contextmanager
    def replica(self, is_watched, found):
        """Take a replica's changes back after this context, and add them to ``found`` by key."""
        few = sum(each.numel() for each in self.tensors) <= FEW
        if not self.saved and (is_watched or len(self.reach.changing) or few):
            self.saved = [each.detach().clone() for each in self.tensors]
        versions = [version_of(each) for each in self.tensors]
        for tensor, saved in zip(self.tensors, self.saved if is_watched else ()):
            if tensor in self.reach.changing:
                tag(tensor, State(saved))
        if self.own_rows is not None:
            self.own_rows.begin(self.effects)
        try:
            yield
        finally:
            in_place = {} if self.own_rows is None else self.own_rows.end()
            values = self._values(is_watched)  # first: all is taken back
            self.in_place.update((key, whole) for key, (whole, _) in in_place.items())
            found.update((key, own) for key, (_, own) in in_place.items())
            found.update(self._tensors(versions))
            found.update(values)

    def _tensors(self, versions):
        """Return those that were changed in place."""
        found = {}
        for number, (tensor, version) in enumerate(zip(self.tensors, versions)):
            now, key = version_of(tensor), ("state", f"tensor {number}")
            if now != version:
                if not self.saved:
                    raise moved_late(self.reach.model)
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

    def _values(self, is_watched):
        """Return those that were set, added or removed."""
        found, changes = {}, self.effects.take()
        if is_watched and self.own_rows is not None:
            self.own_rows.kept_rows.misled(changes)
        for change in changes:
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
        """Identify the place of a change, the same in each replica and in later calls."""
        if change.key is MISSING:  # of a list so long that its elements are not followed
            raise NotMergeable(Fallback(Reason.NO_RULE, f"that changes {change}"))
        numbers, owner, key = self.reach.numbers, change.owner, change.key
        if change.before is MISSING and isinstance(owner.held, (list, collections.deque)):
            key = "added", key - len(owner.held)
        return numbers.setdefault(owner.identity, len(numbers)), key

    def _leaves(self, value):
        # What was there before the call is put in place as it is.
        known = dict.fromkeys(map(id, self.effects.reached()))
        leaves, unflatten, _ = flatten(value, known)
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
        for key, whole in self.in_place.items():
            if key in merged:
                kept_rows.set_whole(whole, merged[key])
        axes = {id(merged[key]): axis for key, axis in self.axes.items()}
        for change in changes if axes else ():
            note = self.own_rows.kept_rows.note
            note(change.owner, change.key, change.after, lambda leaf: axes.get(id(leaf)))
        self.effects.forget()


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

    __hash__ = None  # type: ignore[assignment]  # it is only compared


def is_user_defined(module):
    """Return whether a module is not one of torch's: its forward may set anything."""
    return not type(module).__module__.startswith("torch.nn")
