"""Calls made as soon as a module has been imported, whoever imports it."""

import importlib.util
import sys
from typing import Any, Callable, Dict, List, Optional

# By the name of the module, and that of the function.
_waiting: "Dict[str, Dict[str, Callable[[Any], None]]]" = {}


def call(function: "Callable[[Any], None]", name: str) -> None:
    """Call ``function`` with the module ``name``: now, or when it has been imported.

    A module has one such call of a function, by its qualified name: a later one takes its place.
    """
    if name in sys.modules:
        function(sys.modules[name])
        return
    key = f"{function.__module__}.{function.__qualname__}"
    _waiting.setdefault(name, {})[key] = function
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def forget() -> None:
    """Drop all calls that are still pending, as a test does in the end."""
    _waiting.clear()


class _Finder:
    """Finder of the modules that calls wait for, which are loaded by a ``_Loader``."""

    def find_spec(
        self, name: str, path: "Any" = None, target: "Any" = None
    ) -> "Optional[importlib.machinery.ModuleSpec]":
        functions = _waiting.pop(name, None)
        if functions is None:
            return None
        spec = importlib.util.find_spec(
            name
        )  # queries this finder again, which does not find it any more
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec
        spec.loader = _Loader(spec.loader, list(functions.values()))  # type: ignore[assignment]
        return spec


class _Loader:
    """Loader of a module that makes its calls afterwards."""

    def __init__(self, loader: "Any", functions: "List[Callable[[Any], None]]") -> None:
        self._loader = loader
        self._functions = functions

    def __getattr__(self, name: str) -> "Any":
        return getattr(self._loader, name)

    def exec_module(self, module: "Any") -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # as if this had not been there
        self._loader.exec_module(module)
        for function in self._functions:
            function(module)
