"""Side effects of calls, which those of replicas together must equal.

Attributes, lists, dictionaries, closures: all that a call reaches and changes there, by itself or
in its hooks. Each replica begins with the same state, and its changes are undone. Their values are
merged as results are, and written once. So are tensors that are not buffers and are changed in
place.
"""

import collections
import contextlib
import functools
import types
from typing import Any, Collection, Dict, Iterator, List, Tuple

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

#: Attributes in which modules keep hooks.
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Attributes of any module in which torch keeps parts, weights and hooks: they have rules.
_INTERNALS = [name for name, value in vars(torch.nn.Module()).items() if isinstance(value, dict)]
_CACHE = "_compat_side_effects"  # in the model, to which it refers
#: Types of attributes that a call may branch on.
FLAGS = (bool, str, type(None), int)
#: Up to so many elements of tensors are copied in each call; more, only where a call changes them.
FEW = 1 << 20


class Reach:
    """Values that the calls of one model reach. They are collected anew if its parts change.

    Subclasses define the roots, and which values are not traversed.

    Arguments:
        model: the model.
        parts: its layers, modules and hooks.
    """

    def __init__(self, model, parts):
        self.model, self.parts = model, parts
        self.numbers: "Dict[Any, int]" = {}  # of owners of values, the same from call to call
        self.changing = torch.utils.weak.WeakIdKeyDictionary()  # tensors that calls change in place
        self.effects = Effects(self.roots(), self.is_value, self.hidden)

    def __reduce__(self):
        return dict, ()  # a copy of the model collects its values itself

    @classmethod
    def of(cls, model: Any, *modules: "List[torch.nn.Module]") -> "Reach":
        """Return the reach of a model as it is now.

        Arguments:
            model: the model.
            modules: those of the model for ``parts_of``, if the caller has listed them.
        """
        reach, parts = vars(model).get(_CACHE), cls.parts_of(model, *modules)
        is_of_model = type(reach) is cls and reach.model is model
        if not is_of_model or not are_same(reach.parts, parts):
            reach = cls(model, parts)
            patching.attach(model, _CACHE, reach)
        return reach

    @classmethod
    def parts_of(cls, model):
        """List the layers, modules and hooks of a model."""
        raise NotImplementedError

    def roots(self) -> "List[Any]":
        """List the objects that calls begin with."""
        raise NotImplementedError

    def is_value(self, value: Any) -> bool:
        """Return whether an object is a value, which is not traversed."""
        raise NotImplementedError

    def hidden(self, value: Any) -> "Collection[str]":
        """Return the names of attributes of an object that are not traversed."""
        raise NotImplementedError

    def switches(self) -> "Tuple[Any, List[Any]]":
        """Return flags and hooks, which a script may change between calls.

        A hook equals another one of the same code, which is registered for each call.

        Returns:
            A key that is the same for calls of one kind; and whole numbers, which may be counters.
        """
        modules = [part for part in self.parts if isinstance(part, torch.nn.Module)]
        hooks = [part for part in self.parts if not isinstance(part, torch.nn.Module)]
        flags = [
            (number, name, value)
            for number, module in enumerate(modules)
            if is_user_defined(module) and not type(module).__module__.startswith("keras.")
            for name, value in vars(module).items()
            if type(value) in FLAGS and name not in self.hidden(module)
        ]
        numbers = [flag for flag in flags if type(flag[2]) is int]
        codes = tuple(getattr(hook, "__code__", type(hook)) for hook in hooks)
        return (tuple(flag for flag in flags if type(flag[2]) is not int), codes), numbers


class ModuleReach(Reach):
    """Values that calls of a torch module reach, by user-defined modules within it and hooks."""

    @classmethod
    def parts_of(cls, module, parts=None):
        """List modules, and their hooks."""
        parts = list(module.modules()) if parts is None else parts
        held = [vars(part).get(name) for part in parts for name in HOOKS]
        return parts + [hook for hooks in held if hooks for hook in hooks.values()]

    def roots(self):
        """List user-defined modules, and hooks."""
        modules = [part for part in self.parts if isinstance(part, torch.nn.Module)]
        self.inside = {id(vars(part).get(name)) for part in modules for name in _INTERNALS}
        return [part for part in self.parts if is_user_defined(part)]

    def is_value(self, value):
        """Return whether an object is a tensor, or internal to a module."""
        return isinstance(value, torch.Tensor) or id(value) in self.inside

    def hidden(self, value):
        """Return the attribute that this object has in the model."""
        return (_CACHE,) if value is self.model else ()


