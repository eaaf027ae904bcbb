"""Which operations each device has executed, and when: shares of time, and Trace Event Format."""

import contextlib
from typing import Any, Callable, ContextManager, Dict, Iterator, List, NamedTuple, Sequence, Tuple


class Operation(NamedTuple):
    """What a device has executed, as its framework's profiler recorded it.

    Attributes:
        device: its name, as ``Backend.devices()`` has it.
        name: of the operation or the kernel.
        start: in microseconds, from any moment that all operations have in common.
        duration: in microseconds.
    """

    device: str
    name: str
    start: float
    duration: float


@contextlib.contextmanager
def converted(
    recording: "ContextManager[Any]", convert: "Callable[[Any], Any]"
) -> "Iterator[List[Operation]]":
    """What ``Backend.profiled()`` returns, where a framework first records in its own way.

    Arguments:
        recording: gives what it will have filled when it ends.
        convert: makes operations of that.
    """
    operations: "List[Operation]" = []
    stack = contextlib.ExitStack()
    records = stack.enter_context(recording)
    try:
        with stack:
            yield operations
    finally:
        operations.extend(convert(records))


def busy(operations: "Sequence[Operation]") -> "Dict[str, float]":
    """The share of time that each device was executing at least one operation.

    Of the time from the first operation's start to the last one's end, on any of them.
    """
    if not operations:
        return {}
    began = min(each.start for each in operations)
    whole = max(each.start + each.duration for each in operations) - began
    until: "Dict[str, float]" = {}
    worked: "Dict[str, float]" = {}
    for each in sorted(operations, key=lambda each: each.start):
        end = each.start + each.duration
        free = max(each.start, until.get(each.device, began))
        worked[each.device] = worked.get(each.device, 0.0) + max(0.0, end - free)
        until[each.device] = max(end, free)
    return {device: time / whole if whole else 1.0 for device, time in worked.items()}


def trace(
    operations: "Sequence[Operation]", names: "Sequence[Tuple[str, str]]"
) -> "Dict[str, Any]":
    """The operations for a trace viewer: a "process" for each device.

    In the JSON object format of Chrome's Trace Event Format. Operations that overlap are shown in
    "threads" below each other, since one of these must be a stack.

    Arguments:
        names: the devices, in the order to show, and the title of each.
    """
    began = min([each.start for each in operations] or [0.0])
    events: "List[Dict[str, Any]]" = []
    places = {device: place for place, (device, _) in enumerate(names)}
    for place, (_, title) in enumerate(names):
        event = {"ph": "M", "pid": place, "tid": 0}
        events.append(dict(event, name="process_name", args={"name": title}))
        events.append(dict(event, name="process_sort_index", args={"sort_index": place}))
    free: "Dict[str, List[float]]" = {}  # when each thread of a device has ended its last one
    for each in sorted(operations, key=lambda each: (each.start, -each.duration)):
        threads = free.setdefault(each.device, [])
        thread = next((i for i, end in enumerate(threads) if end <= each.start), len(threads))
        threads[thread : thread + 1] = [each.start + each.duration]
        event = {"ph": "X", "pid": places[each.device], "tid": thread, "name": each.name}
        event.update(ts=round(each.start - began, 3), dur=round(each.duration, 3))
        events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}
