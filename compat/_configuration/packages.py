"""Which distributions are installed, and in which version, without importing them."""

import os
import sys
from typing import Dict, Optional, Tuple

from .discovery import content


def version(*names: str) -> "Optional[str]":
    """Return the version of the first of these distributions that is installed, or None.

    Read from the names of the folders on ``sys.path``, which are gone through once.

    Python 3.6 and 3.7 have no importlib.metadata, and pkg_resources takes longer than Keras'
    own choice of a backend.
    """
    found = _found()
    return next(filter(None, (found.get(normalised(name)) for name in names)), None)


def matching(pattern: str) -> "Dict[str, str]":
    """Return the versions of all whose names match, by name, sorted.

    Arguments:
        pattern: a regular expression for whole names, in lower case with ``-``.
    """
    import re

    found = {name.replace("_", "-"): number for name, number in sorted(_found().items()) if number}
    return {name: number for name, number in found.items() if re.fullmatch(pattern, name)}


def _found() -> "Dict[str, Optional[str]]":
    """Return the versions of all distributions, by their normalised names.

    None where nothing tells it.
    """
    found: "Dict[str, Optional[str]]" = {}
    for folder in sys.path:
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in entries:
            stem, extension = os.path.splitext(entry)
            project, _, rest = stem.partition("-")
            project = normalised(project)
            if extension in (".dist-info", ".egg-info") and project not in found:
                # A development install has no version in the name of its folder.
                number = rest.partition("-")[0] or _metadata_version(os.path.join(folder, entry))
                found[project] = number
    return found


def _metadata_version(folder: str) -> "Optional[str]":
    lines = content(os.path.join(folder, "PKG-INFO")).splitlines()
    found = [line.partition(":")[2].strip() for line in lines if line.startswith("Version:")]
    return found[0] if found else None


def normalised(name: str) -> str:
    return name.lower().replace("-", "_").replace(".", "_")


def release(version: str) -> "Tuple[int, ...]":
    """Return the first two numbers of a version, for comparison: (2, 4) for "2.4rc0"."""
    import re

    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
