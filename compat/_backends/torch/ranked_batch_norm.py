"""Batch normalization by the mean and the variance of all ranks' samples.

In training, a layer that asks for it gathers the moments of all ranks once in the forward pass, and
the gradients by them once in the backward pass.
"""

import contextlib
import weakref
from typing import Any, Iterable, Iterator, Optional

import torch

from ... import _keras
from ..._rows import own_statistics
from ..._runtime import patching, synchronized
from . import batch_norm, keras_batch_norm
from .arguments import first_batch
from .gradient_exchange import calls, waiting
from .native import ForwardMethod
from .ranked_reductions import RankReductions

_LAYERS = torch.nn.modules.batchnorm._BatchNorm
# The function of torch's that refuses a single value per channel, of this rank.
_CHECK = "_verify_batch_size"


class _FunctionMode(torch.overrides.TorchFunctionMode):
    """A context in which ``torch.nn.functional.batch_norm()`` has the samples of all ranks."""

    def __init__(self, reductions: RankReductions) -> None:
        super().__init__()
        self.reductions, self.is_used = reductions, False

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        # torch.compile() compiles these lines for all functions that a model calls.
        is_computed = func is batch_norm.FUNCTION or func is batch_norm.CALLED
        if is_computed or func is batch_norm.OPERATOR or func is batch_norm.OVERLOAD:
            self.is_used = True
            return batch_norm.compute(self.reductions, func, args, kwargs)
        if not torch.compiler.is_compiling() and batch_norm.is_other(func, args, kwargs):
            self._warn_of(func)
        return func(*args, **kwargs)

    def _warn_of(self, function):
        exchange, topic = self.reductions.exchange, ("function", function)
        if topic not in exchange.warned:
            exchange.warned.add(topic)
            own_statistics.warn(
                f"{type(exchange.model()).__name__} is to normalize by the statistics of the whole "
                f"batch, and calls {function}, which uses those of each rank's samples. Call "
                "torch.nn.functional.batch_norm()."
            )


class _OfRank(patching.InstanceMethod):
    """A method of a layer that normalizes, in a model that is one of several ranks'.

    Deep copies of a layer share it.
    """

    def __init__(self):
        super().__init__([])
        # By layer: those of the models that have it, the one that was parallelized last at the end.
        self.exchanges: "Any" = weakref.WeakKeyDictionary()

    def reductions(self, layer: Any, inputs: torch.Tensor) -> "Optional[RankReductions]":
        """Return the reductions of a call in training; None: it has this rank's samples alone."""
        exchange = self.exchange(layer)
        model = None if exchange is None else exchange.model()
        if model is None or exchange.source.is_alone:
            return None
        is_asked = synchronized.is_asked(model) or synchronized.asks(layer)
        if not is_asked or exchange.source.is_only_traced(model, inputs):
            return None
        return RankReductions(exchange, getattr(layer, "process_group", None))

    def exchange(self, layer: Any) -> Any:
        """Return the exchange of the outermost model under way that has the layer.

        Of several, such as the discriminator of a GAN and the whole GAN, each has rows of its own.
        """
        exchanges = self.exchanges.get(layer, [])
        under_way = [each for each in calls.exchanges if each in exchanges]
        return (under_way[:1] or exchanges[-1:] or [None])[0]


class RankedNormForward(_OfRank, ForwardMethod):
    """The ``forward`` of a module of torch."""

    is_unused = False  # all ranks' samples, as a warning has said

    @torch.compiler.disable
    def invoke(self, layer, *args, **kwargs):
        """Normalize by all ranks' samples in training."""
        forward = self.plain(layer)
        if type(layer) is torch.nn.SyncBatchNorm:  # its own refuses tensors of CPUs
            forward = _LAYERS.forward.__get__(layer)
        inputs = first_batch((args, kwargs))
        reductions = self.reductions(layer, inputs) if layer.training else None
        if reductions is None:
            return forward(*args, **kwargs)
        with _FunctionMode(reductions) as mode:
            result = forward(*args, **kwargs)
        if not mode.is_used and not self.is_unused:
            self.is_unused = True
            own_statistics.warn(
                f"A layer {type(layer).__name__} does not normalize by "
                "torch.nn.functional.batch_norm(), so that it has the statistics of each rank's "
                "own samples unless it exchanges them by itself."
            )
        return result


class RankedKerasMoments(_OfRank):
    """The function by which a layer of Keras computes moments, in training."""

    method = "_moments"

    def invoke(self, layer, inputs, mask):
        """Compute those of all ranks' samples."""
        reductions = self.reductions(layer, inputs)
        if reductions is not None:
            return keras_batch_norm.whole_moments(reductions, layer, inputs, mask)
        with patching.replaced(layer, synchronized=False):  # which Keras refuses on torch
            return self.plain(layer)(inputs, mask)


