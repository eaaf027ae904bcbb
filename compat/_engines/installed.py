"""Which engines are installed, and for which frameworks: told by files, nothing is imported."""

import collections
import glob
import importlib.util
import os
import re
import shutil

from .. import _distributions

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List

# What Horovod can be built for, each with a library of its own.
_HOROVOD = "tensorflow", "mxnet", "torch"
# Whose libraries these are.
_MPI = {
    "libmpi.so.12": "MPICH, Intel MPI or an old Open MPI",
    "libmpi.so.20": "Open MPI",
    "libmpi.so.40": "Open MPI",
}


class Installed(collections.namedtuple("Installed", "name version frameworks through launcher")):
    """An engine that is installed.

    Arguments:
        name: "Horovod".
        version: its own, or that of the framework that it is a part of.
        frameworks: those whose ranks it can connect, as built.
        through: what it can communicate through: "gloo", "nccl", "libmpi.so.40"; empty: not known.
        launcher: the path of the program that starts its ranks, where that is separate.
    """

    def __str__(self) -> str:
        through = ["through " + " or ".join(map(_mpi, self.through))] if self.through else []
        frameworks = ["for " + (" or ".join(self.frameworks) or "no framework")]
        launcher = [self.launcher] if self.launcher else []
        return ", ".join([self.name + " " + self.version] + frameworks + through + launcher)


def engines() -> "List[Installed]":
    """All of them, in order of their names."""
    found = [_horovod(), _jax(), _mpi4py(), _tensorflow(), _torch()]
    return [engine for engine in found if engine]


def _horovod():
    version, folder = _package("horovod", "horovod")
    if not folder:
        return None
    built = [name for name in _HOROVOD if glob.glob(_inside(folder, name, "mpi_lib*.so"))]
    return Installed("Horovod", version, built, [], None)


def _jax():
    version, folder = _package("jax", "jax")
    if not folder or not os.path.exists(os.path.join(folder, "_src", "distributed.py")):
        return None
    cuda = _distributions.matching(r"jax-cuda\d+-plugin")
    return Installed("jax.distributed", version, ["jax"], ["gloo"] + ["nccl"] * bool(cuda), None)


def _mpi4py():
    version, folder = _package("mpi4py", "mpi4py")
    if not folder:
        return None
    libraries = set()
    for path in glob.glob(_inside(folder, "MPI*.so")):
        with open(path, "rb") as file:
            libraries.update(re.findall(rb"libmpi\w*\.so[.\d]*", file.read()))
    names = sorted(name.decode() for name in libraries)
    return Installed("mpi4py", version, ["theano", "cntk"], names, shutil.which("mpirun"))


def _mpi(library):
    return "{} ({})".format(library, _MPI[library]) if library in _MPI else library


def _tensorflow():
    """The cluster of TF_CONFIG, in the versions that have its options."""
    names = "tensorflow", "tensorflow-cpu", "tensorflow-gpu"
    version, folder = _package("tensorflow", *names)
    if not folder or _distributions.release(version) < (2, 4):
        return None
    return Installed("TF_CONFIG's cluster", version, ["tensorflow"], [], None)


def _torch():
    """What torch was compiled with stands in its files for CMake."""
    version, folder = _package("torch", "torch")
    if not folder:
        return None
    through = []
    for path in glob.glob(_inside(folder, "share", "cmake", "Caffe2", "Caffe2Targets.cmake")):
        with open(path, encoding="utf-8", errors="replace") as file:
            text = file.read()
        through = [name for name in ("gloo", "nccl") if "USE_C10D_" + name.upper() in text]
    return Installed("torch.distributed", version, ["torch"], through, None)


def _package(module, *distributions):
    """Version and folder of an installed package, or (None, None)."""
    version = _distributions.version(*distributions)
    spec = importlib.util.find_spec(module) if version else None
    folders = list((spec and spec.submodule_search_locations) or [])
    return (version, folders[0]) if folders else (None, None)


def _inside(folder, *parts):
    """A pattern for ``glob``."""
    return os.path.join(glob.escape(folder), *parts)
