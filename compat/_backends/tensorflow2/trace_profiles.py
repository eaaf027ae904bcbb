"""Profiles of TensorFlow 2.1 and 2.2, whose profilers write traces in forms of their own."""

import collections
import contextlib
import gzip
import json
import re
import time
from typing import Any, Dict, Iterator, List, Tuple

from ... import errors

_DEVICE = re.compile(r"(^|,)device=([^,]+)")


@contextlib.contextmanager
def recorded() -> "Iterator[List[Any]]":
    """Record a trace by the profiler of TensorFlow 2.1; yield a list that gets its ``StepStats``.

    Raises:
        InvalidArgumentError: the profiler is running already.
    """
    from tensorflow.core.protobuf import trace_events_pb2
    from tensorflow.python.eager import profiler

    statistics: "List[Any]" = []
    try:
        profiler.start()
    except profiler.ProfilerAlreadyRunningError as error:
        raise already_running("tf.summary.trace_export()") from error
    try:
        yield statistics
    finally:
        time.sleep(0.1)  # see profiler._profile()
        statistics.append(statistics_of(trace_events_pb2.Trace.FromString(profiler.stop())))


def already_running(remedy: str) -> "errors.InvalidArgumentError":
    """Return the error for a profile that a script records.

    Arguments:
        remedy: the call that ends it.
    """
    return errors.InvalidArgumentError(
        "timeline(): TensorFlow's profiler is running already, and it records one profile at a "
        f"time. End that one first: {remedy}, or a fit() whose TensorBoard callback has "
        "profile_batch."
    )


def statistics_of(trace: "Any") -> "Any":
    """Return the events of a trace of TensorFlow 2.1 as ``StepStats``.

    An operation that a thread of the CPU executes or launches has its device in its label.
    """
    from tensorflow.core.framework import step_stats_pb2

    records = collections.defaultdict(list)
    for event in trace.trace_events:
        arguments = dict(event.args)
        label, name = arguments.get("label", ""), arguments.get("long name", event.name)
        device = _DEVICE.search(label)
        if device:
            node, _, kind = name.rpartition(":")
            label = f"{node} = {kind}()"
        else:
            node = name
        times = {"all_start_micros": event.timestamp_ps // 10**6}
        times["op_end_rel_micros"] = event.duration_ps // 10**6
        record = step_stats_pb2.NodeExecStats(node_name=node, timeline_label=label, **times)
        records[device.group(2) if device else trace.devices[event.device_id].name].append(record)
    by_device = [
        step_stats_pb2.DeviceStepStats(device=device, node_stats=nodes)
        for device, nodes in records.items()
        if "device:" in device  # the threads themselves are on "/host:CPU"
    ]
    return step_stats_pb2.StepStats(dev_stats=by_device)


def planes_of(content: bytes) -> "Any":
    """Return the planes of a profile, as later versions write them, from TensorFlow 2.2's trace.

    Arguments:
        content: compressed JSON, for browsers.
    """
    from tensorflow.core.profiler.protobuf import xplane_pb2

    space = xplane_pb2.XSpace()
    planes: "Dict[int, Any]" = collections.defaultdict(space.planes.add)
    lines: "Dict[Tuple[int, int], Any]" = {}
    numbers: "Dict[Tuple[int, str, str], int]" = {}

    def number(pid: int, kind: str, name: str) -> int:
        """Return the number of a name in a plane's metadata of a kind."""
        key = pid, kind, name
        if key not in numbers:
            numbers[key] = len(numbers) + 1
            getattr(planes[pid], kind)[numbers[key]].name = name
        return numbers[key]

    for event in json.loads(gzip.decompress(content).decode("utf-8"))["traceEvents"]:
        if not event:  # the last one
            continue
        pid = event["pid"]
        plane, place = planes[pid], (pid, event.get("tid"))
        if event.get("name") == "process_name":
            plane.name = event["args"]["name"]
        if place[1] is None:
            continue
        if place not in lines:
            lines[place] = plane.lines.add()
        if event["ph"] == "X":
            record = lines[place].events.add(
                metadata_id=number(pid, "event_metadata", event["name"]),
                offset_ps=int(event["ts"] * 1e6),
                duration_ps=int(event["dur"] * 1e6),
            )
            for key, value in event.get("args", {}).items():
                kind = number(pid, "stat_metadata", key)
                record.stats.add(metadata_id=kind, str_value=str(value))
        elif event["name"] == "thread_name":
            lines[place].name = event["args"]["name"]
    return space.planes