def _follow_new_layers(kind: type) -> None:
    """Have layers of Keras that a model makes within a call normalize by all ranks' samples in it.

    Arguments:
        kind: Keras' class of batch normalization.
    """
    plain = getattr(kind, "_moments", None)
    if plain is None or patching.find(kind, "_moments") is not None:
        return

    def _moments(self, inputs, mask):
        exchange = next(filter(_is_asked, calls.exchanges), None)
        if exchange is None or RankedKerasMoments.of(self) is not None:
            return plain(self, inputs, mask)
        if exchange.source.is_only_traced(exchange.model(), inputs):
            return plain(self, inputs, mask)
        return keras_batch_norm.whole_moments(RankReductions(exchange), self, inputs, mask)

    patching.Patch(kind, "_moments", _moments)


def _is_asked(exchange):
    """Return whether all batch normalization of the model of an exchange has all ranks' samples."""
    model = exchange.model()
    return model is not None and synchronized.is_asked(model) and not exchange.source.is_alone


def is_synchronizable(layer: Any) -> bool:
    """Return whether a layer computes its statistics by functions that compat replaces."""
    return isinstance(layer, _LAYERS) or _keras.has_keras_methods(layer, ("call", "_moments"))


def follow(exchange: Any, model: Any, parts: "Iterable[Any]") -> None:
    """Have layers of a rank's model that ask for it normalize by all ranks' samples.

    Arguments:
        exchange: the ``Exchange`` of the model's gradients.
        model: the model.
        parts: the modules within it.
    """
    is_asked = synchronized.is_asked(model)
    named = ((str(place), part) for place, part in enumerate(parts))
    found = batch_norm.layers(named).values()
    layers = [layer for layer in found if is_asked or synchronized.asks(layer)]
    before, exchange.normalizing = exchange.normalizing, set(map(id, found))
    if before is not None:
        _check([layer for layer in layers if id(layer) not in before], model, is_asked)
    for layer in layers:
        kind = RankedNormForward if isinstance(layer, _LAYERS) else RankedKerasMoments
        if kind.of(layer) is None and hasattr(layer, kind.method):
            kind().install(layer)
        method = kind.of(layer)
        if method is not None:
            others = [e for e in method.exchanges.get(layer, ()) if e.model() not in (None, model)]
            method.exchanges[layer] = [*others, exchange]
    if layers or is_asked:
        exchange.engine.prepare_statistics()
    keras = _keras.keras_of(model)
    if is_asked and keras is not None:
        _follow_new_layers(keras.layers.BatchNormalization)


def _check(layers, model, is_asked):
    """Warn of layers that a model has got since it was parallelized, if they cannot do that."""
    layers = [layer for layer in layers if not is_synchronizable(layer)]
    names = [getattr(layer, "name", type(layer).__name__) for layer in layers]
    if names:
        name = getattr(model, "name", type(model).__name__)
        own_statistics.warn_of_layers("torch", name, "rank", names, is_asked)


@contextlib.contextmanager
def recomputing() -> "Iterator[None]":
    """Return the context of a backward pass, in which ``torch.utils.checkpoint`` calls functions.

    A mode would dispatch ``torch.autograd.backward()`` itself.
    """
    due = [exchange for exchange in waiting() if exchange.calls_batch_norm and _is_asked(exchange)]
    if not due or patching.find(torch, "batch_norm") is not None:
        yield
        return
    plain, reductions = torch.batch_norm, RankReductions(due[0])

    def recomputed(*args, **kwargs):
        if calls.exchanges:  # a forward pass, of another thread
            return plain(*args, **kwargs)
        return batch_norm.compute(reductions, plain, args, kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(patching.replaced(torch, batch_norm=recomputed))
        if hasattr(torch.nn.functional, _CHECK):  # the forward pass has checked all ranks' sizes
            checks = {_CHECK: lambda size: None}
            stack.enter_context(patching.replaced(torch.nn.functional, **checks))
        yield


def _has_mode():
    """Return whether functions normalize by all ranks' samples at present."""
    modes = torch.overrides._get_current_function_mode_stack()
    return any(isinstance(mode, _FunctionMode) for mode in modes)


@contextlib.contextmanager
def called(exchange: Any, model: torch.nn.Module) -> "Iterator[Any]":
    """Return the context of a call of a model, or of its step.

    Functions that it calls by itself normalize by all ranks' samples in it, if that is asked for.
    The context yields their ``_FunctionMode``; None: another model's call has one, or none is due.
    """
    with exchange.called():
        if not model.training or not _is_asked(exchange) or _has_mode():
            yield None
            return
        with _FunctionMode(RankReductions(exchange)) as mode:
            yield mode
        exchange.calls_batch_norm = mode.is_used


def call(exchange: Any, model: torch.nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
    """Return the result of a model.

    Arguments:
        exchange: the ``Exchange`` of its gradients.
        model: the model.
        forward: its plain method.
        args: arguments of the call.
        kwargs: likewise, by name.
    """
    with called(exchange, model) as mode:
        if mode is not None and exchange.calls_batch_norm:
            return _eager(forward, args, kwargs)
        return forward(*args, **kwargs)


@torch.compiler.disable
def _eager(forward, args, kwargs):
    """Call a function, also where torch.compile() has compiled it.

    So a model that normalizes by functions is not traced up to the first one and behind each.
    """
    return forward(*args, **kwargs)
