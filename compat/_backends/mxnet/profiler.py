"""Operations that each context executed, and when, by the profiler of MXNet's engine."""

import collections
import contextlib
import json
import os
import tempfile
from typing import Any, Callable, Counter, Dict, List, Tuple

import mxnet as mx

from ..._runtime.operation_times import Operation, converted, count_products

# Products of layers: matrix products, convolutions, look-ups. A loss has none of them.
PRODUCTS = ("dot", "Convolution", "FullyConnected", "Embedding")


@contextlib.contextmanager
def recorded():
    """Record MXNet's engine; yield a list, to which its events are added at the end."""
    events: "List[Dict[str, Any]]" = []
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        # By default MXNet also writes once a second, from another thread: into a file that is
        # being read, or a folder that is being removed.
        mx.profiler.set_config(
            profile_symbolic=True, profile_imperative=True, continuous_dump=False, filename=path
        )
        mx.nd.waitall()
        mx.profiler.set_state("run")
        try:
            yield events
            mx.nd.waitall()
        finally:
            mx.profiler.set_state("stop")
            mx.profiler.dump(finished=False)
            with open(path) as file:
                text = file.read()
            # From the second record of a process on, the list begins with a comma.
            listed = text[text.index("[") + 1 : text.rindex("]")]
            events += json.loads("[" + listed.lstrip().lstrip(",") + "]")


def operations(step: "Callable[[], Any]") -> "Counter[Tuple[str, str]]":
    """Count the operations in ``step()`` by device and name, as MXNet's engine records them."""
    with recorded() as events:
        step()
    return collections.Counter((each.device, each.name) for each in _executed(events, "cpu"))


def products(step: "Callable[[], Any]") -> "Dict[str, Tuple[int, int]]":
    """Count the products of layers in ``step()``; see ``count_products``."""
    return count_products(
        (device, "_backward_" in name)
        for device, name in operations(step).elements()
        if name.rpartition("_backward_")[2] in PRODUCTS
    )


def profiled(contexts):
    """Return the result of ``MXNet.profiled()``, for the configured contexts."""
    kind = contexts[0].partition("(")[0]
    return converted(recorded(), lambda events: _executed(events, kind))


def _executed(events, kind):
    """Yield the operations that a profiler's events record, on contexts of a kind."""
    begun: "Dict[Any, List[Dict[str, Any]]]" = {}  # by process and thread: events without end
    # In the record CPUs come first, one for each core. There are CPU contexts beyond the cores,
    # under the numbers of the next devices; but contexts are all CPUs, or all GPUs (MXNet's
    # src/profiler/profiler.cc).
    before = 0 if kind == "cpu" else len(os.sched_getaffinity(0))
    for event in events:
        if event.get("cat") != "operator":
            continue
        started = begun.setdefault((event.get("pid"), event.get("tid")), [])
        if event["ph"] == "B":
            started.append(event)
        elif event["ph"] == "E" and started:
            first = started.pop()
            device = f"{kind}({event['pid'] - before})"
            yield Operation(device, first["name"], first["ts"], event["ts"] - first["ts"])
