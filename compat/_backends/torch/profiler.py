"""Operations that each device executes, and when, from torch's profiler."""

from typing import Any, Callable, Dict, List, Optional

import torch

from ... import errors
from ..._runtime.operation_times import Operation, converted, count_products

#: Prefix of the ranges that replicas mark for the profiler; the device's name follows.
REPLICA = "replica on "
_GRADIENT = "autograd::engine::evaluate_function: "
# Operations of layers, and those of their gradients.
PRODUCTS = ("aten::addmm", "aten::mm", "aten::bmm", "aten::convolution", "aten::embedding")
GRADIENTS = PRODUCTS + ("aten::convolution_backward", "aten::embedding_dense_backward")


def profiled(devices: "List[str]") -> Any:
    """Return the context of ``Torch.profiled()``, for the configured devices."""
    if torch.autograd._profiler_enabled():  # another one would end it, silently
        raise errors.profiler_runs("torch")
    kinds = torch.profiler.ProfilerActivity
    activities = [kinds.CPU, kinds.CUDA] if devices[0].startswith("cuda") else [kinds.CPU]
    recording = _profile(activities)
    return converted(recording, lambda profile: _executed(profile.events(), devices))


def _executed(events, devices):
    """Yield operations: on simulated devices replicas', and the steps of their backward pass."""
    owners = _owners(events)
    for event in events:
        name, caller, device = event.name, event.cpu_parent, None
        if devices[0].startswith("cuda"):
            if event.device_type == torch.autograd.DeviceType.CUDA:
                device = f"cuda:{event.device_index}"
        elif len(devices) == 1:
            device = devices[0] if caller is None else None
        elif name.startswith(_GRADIENT):
            name, device = "gradient of " + name[len(_GRADIENT) :], owners.get(_forward_of(event))
        elif caller is not None and caller.name.startswith(REPLICA):
            device = replica(event)
        if device is not None:
            time = event.time_range
            yield Operation(device, name, time.start, time.end - time.start)


def _profile(activities):
    """Return torch's profiler of all threads: replicas that reduce values have their own."""
    settings = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    return torch.profiler.profile(activities=activities, experimental_config=settings)


def products(step: "Callable[[], Any]") -> "Dict[str, Any]":
    """Count the products of layers in ``step()`` by replica; see ``count_products``."""
    with _profile([torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return count_products(_products(profile.events()))


def _products(events):
    """Yield the device of each product of a replica, and whether it is a gradient's.

    A product is called by its replica's forward pass, and the gradient that autograd computes has
    its operation's sequence number.
    """
    owners = _owners(events)
    for event in events:
        # A convolution calls its own implementation.
        if event.name in PRODUCTS and _within(event.cpu_parent, PRODUCTS) is None:
            if replica(event) is not None:
                yield replica(event), False
        gradient = _within(event, _GRADIENT) if event.name in GRADIENTS else None
        if gradient is not None and _forward_of(gradient) in owners:
            yield owners[_forward_of(gradient)], True


def _owners(events):
    """Return the device of each operation's replica, by its thread and its sequence number."""
    pairs = (((event.thread, event.sequence_nr), replica(event)) for event in events)
    return {key: device for key, device in pairs if key[1] >= 0 and device is not None}


def _forward_of(gradient):
    """Return the key in ``_owners`` of the operation that a gradient is of."""
    return gradient.fwd_thread, gradient.sequence_nr


def replica(event: Any) -> "Optional[str]":
    """Return the device of the replica that an operation belongs to, or None."""
    parent = _within(event.cpu_parent, REPLICA)
    return None if parent is None else parent.name[len(REPLICA) :]


def _within(event, names):
    """Return the innermost operation, this one or around it, whose name begins so, or None."""
    while event is not None and not event.name.startswith(names):
        event = event.cpu_parent
    return event
