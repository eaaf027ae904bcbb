"""Versions of installed distributions, found without importing them."""

import os
import sys
from typing import Dict, Optional, Tuple

from .discovery import content


def version(*names: str) -> "Optional[str]":
    """Return the version of the first of these distributions that is installed, or None.

    Read from the names of the folders on ``sys.path``.

    Python 3.6 and 3.7 have no importlib.metadata, and pkg_resources takes longer than Keras'
    own choice of a backend.
    """
    versions = _installed_versions()
    return next(filter(None, (versions.get(normalised(name)) for name in names)), None)


def matching(pattern: str) -> "Dict[str, str]":
    """Return the versions of all distributions whose names match, by name, sorted.

    Arguments:
        pattern: a regular expression for whole names, in lower case with ``-``.
    """
    import re

    versions = {
        name.replace("_", "-"): number
        for name, number in sorted(_installed_versions().items())
        if number
    }
    return {name: number for name, number in versions.items() if re.fullmatch(pattern, name)}


def _installed_versions() -> "Dict[str, Optional[str]]":
    """Return the versions of all distributions, by their normalised names; None where unknown."""
    versions: "Dict[str, Optional[str]]" = {}
    for folder in sys.path:
        try:
            entries = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in entries:
            stem, extension = os.path.splitext(entry)
            project, _, rest = stem.partition("-")
            project = normalised(project)
            if extension in (".dist-info", ".egg-info") and project not in versions:
                # A development install has no version in the name of its folder.
                number = rest.partition("-")[0] or _metadata_version(os.path.join(folder, entry))
                versions[project] = number
    return versions


def _metadata_version(folder: str) -> "Optional[str]":
    """Return the version in a distribution's metadata."""
    lines = content(os.path.join(folder, "PKG-INFO")).splitlines()
    versions = [line.partition(":")[2].strip() for line in lines if line.startswith("Version:")]
    return versions[0] if versions else None


def normalised(name: str) -> str:
    """Return a distribution's name as in its folder's name, in lower case."""
    return name.lower().replace("-", "_").replace(".", "_")


def release(version: str) -> "Tuple[int, ...]":
    """Return the first two numbers of a version, for comparison: (2, 4) for "2.4rc0"."""
    import re

    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])
