"""Changes to others' objects: each one is listed, is made once, and can be undone."""

import contextlib
import threading
import types
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

_patches: "List[Patch]" = []


class Patch:
    """One attribute of a module, a class or an instance that compat has replaced, and keeps.

    Or one item of a dictionary, such as a framework's registry of rules.

    An instance gets the attribute in its ``__dict__``. Keras and torch would track what is set by
    ``setattr`` as a part of the model.

    Arguments:
        owner: the module, class, instance or dictionary.
        name: the attribute's name, or the item's key.
        value: what replaces it.

    Raises:
        RuntimeError: compat has replaced this attribute already. Two patches could only be taken
            back in the right order.
    """

    def __init__(self, owner: "Any", name: "Any", value: "Any") -> None:
        if find(owner, name) is not None:
            raise RuntimeError(f"compat has replaced {name} of {owner!r} already")
        self.owner = owner
        self.name = name
        self.was_own = name in _names(owner)  # else it is inherited, or was not there
        self.before = _names(owner).get(name)
        self._set(value)
        _patches.append(self)

    def _set(self, value: "Any") -> None:
        if isinstance(self.owner, (type, types.ModuleType)):
            setattr(self.owner, self.name, value)
        elif isinstance(self.owner, dict):
            self.owner[self.name] = value
        else:
            attach(self.owner, self.name, value)

    def take_back(self) -> None:
        """Restore the owner's own attribute."""
        _patches.remove(self)
        if self.was_own:
            self._set(self.before)
        elif isinstance(self.owner, (type, types.ModuleType)):
            delattr(self.owner, self.name)
        elif isinstance(self.owner, dict):
            del self.owner[self.name]
        else:
            detach(self.owner, self.name)


class WatchingPatch(Patch):
    """A patch that changes nothing, and watches whether others are reached."""

    watches = True


class MendingPatch(Patch):
    """A patch that repairs a fault of a framework, for all models, once in a process."""

    mends = True


def _names(owner: "Any") -> "Dict[Any, Any]":
    return owner if isinstance(owner, dict) else vars(owner)


def attach(instance: "Any", name: str, value: "Any") -> None:
    """Set an attribute of an instance, such as a model, bypassing its ``__setattr__``.

    Keras and torch track what is set by ``setattr`` as a part of the model. The value lives as long
    as the instance, and no list has it.
    """
    vars(instance)[name] = value


def detach(instance: "Any", name: str) -> "Any":
    """Delete an attribute that ``attach`` has set, and return its value."""
    return vars(instance).pop(name)


def change_class(instance: "Any", kind: type) -> None:
    """Change an instance's class, for methods that Python looks up in the class alone."""
    object.__setattr__(instance, "__class__", kind)


def find(owner: "Any", name: "Any") -> "Optional[Patch]":
    """Return the patch of this attribute that stands now, or None."""
    return next((p for p in _patches if p.owner is owner and p.name == name), None)


def patches() -> "List[Patch]":
    """Return all patches that stand, in the order in which they were made.

    Methods of single models are not among them: ``InstanceMethod.of(model)`` finds those.
    """
    return list(_patches)


@contextlib.contextmanager
def replaced(owner: "Any", **attributes: "Any") -> "Iterator[None]":
    """Replace attributes of ``owner`` within a block."""
    with contextlib.ExitStack() as afterwards:
        for name, value in attributes.items():
            afterwards.callback(Patch(owner, name, value).take_back)
        yield


class SharedPatches:
    """Patches that stand while any thread is within a block.

    Arguments:
        targets: a function that returns, for each attribute to replace, its owner, its name and a
            function from the attribute to what replaces it. Those that are replaced already stay.
    """

    def __init__(self, targets: "Callable[[], Iterable[Tuple[Any, str, Callable[[Any], Any]]]]"):
        self.targets, self.lock, self.scopes = targets, threading.Lock(), 0
        self.patches: "List[Patch]" = []

    def __enter__(self) -> None:
        with self.lock:
            self.scopes += 1
            for owner, name, replacement in self.targets():
                if find(owner, name) is None:
                    self.patches.append(Patch(owner, name, replacement(getattr(owner, name))))

    def __exit__(self, *raised: "Any") -> None:
        with self.lock:
            self.scopes -= 1
            while self.patches and not self.scopes:
                self.patches.pop().take_back()


