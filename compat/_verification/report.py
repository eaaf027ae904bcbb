"""Records of verifications in this process: kept, shown, and written for another process."""

import os
from typing import Any, Dict, List, Mapping, Optional, Sequence

from .._configuration import settings
from .._runtime import safe_files
from .._runtime.process import process

# Kind of step -> the word for it.
STEPS = {"train": "training", "evaluate": "test", "predict": "prediction"}


class Record:
    """The verifications of one model, shown by ``compat test script.py``.

    Attributes:
        model: its name.
        devices: their names.
        steps: verified, for each kind.
        largest: the largest difference, relative to the size of what differs, and its label.
        incomparable: labels, and why.
        operations: for each device, how many matrix products and convolutions it ran in the forward
            and in the backward pass, as the framework recorded them; empty where they were not
            requested.
        failure: the text of the error, where something differed; or None.
    """

    def __init__(self, model: str, devices: "Sequence[str]") -> None:
        self.model = model
        self.devices = list(devices)
        self.steps = dict.fromkeys(STEPS, 0)
        self.compared = 0
        self.largest = (0.0, "")
        self.incomparable: "Dict[str, str]" = {}
        self.operations: "Dict[str, Any]" = {}
        self.failure: "Optional[str]" = None

    def as_dict(self) -> "Dict[str, Any]":
        """Return the record for JSON."""
        return dict(vars(self))


def report_at_exit(environ: "Mapping[str, str]") -> None:
    """Have this process write its records to the folder ``COMPAT_VERIFY_REPORT``, if it is set."""
    folder = environ.get("COMPAT_VERIFY_REPORT")
    if folder and not process.records_operations:
        import atexit

        process.records_operations = True
        atexit.register(_write, os.path.join(folder, f"{os.getpid()}.json"))


def _write(path: str) -> None:
    import json

    safe_files.write(path, json.dumps([record.as_dict() for record in process.verified]))


def shown(record: "Mapping[str, Any]") -> "List[str]":
    """Return a record (``Record.as_dict``) for a person, in lines."""
    verified = [(n, STEPS[kind]) for kind, n in record["steps"].items() if n]
    steps = [f"{n} {word} step{'s' if n > 1 else ''}" for n, word in verified]
    difference, label = record["largest"]
    lines = ["model {!r} on {}".format(record["model"], settings.listed(record["devices"]))]
    lines.append("  verified: {}".format(", ".join(steps) or "no step"))
    if record["compared"]:
        lines[-1] += "; {} values".format(record["compared"])
        where = f" ({label})" if label else ""
        lines.append(f"  largest difference: {difference:.1e} of its size{where}")
    operations = sorted(record["operations"].items())
    if operations and not _has_products(record):
        lines.append("  no products were seen on any device")
    elif operations:
        places = ["{} {} + {}".format(device, *counts) for device, counts in operations]
        lines.append(f"  products ran, forward + backward: {settings.listed(places)}")
        if _idle(record):
            lines.append(f"  only {len(record['devices']) - _idle(record)} of its devices worked")
    incomparable = record["incomparable"]
    for reason in sorted(set(incomparable.values())):
        labels = sorted(label for label in incomparable if incomparable[label] == reason)
        more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
        lines.append("  not compared: {}{} ({})".format(", ".join(labels[:3]), more, reason))
    if record["failure"]:
        lines.append("  " + record["failure"])
    return lines


def is_good(record: "Mapping[str, Any]") -> bool:
    """Return whether nothing differed, and more than one device worked."""
    return not record["failure"] and not _idle(record)


def _has_products(record: "Mapping[str, Any]") -> bool:
    """Return whether a device ran products: some models have none, nor has XLA for single rows."""
    return any(map(any, record["operations"].values()))


def _idle(record: "Mapping[str, Any]") -> int:
    """Return how many devices ran no products forward and backward, though others did."""
    working = sum(map(all, record["operations"].values()))
    return len(record["devices"]) - working if _has_products(record) else 0
