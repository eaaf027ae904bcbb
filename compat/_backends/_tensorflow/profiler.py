"""When and where operations ran, by the statistics that TensorFlow records of a run."""

import collections

from ..._runtime.operation_times import Operation

# These wait for another device or for the input pipeline, or run other operations.
WAITING = ("_Send", "_Recv", "_HostSend", "_HostRecv", "IteratorGetNext", "PartitionedCall")


def operations_of(statistics, devices):
    """Yield the operations of these runs' ``StepStats`` on the devices that are configured.

    A GPU's own record ("/device:GPU:0/stream:all") counts where each GPU that ran has one, else
    the record of what the CPU launched on it. Before TensorFlow 1.15, all GPUs' kernels are
    recorded as those of the first.
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


def titled(node, kind):
    """Return the name of an operation in a profiler."""
    return f"{kind}: {node}"


def _operations(device, records):
    """Records as operations, without those that tell of waiting."""
    for record in records:
        # "sequential/dense/MatMul = MatMul(...)"; a GPU's own record has none of the kind.
        kind = record.timeline_label.partition(" = ")[2].partition("(")[0]
        if not kind.endswith(WAITING):
            name = titled(record.node_name, kind) if kind else record.node_name
            start = record.all_start_micros + record.op_start_rel_micros
            duration = max(0, record.op_end_rel_micros - record.op_start_rel_micros)
            yield Operation(device, name, float(start), float(duration))


def as_configured(devices, configured):
    """Return the devices by the names that were configured.

    In TensorFlow 2's v1 mode "/device:CPU:0" is configured by the name "/cpu:0".
    """
    names = {_plain(name): name for name in configured}
    return [names.get(_plain(device), device) for device in devices]


def _plain(device):
    return device.lower().replace("device:", "")