class Callback:
    """A function that a framework calls back, such as a hook of a tensor.

    Arguments:
        name: the framework's name for such functions, "Tensor.register_hook" for example.
        function: the function.
    """

    def __init__(self, name: str, function: "Any") -> None:
        self.name, self.function = name, function

    def __call__(self, *args: "Any") -> "Any":
        return self.function(*args)


class InstanceMethod:
    """A method of one model that hides its class's: how a model runs on several devices.

    The instance gets it as a bound method, like the one it hides: Keras inspects that when it
    saves, a deep copy of the model binds it to the copy, and pickle keeps only its name, so that
    an unpickled model is plain.
    """

    method = "call"

    #: How often it was called: a hook that the framework never calls is reported.
    calls = 0

    def __init__(self, devices: "Sequence[Any]") -> None:
        self.devices = list(devices)
        self.hidden = None  # the instance's attribute before, as after an unpickling

    @property
    def __name__(self) -> str:
        return self.method

    def __call__(self, model: "Any", *args: "Any", **kwargs: "Any") -> "Any":
        self.calls += 1
        return self.invoke(model, *args, **kwargs)

    def invoke(self, model: "Any", *args: "Any", **kwargs: "Any") -> "Any":
        """Run the method in place of the hidden one."""
        raise NotImplementedError

    @classmethod
    def of(cls, model: "Any") -> "Any":
        """Return the method of this kind that this very instance has, or None.

        Also one that another of these methods hides.
        """
        return next(
            (method for method in _stacked(model, cls.method) if isinstance(method, cls)), None
        )

    @classmethod
    def install_on(cls, model: "Any", argument: "Any") -> None:
        """Remove the present method; unless ``argument`` is None, install one made with that."""
        present = cls.of(model)
        if present is not None:
            present.remove(model)
        if argument is not None:
            cls(argument).install(model)

    def install(self, model: "Any", function: "Any" = None) -> None:
        """Install this method on a model.

        Arguments:
            model: the model.
            function: a function in place of this object, where the method has to be one.
        """
        self.hidden = vars(model).get(self.method)
        if function is not None:
            function.made_by = self
        attach(model, self.method, types.MethodType(function or self, model))

    def remove(self, model: "Any") -> None:
        """Remove this method, so that the model has the one that it hides."""
        detach(model, self.method)
        if self.hidden is not None:
            attach(model, self.method, self.plain(model))

    @staticmethod
    def all_of(model: "Any") -> "Dict[str, List[InstanceMethod]]":
        """Return the methods of these kinds that this instance has, by name, outermost first."""
        stacks = {name: list(_stacked(model, name)) for name in list(vars(model))}
        return {name: stack for name, stack in stacks.items() if stack}

    def plain(self, model: "Any") -> "Any":
        """Return the method that this one hides, of this model: deep copies share ``hidden``."""
        hidden = self.hidden or types.MethodType(getattr(type(model), self.method), model)
        if isinstance(getattr(hidden, "__self__", None), type(model)):
            hidden = types.MethodType(hidden.__func__, model)
        return hidden


def _stacked(model: "Any", name: str) -> "Iterator[InstanceMethod]":
    """Yield the methods of these kinds that a model has under a name, the outermost first."""
    bound = vars(model).get(name)
    while bound is not None:
        function = getattr(bound, "__func__", None)
        method = getattr(function, "made_by", function)
        if not isinstance(method, InstanceMethod):
            return
        yield method
        bound = method.hidden
