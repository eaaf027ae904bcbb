"""Operations that each device has executed, and when: recorded, summed up, and written."""

import contextlib
import json
import os
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

from .. import errors
from . import markup, patching, safe_files
from .process import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .._ranks.place import Place

#: How many equal parts a timeline is summed up in: a picture has no room for more.
PARTS = 200


class Operation(NamedTuple):
    """An operation that a device has executed, as its framework's profiler recorded it.

    Attributes:
        device: its name, as ``Backend.devices()`` has it.
        name: of the operation or the kernel.
        start: in microseconds, from any moment common to all operations.
        duration: in microseconds.
    """

    device: str
    name: str
    start: float
    duration: float


class Activity(NamedTuple):
    """The part of a timeline in which a device was executing at least one operation.

    Attributes:
        busy: that part, from 0 to 1.
        timeline_seconds: the whole time: from the first operation's start to the last one's end, on
            any device.
        busy_parts: the same of each of ``PARTS`` equal parts of the time, in order.
    """

    busy: float
    timeline_seconds: float
    busy_parts: "List[float]"


@contextlib.contextmanager
def converted(
    recording: "ContextManager[Any]", convert: "Callable[[Any], Iterable[Operation]]"
) -> "Iterator[List[Operation]]":
    """Return the context of ``Backend.profiled()`` from one with a framework's own records.

    Arguments:
        recording: the framework's context, which yields records that are complete when it ends.
        convert: makes operations of these records.
    """
    operations: "List[Operation]" = []
    with contextlib.ExitStack() as when_recorded, recording as records:
        when_recorded.callback(lambda: operations.extend(convert(records)))
        yield operations


def count_products(products: "Iterable[Tuple[str, bool]]") -> "Dict[str, Tuple[int, int]]":
    """Count the products of layers by device, as ``compat test`` and verification report them.

    Arguments:
        products: of each matrix product or convolution that was executed, the device, and whether
            it is part of the backward pass.

    Returns:
        For each device that executed any, how many in the forward and in the backward pass.
    """
    counts: "Dict[str, List[int]]" = {}
    for device, is_backward in products:
        counts.setdefault(device, [0, 0])[is_backward] += 1
    return {device: (forward, backward) for device, (forward, backward) in counts.items()}


def activities(operations: "List[Operation]", devices: "List[str]") -> "Dict[str, Activity]":
    """Return the ``Activity`` of each device; nothing where there are no operations."""
    if not operations:
        return {}
    began = min(operation.start for operation in operations)
    whole = max(operation.start + operation.duration for operation in operations) - began
    until = dict.fromkeys(devices, 0.0)
    worked = {device: [0.0] * PARTS for device in devices}
    for operation in sorted(operations, key=lambda operation: operation.start):
        end = (operation.start + operation.duration - began) / (whole or 1.0) * PARTS
        start = max((operation.start - began) / (whole or 1.0) * PARTS, until[operation.device])
        until[operation.device] = max(start, end)
        for part in range(int(start), min(int(end) + 1, PARTS)):
            worked[operation.device][part] += max(0.0, min(end, part + 1) - max(start, part))
    by_device = {}
    for device, parts in worked.items():
        busy = min(1.0, sum(parts) / PARTS) if whole else 1.0
        by_device[device] = Activity(busy, whole / 1e6, [round(part, 3) for part in parts])
    return by_device


def share(value: "Optional[float]") -> str:
    """Return a number from 0 to 1 as percents, for a report."""
    if value is None:
        return "-"
    return "<1%" if 0 < value < 0.005 else f"{value:.0%}"


def picture(activities: "Any") -> str:
    """Return an SVG image of when each device was executing something, all on one scale.

    Arguments:
        activities: names, and objects with the attributes of an ``Activity``.
    """
    named = list(activities)
    longest = max(activity.timeline_seconds for _, activity in named) or 1.0
    lanes = []
    for name, activity in named:
        length = activity.timeline_seconds / longest
        lanes.append(markup.Lane(name, "busy " + share(activity.busy), length, activity.busy_parts))
    end = f"{longest * 1e3:,.1f} ms" if longest < 1 else f"{longest:,.1f} s"
    return markup.picture("When each device was executing operations", lanes, ("0", end))


