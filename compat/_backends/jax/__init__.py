"""JAX, under Keras 3."""

import functools
import os
import sys

from ... import _keras, _ranks, errors
from ..._configuration.discovery import usable_cores
from ..._configuration.numeric import whole_number
from ..._configuration.settings import listed
from ...backend import Backend

_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_FRACTION_SINCE_2025 = "XLA_CLIENT_MEM_FRACTION"  # both at once are an error of JAX
_THREADS = "NPROC"  # of XLA on the CPU; by default one for each core


class JAX(Backend):
    """JAX devices: XLA partitions the program of a step among them."""

    name = "jax"
    framework = "jax"
    distributions = ("jax",)
    extra = "jax"
    synchronizes = ("devices", "ranks")  # on devices, arrays are those of the whole batch
    variables = (
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "JAX_PLATFORMS",
        _THREADS,
        "XLA_FLAGS",
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        _FRACTION,
        _FRACTION_SINCE_2025,
    )

    def synchronizes_on_ranks(self, layer):
        """Return whether a layer can use the statistics of the whole batch on several ranks."""
        from . import batch_norm  # imports JAX

        return batch_norm.is_synchronizable(layer)

    # Before the first operation ---------------------------------------------------------------

    def environ(self, settings, environ):
        """Return the variables that JAX reads when it makes its devices.

        See "GPU memory allocation" in its docs.
        """
        variables = dict(super().environ(settings, environ))
        memory = settings.memory
        if (settings.devices.gpus or settings.devices.undecided is not None) and memory:
            if memory.grow:
                variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
            if memory.fraction:
                variables[_FRACTION] = f"{memory.fraction:g}"
            if not memory.grow and _FRACTION_SINCE_2025 in environ:
                variables[_FRACTION_SINCE_2025] = None
        # A program on N CPU devices occupies N threads until its last collective is done. The same
        # threads launch the next programs, and a launch blocks while 32 programs are in flight on
        # its device. By default XLA has one thread per core or per device: steps that are launched
        # without waiting for their results can block them all, and XLA then aborts the process
        # after 40 seconds (GetPjRtCpuClient and CpuPjRtRawLoadedExecutable::Execute in
        # xla/pjrt/cpu/cpu_client.cc). With three per device, two Python threads can launch programs
        # at the same time; more than that would slow down small operations.
        requested, needed = environ.get(_THREADS), 3 * settings.devices.simulated
        available = usable_cores() if requested is None else whole_number(requested) or 0
        if settings.devices.simulated > 1 and available < needed:
            variables[_THREADS] = str(needed)
        return variables

    def initialised(self):
        """Return why it is too late: JAX has made its devices, up to which configuration counts."""
        bridge = sys.modules.get("jax._src.xla_bridge")
        return "JAX has made its devices" if getattr(bridge, "_backends", None) else None

    # After the import -------------------------------------------------------------------------

    def configure(self, settings):
        """Choose devices and memory: JAX's options, and variables that it has yet to read."""
        jax = self.import_framework()
        from . import configuration  # imports jax

        chosen = settings.devices
        changes = {}
        applied, warnings = [], []
        made = bool(self.initialised())
        if made:
            chosen.settle(len(configuration.gpus()))
            configuration.check_devices_made(settings)
        elif chosen.simulated or chosen.declined:
            changes["jax_platforms"] = "cpu"
        elif chosen.gpus:
            if settings.memory and settings.memory.size:
                os.environ[_FRACTION] = f"{configuration.fraction(settings):g}"
                applied.append(f"{_FRACTION}={os.environ[_FRACTION]}")
            platforms = jax.config.jax_platforms or ""
            if platforms and not {"cuda", "gpu", "rocm"} & set(platforms.split(",")):
                warnings.append(
                    f"JAX_PLATFORMS={platforms} keeps JAX from GPUs. Remove the variable, or ask "
                    "for no GPU with gpus=0."
                )
        elif chosen.wanted():
            ids = ",".join(map(str, chosen.wanted()))
            changes.update(jax_cuda_visible_devices=ids, jax_rocm_visible_devices=ids)
        if settings.floatx == "float64":
            changes["jax_enable_x64"] = True  # else JAX makes float32 of it
        for name, value in changes.items():
            jax.config.update(name, value)
            applied.append(f"jax.config.update({name!r}, {value!r})")
        if chosen.simulated and not made:
            applied.append(configuration.simulate(chosen.simulated))
        place = _ranks.own_place()
        if place is not None:
            from ..._ranks.engines.jax_distributed import JaxDistributed  # only ranks need it

            JaxDistributed.join(place)
            applied.append("jax.distributed.initialize()")
        if chosen.undecided is not None and not made:
            gpus = configuration.gpus()  # which makes JAX's devices
            # Those of CUDA and ROCm are now the ones that were asked for; Apple's is one.
            chosen.settle(len(gpus), restricted=any(d.platform != "METAL" for d in gpus))
            if gpus and settings.memory and settings.memory.size:
                raise configuration.one_fraction_for_all_gpus(settings.memory)
        return applied, warnings

    def devices(self):
        """Return the devices' names as Keras has them; simulated ones before JAX makes them."""
        jax = self.import_framework()
        from . import configuration  # imports jax

        number = 0 if self.initialised() else configuration.simulated()
        if number and jax.config.jax_platforms == "cpu":
            return [f"cpu:{index}" for index in range(number)]
        return list(configuration.devices_by_name())

    # Replicas ---------------------------------------------------------------------------------

    def parallelize(self, model, devices):
        """Install a sharded ``call`` on the instance, or remove it for a single device."""
        self.import_framework()
        from . import configuration, replicas  # import jax

        replicas.check_distribution(model)
        before, by_name = replicas.ReplicatedCall.of(model), configuration.devices_by_name()
        if before is not None:
            replicas.remove(model)
        if list(devices) != self.devices()[:1]:
            replicas.install(model, [by_name[name] for name in devices])
        if replicas.ReplicatedCall.of(model) is not before:
            # Keras traces its steps again: its compiled ones contain the former call.
            _keras.forget_compiled_steps(model)
        return model

    def device(self, device):
        """Refuse to place parts of a model: a step is one program."""
        raise self._cannot(
            f"place parts of a model on {device}: under jax.jit a step is one program, all of "
            "which runs on the same devices",
            "Leave compat.device() out; parallelize() splits the batches of the whole model.",
        )

    def verify(self, model, verification):
        """Compare the first steps with those of one device; see ``verification``."""
        from .verification import VerifiedStep  # not at start-up

        VerifiedStep.install_on(model, verification)

    def executed(self, model):
        """Record from the program of the step; see ``executions``."""
        self.import_framework()
        from . import counted_steps, executions, replicas  # import jax

        call = replicas.ReplicatedCall.of(model)
        names = call.names if call else self.devices()
        variables = functools.partial(replicas.variables_of, model)
        return executions.executed(names, variables, counted_steps.runs_programs(model))

    def memory_peaks(self):
        """Return the peaks of ``memory_stats()``, which CPU devices do not have."""
        if not self.initialised():  # not yet, or no longer, as JAX has it at exit
            return {}
        from . import configuration  # imports jax

        devices, key = configuration.devices_by_name(), "peak_bytes_in_use"
        statistics = {name: device.memory_stats() or {} for name, device in devices.items()}
        return {name: stats[key] for name, stats in statistics.items() if key in stats}

    def profiled(self):
        """Record by JAX's profiler."""
        devices = self.devices()
        from . import configuration, profiler  # import jax

        if not configuration.reads_profiles():
            raise errors.unsupported(
                "jax",
                "record when each device executes what in this version",
                "Install JAX 0.7.2 or later; compat.report() shows what each device has computed.",
            )
        return profiler.profiled(devices)

    # Ranks ------------------------------------------------------------------------------------

    def launcher(self, job):
        """Return compat's own launcher, since JAX has none."""
        from ..._ranks.launch import starter  # not at start-up

        return starter.launcher(job)

    def distribute(self, model, place):
        """Have the ranks train the model together; see ``ranks``."""
        self.import_framework()
        from . import ranks, replicas  # they import jax

        replicas.check_distribution(model)
        return ranks.distribute(model, place)


backend = JAX()
