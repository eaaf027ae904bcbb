"""The engines that are installed, and for which frameworks, by their files: nothing is imported."""

import collections
import glob
import importlib.util
import os
import re
import shutil

from ..._configuration import packages

# The frameworks for which Horovod can be built, each with a library of its own.
_HOROVOD = "tensorflow", "mxnet", "torch"


class Installed(collections.namedtuple("Installed", "name version frameworks through launcher")):
    """An engine that is installed.

    Arguments:
        name: "Horovod".
        version: its own, or that of the framework that it is a part of.
        frameworks: those whose ranks it can connect, as built.
        through: the libraries that it is linked with: "libmpi.so.40"; empty: unknown.
        launcher: the path of the program that starts its ranks, where that is separate.
    """

    def __str__(self):
        through = ["through " + " or ".join(self.through)] if self.through else []
        frameworks = ["for " + (" or ".join(self.frameworks) or "no framework")]
        launcher = [self.launcher] if self.launcher else []
        return ", ".join([self.name + " " + self.version] + frameworks + through + launcher)


def engines():
    """Yield the engines that are installed, in order of their names."""
    for version, folder in _found("horovod"):
        frameworks = [name for name in _HOROVOD if _files(folder, name, "mpi_lib*.so")]
        yield Installed("Horovod", version, frameworks, [], None)
    for version, folder in _found("jax"):
        if _files(folder, "_src", "distributed.py"):
            yield Installed("jax.distributed", version, ["jax"], [], None)
    for version, folder in _found("mpi4py"):
        launcher = shutil.which("mpirun")
        yield Installed("mpi4py", version, ["theano", "cntk"], _linked_mpi(folder), launcher)
    for version, _ in _found("tensorflow", "tensorflow-cpu", "tensorflow-gpu"):
        if packages.release(version) >= (2, 4):  # which has all options of the cluster
            yield Installed("TF_CONFIG's cluster", version, ["tensorflow"], [], None)
    for version, _ in _found("torch"):
        yield Installed("torch.distributed", version, ["torch"], [], None)


def _found(module, *others):
    """Return the version and the folder of an installed module, in a list, which may be empty."""
    version = packages.version(module, *others)
    spec = importlib.util.find_spec(module) if version else None
    folders = list((spec and spec.submodule_search_locations) or [])
    return [(version, folder) for folder in folders[:1]]


def _files(folder, *parts):
    return glob.glob(os.path.join(glob.escape(folder), *parts))


def _linked_mpi(folder):
    libraries = set()
    for path in _files(folder, "MPI*.so"):
        with open(path, "rb") as file:
            libraries.update(re.findall(rb"libmpi\w*\.so[.\d]*", file.read()))
    return sorted(name.decode() for name in libraries)
