"""Which backend this process uses, and why. Imports no framework."""

import os
import sys
from typing import Any, Dict, List, Mapping, Optional, Sequence, Tuple

from .. import errors
from .._runtime.safe_files import plain
from . import packages, pip_extras, registry

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..backend import Backend

# Default backend of each Keras.
_DEFAULTS = {"keras-mxnet": "mxnet", "keras": "tensorflow"}


def choose(
    requested: "Optional[str]" = None,
    environ: "Mapping[str, str]" = os.environ,
    typed: bool = False,
) -> "Tuple[Backend, str]":
    """Choose the backend.

    In this order: the one requested; that of the imported Keras; the one that the installed Keras
    would choose (by ``KERAS_BACKEND``, keras.json, where that Keras reads them, or its default);
    the one framework that is installed, also where that Keras' default is another one.

    Arguments:
        requested: a backend's or a framework's name; None: choose one.
        environ: the environment variables of the script.
        typed: whether errors are for a command's ``--backend``, not for ``backend=``.

    Returns:
        The backend, and the reason for it as a phrase.
    """
    if requested is not None:
        return _named(requested, _request(requested, typed), typed)
    keras, reason, is_chosen = _keras_choice(environ)
    if not is_chosen:
        fitting = installed() or installed(registry.plugins())
        if len(fitting) == 1 and keras not in (fitting[0].name, fitting[0].framework):
            return fitting[0], "the only backend installed"
        if keras is None and not fitting:
            raise _no_backend(environ)
        if keras is None:
            remedy = "Pass backend=..., set KERAS_BACKEND, or import keras first."
            if typed:
                such = fitting[0].name
                remedy = f"Pass --backend, such as --backend {such}, or set KERAS_BACKEND."
            names = ", ".join(backend.name for backend in fitting)
            raise errors.AmbiguousBackendError(
                "Several backends are installed and nothing says which one this script uses: "
                f"{names}. {remedy}"
            )
    assert keras is not None  # or one of the errors above was raised
    return _named(keras, reason, typed)


def _no_backend(environ: "Mapping[str, str]") -> "errors.NotInstalledError":
    """Return the error where no backend is installed.

    Its example is the extra of the framework that KERAS_BACKEND names, where one installs here.
    """
    backends = registry.backends()
    frameworks = {backend.framework for backend in backends}
    extras = {
        framework: extra_of([b for b in backends if b.framework == framework])
        for framework in frameworks
    }
    fitting = sorted(filter(pip_extras.installs, extras.values()))
    if not fitting:
        return errors.NotInstalledError(
            "No backend is installed in this Python, and no extra of keras-gpu-compat installs on "
            "Python {}.{}. Use another Python, or install a framework and a Keras that runs on it "
            "yourself.".format(*pip_extras.here())
        )
    wanted = [extras.get(environ.get("KERAS_BACKEND", "")), extras.get("tensorflow")] + fitting
    example = next(extra for extra in wanted if extra in fitting)
    return errors.NotInstalledError(
        "No backend is installed in this Python. Install one of {} with its pins, for example: "
        'pip install "keras-gpu-compat[{}]".'.format(", ".join(fitting), example)
    )


def extra_of(backends: "Sequence[Backend]") -> str:
    """Return the extra of one of these backends that suits the Keras installed."""
    _, version = installed_keras()
    return pip_extras.of(backends, packages.release(version) if version else (None, None))


def installed(backends: "Optional[Sequence[Backend]]" = None) -> "List[Backend]":
    """Return the backends whose framework is installed, in a version that they accept.

    Arguments:
        backends: to choose from; None: all but plug-ins.
    """
    backends = registry.backends() if backends is None else backends
    versions = [(backend, installed_version(backend)) for backend in backends]
    return [backend for backend, version in versions if version and backend.accepts(version)]


def native_to(model: "Any") -> "Optional[Backend]":
    """Return the installed backend whose framework has made a model without Keras, or None.

    Plug-ins are queried where no other backend recognises the model.
    """
    for backends in (registry.backends, registry.plugins):
        for backend in installed(backends()):
            if backend.is_native(model):
                return backend
    return None


