"""A timeline of what each device executes: recorded, and written to a file."""

import contextlib
import json
import os

from .. import errors
from . import operation_times, safe_files
from .process import process

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Iterator, Optional

    from .._ranks.place import Place
    from ..backend import Backend


@contextlib.contextmanager
def recorded(path: str, backend: "Backend", place: "Optional[Place]") -> "Iterator[None]":
    """What ``compat.timeline()`` returns."""
    path = os.path.abspath(of_rank(path, place))
    if process.recording_timeline is not None:
        raise errors.InvalidArgumentError(
            "timeline({!r}): {} is being recorded, and a framework records one timeline at a "
            "time. End that block first.".format(path, process.recording_timeline)
        )
    try:
        safe_files.check_writable(path)
    except OSError as error:
        raise errors.not_writable("timeline({!r})".format(path), error) from error
    with contextlib.ExitStack() as when_recorded:
        with backend.profiled() as operations:
            when_recorded.callback(_write, path, backend.devices(), operations, place)
            process.recording_timeline = path
            try:
                yield
            finally:
                process.recording_timeline = None


def of_rank(path, place):
    """The file of one rank, whose number comes before the ending."""
    if place is None:
        return path
    stem, ending = os.path.splitext(path)
    return "{}.rank{}{}".format(stem, place.rank, ending)


def _write(path, devices, operations, place):
    if place is not None:
        devices = devices[:1]
    operations = [each for each in operations if each.device in devices]
    if not operations:
        errors.warn(
            "timeline({!r}): no configured device executed anything while it was recorded, so "
            "the timeline is empty. Train or call the model within the block.".format(path)
        )
    busy = operation_times.busy(operations)
    process.busy = {device: busy.get(device, 0.0) for device in devices} if operations else {}
    title = "{}" if place is None else "rank {}: {{}}".format(place.rank)
    names = [(device, title.format(device)) for device in devices]
    safe_files.write(path, json.dumps(operation_times.trace(operations, names)) + "\n")
