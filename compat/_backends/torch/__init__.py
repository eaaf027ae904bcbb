"""torch: under Keras 3, and models made with torch alone.

See ``replicas`` for several devices, ``ranks`` for several processes.
"""

import os
import sys

from ... import _keras, errors
from ...backend import Backend

_DEVICE = "KERAS_TORCH_DEVICE"


class Torch(Backend):
    """torch."""

    name = "torch"
    framework = "torch"
    distributions = ("torch",)
    extra = "torch"
    verifies_ranks = True
    variables = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", _DEVICE, "PYTORCH_CUDA_ALLOC_CONF")

    # Before the first use of a GPU --------------------------------------------------------------

    def environ(self, settings, environ):
        """Keras reads its device when it is imported (keras/src/backend/torch/core.py)."""
        variables = dict(super().environ(settings, environ))
        device = environ.get(_DEVICE)
        if settings.devices.declined or settings.devices.simulated:
            if device != "cpu":
                variables[_DEVICE] = "cpu"
        elif settings.devices.gpus and device:
            variables[_DEVICE] = None  # the first GPU is Keras' own choice
        return variables

    def overruled(self, settings, environ):
        device = environ.get(_DEVICE)
        if device and self.environ(settings, environ).get(_DEVICE, device) != device:
            return [f"KERAS_TORCH_DEVICE says {device}, but compat chose {settings.devices}."]
        return []

    def initialised(self):
        """CUDA's variables count until CUDA starts, and Keras starts it on its import."""
        if "keras.src.backend.torch.core" in sys.modules:
            return "keras was imported, which asks torch for GPUs"
        if getattr(sys.modules.get("torch.cuda"), "is_initialized", bool)():
            return "torch has started CUDA"
        return None

    # After the import -------------------------------------------------------------------------

    def configure(self, settings):
        torch = self.import_framework()
        chosen = settings.devices
        too_late = self.initialised()
        applied = []
        self.kept["names"] = [f"cpu:{index}" for index in range(chosen.simulated)] or None
        if chosen.undecided is not None:
            listed = [] if os.environ.get(_DEVICE) == "cpu" else _listed(torch)
            chosen.settle(len(listed))
            self.kept["names"] = [listed[position] for position in chosen.positions]
            applied += _use_first(torch, self.kept["names"], listed)
            if os.environ.get(_DEVICE) == "cpu":
                chosen.reason = _DEVICE + "=cpu"
        elif too_late:
            _check_devices_shown(torch, too_late, chosen)
        if chosen.gpus and settings.memory:
            applied += _limit_memory(torch, settings.memory, self.devices())
        if settings.floatx:
            torch.set_default_dtype(getattr(torch, settings.floatx))
            applied.append(f"torch.set_default_dtype(torch.{settings.floatx})")
        return applied, []

    def devices(self):
        """torch has one CPU: what stands in for GPUs are names, and replicas that run there."""
        torch = self.import_framework()
        names = self.kept.get("names")  # simulated, or chosen among those that torch lists
        if names is None:
            names = [] if os.environ.get(_DEVICE) == "cpu" else _listed(torch)
        return names or ["cpu"]

    # Replicas ---------------------------------------------------------------------------------

    def is_native(self, model):
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(model, torch.nn.Module)

    def parallelize(self, model, devices):
        """Give the instance a ``call`` or ``forward`` that is divided, or the class's one back.

        A stateful Keras model, or one with a fixed batch size, stays in one piece, with a warning.
        """
        self.import_framework()
        from ..._keras import steps  # not at start-up
        from . import models  # imports torch

        _refuse_wrapped(model)
        replicated = list(devices) != self.devices()[:1]
        if _keras.keras_of(model) is None:
            models.ReplicatedForward.install_on(model, devices if replicated else None)
            return model
        if replicated:
            models.refuse_torch_compile(model)
            _keras.warn_of_distribution(model)
        steps.remove(models.ReplicatedKerasCall, model)
        reason = _keras.undivided(model) if replicated else None
        if reason:
            _keras.warn_not_divided(model, reason, self.devices()[0])
        elif replicated:
            steps.install(models.ReplicatedKerasCall, model, devices, "one device")
        return model

    def executed(self, model):
        """From torch's dispatcher."""
        from . import executions  # imports torch

        return executions.executed(self.devices())

    def watch(self, model, check):
        """By hooks of torch's own, which call what stands in place of ``forward``."""
        from . import executions  # imports torch

        executions.WatchedCalls.install_on(model, check)

    def verify(self, model, verification):
        from . import verified_steps  # imports torch

        in_ranks = verification is not None and verification.ranks
        kind, is_left = verified_steps.VerifiedModuleForward, in_ranks
        if _keras.keras_of(model) is not None:
            kind = verified_steps.VerifiedTorchStep
            is_left = not in_ranks and _keras.undivided(model)
        kind.install_on(model, None if is_left else verification)

    def memory_peaks(self):
        """``torch.cuda.max_memory_allocated()``."""
        torch = self.import_framework()
        names = [name for name in self.devices() if name.startswith("cuda")]
        return {name: torch.cuda.max_memory_allocated(name) for name in names}

    def profiled(self):
        """From torch's profiler."""
        from . import timeline  # not at start-up

        return timeline.profiled(self.devices())

    # Ranks ------------------------------------------------------------------------------------

    def launcher(self, job):
        """compat's own: torchrun's store listens at all addresses of the machine."""
        from ..._ranks.launch import starter  # not at start-up

        # As torchrun does: else each rank would have a thread for each core.
        threads = [] if "OMP_NUM_THREADS" in job.environ else ["env", "OMP_NUM_THREADS=1"]
        return threads + starter.launcher(job)

    def distribute(self, model, place):
        """See ``ranks``."""
        self.import_framework()
        from . import ranks  # imports torch

        return ranks.distribute(model, place)


