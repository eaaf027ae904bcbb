"""Records of verifications in this process: kept, shown, and written for another process."""

import os
from typing import Any, Dict, List, Mapping, Optional, Sequence

from .._configuration import settings
from .._runtime import safe_files
from .._runtime.process import process
from .reasons import Incomparable

# Kind of step -> the word for it.
STEPS = {"train": "training", "evaluate": "test", "predict": "prediction"}


class Record:
    """The verifications of one model, shown by ``compat test script.py``.

    Attributes:
        model: its name.
        devices: their names.
        steps: how many were compared, for each kind.
        compared: how many values of these steps.
        uncompared: for each kind of which some were not: how many ``steps``, the latest ``reason``,
            its ``remedy``, and how many values of the outputs in inference were compared
            ``instead``.
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
        self.uncompared: "Dict[str, Dict[str, Any]]" = {}
        self.largest = (0.0, "")
        self.incomparable: "Dict[str, str]" = {}
        self.operations: "Dict[str, Any]" = {}
        self.failure: "Optional[str]" = None

    def seen(self, kind: str) -> int:
        """Return how many steps of a kind there were to compare, whether they were or not."""
        return int(self.steps[kind] + self.uncompared.get(kind, {"steps": 0})["steps"])

    def note_uncompared(self, kind: str, reason: "Incomparable", instead: int) -> None:
        """Note a step that could not be compared: see ``uncompared``."""
        before = self.uncompared.get(kind, {"steps": 0, "instead": 0})
        self.uncompared[kind] = {
            "steps": before["steps"] + 1,
            "reason": reason.text,
            "remedy": reason.remedy,
            "instead": before["instead"] + instead,
        }

    def as_dict(self) -> "Dict[str, Any]":
        """Return the record for JSON, with the verdict: see ``same``."""
        record = dict(vars(self))
        return dict(record, same=same(record))


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
    steps = [_counted(n, kind) for kind, n in record["steps"].items() if n]
    difference, label = record["largest"]
    lines = ["model {!r} on {}".format(record["model"], settings.listed(record["devices"]))]
    lines.append("  verified: {}".format(", ".join(steps) or "no step"))
    if record["compared"]:
        lines[-1] += "; {} values".format(record["compared"])
    if compared_values(record):
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
    for kind, each in record["uncompared"].items():
        lines.append(
            "  not compared: {} ({})".format(_counted(each["steps"], kind), each["reason"])
        )
        values = "{instead} value{s} of the outputs in inference"
        values = values.format(s="s" * (each["instead"] > 1), **each)
        lines.append("    compared instead: " + (values if each["instead"] else "nothing"))
        if each["remedy"]:
            them = "them" if each["steps"] > 1 else "it"
            lines.append("    to compare {}: {}".format(them, each["remedy"]))
    incomparable = record["incomparable"]
    for reason in sorted(set(incomparable.values())):
        labels = sorted(label for label in incomparable if incomparable[label] == reason)
        more = f" and {len(labels) - 3} more" if len(labels) > 3 else ""
        lines.append("  not compared: {}{} ({})".format(", ".join(labels[:3]), more, reason))
    if record["failure"]:
        lines.append("  " + record["failure"])
    return lines


def same(record: "Mapping[str, Any]") -> "Optional[bool]":
    """Return whether several devices did what one does.

    None: that is not known, since of some kind of step none was compared. False, too, if a device
    did not work.
    """
    if record["failure"] or _idle(record):
        return False
    return None if uncompared(record) or not any(record["steps"].values()) else True


def uncompared(record: "Mapping[str, Any]") -> "List[str]":
    """Return the kinds of steps of which none was compared, though there were some, in words."""
    return [f"{STEPS[kind]} steps" for kind in record["uncompared"] if not record["steps"][kind]]


def compared_values(record: "Mapping[str, Any]") -> int:
    """Return how many values were compared, in steps or in place of them."""
    instead = [each["instead"] for each in record["uncompared"].values()]
    return int(sum(instead, record["compared"]))


def _counted(number: int, kind: str) -> str:
    return f"{number} {STEPS[kind]} step{'s' if number > 1 else ''}"


def _has_products(record: "Mapping[str, Any]") -> bool:
    """Return whether a device ran products: some models have none, nor has XLA for single rows."""
    return any(map(any, record["operations"].values()))


def _idle(record: "Mapping[str, Any]") -> int:
    """Return how many devices ran no products forward and backward, though others did."""
    working = sum(map(all, record["operations"].values()))
    return len(record["devices"]) - working if _has_products(record) else 0
