"""The extras of keras-gpu-compat: their backends, their Pythons, and those that install here."""

import sys
from typing import Dict, List, Optional, Sequence, Tuple

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..backend import Backend

# By extra: the backend that it brings; the oldest and the newest Python on which it installs, as in
# docs/install.md; and those on which it is tested, the rows of this project's tox.ini, which is not
# installed with the package (tests/test_matrix.py compares them). Of those that bring the same
# backend the one to take first is in front. Extras that are not here are those of third parties.
TABLE = {
    "tensorflow": ("tensorflow2", ((3, 8), (3, 13)), ((3, 8), (3, 11))),
    "tensorflow23": ("tensorflow2", ((3, 6), (3, 7)), ((3, 7),)),
    "tensorflow20": ("tensorflow2", ((3, 6), (3, 7)), ((3, 7),)),
    "keras3": ("tensorflow2", ((3, 11), (3, 13)), ((3, 11), (3, 13))),
    "tf_keras": ("tensorflow2", ((3, 11), (3, 13)), ((3, 11),)),
    "tensorflow1": ("tensorflow1", ((3, 6), (3, 7)), ((3, 7),)),
    "tensorflow112": ("tensorflow1", ((3, 6), (3, 6)), ((3, 6),)),
    "tensorflow14": ("tensorflow1", ((3, 6), (3, 6)), ((3, 6),)),
    "jax": ("jax", ((3, 11), (3, 13)), ((3, 11),)),
    "torch": ("torch", ((3, 11), (3, 13)), ((3, 11),)),
    "mxnet": ("mxnet", ((3, 6), (3, 8)), ((3, 7), (3, 8))),
    "mxnet16": ("mxnet", ((3, 6), (3, 6)), ((3, 6),)),
    "mxnet15": ("mxnet", ((3, 6), (3, 6)), ((3, 6),)),
    "theano": ("theano", ((3, 6), (3, 8)), ((3, 6), (3, 7), (3, 8))),
    "cntk": ("cntk", ((3, 6), (3, 6)), ((3, 6),)),
}
BACKENDS = {extra: backend for extra, (backend, _, _) in TABLE.items()}
PYTHONS = {extra: pythons for extra, (_, pythons, _) in TABLE.items()}
TESTED = {extra: pythons for extra, (_, _, pythons) in TABLE.items()}
EXTRAS: "Dict[str, List[str]]" = {}  # of each backend
for _extra, _backend in BACKENDS.items():
    EXTRAS.setdefault(_backend, []).append(_extra)


def here() -> "Tuple[int, int]":
    """Return this Python's version, (3, 11)."""
    return sys.version_info[:2]


def installs(extra: str) -> bool:
    """Return whether pip finds all that an extra names on this Python."""
    oldest, newest = PYTHONS.get(extra, (here(), here()))
    return oldest <= here() <= newest


def pythons(extra: str) -> str:
    """Return the Pythons on which an extra installs, as a phrase."""
    texts = list(map(spelled, PYTHONS[extra]))
    word = " to " if PYTHONS[extra][1][1] - PYTHONS[extra][0][1] > 1 else " or "
    return "Python " + word.join(sorted(set(texts), key=texts.index))


def tested(extra: str) -> str:
    """Return the Pythons on which an extra is tested, as a phrase: "Python 3.6, 3.7 and 3.8"."""
    *others, last = map(spelled, TESTED[extra])
    return "Python " + (", ".join(others) + " and " if others else "") + last


def spelled(python: "Tuple[int, ...]") -> str:
    """Return a version of Python as a text: "3.11"."""
    return "{}.{}".format(*python)


def of(backends: "Sequence[Backend]", keras: "Tuple[Optional[int], ...]" = (None, None)) -> str:
    """Return the extra that brings one of several backends of one framework.

    It is one with the installed generation of Keras, if such an extra installs here; where none
    does, the extra to install on another Python.

    Arguments:
        backends: the backends.
        keras: the first two numbers of the version of Keras that is installed.
    """
    extras = [backend.extra for backend in backends]
    if set(extras) <= {"tensorflow", "tensorflow1"}:
        extras = _of_tensorflow("tensorflow1" in extras, "tensorflow" in extras, keras)
    return next(filter(installs, extras), extras[0])


def _of_tensorflow(one: bool, two: bool, keras: "Tuple[Optional[int], ...]") -> "List[str]":
    """Return the extras of TensorFlow 1, 2 or either, the best for that Keras first."""
    old = keras[0] == 2 and keras < (2, 4)
    return (
        ["keras3"] * (two and keras[0] == 3)
        + ["tensorflow14"] * (one and old and keras < (2, 1))
        + ["tensorflow112"] * (one and old and keras < (2, 2))
        + ["tensorflow1"] * (one and (old or not two or keras[0] is None))
        + ["tensorflow", "tensorflow23"] * two
    )
