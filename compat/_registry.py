"""The directory ``_backends`` is the registry: no second list anywhere."""


def names():
    """The names of all backends, sorted: those of the files in ``compat/_backends``."""
    import pkgutil

    from . import _backends

    return sorted(
        module[1]
        for module in pkgutil.iter_modules(_backends.__path__)
        if not module[1].startswith("_")
    )


def load(name):
    """The backend of that name. Imports its file, never its framework."""
    import importlib

    return importlib.import_module("compat._backends." + name).backend


def backends():
    """All backends, in order of their names."""
    return [load(name) for name in names()]