def foreseen(
    requested: "Optional[str]", environ: "Mapping[str, str]", python: str
) -> "Tuple[Backend, str]":
    """Return the backend of a script that another interpreter is to run, from its name alone.

    Returns:
        The backend, and the reason for it as a phrase.
    """
    if requested is not None:
        reason = _request(requested, True)
        return _candidates(requested, reason)[0], reason
    named = environ.get("KERAS_BACKEND")
    if not named:
        raise errors.AmbiguousBackendError(
            f"compat does not look into {python}, and nothing says which backend the script uses "
            "there. Pass --backend, such as --backend=theano, or set KERAS_BACKEND."
        )
    reason = f"KERAS_BACKEND={named}"
    return _candidates(named, reason)[0], reason


def _request(name: str, typed: bool) -> str:
    return f"--backend {name} was asked for" if typed else f"backend={name!r} was asked for"


def _candidates(name: str, reason: str) -> "List[Backend]":
    """Return the backends of that name, or of the framework of that name."""
    backends = registry.backends()
    candidates = (
        [b for b in backends if b.name == name]
        or [b for b in backends if b.framework == name]
        or list(filter(None, [registry.plugin(name)]))
        # KERAS_BACKEND and ``compat run`` name the framework.
        or [b for b in registry.plugins() if b.framework == name]
    )
    if not candidates:
        from . import spelling  # for start-up time: it loads difflib

        known_names = {b.name for b in backends} | {b.framework for b in backends}
        known_names.update(registry.plugin_names())
        meant = spelling.backend(name, known_names) if isinstance(name, str) else None
        meant = f" Did you mean {meant!r}?" if meant else ""
        raise errors.InvalidArgumentError(
            f"{reason}, but compat does not know that backend.{meant} Known backends: "
            f"{', '.join(sorted(known_names))}."
        )
    return candidates


def _named(name: str, reason: str, typed: bool) -> "Tuple[Backend, str]":
    """Return the backend of that name, or the one for the installed version of that framework."""
    candidates = _candidates(name, reason)
    for backend in installed(candidates):
        return backend, reason
    backend = candidates[0]  # all of one framework
    version = installed_version(backend)
    if version is not None:
        known_names = ", ".join(b.name for b in registry.backends())
        raise errors.UnsupportedError(
            f"{backend.framework} {version} is installed, which no backend of compat accepts. "
            f"Known backends: {known_names}."
        )
    extra, use = extra_of(candidates), "Use --backend {}" if typed else "Use backend={!r}"
    others = [use.format(b.name) for b in installed() if extra] or ["Choose another backend"]
    message = f"{backend.framework} is not installed, but {reason}. {others[0]}, or "
    if not extra:  # a third party's
        message += f"install it: pip install {backend.distributions[0]}."
    elif pip_extras.installs(extra):
        message += f'install it: pip install "keras-gpu-compat[{extra}]".'
    else:
        here = pip_extras.spelled(pip_extras.here())
        message += (
            f"run the script on {pip_extras.pythons(extra)}, where pip install "
            f'"keras-gpu-compat[{extra}]" brings it: this is Python {here}.'
        )
    raise errors.NotInstalledError(message)


def keras_backend(environ: "Mapping[str, str]") -> "Optional[str]":
    """Return the backend that the standalone Keras runs on or will run on; None without Keras."""
    return _keras_choice(environ)[0]


def _keras_running() -> "Optional[str]":
    """Return the backend of the standalone Keras, if that is imported completely, or None.

    ``sys.modules`` does not show it: jax is loaded under every Keras 3 backend.
    """
    keras = sys.modules.get("keras")
    if getattr(getattr(keras, "__spec__", None), "_initializing", False):
        return None
    name = getattr(getattr(keras, "backend", None), "backend", None)
    return name() if callable(name) else None


def installed_keras() -> "Tuple[Optional[str], str]":
    """Return name and version of the standalone Keras that is installed, or (None, "")."""
    for name in _DEFAULTS:
        version = packages.version(name)
        if version:
            return name, version
    return None, ""


def _tensorflow_only(keras: "Optional[str]", version: str) -> bool:
    """Return whether this Keras runs on TensorFlow only: 2.4 to 2.15, without file or variable."""
    return keras == "keras" and (2, 4) <= packages.release(version) < (3,)


