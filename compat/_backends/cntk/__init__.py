"""CNTK 2, under Keras 2.

A process of CNTK computes on one device, its default device, which is fixed when it is used first;
importing Keras uses it. So it is chosen before that. Several devices need several processes: see
``ranks.py``; without them ``parallelize()`` is an error that says so.
"""

import contextlib
import os
import sys

from ... import errors
from ..._configuration.settings import listed
from ...backend import Backend

# OpenMPI 1.10's names of the libraries that CNTK's own are linked with, and today's files.
_LIBRARIES = {"libmpi.so.12": "libmpi.so.40", "libmpi_cxx.so.1": "libmpi_cxx.so.40"}


class CNTK(Backend):
    """CNTK 2."""

    name = "cntk"
    framework = "cntk"
    distributions = ("cntk", "cntk-gpu")
    extra = "cntk"
    variables = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH")

    def accepts(self, version):
        return version.startswith("2.")

    def import_framework(self):
        try:
            return super().import_framework()
        except errors.BrokenInstallError as error:
            without_openmpi = _without_openmpi(os.environ)
            if without_openmpi is None:
                raise
            raise without_openmpi from error

    def initialised(self):
        """CNTK looks for GPUs when it is imported."""
        return "cntk was imported" if self.framework in sys.modules else None

    def configure(self, settings):
        imported = [name for name in ("keras", "cntk") if name in sys.modules]
        cntk = self.import_framework()
        warnings = []  # type: list
        device = _wanted(cntk, settings, warnings)
        applied = [] if device is None else [_set_default(cntk, device, imported)]
        self.kept["simulated"] = [f"cpu:{i}" for i in range(settings.devices.simulated)]
        if settings.memory and settings.devices.gpus:
            warnings.append(
                f"memory={settings.memory} was asked for, but CNTK has no setting for a GPU's "
                "memory."
            )
        if settings.floatx not in (None, "float32"):
            warnings.append(
                f"floatx={settings.floatx} was asked for, but on CNTK Keras trains in float32 "
                "only: it makes the places for gradients in that type."
            )
        return applied, warnings

    def devices(self):
        """The default device; one name each for simulated ones, which all are the CPU."""
        default = self.import_framework().device.use_default_device
        return list(self.kept.get("simulated", ())) or [_name(default())]

    def parallelize(self, model, devices):
        """Return ``model`` as it is: it runs on the default device.

        Raises:
            UnsupportedError: several devices, or another one than the first, were asked for.
        """
        first = self.devices()[0]
        if list(devices) != [first]:
            raise self._cannot(
                f"run a model on {listed(devices)} in one process: all of it runs on {first}",
                "Start one process per device, with compat run -n, or train on that one, "
                "with parallelize(model, gpus=1).",
            )
        return model

    def launcher(self, job):
        from ..._ranks.engines import mpi  # here for start-up time

        return mpi.launcher(job)

    def distribute(self, model, place):
        """See ``ranks`` and ``keras2.install``; NotInstalledError where mpi4py is missing."""
        from ..._ranks import keras2
        from ..._ranks.engines import mpi  # these import numpy
        from . import ranks

        kinds = ranks.MakeCNTKTrainFunction, keras2.MakeTestFunction
        keras2.install(model, mpi.MPI.join(place), kinds)
        return model

    def problems(self, environ):
        return [str(error) for error in [_without_openmpi(environ)] if error is not None]


# The default device ---------------------------------------------------------------------------


def _name(device):
    """As CNTK's functions are written: "cpu()", "gpu(0)"."""
    return "cpu()" if device.type() == 0 else f"gpu({device.id()})"


def _wanted(cntk, settings, warnings):
    """The device to make the default; None where CNTK shall choose by itself."""
    devices = settings.devices
    gpus = sum(device.type() != 0 for device in cntk.device.all_devices())
    devices.settle(gpus)
    if not gpus and (devices.gpus or devices.shortage):  # gpu(0) would be a ValueError
        warnings.append(
            "This CNTK shows no GPU: it is a build for the CPU, or CUDA's driver is not "
            "there. The package cntk-gpu is the build for GPUs."
        )
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
    fixed = errors.too_late(
        "cntk",
        f"its default device was fixed when {(imported or ['cntk'])[0]} was imported, and cannot "
        f"become {_name(device)}",
        "Call it before the first `import keras`.",
    )
    try:
        taken = cntk.device.try_set_default_device(device)
    except RuntimeError as error:  # another device is fixed
        raise fixed from error
    try:
        default, excluded = cntk.device.use_default_device(), None
        problem = f"its default device is {_name(default)}"
    except RuntimeError as error:  # all devices are excluded
        default, excluded = None, error
        problem = str(error).partition("\n")[0].rstrip(".")
    if taken and default == device:
        return f"cntk.device.try_set_default_device({_name(device)})"
    if imported and default is not None:
        raise fixed
    raise errors.device_failed(
        "cntk",
        _name(device),
        problem,
        "See that cntk.device.set_excluded_devices() does not name it, and that no other process "
        "holds it.",
    ) from excluded


# Installation ---------------------------------------------------------------------------------


def _without_openmpi(environ):
    """The error for CNTK's libraries without those of OpenMPI that they are linked with, or None.

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


backend = CNTK()
