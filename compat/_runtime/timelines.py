"""A timeline of what each device executes: recorded, and written to a file."""

import contextlib
import json
import os

from .. import errors
from . import operation_times, safe_files
from .process import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, Iterator, Optional

    from .._ranks.place import Place
    from ..backend import Backend


class Timeline:
    """What ``compat.timeline()`` records; in a notebook, once the block has ended, a picture.

    Attributes:
        path: the file.
        activities: when each device was executing something, by its name; empty until then.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.activities: "Dict[str, operation_times.Activity]" = {}

    def __repr__(self):
        return f"<Timeline {self.path}>"

    def _repr_html_(self):
        return operation_times.picture(self.activities.items()) if self.activities else None


@contextlib.contextmanager
def recorded(path: str, backend: "Backend", place: "Optional[Place]") -> "Iterator[Timeline]":
    """What ``compat.timeline()`` returns."""
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
        with backend.profiled() as operations:
            when_recorded.callback(_write, timeline, backend.devices(), operations, place)
            process.recording_timeline = path
            try:
                yield timeline
            finally:
                process.recording_timeline = None


def of_rank(path, place):
    """The file of one rank, whose number comes before the ending."""
    if place is None:
        return path
    stem, ending = os.path.splitext(path)
    return f"{stem}.rank{place.rank}{ending}"


def _write(timeline, devices, operations, place):
    if place is not None:
        devices = devices[:1]
    operations = [each for each in operations if each.device in devices]
    if not operations:
        errors.warn(
            f"timeline({timeline.path!r}): no configured device executed anything while it was "
            "recorded, so the timeline is empty. Train or call the model within the block."
        )
    timeline.activities = process.activities = operation_times.activities(operations, devices)
    title = "{}" if place is None else f"rank {place.rank}: {{}}"
    names = [(device, title.format(device)) for device in devices]
    safe_files.write(timeline.path, json.dumps(operation_times.trace(operations, names)) + "\n")