def _keras_choice(
    environ: "Mapping[str, str]",
) -> "Tuple[Optional[str], str, bool]":
    """Return the standalone Keras' backend, the reason for it, and whether a user has chosen it.

    A file that names the default is not a choice: Keras writes it by itself, whatever it runs on.
    (None, "", False) without Keras.
    """
    running, named = _keras_running(), environ.get("KERAS_BACKEND")
    if running:
        return running, f"the imported keras runs on {running}", True
    keras, version = installed_keras()
    if keras is None:
        return None, "", False
    if _tensorflow_only(keras, version):
        return "tensorflow", f"{keras} {version} runs on TensorFlow only", True
    if named:
        return named, f"KERAS_BACKEND={named}", True
    path, default = keras_json(environ), _DEFAULTS[keras]
    named = read_keras_json(path).get("backend")
    if named:
        return named, f"{path} names it", named != default
    return default, f"it is the default of {keras} {version}", False


def keras_elsewhere(backend: "Backend") -> "List[str]":
    """Return a warning, in a list, where the imported Keras runs on another framework."""
    running = _keras_running()
    if running in (None, backend.name, backend.framework):
        return []
    return [
        f"keras is imported and runs on {running}, but {backend.name} was configured: models of "
        "this keras will not use it. Call configure_gpu() before keras is imported."
        + errors.in_notebook()
    ]


def keras_variable(backend: "Backend", environ: "Mapping[str, str]") -> "Dict[str, str]":
    """Return ``KERAS_BACKEND`` for this backend, where Keras would choose another one; else {}."""
    keras, version = installed_keras()
    if keras is None or _keras_running() or _tensorflow_only(keras, version):
        return {}
    try:
        choice = keras_backend(environ)
    except errors.ConfigurationFileError:  # Keras ignores the file
        choice = _DEFAULTS[keras]
    if choice in (backend.name, backend.framework):
        return {}
    return {"KERAS_BACKEND": backend.framework}


def problems(environ: "Mapping[str, str]") -> "List[str]":
    """Return problems of the installed Keras packages, whatever the backend, a sentence each."""
    keras, version = installed_keras()
    problems = []
    if keras == "keras-mxnet" and packages.version("keras"):
        problems.append(
            "keras and keras-mxnet are both installed; they overwrite each other's files. "
            "Uninstall both, then install one: pip uninstall -y keras keras-mxnet && pip install "
            f"keras-mxnet=={version}"
        )
    requested = environ.get("KERAS_BACKEND")
    if requested not in (None, "", "tensorflow") and keras and _tensorflow_only(keras, version):
        problems.append(
            f"KERAS_BACKEND={requested} is ignored: {keras} {version} runs on TensorFlow only. "
            "Install another Keras, or drop the variable: unset KERAS_BACKEND"
        )
    return problems


def keras_json(environ: "Mapping[str, str]") -> str:
    """Return where Keras looks for its configuration file (``keras/backend/__init__.py``)."""
    keras, version = installed_keras()
    home = environ.get("KERAS_HOME")
    if home is None or (keras == "keras" and packages.release(version) < (2, 2)):
        parent = os.path.expanduser("~")
        home = os.path.join(parent if os.access(parent, os.W_OK) else "/tmp", ".keras")
    return os.path.expanduser(os.path.join(home, "keras.json"))


def read_keras_json(path: str) -> "Dict[str, Any]":
    """Return the settings in Keras' configuration file; none where there is no such file.

    Raises:
        ConfigurationFileError: the file exists, but Keras cannot read it.
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
        old, new = map(shlex.quote, (path, path + ".wrong"))
        raise errors.ConfigurationFileError(
            f"{path} cannot be read: {error}. Keras would ignore it silently. Correct it, set "
            f"KERAS_BACKEND, or move it away: mv {old} {new}"
        ) from error
    return content


def installed_version(backend: "Backend") -> "Optional[str]":
    """Return the version of a backend's framework, imported or installed, or None.

    Imports nothing.
    """
    version = getattr(sys.modules.get(backend.framework), "__version__", None)
    return version if isinstance(version, str) else packages.version(*backend.distributions)
