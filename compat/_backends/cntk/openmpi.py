"""Diagnosis of missing libraries of OpenMPI, with which CNTK's are linked."""

import contextlib
import os
import sys

from ... import errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Mapping, Optional

# Names in OpenMPI 1.10 of the libraries with which CNTK's are linked, and those of today.
_LIBRARIES = {"libmpi.so.12": "libmpi.so.40", "libmpi_cxx.so.1": "libmpi_cxx.so.40"}


def without_openmpi(
    environ: "Mapping[str, str]",
) -> "Optional[errors.BrokenInstallError]":
    """Return an error if libraries of OpenMPI are missing with which CNTK's are linked, or None.

    Links to OpenMPI 4's files in CNTK's folder serve as well.
    """
    import importlib.util  # here for start-up time

    spec = importlib.util.find_spec("cntk")
    if not sys.platform.startswith("linux") or spec is None:
        return None
    of_cntk = os.path.join(list(spec.submodule_search_locations or ())[0], "libs")
    folders = [of_cntk] + environ.get("LD_LIBRARY_PATH", "").split(":")
    cache = b""
    with contextlib.suppress(OSError), open("/etc/ld.so.cache", "rb") as file:
        cache = file.read()  # with the names of libraries in the system's folders
    missing = [
        name
        for name in sorted(_LIBRARIES)
        if name.encode() + b"\0" not in cache
        and not any(os.path.exists(os.path.join(folder, name)) for folder in folders)
    ]
    if not missing:
        return None
    links = [
        f"ln -s $(ldconfig -p | grep -o '/.*/{_LIBRARIES[name]}') {of_cntk}/{name}"
        for name in missing
    ]
    return errors.BrokenInstallError(
        "cntk is installed, but importing it fails without OpenMPI's {}. On Debian and Ubuntu: "
        "apt-get install libopenmpi3 && {}".format(" and ".join(missing), " && ".join(links))
    )
