"""Which backend this process uses, and why. Imports no framework."""

import os
import sys

from . import _registry, errors


def choose(asked=None, environ=os.environ):
    """Choose the backend.

    In this order: what was asked; the Keras that is imported; what the installed Keras would
    choose (``KERAS_BACKEND``, then keras.json, then its default, where that Keras reads them);
    the one framework that is installed.

    Returns:
        The backend, and the reason for it as a phrase.
    """
    if asked is not None:
        return _named(asked, "backend={!r} was asked for".format(asked))
    running = _keras_running()
    if running:
        return _named(running, "the imported keras runs on {}".format(running))
    keras, reason = _keras_choice(environ)
    if keras:
        return _named(keras, reason)
    fitting = [backend for backend in _registry.backends() if installed_version(backend)]
    fitting = [b for b in fitting if b.accepts(installed_version(b))]
    if len(fitting) == 1:
        return fitting[0], "the only backend installed"
    if fitting:
        raise errors.ambiguous_backend([backend.name for backend in fitting])
    raise errors.no_backend(sorted({backend.extra for backend in _registry.backends()}))


def _named(name, reason):
    """The backend of that name, or the one for the installed version of that framework."""
    backends = _registry.backends()
    by_name = [b for b in backends if b.name == name]
    candidates = by_name or [b for b in backends if b.framework == name]
    if not candidates:
        known = {b.name for b in backends} | {b.framework for b in backends}
        raise errors.unknown_backend(name, sorted(known))
    for backend in candidates:
        version = installed_version(backend)
        if version is None:
            continue
        if backend.accepts(version):
            return backend, reason
    backend = candidates[0]
    if version is None:
        raise errors.not_installed(backend.framework, reason, backend.extra)
    raise errors.unsupported_version(backend.framework, version, [b.name for b in backends])


def _keras_running():
    """The backend of the standalone Keras that is imported whole, or None.

    ``sys.modules`` alone tells little: jax is loaded under every Keras 3 backend.
    """
    keras = sys.modules.get("keras")
    spec = getattr(keras, "__spec__", None)
    if keras is None or getattr(spec, "_initializing", False):
        return None
    name = getattr(getattr(keras, "backend", None), "backend", None)
    return name() if callable(name) else None


def _keras_choice(environ):
    """What the installed Keras would choose, and why; (None, None) where no Keras is installed.

    Keras 2.4 to 2.15 runs on TensorFlow only, and reads neither variable nor file.
    """
    mxnet_keras = distribution_version("keras-mxnet")
    version = mxnet_keras or distribution_version("keras")
    if version is None:
        return None, None
    title = "keras{} {}".format("-mxnet" if mxnet_keras else "", version)
    if not mxnet_keras and (2, 4) <= release(version) < (3,):
        return "tensorflow", "{} runs on TensorFlow only".format(title)
    if environ.get("KERAS_BACKEND"):
        return environ["KERAS_BACKEND"], "KERAS_BACKEND={}".format(environ["KERAS_BACKEND"])
    path = keras_json(environ)
    backend = _read_keras_json(path)
    if backend:
        return backend, "{} says so".format(path)
    return "mxnet" if mxnet_keras else "tensorflow", "the default of {}".format(title)


def keras_json(environ):
    """Where Keras looks for its configuration file."""
    home = environ.get("KERAS_HOME") or os.path.join(os.path.expanduser("~"), ".keras")
    return os.path.join(home, "keras.json")


def _read_keras_json(path):
    import json

    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise errors.keras_json_unreadable(path, error) from error
    return content.get("backend") if isinstance(content, dict) else None


def installed_version(backend):
    """The installed version of a backend's framework, or None. Imports nothing."""
    for distribution in backend.distributions:
        version = distribution_version(distribution)
        if version:
            return version
    return None


def distribution_version(name, path=None):
    """The version of an installed distribution, or None, from the folder names on ``sys.path``.

    Python 3.6 and 3.7 have no importlib.metadata, and pkg_resources takes longer than Keras'
    own choice of a backend.
    """
    wanted = _normalised(name)
    for folder in sys.path if path is None else path:
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in entries:
            stem, extension = os.path.splitext(entry)
            if extension in (".dist-info", ".egg-info") and stem.count("-"):
                project, version = stem.split("-")[:2]
                if _normalised(project) == wanted:
                    return version
    return None


def _normalised(name):
    return name.lower().replace("-", "_").replace(".", "_")


def release(version):
    """The first two numbers of a version, for comparison."""
    numbers = [part for part in version.split(".")[:2] if part.isdigit()]
    return tuple(int(part) for part in numbers)