# Configuring ----------------------------------------------------------------------------------


def _check_devices_shown(torch, reason, chosen):
    """Refuse what would have to change now that the GPUs that torch shows are fixed."""
    shown, positions = len(_listed(torch)), list(chosen.positions)
    as_asked = positions == list(range(shown)) if chosen.gpus else not chosen.declined
    if as_asked or not shown:
        return
    raise errors.too_late(
        "torch",
        f"{reason}; it shows {shown} GPUs, and {chosen} was asked for",
        "Call it before the first `import keras`, and before anything runs on a GPU.",
    )


def _listed(torch):
    """The GPUs that torch lists: Apple's, which Keras prefers, or CUDA's, as which AMD's count."""
    if torch.backends.mps.is_available():
        return ["mps"]
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def _use_first(torch, names, listed):
    """Have torch and Keras begin with the first of these, where that is not the first listed."""
    if names == listed[: len(names)] and bool(names) == bool(listed):
        return []
    if not names:  # none of those that were asked for
        os.environ[_DEVICE] = "cpu"
        return [_DEVICE + "=cpu"]
    torch.cuda.set_device(names[0])
    os.environ[_DEVICE] = names[0]
    return [f"torch.cuda.set_device({names[0]!r})", f"{_DEVICE}={names[0]}"]


def _refuse_wrapped(model):
    """torch's own replicas would split each device's part of the batch once more."""
    nn = sys.modules["torch"].nn.parallel
    if isinstance(model, (nn.DataParallel, nn.DistributedDataParallel)):
        name = type(model).__name__
        raise errors.UnsupportedError(
            f"parallelize() was given a torch.nn.parallel.{name}, which splits batches by itself. "
            "Pass the module within it: parallelize(model.module), and use that."
        )


def _limit_memory(torch, memory, devices):
    """torch takes memory as it is needed; a limit is a fraction of each GPU."""
    if memory.grow:
        return ["memory: torch takes it as it is needed"]
    if devices == ["mps"]:
        total = torch.mps.recommended_max_memory() if memory.size else 1
        fraction = memory.fraction or min(1.0, memory.size / float(total))
        torch.mps.set_per_process_memory_fraction(fraction)
        return [f"torch.mps.set_per_process_memory_fraction({fraction:g})"]
    applied = []
    for index in [int(name.rpartition(":")[2]) for name in devices if name != "cpu"]:
        total = torch.cuda.get_device_properties(index).total_memory
        fraction = memory.fraction or min(1.0, memory.size / float(total))
        torch.cuda.set_per_process_memory_fraction(fraction, index)
        applied.append(f"torch.cuda.set_per_process_memory_fraction({fraction:g}, {index})")
    return applied


backend = Torch()