class KerasReach(Reach):
    """Values that calls of a Keras model reach, by user-defined layers and functions."""

    @classmethod
    def parts_of(cls, model):
        """List layers, modules that they wrap, and hooks of these."""
        layers = _keras.all_layers(model)
        wrapped = [vars(layer).get("module") for layer in layers]
        modules = [module for module in wrapped if isinstance(module, torch.nn.Module)]
        return layers + [part for module in modules for part in ModuleReach.parts_of(module)]

    def roots(self):
        """List user-defined layers, and functions that layers of Keras hold."""
        keras = _keras.keras_of(self.model)
        bare = keras.Layer(name="layer"), keras.Model(name="model")
        self.internals = {name for layer in bare for name in vars(layer)} | {_CACHE}
        kinds = types.FunctionType, types.MethodType
        roots = [part for part in self.parts if not self.is_value(part)]
        others = [part for part in self.parts if self.is_value(part)]
        held = [value for part in others for value in vars(part).values()]
        return roots + [f for f in held if isinstance(f, kinds) and _keras.is_users(f)]

    def is_value(self, value):
        """Return whether an object is a tensor, or an object of Keras."""
        is_of_keras = type(value).__module__.partition(".")[0] == "keras"
        is_container = isinstance(value, (list, dict, set))
        return isinstance(value, torch.Tensor) or is_of_keras and not is_container

    def hidden(self, value):
        """Return the attributes that Keras has in each layer."""
        return self.internals if isinstance(value, _keras.keras_of(self.model).Layer) else ()


