"""Which backend this process uses, and why. Imports no framework."""

import os
import sys

from .. import errors
from .._runtime.safe_files import plain
from . import packages, pip_extras, registry

# What each Keras runs on by default.
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
    fitting = installed() or _installed(registry.plugins())
    if len(fitting) == 1 and keras not in (fitting[0].name, fitting[0].framework):
        return fitting[0], "the only backend installed"
    if keras:
        return _named(keras, reason, typed)
    if fitting:
        names = [backend.name for backend in fitting]
        if typed:
            remedy = "Pass --backend, such as --backend {}, or set KERAS_BACKEND.".format(names[0])
        else:
            remedy = "Pass backend=..., set KERAS_BACKEND, or import keras first."
        raise errors.AmbiguousBackendError(
            "Several backends are installed and nothing says which one this script uses: {}. "
            "{}".format(", ".join(names), remedy)
        )
    raise _no_backend(environ)


def _no_backend(environ):
    """The error where none is installed; its example is what KERAS_BACKEND names, if it can be."""
    backends = registry.backends()
    frameworks = sorted({backend.framework for backend in backends})
    extras = {each: extra_of([b for b in backends if b.framework == each]) for each in frameworks}
    fitting = sorted(filter(pip_extras.installs, extras.values()))
    wanted = [extras.get(environ.get("KERAS_BACKEND")), extras.get("tensorflow")] + fitting
    example = next((extra for extra in wanted if extra in fitting), None)
    return errors.no_backend(fitting, example, "{}.{}".format(*pip_extras.here()))


def extra_of(backends):
    """The extra that brings one of these backends, of one framework, for the Keras installed."""
    _, version = installed_keras()
    return pip_extras.of(backends, packages.release(version) if version else (None, None))


def installed():
    """The backends whose framework is installed in a version that they accept; no plug-ins."""
    return _installed(registry.backends())


def _installed(backends):
    found = [(backend, installed_version(backend)) for backend in backends]
    return [backend for backend, version in found if version and backend.accepts(version)]


def native_to(model):
    """The installed backend to whose framework's own kind a model belongs, or None.

    Plug-ins are asked where no other backend knows the model.
    """
    for backends in (registry.backends, registry.plugins):
        for backend in _installed(backends()):
            if backend.is_native(model):
                return backend
    return None


def foreseen(asked, environ, python):
    """The backend of a script that another interpreter is to run, where nothing is looked up.

    Returns:
        The backend, and the reason for it as a phrase.
    """
    name, reason = _variable_told(environ) if asked is None else (asked, _asked(asked, True))
    if name is None:
        raise errors.AmbiguousBackendError(
            "compat does not look into {}, and nothing says which backend the script uses "
            "there. Pass --backend, such as --backend=theano, or set KERAS_BACKEND.".format(python)
        )
    return _candidates(name, reason)[0], reason


def _asked(name, typed):
    return ("--backend {} was asked for" if typed else "backend={!r} was asked for").format(name)


def _candidates(name, reason):
    """The backends of that name, or of the framework of that name."""
    backends = registry.backends()
    candidates = [b for b in backends if b.name == name]
    candidates = candidates or [b for b in backends if b.framework == name]
    candidates = candidates or list(filter(None, [registry.plugin(name)]))
    # KERAS_BACKEND and ``compat run`` name the framework.
    candidates = candidates or [b for b in registry.plugins() if b.framework == name]
    if not candidates:
        from . import spelling  # for start-up time: it loads difflib

        known = {b.name for b in backends} | {b.framework for b in backends}
        known.update(registry.plugin_names())
        meant = spelling.backend(name, known) if isinstance(name, str) else None
        raise errors.InvalidArgumentError(
            "{}, but compat does not know that backend.{} Known backends: {}.".format(
                reason,
                " Did you mean {!r}?".format(meant) if meant else "",
                ", ".join(sorted(known)),
            )
        )
    return candidates


