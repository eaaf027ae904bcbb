"""Saving of a model that is one of several ranks: rank 0 alone writes, and atomically."""

import contextlib
import inspect
import os
import shutil
import tempfile
import types

from .._runtime import patching, safe_files
from .ranked_methods import RankedMethod, install, named


def never_save(model, place):
    """Have this model's saving methods do nothing: another process of the job saves.

    Arguments:
        model: one of Keras.
        place: one that is not rank 0's.
    """
    install(model, types.SimpleNamespace(place=place), KINDS)


class RankedSave(RankedMethod):
    """A method that saves, on rank 0 alone, and atomically. Other ranks do nothing there."""

    def invoke(self, model, *args, **kwargs):
        """Save the model, on rank 0."""
        if self.engine.place.rank:
            return None
        save = self.plain(model)
        bound = inspect.signature(save).bind(*args, **kwargs)
        place = next(iter(bound.arguments))  # the first parameter, whatever its name
        path = bound.arguments[place]
        replaces = bound.arguments.get("overwrite", True)  # else Keras asks what to do
        if not isinstance(path, (str, os.PathLike)) or not replaces and os.path.exists(path):
            return save(*bound.args, **bound.kwargs)
        with atomic_write(os.fspath(path)) as bound.arguments[place]:
            return save(*bound.args, **bound.kwargs)


class RankedExport(RankedSave):
    """``export``, which newer versions of Keras have."""

    method = "export"
    is_optional = True  # before Keras 2.13


KINDS = named(RankedSave, "save", "save_weights") + (RankedExport,)


def written_by_rank_0(keras, place, callbacks):
    """Return the callbacks of this rank's ``fit()``: rank 0 alone has those of Keras that write.

    All ranks restore what a ``BackupAndRestore`` of rank 0 has backed up.
    """
    if not place.rank:
        return callbacks
    kinds = [getattr(keras.callbacks, name, None) for name in ("CSVLogger", "TensorBoard")]
    backup = getattr(keras.callbacks, "BackupAndRestore", None)

    class Restore(keras.callbacks.Callback):  # type: ignore  # any Keras
        def __init__(self, callback):
            super().__init__()
            self.callback = callback

        def on_train_begin(self, logs=None):
            self.callback.set_model(self.model)
            self.callback.on_train_begin(logs)

        def on_train_end(self, logs=None):
            with patching.replaced(self.callback, delete_checkpoint=False):
                self.callback.on_train_end(logs)

    return [
        Restore(callback) if type(callback) is backup else callback
        for callback in callbacks
        if type(callback) not in kinds
    ]


@contextlib.contextmanager
def atomic_write(path):
    """Yield a temporary path to write to; what was written there replaces ``path`` at the end.

    A rank may be killed at any time: then the old file or the new one is at ``path``. A file keeps
    its mode, a link stays, and a folder keeps what is not written anew. Where ``path`` cannot be
    replaced in this way, it is yielded itself, and written as Keras does it.
    """
    target = os.path.realpath(path)
    if not _is_replaceable(path, target):
        yield path
        return
    aside = tempfile.mkdtemp(prefix=".compat-", dir=os.path.dirname(target))
    folder, name = os.path.split(os.path.abspath(path))
    try:
        yield os.path.join(aside, name)
        for written in sorted(os.listdir(aside)):
            place = target if written == name else os.path.join(folder, written)
            _replace(os.path.join(aside, written), place)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


def _is_replaceable(path, target):
    if "://" in path or not os.access(os.path.dirname(target), os.W_OK):
        return False  # a URL, a folder that Keras makes or finds missing, or may not write to
    if os.path.isdir(target):
        stays = os.path.ismount(target) or os.path.samefile(target, os.curdir)
        return os.access(target, os.W_OK) and not stays
    return safe_files.is_replaced(path) and (not os.path.exists(path) or os.access(path, os.W_OK))


def _replace(new, old):
    """Put a file or folder in the place of another."""
    with contextlib.suppress(FileNotFoundError):
        safe_files.give(new, os.stat(old))
    if not (os.path.isdir(new) and os.path.isdir(old)):
        os.replace(new, old)
        return
    aside = tempfile.mkdtemp(prefix=".compat-", dir=os.path.dirname(old))
    os.rename(old, aside)
    try:
        os.rename(new, old)
    except OSError:
        os.rename(aside, old)
        raise
    for folder, folders, files in os.walk(aside):
        beside = os.path.join(old, os.path.relpath(folder, aside))
        for name in folders + files:
            if not os.path.lexists(os.path.join(beside, name)):
                os.rename(os.path.join(folder, name), os.path.join(beside, name))
    shutil.rmtree(aside, ignore_errors=True)
