"""CNTK 2, under Keras 2.

A process of CNTK computes on one device, its default device, which is fixed when it is used first;
importing Keras uses it. So it is chosen before that. Several devices need several processes: see
``_cntk_ranks.py``; without them ``parallelize()`` is an error that says so.
"""

import os
import sys

from .. import errors
from ..backend import Backend

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List, Mapping, Optional, Sequence

    from .._launchers import Ranks
    from .._ranks import Launch
    from .._settings import Settings

# OpenMPI 1.10's names of the libraries that CNTK's own are linked with, and today's files.
_LIBRARIES = {"libmpi.so.12": "libmpi.so.40", "libmpi_cxx.so.1": "libmpi_cxx.so.40"}


class CNTK(Backend):
    """CNTK 2."""

    name = "cntk"
    framework = "cntk"
    distributions = ("cntk", "cntk-gpu")
    extra = "cntk"
    options = ("excluded_devices",)
    variables = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH")

    def __init__(self):
        self._simulated = 0

    def accepts(self, version: str) -> bool:
        return version.startswith("2.")

    def import_framework(self) -> "Any":
        try:
            return super().import_framework()
        except errors.BrokenInstallError as error:
            missing = _missing_libraries(os.environ)
            if not missing:
                raise
            raise errors.cntk_without_openmpi(*missing) from error

    def initialised(self) -> "Optional[str]":
        """CNTK looks for GPUs when it is imported."""
        return "cntk was imported" if self.framework in sys.modules else None

    def configure(self, settings: "Settings") -> "List[str]":
        imported = [name for name in ("keras", "cntk") if name in sys.modules]
        cntk = self.import_framework()
        applied = []
        excluded = _excluded(cntk, settings)
        if excluded:
            cntk.device.set_excluded_devices(excluded)
            names = ", ".join(map(_name, excluded))
            applied.append("cntk.device.set_excluded_devices([{}])".format(names))
        device = _wanted(cntk, settings)
        if device is not None:
            applied.append(_set_default(cntk, device, imported))
        self._simulated = settings.devices.simulated or 0
        if settings.memory and settings.devices.gpus:
            settings.warnings.append(errors.cntk_no_memory_limit(settings.memory))
        if settings.floatx not in (None, "float32"):
            settings.warnings.append(errors.cntk_trains_in_float32(settings.floatx))
        return applied

    def devices(self) -> "List[str]":
        """The default device; one name each for simulated ones, which all are the CPU."""
        if self._simulated:
            return ["cpu:{}".format(index) for index in range(self._simulated)]
        return [_name(self.import_framework().device.use_default_device())]

    def parallelize(self, model: "Any", devices: "Sequence[str]") -> "Any":
        """Return ``model`` as it is: it runs on the default device.

        Raises:
            UnsupportedError: several devices, or another one than the first, were asked for.
        """
        first = self.devices()[0]
        if list(devices) != [first]:
            raise errors.one_device_only(self.name, ", ".join(devices), first)
        return model

    def launcher(self, launch: "Launch") -> "List[str]":
        from . import _mpi

        return _mpi.launcher(launch)

    def distribute(self, model: "Any", ranks: "Ranks") -> "Any":
        """Train ``model`` together with the other ranks; see ``_cntk_ranks.py``.

        BatchNorm normalises each rank's rows by their own statistics, and its moving averages take
        one step to the mean of theirs.

        Raises:
            NotInstalledError: mpi4py is missing.
            RankError: MPI sees other ranks than the launcher started.
        """
        from . import _cntk_ranks  # imports numpy

        return _cntk_ranks.distribute(model, ranks)

    def problems(self, environ: "Mapping[str, str]") -> "List[str]":
        missing = _missing_libraries(environ)
        return [str(errors.cntk_without_openmpi(*missing))] if missing else []


# The default device ---------------------------------------------------------------------------


def _name(device):
    """As CNTK's functions are written: "cpu()", "gpu(0)"."""
    return "cpu()" if device.type() == 0 else "gpu({})".format(device.id())


def _has_gpus(cntk):
    """A build for the CPU lists no GPU, and ``gpu(0)`` is a ValueError there."""
    return any(device.type() != 0 for device in cntk.device.all_devices())


def _wanted(cntk, settings):
    """The device to make the default; None where CNTK shall choose by itself."""
    devices = settings.devices
    devices.settle(sum(device.type() != 0 for device in cntk.device.all_devices()))
    if not _has_gpus(cntk) and (devices.gpus or devices.shortage):
        settings.warnings.append(errors.cntk_without_gpus())
    elif devices.gpus:
        return cntk.device.gpu(devices.ordinals(os.environ)[0])
    if devices.gpus or devices.declined or devices.simulated or devices.shortage:
        return cntk.device.cpu()
    return None


def _set_default(cntk, device, imported):
    """Fix the default device, and see that it is this one.

    ``try_set_default_device`` may return False for a device that it does not take, and True for
    one that it does not use.
    """
    try:
        taken = cntk.device.try_set_default_device(device)
    except RuntimeError as error:  # another device is fixed
        raise errors.cntk_device_fixed(_name(device), imported) from error
    default = cntk.device.use_default_device()
    if not taken or default != device:
        if imported:
            raise errors.cntk_device_fixed(_name(device), imported)
        raise errors.device_failed(
            "cntk",
            _name(device),
            "its default device is {}".format(_name(default)),
            "See that excluded_devices does not name it, and that no other process holds it.",
        )
    return "cntk.device.try_set_default_device({})".format(_name(device))


def _excluded(cntk, settings):
    """CNTK's descriptors of the devices that ``excluded_devices`` names."""
    asked, excluded = settings.options.get("excluded_devices", ()), []
    if isinstance(asked, (int, str)):
        asked = [asked]
    for entry in asked:
        if entry == "cpu":
            excluded.append(cntk.device.cpu())
        elif isinstance(entry, int) and not isinstance(entry, bool) and entry >= 0:
            if any(d.type() != 0 and d.id() == entry for d in cntk.device.all_devices()):
                excluded.append(cntk.device.gpu(entry))
        else:
            raise errors.cntk_excluded_devices_invalid(settings.options["excluded_devices"])
    return excluded


# Installation ---------------------------------------------------------------------------------


def _missing_libraries(environ):
    """CNTK's own folder of libraries, and what OpenMPI's library is missing, or nothing."""
    import importlib.util

    spec = importlib.util.find_spec("cntk")
    if not sys.platform.startswith("linux") or spec is None:
        return []
    own = os.path.join(list(spec.submodule_search_locations)[0], "libs")
    folders = [own] + environ.get("LD_LIBRARY_PATH", "").split(":")
    known = _loader_cache()
    missing = [
        name
        for name in sorted(_LIBRARIES)
        if name not in known and not any(os.path.exists(os.path.join(f, name)) for f in folders)
    ]
    return [own, {name: _LIBRARIES[name] for name in missing}] if missing else []


def _loader_cache():
    """Names of the libraries that the dynamic loader finds in the system's folders."""
    import subprocess

    try:
        listed = subprocess.check_output(
            ["/sbin/ldconfig", "-p"], env={}, stderr=subprocess.DEVNULL, universal_newlines=True
        )
    except (OSError, subprocess.CalledProcessError):
        return set()
    return {line.split()[0] for line in listed.splitlines() if line.startswith("\t")}


backend = CNTK()
