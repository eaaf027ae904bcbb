"""torch as a backend: under Keras 3, and models made with torch alone.

See ``replicas`` for several devices, ``ranks`` for several processes.
"""

import os
import sys

from ... import _keras
from ...backend import Backend
from . import configuration


class Torch(Backend):
    """torch."""

    name = "torch"
    framework = "torch"
    distributions = ("torch",)
    extra = "torch"
    verifies_ranks = True
    synchronizes = ("devices", "ranks")
    variables = (
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        configuration.DEVICE,
        "PYTORCH_CUDA_ALLOC_CONF",
    )

    # Before the first use of a GPU --------------------------------------------------------------

    def environ(self, settings, environ):
        """Return the variables to set; Keras reads its device when it is imported."""
        variables = dict(super().environ(settings, environ))
        device = environ.get(configuration.DEVICE)
        if settings.devices.declined or settings.devices.simulated:
            if device != "cpu":
                variables[configuration.DEVICE] = "cpu"
        elif settings.devices.gpus and device:
            variables[configuration.DEVICE] = None  # the first GPU is Keras' own choice
        return variables

    def overruled(self, settings, environ):
        """Return a warning if the environment names another device."""
        device = environ.get(configuration.DEVICE)
        if device and self.environ(settings, environ).get(configuration.DEVICE, device) != device:
            return [f"KERAS_TORCH_DEVICE says {device}, but compat chose {settings.devices}."]
        return []

    def initialised(self):
        """Return why CUDA's variables have no effect now; they have until CUDA or Keras starts."""
        if "keras.src.backend.torch.core" in sys.modules:
            return "keras was imported, which asks torch for GPUs"
        if getattr(sys.modules.get("torch.cuda"), "is_initialized", bool)():
            return "torch has started CUDA"
        return None

    # After the import -------------------------------------------------------------------------

    def configure(self, settings):
        """Set devices, memory and float type in torch."""
        torch = self.import_framework()
        chosen = settings.devices
        too_late = self.initialised()
        applied = []
        self.kept["names"] = [f"cpu:{index}" for index in range(chosen.simulated)] or None
        if chosen.undecided is not None:
            listed = (
                [] if os.environ.get(configuration.DEVICE) == "cpu" else configuration.listed(torch)
            )
            chosen.settle(len(listed))
            self.kept["names"] = [listed[position] for position in chosen.positions]
            applied += configuration.use_first(torch, self.kept["names"], listed)
            if os.environ.get(configuration.DEVICE) == "cpu":
                chosen.reason = configuration.DEVICE + "=cpu"
        elif too_late:
            configuration.check_devices_shown(torch, too_late, chosen)
        if chosen.gpus and settings.memory:
            applied += configuration.limit_memory(torch, settings.memory, self.devices())
        if settings.floatx:
            torch.set_default_dtype(getattr(torch, settings.floatx))
            applied.append(f"torch.set_default_dtype(torch.{settings.floatx})")
        return applied, []

    def devices(self):
        """Return the devices' names; on the one CPU that torch has they are names of replicas."""
        torch = self.import_framework()
        names = self.kept.get("names")  # simulated, or chosen among those that torch lists
        if names is None:
            names = (
                [] if os.environ.get(configuration.DEVICE) == "cpu" else configuration.listed(torch)
            )
        return names or ["cpu"]

    # Replicas ---------------------------------------------------------------------------------

    def is_native(self, model):
        """Return whether a model is a torch module."""
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(model, torch.nn.Module)

    def batch_norm_layers(self, model):
        """Return the modules that are batch normalization, by name."""
        from . import batch_norm  # not at start-up

        return batch_norm.layers(model.named_modules())

    def synchronizes_on_ranks(self, layer):
        """Return whether a layer can use the statistics of the whole batch on several ranks."""
        from .ranked_batch_norm import is_synchronizable  # not at start-up

        return is_synchronizable(layer)

    def parallelize(self, model, devices):
        """Replace the instance's ``call`` or ``forward`` by one on several devices, or restore it.

        A stateful Keras model, or one with a fixed batch size, runs unsplit, with a warning.
        """
        self.import_framework()
        from ..._keras import steps  # not at start-up
        from . import keras_replicas, native  # import torch

        native.refuse_wrapped(model)
        replicated = list(devices) != self.devices()[:1]
        if _keras.keras_of(model) is None:
            native.ReplicatedForward.install_on(model, devices if replicated else None)
            return model
        if replicated:
            keras_replicas.refuse_torch_compile(model)
            _keras.warn_of_distribution(model)
        steps.remove(keras_replicas.ReplicatedKerasCall, model)
        reason = _keras.unsplit_reason(model) if replicated else None
        if reason:
            _keras.warn_left_unsplit(model, reason, self.devices()[0])
        elif replicated:
            steps.install(keras_replicas.ReplicatedKerasCall, model, devices, "one device")
        return model

    def executed(self, model):
        """Return the counts of operations that torch's dispatcher reports."""
        from . import executions  # imports torch

        return executions.executed(self.devices())

    def watch(self, model, check):
        """Check calls by torch's hooks, which do not depend on the replaced ``forward``."""
        from . import watched_calls  # imports torch

        watched_calls.WatchedCalls.install_on(model, check)

    def verify(self, model, verification):
        """Compare the first steps of a model with one device; None: no more."""
        from .native_verification import VerifiedForward  # imports torch
        from .verification import VerifiedStep

        in_ranks = verification is not None and verification.ranks
        kind, is_left = VerifiedForward, in_ranks
        if _keras.keras_of(model) is not None:
            kind = VerifiedStep
            is_left = not in_ranks and _keras.unsplit_reason(model)
        kind.install_on(model, None if is_left else verification)

    def memory_peaks(self):
        """Return ``torch.cuda.max_memory_allocated()`` of each GPU."""
        torch = self.import_framework()
        names = [name for name in self.devices() if name.startswith("cuda")]
        return {name: torch.cuda.max_memory_allocated(name) for name in names}

    def profiled(self):
        """Return the operations that torch's profiler records."""
        from . import profiler  # not at start-up

        return profiler.profiled(self.devices())

    # Ranks ------------------------------------------------------------------------------------

    def launcher(self, job):
        """Return compat's launcher: torchrun's store listens at all addresses of the machine."""
        from ..._ranks.launch import starter  # not at start-up

        # As torchrun does: else each rank would have a thread for each core.
        threads = [] if "OMP_NUM_THREADS" in job.environ else ["env", "OMP_NUM_THREADS=1"]
        return threads + starter.launcher(job)

    def distribute(self, model, place):
        """Make a model one of several ranks'. See ``ranks``."""
        self.import_framework()
        from . import ranks  # imports torch

        return ranks.distribute(model, place)


backend = Torch()
