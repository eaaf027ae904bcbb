"""The public methods of a Keras model that train, evaluate and predict, watched.

The framework's steps begin there, whatever functions a Keras makes for them, so a check notices
steps that never reach the methods that compat replaces.
"""

import functools
import inspect
from typing import Any, Dict, List, Optional, Type

from .. import _keras
from .._runtime import patching

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .._runtime.usage import UsageCheck

_KINDS = {
    "fit": "train",
    "fit_generator": "train",
    "train_on_batch": "train",
    "evaluate": "evaluate",
    "evaluate_generator": "evaluate",
    "test_on_batch": "evaluate",
    "predict": "predict",
    "predict_generator": "predict",
    "predict_on_batch": "predict",
}
# Kind of step -> the attribute of Keras' function for it.
_FUNCTIONS = dict(zip(("train", "evaluate", "predict"), _keras.FUNCTIONS))


class WatchedMethod(patching.InstanceMethod):
    """A method whose steps, of one kind, a ``UsageCheck`` checks."""

    watches = True

    def __init__(self, check: "UsageCheck") -> None:
        super().__init__([])
        self.check = check

    def install(self, model: "Any", function: "Any" = None) -> None:
        super().install(model, function)
        # Wrappers look up its arguments.
        self.__signature__ = inspect.signature(getattr(type(model), self.method))

    def invoke(self, model: "Any", *args: "Any", **kwargs: "Any") -> "Any":
        kind = _KINDS[self.method]
        function = functools.partial(function_of, model, kind, self.method)
        with self.check.step(kind, function, self.method):
            return self.check.call(self.plain(model), args, kwargs)


_METHODS: "List[Type[WatchedMethod]]" = [
    type("WatchedMethod", (WatchedMethod,), {"method": name}) for name in _KINDS
]


def function_of(model: "Any", kind: str, method: str = "") -> "Any":
    """Return the function that Keras has made for a method's steps, or None."""
    inner, attribute = _keras.inner_model(model), _FUNCTIONS[kind]
    if not method.endswith("_on_batch"):
        attribute = _keras.function_of_epochs(inner, attribute)
    return getattr(inner, attribute, None)


def install(model: "Any", check: "Optional[UsageCheck]") -> None:
    """Have a check watch a model's methods; None: stop watching."""
    for method in _METHODS:
        watched = method.of(model)
        if watched is not None:
            watched.remove(model)
        if check is not None and hasattr(type(model), method.method):
            method(check).install(model)


def check_of(model: "Any") -> "Optional[UsageCheck]":
    """Return the check that watches a model's methods, or None."""
    methods = (method.of(model) for method in _METHODS)
    return next((watched.check for watched in methods if watched is not None), None)


def hooks(model: "Any") -> "Dict[str, patching.InstanceMethod]":
    """Return the methods that compat replaced on a model and its inner model, but for these."""
    hooks = {}
    for owner in (model, _keras.inner_model(model)):
        stacks = patching.InstanceMethod.all_of(owner) if owner is not None else {}
        for name, stack in stacks.items():
            replaced = [method for method in stack if not hasattr(method, "watches")]
            hooks.update({name: replaced[-1]} if replaced else {})
    return hooks
