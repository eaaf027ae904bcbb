"""What each device executes, and when: from JAX's profiler."""

import contextlib
import glob
import os
import re
import tempfile

from ... import errors
from ..._operations import Operation


@contextlib.contextmanager
def profiled(devices):
    """What ``JAX.profiled()`` returns, for the configured devices."""
    import jax

    operations = []  # type: list
    with tempfile.TemporaryDirectory() as folder:
        _start(jax, folder)
        try:
            yield operations
            jax.effects_barrier()
        finally:
            jax.profiler.stop_trace()
            for path in glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True):
                profile = jax.profiler.ProfileData.from_file(path)
                operations += _operations(profile, devices)


def _start(jax, folder):
    kind = getattr(jax.profiler, "ProfileOptions", None)
    options = {}
    if kind is not None:
        options["profiler_options"] = kind()
        options["profiler_options"].python_tracer_level = 0  # each call of a Python function
    try:
        jax.profiler.start_trace(folder, **options)
    except RuntimeError as error:
        if "one profile" not in str(error).lower():
            raise
        raise errors.profiler_runs("jax") from error


def _operations(profile, devices):
    """Kernels of GPUs, which have planes of their own; of CPU devices the instructions of XLA."""
    for plane in profile.planes:
        gpu = re.match(r"/device:GPU:(\d+)", plane.name)
        for line in plane.lines:
            for event in line.events:
                if gpu:
                    place = int(gpu.group(1)) if line.name.startswith("Stream") else None
                else:
                    place = _cpu(event)
                if place is not None and place < len(devices):
                    start, duration = event.start_ns / 1e3, event.duration_ns / 1e3
                    yield Operation(devices[place], event.name, start, duration)


def _cpu(event):
    record = dict(event.stats)
    return record.get("device_ordinal") if "hlo_op" in record else None
