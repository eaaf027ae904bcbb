"""Unpack the OpenMPI library that CNTK needs into a folder, without installing it.

    python tests/openmpi.py FOLDER

FOLDER then goes into LD_LIBRARY_PATH. The packages are Debian's; nobody need be root. What is
there already stays. Fails, with the command to type, where apt-get cannot get them.
"""

import glob
import os
import subprocess
import sys
import tempfile

# CNTK 2.7 is linked with OpenMPI 1.10; version 4 has all that it calls.
NAMES = {"libmpi.so.12": "libmpi.so.40", "libmpi_cxx.so.1": "libmpi_cxx.so.40"}


def apt_get(folder, *arguments):
    """Run apt-get with a cache, and lists if need be, of its own."""
    own = ["-o", "Dir::Cache=" + folder, "-o", "Debug::NoLocking=1"]
    return subprocess.call(["apt-get", "--quiet=2"] + own + list(arguments))


def download(folder):
    os.makedirs(os.path.join(folder, "archives", "partial"))
    lists = os.path.join(folder, "lists")
    os.makedirs(os.path.join(lists, "partial"))
    package = ["install", "--yes", "--download-only", "--no-install-recommends", "--reinstall"]
    package += ["libopenmpi3"]
    if apt_get(folder, *package) == 0:
        return True
    new = ["-o", "Dir::State::lists=" + lists]  # this machine has no lists yet
    return apt_get(folder, *(new + ["update"])) == 0 and apt_get(folder, *(new + package)) == 0


def main(target):
    if os.path.exists(os.path.join(target, "libmpi.so.12")):
        return 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = download(folder)
        except OSError as error:
            done = error
        if done is not True:
            print("apt-get did not get libopenmpi3, which CNTK needs: {}".format(done))
            print("Install it: apt-get install libopenmpi3")
            return 1
        root = os.path.join(folder, "root")
        for package in glob.glob(os.path.join(folder, "archives", "*.deb")):
            subprocess.check_call(["dpkg-deb", "--extract", package, root])
        os.makedirs(target, exist_ok=True)
        for library in glob.glob(os.path.join(root, "usr", "lib", "*", "*.so.*")):
            os.rename(library, os.path.join(target, os.path.basename(library)))
    for name, there in NAMES.items():
        os.symlink(there, os.path.join(target, name))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
