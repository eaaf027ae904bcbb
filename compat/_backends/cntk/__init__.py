"""CNTK 2, under Keras 2.

A process of CNTK computes on one device, its default device, which is fixed by its first use, such
as the import of Keras. So it is chosen before that. Several devices need several processes: see
``ranks``; without them ``parallelize()`` raises an error.
"""

import contextlib
import os
import sys

from ... import errors
from ..._configuration.settings import listed
from ...backend import Backend
from . import configuration, openmpi

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import List


class CNTK(Backend):
    """The backend of CNTK 2."""

    name = "cntk"
    framework = "cntk"
    distributions = ("cntk", "cntk-gpu")
    extra = "cntk"
    variables = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "LD_LIBRARY_PATH")

    def accepts(self, version):
        """Return whether a version is of CNTK 2."""
        return version.startswith("2.")

    def import_framework(self):
        """Import CNTK; name OpenMPI where its libraries are missing."""
        try:
            return super().import_framework()
        except errors.BrokenInstallError as error:
            diagnosis = openmpi.without_openmpi(os.environ)
            if diagnosis is None:
                raise
            raise diagnosis from error

    def initialised(self):
        """Return why it is too late, or None: CNTK looks for GPUs when it is imported."""
        return "cntk was imported" if self.framework in sys.modules else None

    def configure(self, settings):
        """Fix the default device; return lines for the report, and warnings."""
        imported = [name for name in ("keras", "cntk") if name in sys.modules]
        cntk = self.import_framework()
        warnings: "List[str]" = []
        device = configuration.wanted_device(cntk, settings, warnings)
        applied = [] if device is None else [configuration.set_default(cntk, device, imported)]
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
        """Return the default device; or the simulated ones, which are all the CPU."""
        default = self.import_framework().device.use_default_device
        return list(self.kept.get("simulated", ())) or [configuration.name_of(default())]

    def parallelize(self, model, devices):
        """Return a model as it is: it runs on the default device.

        Raises:
            UnsupportedError: other devices than that were requested.
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
        """Return the command that starts ranks by MPI."""
        from ..._ranks.engines import mpi  # here for start-up time

        return mpi.launcher(job)

    def distribute(self, model, place):
        """Install a rank's methods on a model; see ``ranks``.

        Raises:
            NotInstalledError: mpi4py is missing.
        """
        from ..._ranks import keras2
        from ..._ranks.engines import mpi  # these import numpy
        from . import ranks

        kinds = ranks.MakeCNTKTrainFunction, keras2.MakeTestFunction
        keras2.install(model, mpi.MPI.join(place), kinds)
        return model

    def problems(self, environ):
        """Return a line for libraries of OpenMPI that are missing."""
        return [str(error) for error in [openmpi.without_openmpi(environ)] if error is not None]


backend = CNTK()
