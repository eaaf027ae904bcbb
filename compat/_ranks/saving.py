"""Saving a Keras model on several ranks: rank 0 alone writes, and it writes atomically."""

import contextlib
import inspect
import os
import shutil
import tempfile
import types

from .ranked_method import RankedMethod

# Names of the methods that write files. Other ranks do nothing there.
SAVING = ("save", "save_weights", "export")


def install(model, engine):
    """Have the methods of this model that save do so on rank 0 alone."""
    for method in SAVING:
        if hasattr(type(model), method) and RankedSave.named(method).of(model) is None:
            RankedSave.named(method)(engine).install(model)


def never_save(model, place):
    """Have this model's saving methods do nothing: another process of the job saves.

    Arguments:
        place: one that is not rank 0's.
    """
    install(model, types.SimpleNamespace(place=place))


class RankedSave(RankedMethod):
    """A method that saves, on rank 0 alone, and atomically."""

    @classmethod
    def named(cls, method):
        return _SAVING[method]

    def __call__(self, model, *args, **kwargs):
        if self.engine.place.rank:
            return None
        save = self.plain(model)
        bound = inspect.signature(save).bind(*args, **kwargs)
        place = next(iter(bound.arguments))  # the first parameter, whatever its name
        path = bound.arguments[place]
        replaces = bound.arguments.get("overwrite", True)  # else Keras asks what to do
        if not isinstance(path, (str, os.PathLike)) or not replaces and os.path.exists(path):
            return save(*bound.args, **bound.kwargs)
        with atomic_write(os.fspath(path)) as aside:
            bound.arguments[place] = aside
            return save(*bound.args, **bound.kwargs)


_SAVING = {name: type("RankedSave", (RankedSave,), {"method": name}) for name in SAVING}


@contextlib.contextmanager
def atomic_write(path):
    """Yield a temporary path to write to; what was written there replaces ``path`` at the end.

    A rank may be killed at any time: at ``path`` is then the old file or the new one.
    """
    folder, name = os.path.split(os.path.abspath(path))
    aside = tempfile.mkdtemp(prefix=".{}.".format(name), dir=folder)
    try:
        yield os.path.join(aside, name)
        for written in sorted(os.listdir(aside)):
            target = os.path.join(folder, written)
            if os.path.isdir(target) and not os.path.islink(target):
                os.rename(target, os.path.join(aside, written + ".old"))
            os.replace(os.path.join(aside, written), target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
