"""OpenMPI's libraries, which CNTK's own are linked with, and which may be missing."""

import contextlib
import os
import sys

from ... import errors

# OpenMPI 1.10's names of the libraries that CNTK's own are linked with, and today's files.
_LIBRARIES = {"libmpi.so.12": "libmpi.so.40", "libmpi_cxx.so.1": "libmpi_cxx.so.40"}


def without_openmpi(environ):
    """Return the error for CNTK's libraries without OpenMPI's that they are linked with, or None.

    In CNTK's own folder OpenMPI 4's files do for them.
    """
    import importlib.util  # here for start-up time

    spec = importlib.util.find_spec("cntk")
    if not sys.platform.startswith("linux") or spec is None:
        return None
    own = os.path.join(list(spec.submodule_search_locations)[0], "libs")
    folders = [own] + environ.get("LD_LIBRARY_PATH", "").split(":")
    known = b""
    with contextlib.suppress(OSError), open("/etc/ld.so.cache", "rb") as file:
        known = file.read()  # with the names of what the loader finds in the system's folders
    missing = [
        name
        for name in sorted(_LIBRARIES)
        if name.encode() + b"\0" not in known
        and not any(os.path.exists(os.path.join(folder, name)) for folder in folders)
    ]
    if not missing:
        return None
    links = [
        f"ln -s $(ldconfig -p | grep -o '/.*/{_LIBRARIES[name]}') {own}/{name}" for name in missing
    ]
    return errors.BrokenInstallError(
        "cntk is installed, but importing it fails without OpenMPI's {}. On Debian and Ubuntu: "
        "apt-get install libopenmpi3 && {}".format(" and ".join(missing), " && ".join(links))
    )
