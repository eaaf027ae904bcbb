"""Traversal of the objects that a call can reach, and their contents.

Contents are the attributes of objects, dictionaries, lists, sets, variables of closures, attributes
of user-defined classes, globals that user-defined functions name, and numpy arrays.
"""

import collections
import functools
import sys
import types
from typing import Any, Callable, Dict, Iterator, List, Optional, Sequence, cast

from .. import errors

#: Objects of these packages belong to the framework; those of Keras within them do not.
FRAMEWORKS = ("compat", "jax", "jaxlib", "mxnet", "numpy", "tensorflow", "tensorflow_core", "torch")

#: Stands for a value where there is none: an attribute that is new, or deleted.
MISSING = type("Missing", (), {"__repr__": lambda self: "MISSING"})()

# Longer containers hold data, not state of a call: only changes of their lengths are noticed.
_LONGEST = 10000
# Larger arrays are data.
_LARGEST = 1 << 20

ATOMS = {int, float, complex, bool, str, bytes, type(None), type(Ellipsis), range, slice}
ATOMS |= {type(MISSING), types.BuiltinFunctionType, types.CodeType}


def reached(
    roots: "Sequence[Any]",
    is_value: "Callable[[Any], bool]",
    seen: "Optional[Dict[int, Any]]" = None,
    owners: "Optional[Callable[[Any], Iterator[Owner]]]" = None,
) -> "Iterator[Any]":
    """Iterate over objects, and all that are reachable from them, in order, each once.

    Arguments:
        roots: the objects to begin with.
        is_value: returns whether a value is not traversed.
        seen: objects reached before, by id; they are kept alive there, so that ids stay unique.
        owners: in place of ``owners_of``.
    """
    owners = owners or owners_of
    seen, pending = {} if seen is None else seen, list(reversed(roots))
    while pending:
        value = pending.pop()
        if id(value) in seen or type(value) in ATOMS or isinstance(value, types.ModuleType):
            continue
        seen[id(value)] = value
        yield value
        if not is_value(value):
            contents = [content for owner in owners(value) for content in owner.read().values()]
            pending += reversed(contents + _led_to(value))


def is_same(value: "Any", other: "Any") -> bool:
    """Return whether two values are one object, or equal numbers or texts."""
    return value is other or type(value) is type(other) and type(value) in ATOMS and value == other


class Owner:
    """Owner of values: a dictionary, or an object with attributes; subclasses are other kinds.

    Attributes:
        held: the container of the values.
        of: the object whose attributes they are, or None.
        is_compared: whether values are compared by equality, not by identity.
        hidden: keys that are ignored.
    """

    is_compared = False
    hidden: "Any" = ()

    def __init__(self, held: "Any", of: "Any" = None) -> None:
        self.held, self.of = held, of
        self.identity: "Any" = (id(held), None)

    def described(self, key: "Any") -> str:
        """Return a description of a value's place, for messages."""
        if self.of is not None:
            return f"attribute {key!r} of {type(self.of).__name__}"
        return f"item {key!r} of a dictionary"

    def read(self) -> "Dict[Any, Any]":
        """Return the present values by key."""
        if len(self.held) > _LONGEST:
            return {MISSING: len(self.held)}
        values = dict(self.held)
        for key in self.hidden:
            values.pop(key, None)
        return values

    def write(self, key: "Any", value: "Any") -> None:
        """Set a value, or delete it if it is ``MISSING``."""
        if key is MISSING:
            return
        if value is MISSING:
            dict.pop(self.held, key, None)
        else:
            dict.__setitem__(self.held, key, value)

    def restore(self, before: "Dict[Any, Any]") -> None:
        """Set all values as ``read`` has returned them."""
        if MISSING in before:
            return
        for key in [key for key in self.held if key not in before and key not in self.hidden]:
            dict.__delitem__(self.held, key)
        dict.update(self.held, before)


