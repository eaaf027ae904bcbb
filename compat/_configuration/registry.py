"""Registry of backends: the folders in ``_backends``, and backends of third parties.

The directory lists compat's own backends: there is no second list. A third party passes an
instance to ``register()``, or names one in its package's entry points, in the group
``keras_gpu_compat.backends``: a plug-in. Entry points are read only where no other backend has the
name, the option or the model in question: they cost nothing otherwise, and a broken one matters
only to those who use it.
"""

import os
import sys

from .. import errors
from ..backend import Backend

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterable, Iterator, List, Optional, Tuple, Union

ENTRY_POINTS = "keras_gpu_compat.backends"

_registered: "Dict[str, Backend]" = {}


def names() -> "List[str]":
    """Return the names of compat's own backends, sorted: those of their folders."""
    import pkgutil

    folder = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "_backends")
    return sorted(
        module[1] for module in pkgutil.iter_modules([folder]) if not module[1].startswith("_")
    )


def load(name: str) -> "Backend":
    """Return the backend of a folder, importing its module, but not its framework."""
    import importlib

    backend: Backend = importlib.import_module("compat._backends." + name).backend
    return backend


def backends() -> "List[Backend]":
    """Return all backends but plug-ins, by name, then those that were registered."""
    return [load(name) for name in names()] + list(_registered.values())


def find(name: str) -> "Optional[Backend]":
    """Return the backend of a name, whether compat's own, registered or a plug-in, or None.

    Raises:
        BrokenInstallError: as ``plugin()``.
    """
    return next((backend for backend in backends() if backend.name == name), None) or plugin(name)


def options(wanted: "Iterable[str]") -> "List[str]":
    """Return the keyword options of ``configure_gpu()`` that backends know, sorted.

    Arguments:
        wanted: those that were passed. Plug-ins are loaded where other backends lack one.
    """
    options = {option for backend in backends() for option in backend.options}
    if not options.issuperset(wanted):
        options.update(option for backend in plugins() for option in backend.options)
    return sorted(options)


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
            name of one of compat's own backends (a ``ValueError``).
    """
    problem = _problem(backend)
    if problem:
        named = isinstance(backend, Backend) and backend.name
        name = repr(named) if named else errors.class_of(backend)
        raise errors.InvalidArgumentError(
            f"register() cannot take {name}: {problem}. Pass an instance of a subclass of "
            "compat.Backend that has a name of its own."
        )
    _registered[backend.name] = backend
    return backend


def _problem(backend: "Any") -> "Optional[str]":
    """Return why an object cannot be registered, a clause, or None."""
    if not isinstance(backend, Backend):
        return "it is no instance of a subclass of compat.Backend"
    required = "name", "framework", "distributions"
    empty = [attribute for attribute in required if not getattr(backend, attribute)]
    if empty:
        return "it has no {}".format(", ".join(empty))
    return "compat has a backend of that name" if backend.name in names() else None


def plugin(name: str) -> "Optional[Backend]":
    """Return the backend that an installed package has by that name in its entry points, or None.

    Raises:
        BrokenInstallError: importing it fails, or it is no backend (an ``ImportError``).
    """
    return next((_load_plugin(*entry) for entry in _entry_points() if entry[0] == name), None)


def plugins() -> "List[Backend]":
    """Return the backends of all entry points, without those that are broken or registered.

    Of several of one name the first counts, as for ``plugin()``.
    """
    backends_by_name: "Dict[str, Optional[Backend]]" = {}
    for name, reference in _entry_points():
        if name not in backends_by_name and name not in _registered:
            try:
                backends_by_name[name] = _load_plugin(name, reference)
            except errors.BrokenInstallError:
                backends_by_name[name] = None
    return [backend for backend in backends_by_name.values() if backend is not None]


def plugin_names() -> "List[str]":
    """Return the names in all entry points, importing nothing."""
    return [name for name, _ in _entry_points()]


def _load_plugin(name: str, reference: str) -> "Backend":
    import importlib

    module, _, attribute = reference.partition(":")
    cause = None
    try:
        backend: Backend = getattr(importlib.import_module(module.strip()), attribute.strip())
        problem: "Union[None, str, Exception]" = _problem(backend)
        if problem is None and backend.name != name:
            problem = f"its name is {backend.name!r}"
    except Exception as error:  # whatever a package can do wrong
        problem = cause = error
    if problem:
        raise errors.BrokenInstallError(
            f"An installed package names {reference} as the backend {name!r} in its entry points, "
            f"but that gives no backend: {problem}. Repair or uninstall that package."
        ) from cause
    return backend


def _entry_points() -> "Iterator[Tuple[str, str]]":
    """Yield name and ``module:attribute`` of each entry point of installed packages.

    Python 3.6 and 3.7 have no importlib.metadata, and not always setuptools' pkg_resources.
    """
    import configparser
    import contextlib
    import glob

    for folder in sys.path:
        pattern = os.path.join(glob.escape(folder), "*.*-info", "entry_points.txt")
        for path in sorted(glob.glob(pattern)):
            listed = configparser.RawConfigParser(delimiters="=", strict=False)
            listed.optionxform = str  # type: ignore[assignment,method-assign]  # names keep their case
            with contextlib.suppress(UnicodeDecodeError, configparser.Error):
                if listed.read(path, "utf-8") and listed.has_section(ENTRY_POINTS):
                    yield from listed.items(ENTRY_POINTS)
