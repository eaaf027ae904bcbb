"""Flags that Theano or Keras ignores."""

import importlib.util
import os
import re

from ... import errors
from ..._configuration import detection
from .flags import Flags, split_flags

_FLOATX = "float16", "float32", "float64", "16", "32", "64"


def problems(environ, version):
    """Yield a sentence for each flag that Theano or Keras ignores.

    Arguments:
        environ: the environment.
        version: Theano's version, or None.
    """
    try:
        for name, value in split_flags(environ.get("THEANO_FLAGS", "")):
            if value is None:
                yield f"THEANO_FLAGS: {name!r} has no value, Theano ignores it."
            elif name != name.strip() or value != value.strip():
                entry, name, value = f"{name}={value}", name.strip(), value.strip()
                yield (
                    f"THEANO_FLAGS: {entry!r} has a space beside its '=', Theano does not take it "
                    f"for {name}. Write {name}={value}."
                )
        flags, names = Flags(environ), defined()
        if names:
            yield from unknown(flags, names, version)
        path, floatx = detection.keras_json(environ), (flags.get("floatX") or "").strip()
        keras = detection.read_keras_json(path).get("floatx", "float32")
        if floatx in _FLOATX and floatx[-2:] != keras[-2:]:  # Theano knows "32", too
            yield (
                f"floatX={floatx}: Keras sets {keras} when it is imported, as {path} says or by "
                "default. Pass floatx= to configure_gpu(), which sets both."
            )
    except errors.CompatError as error:
        yield str(error)


def unknown(flags, names, version, only_misspelled=False):
    """Yield a sentence for each flag that is not one of Theano's.

    Arguments:
        flags: the ``Flags``.
        names: the names of Theano's flags.
        version: Theano's version.
        only_misspelled: whether to leave out those that are like none of Theano's.
    """
    from ..._configuration import spelling  # here for start-up time

    for name, value in flags.spelled_as(names):
        meant = None if name in names else spelling.closest(name, names)
        if meant or name not in names and not only_misspelled:
            hint = f" Did you mean {meant}?" if meant else ""
            yield f"{name}={value}: Theano {version} has no flag {name}, and ignores it.{hint}"


def defined():
    """Return the names of the installed Theano's flags; an empty set where they are unknown.

    They are read from the text of its ``configdefaults.py``, since importing that configures
    Theano and may initialize a GPU.
    """
    spec = importlib.util.find_spec("theano")
    if spec is None or not spec.origin:
        return set()
    path = os.path.join(os.path.dirname(spec.origin), "configdefaults.py")
    with open(path, encoding="utf-8") as file:
        return set(re.findall(r"AddConfigVar\(\s*['\"]([\w.]+)", file.read()))
