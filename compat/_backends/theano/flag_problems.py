"""What Theano will not take as it was meant: flags of its environment and its files.

A value that it refuses is Theano's own error when it is imported, which names those that it takes.
"""

import importlib.util
import os
import re

from ... import errors
from ..._configuration import detection
from . import theano_flags

_FLOATX = "float16", "float32", "float64", "16", "32", "64"


def found(environ, version):
    """A sentence for each flag that Theano, or Keras, ignores.

    Arguments:
        version: Theano's, or None.
    """
    try:
        yield from _ignored(theano_flags.split_flags(environ.get("THEANO_FLAGS", "")))
        said, known = theano_flags.Flags(environ), defined()
        if known:
            yield from unknown(said, known, version)
        yield from _overruled((said.get("floatX") or "").strip(), environ)
    except errors.CompatError as error:
        yield str(error)


def unknown(said, known, version, only_misspelled=False):
    """A sentence for each flag that is none of Theano's.

    Arguments:
        said: the flags, a ``theano_flags.Flags``.
        known: the names of Theano's.
        only_misspelled: leave out those that are like none of Theano's.
    """
    from ..._configuration import spelling  # here for start-up time

    for name, value in said.spelled_as(known):
        meant = None if name in known else spelling.closest(name, known)
        if meant or name not in known and not only_misspelled:
            hint = f" Did you mean {meant}?" if meant else ""
            yield f"{name}={value}: Theano {version} has no flag {name}, and ignores it.{hint}"


def defined():
    """The names of the installed Theano's flags; none where they are not known.

    Read from its ``configdefaults.py``, since importing that configures Theano and may bring up a
    GPU.
    """
    spec = importlib.util.find_spec("theano")
    if spec is None or not spec.origin:
        return set()
    path = os.path.join(os.path.dirname(spec.origin), "configdefaults.py")
    with open(path, encoding="utf-8") as file:
        return set(re.findall(r"AddConfigVar\(\s*['\"]([\w.]+)", file.read()))


def _ignored(entries):
    """Why Theano ignores entries of THEANO_FLAGS."""
    for name, value in entries:
        if value is None:
            yield f"THEANO_FLAGS: {name!r} has no value, Theano ignores it."
        elif name != name.strip() or value != value.strip():
            entry, name, value = f"{name}={value}", name.strip(), value.strip()
            yield (
                f"THEANO_FLAGS: {entry!r} has a space beside its '=', Theano does not take it for "
                f"{name}. Write {name}={value}."
            )


def _overruled(floatx, environ):
    """That Keras will not leave ``floatX`` as it is, if so."""
    path = detection.keras_json(environ)
    keras = detection.read_keras_json(path).get("floatx", "float32")
    if floatx in _FLOATX and floatx[-2:] != keras[-2:]:  # Theano knows "32", too
        yield (
            f"floatX={floatx}: Keras sets {keras} when it is imported, as {path} says or by "
            "default. Pass floatx= to configure_gpu(), which sets both."
        )
