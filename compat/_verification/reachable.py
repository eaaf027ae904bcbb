"""What the objects of a model hold: its variables, and the numbers that they are set to."""

import functools
import types

# What objects of these packages hold belongs to the framework; Keras within them does not.
_FRAMEWORKS = ("compat", "jax", "jaxlib", "numpy", "tensorflow", "tensorflow_core", "torch")


def variables(roots, kinds):
    """All variables that objects hold: in attributes, containers, and what functions refer to.

    Arguments:
        roots: the objects.
        kinds: the classes of variables, as ``isinstance`` takes them.
    """
    return [value for value in _all(roots, kinds) if isinstance(value, kinds)]


class Attributes:
    """What attributes of some objects are now, such as counters.

    Arguments:
        objects: those that have them.
        is_kept: whether an attribute of that name and value is one of them.
        forgets: whether those that an object gets later are taken from it, too.
    """

    def __init__(self, objects, is_kept, forgets=True):
        self._is_kept = is_kept
        self._forgets = forgets
        self._held = [(vars(each), self._of(vars(each))) for each in objects]

    def _of(self, attributes):
        return {name: value for name, value in attributes.items() if self._is_kept(name, value)}

    def have_changed(self):
        return any(now.get(k) != v for now, values in self._held for k, v in values.items())

    def put_back(self):
        for attributes, values in self._held:
            for name in set(self._of(attributes)) - set(values) if self._forgets else ():
                del attributes[name]
            attributes.update(values)


def numbers(roots):
    """``Attributes`` that are numbers, of objects and of all that they hold."""
    objects = [value for value in _all(roots, ()) if _has_attributes(value)]
    return Attributes(objects, lambda name, value: type(value) in (int, float), forgets=False)


def _all(roots, kinds):
    """The objects, and all that they hold; nothing that variables do."""
    seen, pending = {}, list(reversed(roots))
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        yield value
        if not isinstance(value, kinds):
            pending.extend(reversed(_held(value)))


def _held(value):
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, (list, tuple, set, frozenset)):
        return list(value)
    if isinstance(value, types.MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.FunctionType) and _is_entered(value.__module__):
        names = [name for name in value.__code__.co_names if name in value.__globals__]
        cells = [content for cell in value.__closure__ or () for content in _contents(cell)]
        defaults = [value.__defaults__, value.__kwdefaults__]
        return cells + defaults + [value.__globals__[name] for name in names]
    return list(vars(value).values()) if _has_attributes(value) else []


def _has_attributes(value):
    kind = type(value)
    if isinstance(value, (type, types.ModuleType, types.FunctionType)):
        return False
    is_known = _is_entered(kind.__module__) or hasattr(kind, "apply_gradients")
    return is_known and hasattr(value, "__dict__")


def _is_entered(module):
    return (module or "").split(".")[0] not in _FRAMEWORKS or ".keras." in module


def _contents(cell):
    try:
        return [cell.cell_contents]
    except ValueError:  # of a function that is yet to be defined
        return []