class _Names(Owner):
    """Some variables of a module, such as the globals that a function names, or of a class."""

    def __init__(self, held: "Any", names: "Sequence[str]") -> None:
        super().__init__(held)
        self.names = names
        self.identity = id(held), tuple(names)

    def described(self, key: "Any") -> str:
        if isinstance(self.held, type):
            return f"attribute {key!r} of class {self.held.__name__}"
        return f"global variable {key!r}"

    def read(self) -> "Dict[Any, Any]":
        values = vars(self.held) if isinstance(self.held, type) else self.held
        return {name: values[name] for name in self.names if name in values}

    def write(self, key: "Any", value: "Any") -> None:
        if not isinstance(self.held, type):
            super().write(key, value)
        elif value is MISSING:
            delattr(self.held, key)
        else:
            setattr(self.held, key, value)

    def restore(self, before: "Dict[Any, Any]") -> None:
        now = self.read()
        for key in set(now).union(before):
            if not is_same(now.get(key, MISSING), before.get(key, MISSING)):
                self.write(key, before.get(key, MISSING))


class _Slots(Owner):
    """The attributes of an object with slots."""

    def __init__(self, held: "Any", names: "Sequence[str]") -> None:
        super().__init__(held, of=held)
        self.names = names

    def read(self) -> "Dict[Any, Any]":
        values = {name: getattr(self.held, name, MISSING) for name in self.names}
        return {name: value for name, value in values.items() if value is not MISSING}

    def write(self, key: "Any", value: "Any") -> None:
        if value is MISSING:
            delattr(self.held, key)
        else:
            setattr(self.held, key, value)

    restore = _Names.restore


class _Elements(Owner):
    """A list or a deque."""

    def described(self, key: "Any") -> str:
        return f"element {key} of a list"

    def read(self) -> "Dict[Any, Any]":
        if len(self.held) > _LONGEST:
            return {MISSING: len(self.held)}
        return dict(enumerate(self.held))

    def write(self, key: "Any", value: "Any") -> None:
        if key is MISSING:
            return
        if value is MISSING:
            del self.held[-1]  # the last ones are those that are missing
        elif key < len(self.held):
            self.held[key] = value
        else:
            self.held.append(value)

    def restore(self, before: "Dict[Any, Any]") -> None:
        if MISSING in before:
            while len(self.held) > before[MISSING]:
                self.held.pop()
        elif isinstance(self.held, list):
            self.held[:] = before.values()
        else:
            self.held.clear()
            self.held.extend(before.values())


class _Members(Owner):
    """A set."""

    is_compared = True

    def described(self, key: "Any") -> str:
        return "a set"

    def read(self) -> "Dict[Any, Any]":
        return {None: frozenset(self.held)}

    def write(self, key: "Any", value: "Any") -> None:
        self.held.clear()
        self.held.update(value)

    def restore(self, before: "Dict[Any, Any]") -> None:
        self.write(None, before[None])


class _Contents(Owner):
    """The value of a closure's variable."""

    def described(self, key: "Any") -> str:
        return "a variable of a closure"

    def read(self) -> "Dict[Any, Any]":
        try:
            return {None: self.held.cell_contents}
        except ValueError:  # of a function that is yet to be defined
            return {}

    def write(self, key: "Any", value: "Any") -> None:
        if sys.version_info >= (3, 7):
            self.held.cell_contents = value
        else:  # read-only there
            import ctypes

            cell, content = ctypes.py_object(self.held), ctypes.py_object(value)
            ctypes.pythonapi.PyCell_Set(cell, content)

    def restore(self, before: "Dict[Any, Any]") -> None:
        if before:
            self.write(None, before[None])


class _Array(Owner):
    """The numbers of a numpy array."""

    is_compared = True

    def described(self, key: "Any") -> str:
        return "an array of numpy's"

    def read(self) -> "Dict[Any, Any]":
        return {None: (self.held.shape, self.held.tobytes())}

    def write(self, key: "Any", value: "Any") -> None:
        import numpy as np

        if isinstance(value, tuple):  # as it was read
            value = np.frombuffer(value[1], self.held.dtype).reshape(value[0])
        self.held[...] = value

    def restore(self, before: "Dict[Any, Any]") -> None:
        if self.held.flags.writeable and self.read() != before:
            self.write(None, before[None])


def _is_array(value: "Any") -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray):
        return False
    return value.nbytes <= _LARGEST and not value.dtype.hasobject and value.flags.writeable


