"""JAX, under Keras 3.

See ``replicas`` for several devices, ``ranks`` for several processes.
"""

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
    """JAX."""

    name = "jax"
    framework = "jax"
    distributions = ("jax",)
    extra = "jax"
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

    # Before the first operation ---------------------------------------------------------------

    def environ(self, settings, environ):
        """JAX reads them when it makes its devices ("GPU memory allocation" in its docs)."""
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
        asked, needed = environ.get(_THREADS), 3 * settings.devices.simulated
        has = usable_cores() if asked is None else whole_number(asked) or 0
        if settings.devices.simulated > 1 and has < needed:
            variables[_THREADS] = str(needed)
        return variables

    def initialised(self):
        """Variables and configuration count until JAX makes its devices."""
        bridge = sys.modules.get("jax._src.xla_bridge")
        return "JAX has made its devices" if getattr(bridge, "_backends", None) else None

    # After the import -------------------------------------------------------------------------

    def configure(self, settings):
        jax = self.import_framework()
        from . import configuration  # imports jax

        chosen = settings.devices
        changes = {}
        applied, warnings = [], []
        made = bool(self.initialised())
        if made:
            chosen.settle(len(_gpus(jax)))
            _check_devices_made(jax, settings)
        elif chosen.simulated or chosen.declined:
            changes["jax_platforms"] = "cpu"
        elif chosen.gpus:
            if settings.memory and settings.memory.size:
                os.environ[_FRACTION] = f"{_fraction(settings):g}"
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
            gpus = _gpus(jax)  # which makes JAX's devices
            # Those of CUDA and ROCm are now the ones that were asked for; Apple's is one.
            chosen.settle(len(gpus), restricted=any(d.platform != "METAL" for d in gpus))
            if gpus and settings.memory and settings.memory.size:
                raise _one_fraction_for_all_gpus(settings.memory)
        return applied, warnings

    def devices(self):
        """As Keras names them. Simulated ones are known before JAX makes them."""
        jax = self.import_framework()
        from . import configuration  # imports jax

        if (
            not self.initialised()
            and jax.config.jax_platforms == "cpu"
            and configuration.simulated()
        ):
            return [f"cpu:{index}" for index in range(configuration.simulated())]
        return list(_devices(jax))

    # Replicas ---------------------------------------------------------------------------------

    def parallelize(self, model, devices):
        """Give the instance a ``call`` that is sharded, or the class's own one back."""
        jax = self.import_framework()
        from . import replicas  # imports jax

        replicas.check_distribution(model)
        before, by_name = replicas.ShardedCall.of(model), _devices(jax)
        if before is not None:
            replicas.remove(model)
        if list(devices) != self.devices()[:1]:
            replicas.install(model, [by_name[name] for name in devices])
        if replicas.ShardedCall.of(model) is not before:
            # Keras traces its steps again: the ones it has hold the call that was.
            _keras.forget_compiled_steps(model)
        return model

    def device(self, device):
        raise self._cannot(
            f"place parts of a model on {device}: under jax.jit a step is one program, all of "
            "which runs on the same devices",
            "Leave compat.device() out; parallelize() splits the batches of the whole model.",
        )

    def verify(self, model, verification):
        from . import verification  # not at start-up

        verification.VerifiedStep.install_on(model, verification)

    def executed(self, model):
        """From the program of the step; see ``executions``."""
        self.import_framework()
        from . import counted_steps, executions, replicas  # import jax

        call = replicas.ShardedCall.of(model)
        names = call.names if call else self.devices()
        variables = functools.partial(replicas.variables_of, model)
        return executions.by_device(names, variables, counted_steps.runs_programs(model))

    def memory_peaks(self):
        """``memory_stats()``, which CPU devices do not have."""
        devices, key = _devices(self.import_framework()), "peak_bytes_in_use"
        told = {name: device.memory_stats() or {} for name, device in devices.items()}
        return {name: stats[key] for name, stats in told.items() if key in stats}

    def profiled(self):
        """From JAX's profiler."""
        devices = self.devices()
        from . import configuration, profiler  # import jax

        if not configuration.reads_profiles():
            raise errors.unsupported(
                "jax",
                "record when each device executes what in this version",
                "Install JAX 0.7.2 or later; compat.report() says what each device has computed.",
            )
        return profiler.profiled(devices)

    # Ranks ------------------------------------------------------------------------------------

    def launcher(self, job):
        """JAX has none of its own."""
        from ..._ranks.launch import starter  # not at start-up

        return starter.launcher(job)

    def distribute(self, model, place):
        """See ``ranks``."""
        self.import_framework()
        from . import ranks, replicas  # they import jax

        replicas.check_distribution(model)
        return ranks.distribute(model, place)


# Configuring ----------------------------------------------------------------------------------


def _devices(jax):
    """JAX's devices, by Keras' names for them."""
    from . import programs  # imports jax

    return {programs.device_name(device): device for device in jax.local_devices()}


def _gpus(jax):
    return [device for device in jax.local_devices() if device.platform != "cpu"]


def _check_devices_made(jax, settings):
    """Refuse what would have to change now that JAX has made its devices."""
    made, chosen = jax.local_devices(), settings.devices
    on_cpu = made[0].platform == "cpu"
    if chosen.simulated:
        as_asked = on_cpu and len(made) == chosen.simulated
    elif chosen.gpus:
        everything = list(chosen.positions) == list(range(len(made)))
        as_asked = not on_cpu and everything and not settings.memory
    else:
        as_asked = on_cpu or not chosen.declined
    if as_asked:
        return
    imported = [module.split(".")[0] for module in sys.modules]  # in the order of import
    first = next(top for top in imported if top in ("keras", "jax"))
    raise errors.too_late(
        "jax",
        f"JAX made its devices ({listed(list(_devices(jax)))}) with its first operation (it was "
        f"imported by `import {first}`), and cannot change them or their memory any more "
        f"({settings})",
        "Call it before the first model, variable or array is made, best before the first "
        "`import jax` or `import keras`.",
    )


def _fraction(settings):
    """The size asked for, as a fraction of each GPU."""
    totals = set(settings.devices.memory_totals())
    if len(totals) != 1 or 0 in totals:
        raise _one_fraction_for_all_gpus(settings.memory)
    return min(1.0, settings.memory.size / float(totals.pop()))


def _one_fraction_for_all_gpus(memory):
    return errors.unsupported(
        "jax",
        f"limit memory to {memory}: it takes one fraction for all GPUs, and nvidia-smi does not "
        "tell that they all have the same amount",
        'Use a fraction such as memory=0.5, or memory="grow".',
    )


backend = JAX()