def trace(operations: "List[Operation]", names: "Any") -> "Dict[str, Any]":
    """Return the operations for a trace viewer: a "process" for each device.

    In the JSON object format of Chrome's Trace Event Format. Operations that overlap are shown in
    "threads" below each other, since one of these must be a stack.

    Arguments:
        operations: of all devices.
        names: the devices, in the order to show, and the title of each.
    """
    began = min([operation.start for operation in operations] or [0.0])
    events: "List[Dict[str, Any]]" = []
    places = {device: place for place, (device, _) in enumerate(names)}
    for place, (_, title) in enumerate(names):
        event = {"ph": "M", "pid": place, "tid": 0}
        events.append(dict(event, name="process_name", args={"name": title}))
        events.append(dict(event, name="process_sort_index", args={"sort_index": place}))
    free: "Dict[str, List[float]]" = {}  # when each thread of a device has ended its last one
    for operation in sorted(
        operations, key=lambda operation: (operation.start, -operation.duration)
    ):
        threads = free.setdefault(operation.device, [])
        thread = next((i for i, end in enumerate(threads) if end <= operation.start), len(threads))
        threads[thread : thread + 1] = [operation.start + operation.duration]
        event = {"ph": "X", "pid": places[operation.device], "tid": thread, "name": operation.name}
        event.update(ts=round(operation.start - began, 3), dur=round(operation.duration, 3))
        events.append(event)
    return {"traceEvents": events, "displayTimeUnit": "ms"}


# Recording -------------------------------------------------------------------------------------


class Timeline:
    """The recording of ``compat.timeline()``; in a notebook, once the block has ended, a picture.

    Attributes:
        path: the file.
        activities: the ``Activity`` of each device, by its name; empty until then.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.activities: "Dict[str, Activity]" = {}

    def __repr__(self) -> str:
        return f"<Timeline {self.path}>"

    def _repr_html_(self) -> "Optional[str]":
        return picture(self.activities.items()) if self.activities else None


@contextlib.contextmanager
def recorded(path: str, backend: "Any", place: "Any") -> "Iterator[Timeline]":
    """Record a timeline within a block, for ``compat.timeline()``.

    Arguments:
        path: the file to write.
        backend: the configured backend.
        place: this process's place among the ranks, or None.
    """
    path = os.path.abspath(of_rank(path, place))
    if process.recording_timeline is not None:
        raise errors.InvalidArgumentError(
            f"timeline({path!r}): {process.recording_timeline} is being recorded, and a framework "
            "records one timeline at a time. End that block first."
        )
    try:
        safe_files.check_writable(path)
    except OSError as error:
        raise errors.not_writable(f"timeline({path!r})", error) from error
    timeline = Timeline(path)
    with contextlib.ExitStack() as when_recorded:
        with backend.profiled() as operations, patching.replaced(process, recording_timeline=path):
            when_recorded.callback(_write, timeline, backend.devices(), operations, place)
            yield timeline


def of_rank(path: str, place: "Optional[Place]") -> str:
    """Return the file of one rank, with its number before the ending."""
    if place is None:
        return path
    stem, ending = os.path.splitext(path)
    return f"{stem}.rank{place.rank}{ending}"


def _write(
    timeline: "Timeline",
    devices: "List[str]",
    operations: "List[Operation]",
    place: "Optional[Place]",
) -> None:
    if place is not None:
        devices = devices[:1]
    operations = [operation for operation in operations if operation.device in devices]
    if not operations:
        errors.warn(
            f"timeline({timeline.path!r}): no configured device executed anything while it was "
            "recorded, so the timeline is empty. Train or call the model within the block."
        )
    timeline.activities = process.activities = activities(operations, devices)
    title = "{}" if place is None else f"rank {place.rank}: {{}}"
    names = [(device, title.format(device)) for device in devices]
    safe_files.write(timeline.path, json.dumps(trace(operations, names)) + "\n")
