"""On which Pythons each backend's extras are tested: the rows of this project's tox.ini.

tox.ini is not installed with the package; tests/test_matrix.py compares the two.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Tuple

    Python = Tuple[int, int]

# By backend, the extra to take first in front.
ROWS: "Dict[str, Dict[str, Tuple[Python, ...]]]" = {
    "tensorflow2": {
        "tensorflow": ((3, 8), (3, 11)),
        "tensorflow23": ((3, 7),),
        "tensorflow20": ((3, 7),),
        "keras3": ((3, 11), (3, 13)),
        "tf_keras": ((3, 11),),
    },
    "tensorflow1": {
        "tensorflow1": ((3, 7),),
        "tensorflow112": ((3, 6),),
        "tensorflow14": ((3, 6),),
    },
    "jax": {"jax": ((3, 11),)},
    "torch": {"torch": ((3, 11),)},
    "mxnet": {
        "mxnet": ((3, 7), (3, 8)),
        "mxnet16": ((3, 6),),
        "mxnet15": ((3, 6),),
    },
    "theano": {"theano": ((3, 6), (3, 7), (3, 8))},
    "cntk": {"cntk": ((3, 6),)},
}

PYTHONS = {extra: pythons for extras in ROWS.values() for extra, pythons in extras.items()}


def backend(extra: str) -> str:
    """The name of the backend that an extra brings."""
    return next(name for name, extras in ROWS.items() if extra in extras)


def phrase(extra: str) -> str:
    """The Pythons on which an extra is tested: "Python 3.6, 3.7 and 3.8"."""
    *others, last = (spelled(python) for python in PYTHONS[extra])
    return "Python " + (", ".join(others) + " and " if others else "") + last


def spelled(python: "Python") -> str:
    return "{}.{}".format(*python)
