"""Where in a model a function is called."""

import os
import sys

import torch

from ... import _rows

TORCH = os.path.dirname(torch.__file__) + os.sep
_COMPAT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))) + os.sep
_KERAS = os.path.join("-packages", "keras", "")
_OVERRIDES = torch.overrides.__file__
#: Where torch packs sequences, sorted by their lengths.
_PACKING = tuple(os.path.join(TORCH, "nn", part, "rnn.py") for part in ("utils", "modules"))


def is_packing():
    """Whether torch sorts the rows to pack them, and will put them back."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_COMPAT, _OVERRIDES)):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename in _PACKING


def across(model, name, why="mixed"):
    """Where a function is called: in which module, and by which line of the user's."""
    frame, line, module = sys._getframe(1), None, None
    while frame is not None and (line is None or module is None):
        file = frame.f_code.co_filename
        own = file.startswith((TORCH, _COMPAT)) or _KERAS in file
        if line is None and not own and not file.startswith("<"):
            line = f"{os.path.basename(file)}, line {frame.f_lineno}"
        part = frame.f_locals.get("self")
        if module is None and frame.f_code.co_name in ("forward", "call"):
            module = part if hasattr(part, "named_modules") else None
        frame = frame.f_back
    return _rows.Across(name, _described(model, module), line, why)


def _described(model, module):
    if module is None or module is model:
        return None
    if hasattr(module, "get_config") and hasattr(module, "name"):
        return f"layer {module.name!r}"
    kind = type(module).__name__
    path = next((path for path, part in model.named_modules() if part is module), None)
    return kind if path is None else f"{path} ({kind})"