def _named(name, reason, typed):
    """The backend of that name, or the one for the installed version of that framework."""
    candidates = _candidates(name, reason)
    for backend in _installed(candidates):
        return backend, reason
    backend = candidates[0]  # all of one framework
    version = installed_version(backend)
    if version is not None:
        known = [b.name for b in registry.backends()]
        raise errors.UnsupportedError(
            "{} {} is installed, which no backend of compat accepts. Known backends: {}.".format(
                backend.framework, version, ", ".join(known)
            )
        )
    extra = extra_of(candidates)
    if not extra:  # a third party's
        raise errors.NotInstalledError(
            "{} is not installed, but {}. Choose another backend, or install it: pip install "
            "{}.".format(backend.framework, reason, backend.distributions[0])
        )
    use = "Use --backend {}" if typed else "Use backend={!r}"
    others = [use.format(b.name) for b in installed()] or ["Choose another backend"]
    if pip_extras.installs(extra):
        raise errors.NotInstalledError(
            "{} is not installed, but {}. {}, or install it: pip install "
            '"keras-gpu-compat[{}]".'.format(backend.framework, reason, others[0], extra)
        )
    here = "{}.{}".format(*pip_extras.here())
    raise errors.NotInstalledError(
        "{} is not installed, but {}. {}, or run the script on {}, where pip install "
        '"keras-gpu-compat[{}]" brings it: this is Python {}.'.format(
            backend.framework, reason, others[0], pip_extras.pythons(extra), extra, here
        )
    )


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
        version = packages.version(name)
        if version:
            return name, version
    return None, None


def _tensorflow_only(keras, version):
    """Keras 2.4 to 2.15 runs on TensorFlow only, and reads neither variable nor file."""
    return keras == "keras" and (2, 4) <= packages.release(version) < (3,)


def _keras_told(environ):
    """What the standalone Keras was told to run on, and how; (None, None) if nothing was said.

    Nothing is where its file names the default: Keras writes that by itself, whatever it runs on.
    """
    running = _keras_running()
    if running:
        return running, "the imported keras runs on {}".format(running)
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
    return [
        "keras is imported and runs on {}, but {} was configured: models of this keras will "
        "not use it. Call configure_gpu() before keras is imported.".format(running, backend.name)
        + errors.in_notebook()
    ]


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
    """Problems of the installed Keras packages, whatever the backend, a sentence each."""
    keras, version = installed_keras()
    found = []
    if keras == "keras-mxnet" and packages.version("keras"):
        found.append(
            "keras and keras-mxnet are both installed; they overwrite each other's files. "
            "Uninstall both, then install one: pip uninstall -y keras keras-mxnet && "
            "pip install keras-mxnet=={}".format(version)
        )
    asked = environ.get("KERAS_BACKEND")
    if asked not in (None, "", "tensorflow") and keras and _tensorflow_only(keras, version):
        found.append(
            "KERAS_BACKEND={} is ignored: {} {} runs on TensorFlow only. Install another Keras, or "
            "drop the variable: unset KERAS_BACKEND".format(asked, keras, version)
        )
    return found


def keras_json(environ):
    """Where Keras looks for its configuration file (``keras/backend/__init__.py``)."""
    keras, version = installed_keras()
    home = environ.get("KERAS_HOME")
    is_read = keras != "keras" or packages.release(version) >= (2, 2)
    if home is None or not is_read:
        parent = os.path.expanduser("~")
        home = os.path.join(parent if os.access(parent, os.W_OK) else "/tmp", ".keras")
    return os.path.expanduser(os.path.join(home, "keras.json"))


def read_keras_json(path):
    """The settings in that file; none where there is no such file.

    Raises:
        ConfigurationFileError: the file is there, but it is not what Keras writes.
    """
    import json
    import shlex

    try:
        with open(path, encoding="utf-8", opener=plain) as file:
            content = json.load(file)
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise errors.ConfigurationFileError(
            "{} cannot be read: {}. Keras would ignore it silently. Correct it, set "
            "KERAS_BACKEND, or move it away: mv {} {}".format(
                path, error, *[shlex.quote(each) for each in (path, path + ".wrong")]
            )
        ) from error
    return content


def installed_version(backend):
    """The version of a backend's framework, imported or installed, or None. Imports nothing."""
    version = getattr(sys.modules.get(backend.framework), "__version__", None)
    if isinstance(version, str):
        return version
    return packages.version(*backend.distributions)
