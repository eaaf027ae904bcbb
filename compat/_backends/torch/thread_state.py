"""State that torch, Keras and Python keep for each thread, carried over to another one."""

import contextlib
import contextvars  # novm
import sys
from typing import Iterator, Sequence

import torch
from torch.utils import _python_dispatch

from ..._rows.splitting import unsplit


class CallersState:
    """The state that torch, Keras and Python keep for each thread, as the caller's has it now.

    Arguments:
        names: those of the devices.
    """

    def __init__(self, names: "Sequence[str]") -> None:
        self.context = contextvars.copy_context()  # novm
        self.is_grad_enabled = torch.is_grad_enabled()
        types = sorted({"cpu", *(name.partition(":")[0] for name in names)})
        self.autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in types
        ]
        self.caches_casts = torch.is_autocast_cache_enabled()
        self.functions = torch.overrides._get_current_function_mode_stack()
        self.dispatched = _python_dispatch._get_current_dispatch_mode_stack()
        top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", lambda _: None)
        self.saved_tensors = top(False)
        gpus = [name for name in names if name.startswith("cuda")]
        self.gpu = torch.cuda.current_device() if gpus else None
        self.streams = [torch.cuda.current_stream(name) for name in gpus]
        self.values = [
            (local, {k: list(v) if type(v) is list else v for k, v in vars(local()).items()})
            for local in _locals()
        ]

    @contextlib.contextmanager
    def entered(self) -> "Iterator[None]":
        """Return the context in which the present thread has this state."""
        for variable, value in self.context.items():
            variable.set(value)
        for local, values in self.values:
            for name, value in values.items():
                setattr(local(), name, value)
        for stream in self.streams:
            torch.cuda.set_stream(stream)
        if self.gpu is not None:
            torch.cuda.set_device(self.gpu)
        for kind, is_enabled, dtype in self.autocast:
            torch.set_autocast_enabled(kind, is_enabled)
            torch.set_autocast_dtype(kind, dtype)
        torch.set_autocast_cache_enabled(self.caches_casts)
        with contextlib.ExitStack() as afterwards:
            afterwards.enter_context(torch.set_grad_enabled(self.is_grad_enabled))
            afterwards.enter_context(unsplit)
            if self.saved_tensors is not None:
                torch._C._autograd._push_saved_tensors_default_hooks(*self.saved_tensors)
                afterwards.callback(torch._C._autograd._pop_saved_tensors_default_hooks)
            for mode in self.dispatched:
                _python_dispatch._push_mode(mode)
                afterwards.callback(_python_dispatch._pop_mode)
            for mode in self.functions:
                torch._C._push_on_torch_function_stack(mode)
                afterwards.callback(torch._C._pop_torch_function_stack)
            yield


def _locals():
    """Return functions that get the ``threading.local()`` objects of torch and of Keras."""
    functions = [lambda: torch._GLOBAL_DEVICE_CONTEXT]
    state = sys.modules.get("keras.src.backend.common.global_state")
    names = ("GLOBAL_STATE_TRACKER", "GLOBAL_SETTINGS_TRACKER")
    functions += [lambda name=name: getattr(state, name) for name in names if hasattr(state, name)]
    return functions