class CallEffects:
    """Side effects of one call.

    Arguments:
        reach: a ``Reach``, whose present state is that before the call.
        weights: the ids of tensors that are merged by other rules, such as weights.

    Attributes:
        before: values before the call, by the keys of those after it.
        has_new_tensors: whether a tensor was changed in place that no call before has changed.
    """

    def __init__(self, reach: Reach, weights: "Collection[int]") -> None:
        self.reach, self.effects = reach, reach.effects
        self.effects.note()
        tensors = {id(v): v for v in self.effects.values() if isinstance(v, torch.Tensor)}
        self.tensors = [v for key, v in tensors.items() if key not in weights and not v.is_meta]
        self.before: "Dict[Any, Any]" = {}
        self.changed: "Dict[Any, torch.Tensor]" = {}  # in place, by key
        self.changes: "Dict[Any, Any]" = {}  # by place
        self.saved: "List[torch.Tensor]" = []  # copies of the tensors, where they may change
        self.replica_rows: Any = None  # the ``ReplicaRows`` of the replica that runs
        self.axes: "Dict[Any, int]" = {}  # batch dimensions of what is written, by key
        self.in_place: "Dict[Any, Any]" = {}  # values of rows that replicas have changed, by key
        self.has_new_tensors = False

    def random_numbers(self) -> contextlib.ExitStack:
        """Return a context after which random numbers are drawn as from now on."""
        afterwards = random_numbers()
        for get, put in self.effects.random_numbers():
            afterwards.callback(put, get())
        for value in self.effects.reached():
            if isinstance(value, torch.Generator):
                afterwards.callback(value.set_state, value.get_state())
        return afterwards

    @contextlib.contextmanager
    def replica(
        self, is_watched: bool, state: "Dict[Any, Any]", turn: Any = None
    ) -> "Iterator[None]":
        """Return the context of a replica, after which its changes are undone.

        Arguments:
            is_watched: whether placements are inferred.
            state: a dictionary to which the values that it has changed are added, by key.
            turn: its ``ReplicaTurn``, or None where replicas run one after the other.
        """
        if turn is not None and len(self.reach.changing):
            raise _unsuspended()
        are_few = sum(tensor.numel() for tensor in self.tensors) <= FEW
        if not self.saved and (is_watched or len(self.reach.changing) or are_few):
            self.saved = [tensor.detach().clone() for tensor in self.tensors]
        versions = [version_of(tensor) for tensor in self.tensors]
        for tensor, saved in zip(self.tensors, self.saved if is_watched else ()):
            if tensor in self.reach.changing:
                tag(tensor, State(saved))
        rows = self.replica_rows
        if rows is not None:
            rows.begin(self.effects)
        if turn is not None:
            turn.suspensions.append(functools.partial(self._suspended, rows, versions))
        try:
            yield
        finally:
            in_place = {} if rows is None else rows.end()
            values = self._values(is_watched)  # first: all changes are undone
            self.in_place.update((key, whole) for key, (whole, _) in in_place.items())
            state.update((key, shard) for key, (_, shard) in in_place.items())
            state.update(self._tensors(versions))
            state.update(values)

    def _suspended(self, rows, versions):
        """Undo a replica's changes; return a function that makes them again."""
        if [version_of(tensor) for tensor in self.tensors] != versions:
            raise _unsuspended()
        shards = [] if rows is None else rows.put_back()
        effects_again = self.effects.suspended()

        def again():
            effects_again()
            for owner, key, shard in shards:
                owner.write(key, shard)

        return again

    def _tensors(self, versions):
        """Return the tensors that were changed in place, by key, and restore them."""
        changed = {}
        for number, (tensor, version) in enumerate(zip(self.tensors, versions)):
            now, key = version_of(tensor), ("state", f"tensor {number}")
            if now != version:
                if not self.saved:
                    raise moved_late(self.reach.model)
                changed[key] = copy_of(tensor)
                saved = self.saved[number]
                self.before[key], self.changed[key] = saved, tensor
                if now[1] != version[1]:
                    tensor.data = saved.clone()
                tensor.data.copy_(saved)
                is_new = tensor not in self.reach.changing
                self.has_new_tensors = self.has_new_tensors or is_new
                self.reach.changing[tensor] = True
            if tag_of(tensor) is not None:
                del tensor._compat_rows
        return changed

    def _values(self, is_watched):
        """Return the values that were set, added or removed, by key, and undo that."""
        values, changes = {}, self.effects.take()
        if is_watched and self.replica_rows is not None:
            self.replica_rows.kept_rows.misled(changes)
        for change in changes:
            place = self._place(change)
            leaves, unflatten = self._leaves(change.after)
            keys = [("effect", place, index) for index in range(len(leaves))]
            earlier = self._leaves(change.before)[0]
            if len(earlier) == len(leaves):
                self.before.update((k, v) for k, v in zip(keys, earlier) if is_number(v))
            self.changes[place] = change, unflatten, keys
            values.update(zip(keys, leaves))
        return values

    def _place(self, change):
        """Identify the place of a change, the same in each replica and in later calls."""
        if change.key is MISSING:  # of a list so long that its elements are not followed
            raise NotMergeable(Fallback(Reason.NO_RULE, f"that changes {change}"))
        numbers, owner, key = self.reach.numbers, change.owner, change.key
        if change.before is MISSING and isinstance(owner.held, (list, collections.deque)):
            key = "added", key - len(owner.held)
        return numbers.setdefault(owner.identity, len(numbers)), key

    def _leaves(self, value):
        # Containers that were reached before the call are leaves.
        reached = dict.fromkeys(map(id, self.effects.reached()))
        leaves, unflatten, _ = flatten(value, reached)
        return [_Same(v) if isinstance(v, _Same.KINDS) else v for v in leaves], unflatten

    def finish(self, merged: "Dict[Any, Any]") -> None:
        """Write the merged values, by key."""
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
            note = self.replica_rows.kept_rows.note
            note(change.owner, change.key, change.after, lambda leaf: axes.get(id(leaf)))
        self.effects.forget()


def _unsuspended():
    """Return the error for tensors that replicas would change by turns."""
    return NotMergeable(Fallback(Reason.CROSS_BATCH, "that changes a tensor in place"))


class _Same:
    """Stand-in for a function or a handle that each replica makes: equal to others of its code."""

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


def is_user_defined(module: Any) -> bool:
    """Return whether a module is not one of torch's: its forward may set anything."""
    return not type(module).__module__.startswith("torch.nn")
