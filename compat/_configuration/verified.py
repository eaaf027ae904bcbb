"""On which Pythons each backend's extras are tested."""

from typing import Dict, Tuple

from .pip_extras import TABLE

Python = Tuple[int, int]

# By backend, the extra to take first in front.
ROWS: Dict[str, Dict[str, Tuple[Python, ...]]] = {}
for _extra, (_backend, _, _pythons) in TABLE.items():
    ROWS.setdefault(_backend, {})[_extra] = _pythons
PYTHONS = {extra: pythons for extra, (_, _, pythons) in TABLE.items()}


def backend(extra: str) -> str:
    """The name of the backend that an extra brings."""
    return TABLE[extra][0]


def phrase(extra: str) -> str:
    """The Pythons on which an extra is tested: "Python 3.6, 3.7 and 3.8"."""
    *others, last = (spelled(python) for python in PYTHONS[extra])
    return "Python " + (", ".join(others) + " and " if others else "") + last


def spelled(python: Python) -> str:
    return "{}.{}".format(*python)
