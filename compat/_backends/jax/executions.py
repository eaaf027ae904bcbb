"""Proof of use: which devices computed shards of a batch in a step, as JAX reports it.

A program that is compiled for all devices may compute the same on each of them. What counts is
that XLA has partitioned it: that it has arrays of which each device holds a part, or instructions
by which devices exchange parts.
"""

import contextlib
import re
import weakref

import jax

from ..._runtime.usage import Executed
from . import programs
from .configuration import device_name

# Collective instructions, partition-id, and shardings of a program's arguments and results.
_PARTITIONED = re.compile(
    r"\b(partition-id|all-reduce|all-gather|all-to-all|collective-permute|reduce-scatter)"
    r"(-start)?\(|sharding=\{devices="
)


@contextlib.contextmanager
def executed(names, variables, is_compiled=True):
    """Count the operations by which each device computes a shard within a block.

    These are the operations of the largest program that is compiled within. Where steps are not
    compiled, or were compiled before, the arrays that the step has computed are counted instead.

    Arguments:
        names: of the devices.
        variables: a function that returns the variables that a step may assign.
        is_compiled: whether a step is one program.
    """
    counts = Executed.fromkeys(names, 0)
    before = {id(variable): _reference(variable) for variable in variables()}
    with programs.compiled() as compiled:
        yield counts
    steps = [
        (program.to_string(), devices)
        for program, devices in compiled
        if is_compiled and (len(devices) > 1 or program.name.endswith("_step"))
    ]
    if steps:
        text, devices = max(steps, key=lambda step: len(step[0]))
        is_partitioned = len(devices) > 1 and _PARTITIONED.search(text)
        for device in devices if is_partitioned else devices[:1]:
            if device_name(device) in counts:
                counts[device_name(device)] += text.count(" = ")
        return
    for variable in variables():
        reference = before.get(id(variable), lambda: None)
        if variable._value is not None and reference() is not variable._value:
            for device in variable._value.devices():
                if device_name(device) in counts:
                    counts[device_name(device)] += 1
    counts.is_known = any(counts.values())


def _reference(variable):
    value = variable._value
    return weakref.ref(value) if isinstance(value, jax.Array) else (lambda: value)
