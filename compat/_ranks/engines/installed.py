"""Which engines are installed, and for which frameworks: told by files, nothing is imported."""

import collections
import glob
import importlib.util
import os
import re
import shutil

from ..._configuration import packages

# What Horovod can be built for, each with a library of its own.
_HOROVOD = "tensorflow", "mxnet", "torch"


class Installed(collections.namedtuple("Installed", "name version frameworks through launcher")):
    """An engine that is installed.

    Arguments:
        name: "Horovod".
        version: its own, or that of the framework that it is a part of.
        frameworks: those whose ranks it can connect, as built.
        through: the libraries that it is linked with: "libmpi.so.40"; empty: not told.
        launcher: the path of the program that starts its ranks, where that is separate.
    """

    def __str__(self):
        through = ["through " + " or ".join(self.through)] if self.through else []
        frameworks = ["for " + (" or ".join(self.frameworks) or "no framework")]
        launcher = [self.launcher] if self.launcher else []
        return ", ".join([self.name + " " + self.version] + frameworks + through + launcher)


def engines():
    """All of them, in order of their names."""
    found = []
    for name, distributions, look in _ENGINES:
        version = packages.version(*distributions)
        spec = importlib.util.find_spec(distributions[0]) if version else None
        folders = list((spec and spec.submodule_search_locations) or [])
        parts = look(version, folders[0]) if folders else None
        if parts is not None:
            found.append(Installed(name, version, *parts))
    return found


# Each returns the frameworks, the libraries that it is linked with and the launcher; or None.


def _horovod(version, folder):
    return [name for name in _HOROVOD if glob.glob(_inside(folder, name, "mpi_lib*.so"))], [], None


def _jax(version, folder):
    exists = os.path.exists(os.path.join(folder, "_src", "distributed.py"))
    return (["jax"], [], None) if exists else None


def _mpi4py(version, folder):
    libraries = set()
    for path in glob.glob(_inside(folder, "MPI*.so")):
        with open(path, "rb") as file:
            libraries.update(re.findall(rb"libmpi\w*\.so[.\d]*", file.read()))
    names = sorted(name.decode() for name in libraries)
    return ["theano", "cntk"], names, shutil.which("mpirun")


def _tensorflow(version, folder):
    """The cluster of TF_CONFIG, in the versions that have its options."""
    return None if packages.release(version) < (2, 4) else (["tensorflow"], [], None)


def _torch(version, folder):
    return ["torch"], [], None


def _inside(folder, *parts):
    """A pattern for ``glob``."""
    return os.path.join(glob.escape(folder), *parts)


# Their names, their distributions, of which the first has the module's name, and what looks there.
_ENGINES = (
    ("Horovod", ["horovod"], _horovod),
    ("jax.distributed", ["jax"], _jax),
    ("mpi4py", ["mpi4py"], _mpi4py),
    ("TF_CONFIG's cluster", ["tensorflow", "tensorflow-cpu", "tensorflow-gpu"], _tensorflow),
    ("torch.distributed", ["torch"], _torch),
)  # type: tuple
