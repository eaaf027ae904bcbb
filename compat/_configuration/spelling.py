"""Suggestions for misspelled names. Loaded only where a name is refused."""

import difflib
import re
from typing import Any, Iterable, Optional

# Other libraries' names for gpus=, without underscores, which are no misspellings of it.
_GPUS = "numgpus device devices deviceids numdevices visibledevices visibledevicelist".split()


def plain(name: str) -> str:
    """Return a name in lower case, without underscores and hyphens."""
    return name.lower().replace("_", "").replace("-", "")


def closest(name: str, names: "Iterable[str]") -> "Optional[str]":
    """Return the name that another one is a misspelling of, or None."""
    by_plain = {plain(candidate): candidate for candidate in names}
    matches = difflib.get_close_matches(plain(name), list(by_plain), 1, 0.75)
    return by_plain[matches[0]] if matches else None


def backend(name: str, names: "Iterable[str]") -> "Optional[str]":
    """Return the backend that a short name or a misspelling means, or None."""
    letters = re.compile(".*".join(map(re.escape, plain(name))))
    longer = sorted(filter(letters.match, names), key=len)
    is_one = longer and all(candidate.startswith(longer[0]) for candidate in longer)
    return longer[0] if is_one else closest(name, names)


def meant(name: str, value: "Any", names: "Iterable[str]") -> "Optional[str]":
    """Return the argument to write in place of ``name=value`` in ``configure_gpu()``, or None.

    Arguments:
        name: an argument that it does not have.
        value: its value.
        names: its arguments, and the options of backends.
    """
    short = plain(name)
    if "grow" in short:
        return 'memory="grow"'
    if "fraction" in short:
        right = isinstance(value, float) and 0 < value <= 1
        return f"memory={value if right else 0.5}"
    if "memory" in short and type(value) is int:
        return f'memory="{value}MiB"'  # in which others count it
    right_name = "gpus" if short in _GPUS else closest(name, names)
    if right_name is None:
        return None
    text = repr(value)
    return "{}={}".format(right_name, text if len(text) <= 40 and "\n" not in text else "...")
