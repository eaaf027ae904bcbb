"""Which backends there are: the files in ``_backends``, and those of third parties.

The directory is the registry of what compat brings along: no second list anywhere. A third
party hands an instance to ``register()``, or names one in its package's entry points, in the
group ``keras_gpu_compat.backends``; those are looked at only when nothing else has the name,
so that a broken one troubles nobody who does not ask for it.
"""

import sys

from . import errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Optional

    from .backend import Backend

ENTRY_POINTS = "keras_gpu_compat.backends"

_registered = {}  # type: dict


def names():
    """The names of the backends that compat brings along, sorted: those of their files."""
    import pkgutil

    from . import _backends

    return sorted(
        module[1]
        for module in pkgutil.iter_modules(_backends.__path__)
        if not module[1].startswith("_")
    )


def load(name):
    """The backend of that file. Imports the file, never its framework."""
    import importlib

    return importlib.import_module("compat._backends." + name).backend


def backends():
    """All backends, in order of their names, then those that were registered."""
    return [load(name) for name in names()] + list(_registered.values())


def register(backend: "Backend") -> "Backend":
    """Make a backend of your own known to this process.

    A package does without this call: it names the instance in its entry points, in the group
    ``keras_gpu_compat.backends``, under the backend's name.

    Arguments:
        backend: an instance of a subclass of ``compat.Backend``, with its ``name``,
            ``framework`` and ``distributions`` set.

    Returns:
        ``backend``. The same name again replaces an earlier registration.

    Raises:
        InvalidArgumentError: it is no instance of ``Backend``, lacks one of these, or has the
            name of a backend that compat brings along (a ``ValueError``).
    """
    problem = _problem(backend)
    if problem:
        raise errors.invalid_backend(backend, problem)
    _registered[backend.name] = backend
    return backend


def _problem(backend):
    """Why this object cannot be registered, or None."""
    from .backend import Backend

    if not isinstance(backend, Backend):
        return "it is no instance of a subclass of compat.Backend"
    for attribute in ("name", "framework", "distributions"):
        if not getattr(backend, attribute):
            return "its {} is empty".format(attribute)
    if backend.name in names():
        return "compat has a backend of that name"
    return None


def plugin(name: str) -> "Optional[Backend]":
    """The backend that an installed package names so in its entry points, or None.

    Raises:
        BrokenInstallError: importing it fails, or it is no backend (an ``ImportError``).
    """
    import importlib

    for reference in _references(name):
        module, _, attribute = reference.partition(":")
        try:
            backend = getattr(importlib.import_module(module.strip()), attribute.strip())
        except Exception as error:  # whatever a package can do wrong
            raise errors.broken_plugin(name, reference, error) from error
        problem = _problem(backend)
        if problem:
            raise errors.broken_plugin(name, reference, problem)
        return backend
    return None


def _references(name):
    """``module:attribute`` of the entry points of that name, as installed packages list them.

    Python 3.6 and 3.7 have no importlib.metadata, and not always setuptools' pkg_resources.
    """
    import configparser
    import glob
    import os

    for folder in sys.path:
        pattern = os.path.join(glob.escape(folder), "*.*-info", "entry_points.txt")
        for path in sorted(glob.glob(pattern)):
            listed = configparser.RawConfigParser(delimiters="=", strict=False)
            listed.optionxform = str  # type: ignore  # names keep their case
            try:
                listed.read(path, encoding="utf-8")
            except (configparser.Error, UnicodeDecodeError):
                continue  # not ours
            if listed.has_option(ENTRY_POINTS, name):
                yield listed.get(ENTRY_POINTS, name)
