"""Calls that torch traces or transforms, which have no rows to split; and inference mode."""

import contextlib
from typing import Any

import torch
from torch._C import _functorch

_TRACING = torch._C._TorchDispatchModeKey.FAKE, torch._C._TorchDispatchModeKey.PROXY


def is_traced() -> bool:
    """Return whether torch only records operations, and no device computes anything.

    So do ``torch.jit.trace()``, ``torch.export``, ``make_fx()`` and ``FakeTensorMode``.
    """
    if torch.jit.is_tracing():
        return True
    modes = torch._C._len_torch_dispatch_stack()
    return modes > 0 and any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING)


def is_transformed() -> bool:
    """Return whether a function of ``torch.func`` transforms the call, such as ``vmap()``."""
    return _functorch.maybe_current_level() is not None


def counted_changes() -> "contextlib.AbstractContextManager[Any]":
    """Return a context that counts changes in place, as ``torch.inference_mode()`` does not."""
    outside = contextlib.ExitStack()
    if torch.is_inference_mode_enabled():
        outside.enter_context(torch.inference_mode(False))
        outside.enter_context(torch.no_grad())
    return outside
