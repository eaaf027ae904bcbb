"""What was meant by a name that compat does not know. Loaded only where one is refused."""

import difflib
import re
from typing import Any, Iterable, Optional

# Other libraries' names for gpus=, without underscores, which are no misspellings of it.
_GPUS = "numgpus device devices deviceids numdevices visibledevices visibledevicelist".split()


def plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def closest(name: str, known: "Iterable[str]") -> "Optional[str]":
    """Return the one of these names that this is a misspelling of, or None."""
    by_plain = {plain(each): each for each in known}
    found = difflib.get_close_matches(plain(name), list(by_plain), 1, 0.75)
    return by_plain[found[0]] if found else None


def backend(name: str, known: "Iterable[str]") -> "Optional[str]":
    """Return the one of these backends that is meant by a short name or a misspelling, or None."""
    letters = re.compile(".*".join(map(re.escape, plain(name))))
    longer = sorted(filter(letters.match, known), key=len)
    is_one = longer and all(each.startswith(longer[0]) for each in longer)
    return longer[0] if is_one else closest(name, known)


def meant(name: str, value: "Any", known: "Iterable[str]") -> "Optional[str]":
    """Return what to write in place of ``name=value`` in ``configure_gpu()``, or None.

    Arguments:
        known: its arguments, and the options of backends.
    """
    short = plain(name)
    if "grow" in short:
        return 'memory="grow"'
    if "fraction" in short:
        right = isinstance(value, float) and 0 < value <= 1
        return f"memory={value if right else 0.5}"
    if "memory" in short and type(value) is int:
        return f'memory="{value}MiB"'  # in which others count it
    right_name = "gpus" if short in _GPUS else closest(name, known)
    if right_name is None:
        return None
    text = repr(value)
    return "{}={}".format(right_name, text if len(text) <= 40 and "\n" not in text else "...")
