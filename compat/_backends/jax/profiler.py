"""Which device executes which operations, and when, by JAX's profiler."""

import contextlib
import glob
import os
import re
import sys
import tempfile
from typing import Any, Dict, List, Tuple

import jax

from ... import errors
from ..._runtime import patching
from ..._runtime.operation_times import Operation, converted
from . import configuration, programs


def executed_operations(step):
    """Run a step whose program is yet to be compiled; return the operations that each device ran.

    The profiler records which instruction ran on which device; the compiled program has the
    products that each instruction computes.
    """
    with contextlib.ExitStack() as recording, programs.compiled() as compiled:
        reads_profiles = configuration.reads_profiles()
        events = recording.enter_context(recorded()) if reads_profiles else None
        recording.enter_context(_named_by_layers())
        step()
    computed: "Dict[str, Dict[str, List[programs.ProgramOperation]]]" = {}
    executed: "Dict[str, List[programs.ProgramOperation]]" = {}  # by device
    for program, devices in compiled:
        if program.name.endswith("_step"):
            computed[program.name] = programs.operations(program.to_string())
            if events is None:  # all devices of a program execute all of it
                ran = sum(computed[program.name].values(), [])
                names = map(configuration.device_name, devices)
                executed.update((name, list(ran)) for name in names)
    if events is None:
        return executed
    for *_, record in events:
        if record.get("hlo_module") in computed and "hlo_op" in record:
            device = "{}:{}".format(jax.devices()[0].platform, record["device_ordinal"])
            ran = computed[record["hlo_module"]][record["hlo_op"]]
            executed.setdefault(device, []).extend(ran)
    return executed


@contextlib.contextmanager
def _named_by_layers():
    """Have layers name their operations within a block, as those of Keras 3.8 and later do.

    JAX leaves out of the name of an operation that it is a derivative if no scope has a name.
    """
    backend = sys.modules["keras.src.backend"]
    if hasattr(sys.modules["keras.src.backend.jax.core"], "name_scope"):
        yield
        return

    class NamedScope(backend.name_scope):
        def __enter__(self):
            self.named = jax.named_scope(self.name)
            self.named.__enter__()
            return super().__enter__()

        def __exit__(self, *error):
            super().__exit__(*error)
            self.named.__exit__(*error)

    with patching.replaced(backend, name_scope=NamedScope):
        yield


def products(executed: "Dict[str, List[Any]]") -> "Dict[str, Tuple[int, int]]":
    """Return the numbers of matrix products and convolutions by device, forward and backward."""
    counts = {}
    for device, operations in executed.items():
        names = [operation.name for operation in operations]
        backward = sum("transpose(jvp(" in name for name in names)
        forward = sum("jvp(" in name and "transpose(" not in name for name in names)
        counts[device] = forward, backward
    return counts


def profiled(devices):
    """Return the result of ``JAX.profiled()``, for the configured devices."""
    return converted(recorded(), lambda events: _operations(events, devices))


@contextlib.contextmanager
def recorded():
    """Record by JAX's profiler within a block; yield a list, to which events are added at its end.

    Each has the names of plane, line and event, its start and duration, and its statistics.
    """
    events: "List[Any]" = []
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # each call of a Python function
    with tempfile.TemporaryDirectory() as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as error:
            if "one profile" not in str(error).lower():
                raise
            raise errors.profiler_runs("jax") from error
        try:
            yield events
            jax.effects_barrier()
        finally:
            jax.profiler.stop_trace()
            for path in glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True):
                profile = jax.profiler.ProfileData.from_file(path)
                for plane in profile.planes:
                    for line in plane.lines:
                        for e in line.events:
                            span = e.start_ns / 1e3, e.duration_ns / 1e3
                            events.append((plane.name, line.name, e.name, span, dict(e.stats)))


def _operations(events, devices):
    """Yield the kernels of GPUs, one plane for each; of CPU devices XLA's instructions."""
    ids = [device.id for device in jax.local_devices()]  # a rank's do not begin with 0
    for plane, line, name, span, statistics in events:
        gpu, place = re.match(r"/device:GPU:(\d+)", plane), None
        if gpu and line.startswith("Stream"):
            place = int(gpu.group(1))
        elif not gpu and "hlo_op" in statistics:
            ordinal = statistics.get("device_ordinal")
            place = ids.index(ordinal) if ordinal in ids else ordinal
        if place is not None and place < len(devices):
            yield Operation(devices[place], name, *span)
