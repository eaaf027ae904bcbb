"""Which operations each device has executed, and when: shares of time, and Trace Event Format."""

import contextlib
from typing import (
    Any,
    Callable,
    ContextManager,
    Dict,
    Iterable,
    Iterator,
    List,
    NamedTuple,
    Optional,
    Tuple,
)

from . import markup

#: How many equal parts a timeline is summed up in: a picture has no room for more.
PARTS = 200


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


class Activity(NamedTuple):
    """How much of a timeline a device was executing at least one operation.

    Attributes:
        busy: a share of the whole time: from the first operation's start to the last one's end, on
            any device.
        timeline_seconds: the whole time.
        busy_parts: the same share of each of ``PARTS`` equal parts of it, in their order.
    """

    busy: float
    timeline_seconds: float
    busy_parts: "List[float]"


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


def activities(operations: "List[Operation]", devices: "List[str]") -> "Dict[str, Activity]":
    """When each device was executing something; nothing where none was."""
    if not operations:
        return {}
    began = min(each.start for each in operations)
    whole = max(each.start + each.duration for each in operations) - began
    until = dict.fromkeys(devices, 0.0)
    worked = {device: [0.0] * PARTS for device in devices}
    for each in sorted(operations, key=lambda each: each.start):
        end = (each.start + each.duration - began) / (whole or 1.0) * PARTS
        start = max((each.start - began) / (whole or 1.0) * PARTS, until[each.device])
        until[each.device] = max(start, end)
        for part in range(int(start), min(int(end) + 1, PARTS)):
            worked[each.device][part] += max(0.0, min(end, part + 1) - max(start, part))
    found = {}
    for device, parts in worked.items():
        busy = min(1.0, sum(parts) / PARTS) if whole else 1.0
        found[device] = Activity(busy, whole / 1e6, [round(part, 3) for part in parts])
    return found


def share(value: "Optional[float]") -> str:
    if value is None:
        return "-"
    return "<1%" if 0 < value < 0.005 else f"{value:.0%}"


def picture(activities: "Iterable[Tuple[str, Any]]") -> str:
    """An SVG image of when each device was executing something, all on one scale.

    Arguments:
        activities: names, and what has the attributes of an ``Activity``.
    """
    named = list(activities)
    longest = max(each.timeline_seconds for _, each in named) or 1.0
    lanes = []
    for name, each in named:
        length = each.timeline_seconds / longest
        lanes.append(markup.Lane(name, "busy " + share(each.busy), length, each.busy_parts))
    end = f"{longest * 1e3:,.1f} ms" if longest < 1 else f"{longest:,.1f} s"
    return markup.picture("When each device was executing operations", lanes, ("0", end))


def trace(operations: "List[Operation]", names: "List[Tuple[str, str]]") -> "Dict[str, Any]":
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
