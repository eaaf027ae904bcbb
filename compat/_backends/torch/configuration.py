"""The GPUs that torch lists, which of them it begins with, and how much memory it may take.

torch is an argument of each function: the backend is loaded before it is imported.
"""

import os

from ... import errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, List

#: Variable from which Keras reads its device at import (keras/src/backend/torch/core.py).
DEVICE = "KERAS_TORCH_DEVICE"


def check_devices_shown(torch: "Any", reason: str, chosen: "Any") -> None:
    """Refuse a choice of GPUs that are not those that torch shows already.

    Arguments:
        torch: the module.
        reason: why it is too late to change them.
        chosen: the devices.

    Raises:
        TooLateError: they differ.
    """
    shown, positions = len(listed(torch)), list(chosen.positions)
    as_asked = positions == list(range(shown)) if chosen.gpus else not chosen.declined
    if as_asked or not shown:
        return
    raise errors.too_late(
        "torch",
        f"{reason}; it shows {shown} GPUs, and {chosen} was asked for",
        "Call it before the first `import keras`, and before anything runs on a GPU.",
    )


def listed(torch: "Any") -> "List[str]":
    """List the GPUs: Apple's, which Keras prefers, or CUDA's, as which AMD's count."""
    if torch.backends.mps.is_available():
        return ["mps"]
    return [f"cuda:{index}" for index in range(torch.cuda.device_count())]


def use_first(torch: "Any", names: "List[str]", listed: "List[str]") -> "List[str]":
    """Have torch and Keras use the first of these devices, if it is not the first listed.

    Returns:
        The changes that were made, as text.
    """
    if names == listed[: len(names)] and bool(names) == bool(listed):
        return []
    if not names:  # none of the requested GPUs
        os.environ[DEVICE] = "cpu"
        return [DEVICE + "=cpu"]
    torch.cuda.set_device(names[0])
    os.environ[DEVICE] = names[0]
    return [f"torch.cuda.set_device({names[0]!r})", f"{DEVICE}={names[0]}"]


def limit_memory(torch: "Any", memory: "Any", devices: "List[str]") -> "List[str]":
    """Limit memory to a fraction of each GPU; torch allocates it on demand.

    Returns:
        The changes that were made, as text.
    """
    if memory.grow:
        return ["memory: torch takes it as it is needed"]
    if devices == ["mps"]:
        total = torch.mps.recommended_max_memory() if memory.size else 1
        fraction = memory.fraction or min(1.0, memory.size / float(total))
        torch.mps.set_per_process_memory_fraction(fraction)
        return [f"torch.mps.set_per_process_memory_fraction({fraction:g})"]
    applied = []
    for index in [int(name.rpartition(":")[2]) for name in devices if name != "cpu"]:
        total = torch.cuda.get_device_properties(index).total_memory
        fraction = memory.fraction or min(1.0, memory.size / float(total))
        torch.cuda.set_per_process_memory_fraction(fraction, index)
        applied.append(f"torch.cuda.set_per_process_memory_fraction({fraction:g}, {index})")
    return applied
