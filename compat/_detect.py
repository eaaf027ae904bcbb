"""Which backend this process uses, and why. Imports no framework."""

import os
import sys

from . import _extras, _registry, errors

# What each Keras runs on where nobody has chosen.
_DEFAULTS = {"keras-mxnet": "mxnet", "keras": "tensorflow"}


def choose(asked=None, environ=os.environ, typed=False):
    """Choose the backend.

    In this order: what was asked; the Keras that is imported; what the installed Keras would
    choose (``KERAS_BACKEND``, then keras.json, where that Keras reads them, then its default);
    the one framework that is installed, also where that Keras' default is another one.

    Arguments:
        typed: errors are for a command's ``--backend``, not for ``configure_gpu(backend=)``.

    Returns:
        The backend, and the reason for it as a phrase.
    """
    if asked is not None:
        return _named(asked, _asked(asked, typed), typed)
    keras, reason = _keras_told(environ)
    if keras:
        return _named(keras, reason, typed)
    keras, reason = _keras_default(environ)
    fitting = installed()
    if len(fitting) == 1 and keras not in (fitting[0].name, fitting[0].framework):
        return fitting[0], "the only backend installed"
    if keras:
        return _named(keras, reason, typed)
    if fitting:
        raise errors.ambiguous_backend([backend.name for backend in fitting], typed)
    raise _no_backend(environ)


def _no_backend(environ):
    """The error where none is installed; its example is what KERAS_BACKEND names, if it can be."""
    backends = _registry.backends()
    frameworks = sorted({backend.framework for backend in backends})
    extras = {each: extra_of([b for b in backends if b.framework == each]) for each in frameworks}
    fitting = sorted(filter(_extras.installs, extras.values()))
    wanted = [extras.get(environ.get("KERAS_BACKEND")), extras.get("tensorflow")] + fitting
    example = next((extra for extra in wanted if extra in fitting), None)
    return errors.no_backend(fitting, example, "{}.{}".format(*_extras.here()))


def extra_of(backends):
    """The extra that brings one of these backends, of one framework, for the Keras installed."""
    _, version = installed_keras()
    return _extras.of(backends, release(version) if version else (None, None))


def installed():
    """The backends whose framework is installed in a version that they accept."""
    found = [(backend, installed_version(backend)) for backend in _registry.backends()]
    return [backend for backend, version in found if version and backend.accepts(version)]


def foreseen(asked, environ, python):
    """The backend of a script that another interpreter is to run, where nothing is looked up.

    Returns:
        The backend, and the reason for it as a phrase.
    """
    name, reason = _variable_told(environ) if asked is None else (asked, _asked(asked, True))
    if name is None:
        raise errors.backend_of_python_unknown(python)
    return _candidates(name, reason)[0], reason


def _asked(name, typed):
    return ("--backend {} was asked for" if typed else "backend={!r} was asked for").format(name)


def _candidates(name, reason):
    """The backends of that name, or of the framework of that name."""
    backends = _registry.backends()
    by_name = [b for b in backends if b.name == name]
    candidates = by_name or [b for b in backends if b.framework == name]
    if not candidates:
        third_party = _registry.plugin(name)
        candidates = [third_party] if third_party else []
    if not candidates:
        known = {b.name for b in backends} | {b.framework for b in backends}
        raise errors.unknown_backend(reason, sorted(known))
    return candidates


def _named(name, reason, typed):
    """The backend of that name, or the one for the installed version of that framework."""
    candidates = _candidates(name, reason)
    for backend in candidates:
        version = installed_version(backend)
        if version and backend.accepts(version):
            return backend, reason
    backend = candidates[0]  # all of one framework
    version = installed_version(backend)
    if version is None:
        others = [b.name for b in installed()]
        extra = extra_of(candidates)
        if _extras.installs(extra):
            raise errors.not_installed(backend.framework, reason, extra, others, typed)
        place = _extras.pythons(extra), "{}.{}".format(*_extras.here())
        raise errors.not_installable(backend.framework, reason, extra, others, *place, typed=typed)
    known = [b.name for b in _registry.backends()]
    raise errors.unsupported_version(backend.framework, version, known)


def keras_backend(environ):
    """What the standalone Keras runs on or will run on, and why; (None, None) without a Keras."""
    told = _keras_told(environ)
    return told if told[0] else _keras_default(environ)


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


def installed_keras():
    """Name and version of the standalone Keras that is installed, or (None, None)."""
    for name in _DEFAULTS:
        version = distribution_version(name)
        if version:
            return name, version
    return None, None


def _tensorflow_only(keras, version):
    """Keras 2.4 to 2.15 runs on TensorFlow only, and reads neither variable nor file."""
    return keras == "keras" and (2, 4) <= release(version) < (3,)


def _keras_told(environ):
    """What the standalone Keras was told to run on, and how; (None, None) if nothing was said."""
    running = _keras_running()
    if running:
        return running, "the imported keras runs on {}".format(running)
    return _keras_settings(environ)


