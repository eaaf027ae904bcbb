"""What each device executes, and when: from JAX's profiler."""

import contextlib
import glob
import os
import re
import tempfile

from ... import errors
from ..._runtime.operation_times import Operation, converted


def profiled(devices):
    """What ``JAX.profiled()`` returns, for the configured devices."""
    return converted(recorded(), lambda events: _operations(events, devices))


@contextlib.contextmanager
def recorded():
    """Within, JAX's profiler records; gives a list, which afterwards has each event.

    With the names of plane, line and event, its start and duration, and its statistics.
    """
    import jax

    events = []  # type: list
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
    """Kernels of GPUs, which have planes of their own; of CPU devices the instructions of XLA."""
    for plane, line, name, span, statistics in events:
        gpu, place = re.match(r"/device:GPU:(\d+)", plane), None
        if gpu and line.startswith("Stream"):
            place = int(gpu.group(1))
        elif not gpu and "hlo_op" in statistics:
            place = statistics.get("device_ordinal")
        if place is not None and place < len(devices):
            yield Operation(devices[place], name, *span)