class _Wrapped:
    """The owner of a wrapped container's values; TensorFlow's wrapper notices changes by others."""

    def __init__(self, owner: "Owner", wrapper: "Any") -> None:
        self.owner, self.wrapper = owner, wrapper

    def __getattr__(self, name: str) -> "Any":
        return getattr(self.owner, name)

    def write(self, key: "Any", value: "Any") -> None:
        self.owner.write(key, value)
        self.wrapper._update_snapshot()

    def restore(self, before: "Dict[Any, Any]") -> None:
        self.owner.restore(before)
        self.wrapper._update_snapshot()


def owners_of(value: "Any") -> "Iterator[Owner]":
    """Iterate over the owners of the values that a value contains."""
    if hasattr(value, "_update_snapshot") and isinstance(value, (dict, list)):
        wrapper: "Any" = value  # TensorFlow's, around a user's container
        held = (
            Owner(wrapper.__wrapped__) if isinstance(value, dict) else _Elements(wrapper._storage)
        )
        yield cast("Owner", _Wrapped(held, value))  # it has what ``held`` has
    elif isinstance(value, dict):
        yield Owner(value)
    elif isinstance(value, (list, collections.deque)):
        yield _Elements(value)
    elif isinstance(value, set):
        yield _Members(value)
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            yield _Contents(cell)
        if errors.is_users_file(value.__code__.co_filename):
            for name in dict.fromkeys(_named(value.__code__)):
                yield _Names(value.__globals__, [name])
    elif isinstance(value, type):
        yield _Names(value, [n for n, each in vars(value).items() if _is_variable(n, each)])
    elif _is_array(value):
        yield _Array(value)
    if has_attributes(value):
        yield Owner(vars(value), of=value)
    if _is_users_class(type(value)):
        slots = [name for kind in type(value).__mro__ for name in _slots_of(kind)]
        if slots:
            yield _Slots(value, slots)


def _is_variable(name: str, value: "Any") -> bool:
    """Return whether an attribute of a class is data that a call may change."""
    return not name.startswith("__") and not callable(value) and not hasattr(value, "__get__")


def _slots_of(kind: type) -> "List[str]":
    slots = vars(kind).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else slots
    return [name for name in names if name not in ("__dict__", "__weakref__")]


def _led_to(value: "Any") -> "List[Any]":
    """Return the values that are reachable from a value without an owner to restore them."""
    if isinstance(value, (tuple, frozenset)):
        return list(value)
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.FunctionType):
        return [value.__defaults__, value.__kwdefaults__]
    if isinstance(value, type):
        functions = [getattr(member, "fget", member) for member in vars(value).values()]
        functions = [getattr(member, "__func__", member) for member in functions]
        functions = [member for member in functions if isinstance(member, types.FunctionType)]
        return functions + [base for base in value.__bases__ if _is_users_class(base)]
    return [type(value)] if _is_users_class(type(value)) else []


def _is_users_class(kind: type) -> bool:
    """Return whether a class is defined in a script, and not in an installed package."""
    path = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return kind.__module__ != "builtins" and is_entered(kind) and errors.is_users_file(path)


def _named(code: "types.CodeType") -> "Iterator[str]":
    """Iterate over the globals that a function's code, or a function within it, reads or sets."""
    import dis  # for start-up time

    for instruction in dis.get_instructions(code):
        if instruction.opname in ("LOAD_GLOBAL", "STORE_GLOBAL"):
            yield instruction.argval
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _named(constant)


def has_attributes(value: "Any") -> bool:
    """Return whether a value has attributes that are traversed."""
    if isinstance(value, (type, types.ModuleType, types.FunctionType)):
        return False
    may_have = is_entered(type(value)) or hasattr(value, "apply_gradients")
    return may_have and hasattr(value, "__dict__")


def is_entered(kind: type) -> bool:
    """Return whether objects of a class are traversed: it is neither Python's nor a framework's.

    Keras within a framework counts as the user's.
    """
    module = kind.__module__ or ""
    top = module.split(".")[0]
    if top in FRAMEWORKS:
        return ".keras." in module
    return top not in _PYTHONS


_PYTHONS = {"builtins", "threading", "_thread", "weakref", "abc", "typing", "logging", "io", "_io"}
_PYTHONS |= {"enum", "functools", "collections", "random", "types", "re", "inspect", "pathlib"}