def _keras_settings(environ):
    """What the installed Keras reads, and where; (None, None) where nothing but its default is.

    Keras writes its default into its file by itself, whatever it runs on.
    """
    keras, version = installed_keras()
    if keras is None:
        return None, None
    if _tensorflow_only(keras, version):
        return "tensorflow", "{} {} runs on TensorFlow only".format(keras, version)
    named, reason = _variable_told(environ)
    if named is not None:
        return named, reason
    named, reason = _keras_default(environ)
    return (None, None) if named == _DEFAULTS[keras] else (named, reason)


def _variable_told(environ):
    """What ``KERAS_BACKEND`` names, and that it does; (None, None) where it is not set."""
    named = environ.get("KERAS_BACKEND")
    return (named, "KERAS_BACKEND={}".format(named)) if named else (None, None)


def _keras_default(environ):
    """What the installed Keras' file names, else its default; (None, None) without a Keras."""
    keras, version = installed_keras()
    if keras is None:
        return None, None
    path = keras_json(environ)
    named = read_keras_json(path).get("backend")
    if named:
        return named, "{} names it".format(path)
    return _DEFAULTS[keras], "it is the default of {} {}".format(keras, version)


def keras_elsewhere(backend):
    """A warning, in a list, where the imported Keras runs on another framework."""
    running = _keras_running()
    if running in (None, backend.name, backend.framework):
        return []
    return [errors.keras_elsewhere(running, backend.name)]


def keras_variable(backend, environ):
    """``KERAS_BACKEND`` for this backend, as variables, where Keras would choose another one."""
    keras, version = installed_keras()
    if keras is None or _keras_running() or _tensorflow_only(keras, version):
        return {}
    try:
        choice, _ = keras_backend(environ)
    except errors.ConfigurationFileError:  # Keras ignores the file
        choice = _DEFAULTS[keras]
    if choice in (backend.name, backend.framework):
        return {}
    return {"KERAS_BACKEND": backend.framework}


def problems(environ):
    """What is wrong with the Kerases installed, whatever the backend, a sentence each."""
    keras, version = installed_keras()
    found = []
    if keras == "keras-mxnet" and distribution_version("keras"):
        found.append(errors.two_kerases())
    asked = environ.get("KERAS_BACKEND")
    if asked not in (None, "", "tensorflow") and keras and _tensorflow_only(keras, version):
        found.append(errors.keras_backend_ignored(asked, "{} {}".format(keras, version)))
    return found


def keras_json(environ):
    """Where Keras looks for its configuration file (``keras/backend/__init__.py``)."""
    keras, version = installed_keras()
    home = environ.get("KERAS_HOME")
    if home is None or (keras == "keras" and release(version) < (2, 2)):  # came with 2.2.0
        parent = os.path.expanduser("~")
        home = os.path.join(parent if os.access(parent, os.W_OK) else "/tmp", ".keras")
    return os.path.expanduser(os.path.join(home, "keras.json"))


def read_keras_json(path):
    """The settings in that file; none where there is no such file.

    Raises:
        ConfigurationFileError: the file is there, but it is not what Keras writes.
    """
    import json

    from ._files import plain

    try:
        with open(path, encoding="utf-8", opener=plain) as file:
            content = json.load(file)
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise errors.keras_json_unreadable(path, error) from error
    return content


def installed_version(backend):
    """The version of a backend's framework, imported or installed, or None. Imports nothing."""
    version = getattr(sys.modules.get(backend.framework), "__version__", None)
    if isinstance(version, str):
        return version
    return distribution_version(*backend.distributions)


def distribution_version(*names):
    """The version of the first of these distributions that is installed, or None.

    Read from the names of the folders on ``sys.path``, which are gone through once.

    Python 3.6 and 3.7 have no importlib.metadata, and pkg_resources takes longer than Keras'
    own choice of a backend.
    """
    wanted = [_normalised(name) for name in names]
    found = {}  # type: dict
    for folder in sys.path:
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in entries:
            stem, extension = os.path.splitext(entry)
            if extension not in (".dist-info", ".egg-info"):
                continue
            project, _, rest = stem.partition("-")
            project = _normalised(project)
            if project in wanted and project not in found:
                # A development install has no version in the name of its folder.
                version = rest.partition("-")[0] or _metadata_version(os.path.join(folder, entry))
                found[project] = version
    return next((found[name] for name in wanted if found.get(name)), None)


def _metadata_version(folder):
    try:
        with open(os.path.join(folder, "PKG-INFO"), encoding="utf-8") as file:
            for line in file:
                if line.startswith("Version:"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return None


def _normalised(name):
    return name.lower().replace("-", "_").replace(".", "_")


def release(version):
    """The first two numbers of a version, for comparison: (2, 4) for "2.4rc0"."""
    import re

    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
