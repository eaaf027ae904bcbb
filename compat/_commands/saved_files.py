"""Files to which a script saves models, by Keras or by ``torch.save()``, as ranks report them."""

import functools
import os
from typing import Any, Callable, Set

from .._keras import automatic_parallel
from .._runtime import on_import, patching

_METHODS = ("save", "save_weights")


def note(paths: "Set[str]") -> None:
    """Add the paths of the files to which models are saved in this process from now on.

    A rank of models that train together saves on rank 0 alone, to a temporary file first. It calls
    what is replaced here with that, or not at all.
    """

    def watched(save: "Callable[..., Any]", place: int) -> "Callable[..., Any]":
        @functools.wraps(save)
        def save_noted(*args: "Any", **kwargs: "Any") -> "Any":
            given = args[place : place + 1] or [
                kwargs[name] for name in ("filepath", "f") if name in kwargs
            ]
            if given and isinstance(given[0], (str, os.PathLike)) and "://" not in str(given[0]):
                paths.add(os.path.realpath(given[0]))
            return save(*args, **kwargs)

        return save_noted

    def watch_models(module: "Any") -> None:
        for name in automatic_parallel.CLASSES:
            for method in _METHODS:
                kinds = getattr(vars(module).get(name), "__mro__", ())
                owner = next((kind for kind in kinds if method in vars(kind)), None)
                if owner is not None and patching.find(owner, method) is None:
                    save = watched(vars(owner)[method], 1)
                    patching.WatchingPatch(owner, method, save)

    def watch_tensors(module: "Any") -> None:
        patching.WatchingPatch(module, "save", watched(module.save, 1))

    for name in automatic_parallel.MODULES:
        on_import.call(watch_models, name)
    on_import.call(watch_tensors, "torch.serialization")
