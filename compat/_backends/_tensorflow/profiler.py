"""Devices and times of operations, from the statistics that TensorFlow records of a run."""

import collections
from typing import Any, Iterable, Iterator, List, Sequence

from ..._runtime.operation_times import Operation

# These wait for another device or for the input pipeline, or run other operations.
WAITING = ("_Send", "_Recv", "_HostSend", "_HostRecv", "IteratorGetNext", "PartitionedCall")


def operations_of(statistics: "Iterable[Any]", devices: "Sequence[str]") -> "Iterator[Operation]":
    """Yield the operations of runs on the configured devices, from the runs' ``StepStats``.

    If each GPU has a record of its streams ("/device:GPU:0/stream:all"), these count, else the
    records of what the CPU has launched on them. Before TensorFlow 1.15, the kernels of all GPUs
    are recorded as those of the first.
    """
    for run in statistics:
        launched, streams = collections.defaultdict(list), collections.defaultdict(list)
        for record in run.dev_stats:
            name = record.device[record.device.rfind("/device:") :]
            device, _, stream = name[1:].partition("/")
            if not stream:
                launched["/" + device].extend(record.node_stats)
            elif stream == "stream:all":
                streams["/" + device].extend(record.node_stats)
        if set(streams) == {device for device in launched if "GPU" in device}:
            launched.update(streams)
        for device, name in zip(launched, as_configured(launched, devices)):
            if name in devices:
                yield from _operations(name, launched[device])


def titled(node: str, kind: str) -> str:
    """Return the name of an operation in a profile."""
    return f"{kind}: {node}"


def _operations(device, records):
    """Yield the operations of records, without waiting."""
    for record in records:
        # "sequential/dense/MatMul = MatMul(...)"; the record of a stream does not have the type.
        kind = record.timeline_label.partition(" = ")[2].partition("(")[0]
        if not kind.endswith(WAITING):
            name = titled(record.node_name, kind) if kind else record.node_name
            start = record.all_start_micros + record.op_start_rel_micros
            duration = max(0, record.op_end_rel_micros - record.op_start_rel_micros)
            yield Operation(device, name, float(start), float(duration))


def as_configured(devices: "Iterable[str]", configured: "Iterable[str]") -> "List[str]":
    """Return devices by their configured names.

    In TensorFlow 2's v1 mode the configured name of "/device:CPU:0" is "/cpu:0".
    """
    names = {_plain(name): name for name in configured}
    return [names.get(_plain(device), device) for device in devices]


def _plain(device):
    return device.lower().replace("device:", "")
