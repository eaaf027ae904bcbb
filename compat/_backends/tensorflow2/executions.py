"""Proof of use: the devices that executed operations, as TensorFlow's runtime reports them.

It reports the partitions of a function's graph when the function is first executed, and every
operation that runs eagerly, with its results, which have a device.
"""

import contextlib
from typing import Any, Iterator, List, Sequence, Set

from ..._runtime.usage import Executed
from .configuration import short_name
from .op_callbacks import ignore, is_function, listen
from .run_metadata import begin, collect, end, functions_of, lock, nodes_of, script_records


class Recorder:
    """Counter of the operations that devices execute in a step of this thread.

    It stops by itself once each device has executed some, or after so many operations that there
    have been several steps.

    Arguments:
        devices: their names.

    Attributes:
        counts: the number of operations by device.
    """

    #: Operations, and functions, after which it stops.
    LIMIT, FUNCTIONS = 200000, 100

    def __init__(self, devices: "Sequence[str]") -> None:
        self.counts = Executed({device: 0 for device in devices})
        self.records: "List[Any]" = []
        self.left = self.LIMIT
        self.seen: "Set[str]" = set()  # names of functions that were recorded
        self.unseen: "Set[str]" = set()  # and of those that were not
        self.is_running = not script_records()
        self.counts.is_known = self.is_running
        if self.is_running:
            begin(self.records)
            listen(self._note)

    def _note(self, kind, outputs):
        if not self.is_running:  # it has ended in the thread of a replica
            ignore(self._note)
            return
        self.left -= 1
        if is_function(kind):
            self.left -= self.LIMIT // self.FUNCTIONS
            with lock:
                collect()
            # A function that was executed before is not recorded.
            (self.seen if self._count_nodes() else self.unseen).add(kind)
        elif outputs and hasattr(outputs[0], "numpy"):
            self._count(outputs[0].device)
        if script_records() or all(self.counts.values()) or self.left <= 0:
            self.end()

    def _count(self, device):
        name = short_name(device)
        if name in self.counts:
            self.counts[name] += 1

    def _count_nodes(self):
        """Count the nodes that were recorded; return whether any function was."""
        functions, nodes, self.records[:] = functions_of(self.records), nodes_of(self.records), []
        for node in nodes:
            self._count(node.device)  # identities, too: a model may do no more
        return bool(functions)

    def end(self) -> None:
        """Stop recording."""
        if not self.is_running:
            return
        self.is_running = False
        ignore(self._note)
        end(self.records)
        self._count_nodes()
        may_be_more = self.unseen - self.seen or script_records()
        self.counts.is_known = all(self.counts.values()) or not may_be_more


@contextlib.contextmanager
def executed(devices: "Sequence[str]") -> "Iterator[Executed]":
    """Count the operations that devices execute in the first step."""
    recorder = Recorder(devices)
    try:
        yield recorder.counts
    finally:
        recorder.end()
