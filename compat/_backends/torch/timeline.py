"""What each device executes, and when: from torch's profiler."""

import contextlib

from ... import errors
from ..._runtime.operation_times import Operation

_REPLICA = "replica on "
GRADIENT = "autograd::engine::evaluate_function: "


@contextlib.contextmanager
def profiled(devices):
    """What ``Torch.profiled()`` returns, for the configured devices."""
    import torch

    if torch.autograd._profiler_enabled():  # another one would end it, silently
        raise errors.profiler_runs("torch")
    operations = []  # type: list
    activities = [torch.profiler.ProfilerActivity.CPU]
    if devices[0].startswith("cuda"):
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    profile = torch.profiler.profile(activities=activities)
    profile.start()
    try:
        yield operations
        if devices[0].startswith("cuda"):
            torch.cuda.synchronize()
    finally:
        profile.stop()
        events = profile.events()
        if devices[0].startswith("cuda"):
            cuda = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA]
            operations += [_operation(f"cuda:{e.device_index}", e) for e in cuda]
        elif len(devices) == 1:
            operations += [_operation(devices[0], e) for e in events if e.cpu_parent is None]
        else:
            operations += _of_replicas(events)


def _operation(device, event, name=None):
    time = event.time_range
    return Operation(device, name or event.name, time.start, time.end - time.start)


def _of_replicas(events):
    """On simulated devices: what replicas call, and the steps of the backward pass through that."""
    for event in events:
        device = replica(event)
        if device is not None and event.cpu_parent.name.startswith(_REPLICA):
            yield _operation(device, event)
    devices = owners(events)
    for event in events:
        if event.name.startswith(GRADIENT) and event.sequence_nr in devices:
            name = "gradient of " + event.name[len(GRADIENT) :]
            yield _operation(devices[event.sequence_nr], event, name)


def owners(events):
    """The device of the replica that called an operation, by the number its gradient has, too."""
    pairs = ((event.sequence_nr, replica(event)) for event in events)
    return {number: device for number, device in pairs if number >= 0 and device is not None}


def replica(event):
    """The device of the replica that an operation belongs to; None: of none."""
    parent = event.cpu_parent
    while parent is not None and not parent.name.startswith(_REPLICA):
        parent = parent.cpu_parent
    return None if parent is None else parent.name[len(_REPLICA) :]
