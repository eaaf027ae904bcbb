"""Which batch normalization is to use the statistics of the whole batch, and whether it can."""

import weakref

from .. import _keras
from .._rows import own_statistics
from .._runtime import synchronized
from .._runtime.process import process

# Horovod's and torch's own layers communicate with the other ranks by themselves.
_RANKED = ("horovod", "torch")


def ask(backend, model, wanted):
    """Note whether all batch normalization of a model is to use the whole batch's statistics.

    Models that contain this one then do so in its layers, too, and one that was compiled before is
    traced again.
    """
    is_keras = _keras.keras_of(model) is not None
    models = [reference() for reference in process.keras_models]
    known = [other for other in models if other is not None]
    if is_keras and all(other is not model for other in known):
        process.keras_models = [weakref.ref(other) for other in [*known, model]]
    if not wanted and not synchronized.is_asked(model):
        return
    synchronized.ask(model, wanted)
    layers = _layers(backend, model).values()
    changed = [layer for layer in layers if synchronized.ask_layer(layer, wanted)]
    for part in _keras.layers_within(model) if is_keras and not wanted else ():
        if synchronized.is_asked(part):  # a model within, for itself
            for layer in _layers(backend, part).values():
                synchronized.ask_layer(layer, True)
    if is_keras and changed:
        within = {id(layer) for layer in changed}
        for other in known:
            if other is not model and within & set(map(id, _keras.layers_within(other))):
                _keras.trace_again(other)


def check_devices(backend, model, name, devices):
    """Warn of layers that are to use the whole batch's statistics, and do not on several devices.

    Raises:
        UnsupportedError: under ``configure_gpu(strict=True)``.
    """
    if len(devices) > 1 and "devices" not in backend.synchronizes:
        _check(backend, model, name, "device", synchronized.asks, lambda layer: False)


def check_ranks(backend, model, name, place):
    """Warn of layers that are to use the statistics of all ranks' samples, and do not.

    Raises:
        UnsupportedError: under ``configure_gpu(strict=True)``.
    """

    def asks(layer):
        by_itself = type(layer).__module__.partition(".")[0] in _RANKED
        return synchronized.asks(layer) and not by_itself

    if place.size > 1:
        _check(backend, model, name, "rank", asks, backend.synchronizes_on_ranks)


def check_built(backend, model, devices):
    """Warn of layers built under a framework's strategy, which ask for it only by themselves.

    Raises:
        UnsupportedError: under ``configure_gpu(strict=True)``.
    """
    layers = _layers(backend, model).items()
    own = [name for name, layer in layers if not synchronized.asks(layer)]
    if own and len(devices) > 1:
        where = own_statistics.listed(own)
        own_statistics.warn(
            "sync_batch_norm=True does not change a model that is built under a strategy of the "
            f"framework: each device uses the statistics of its own samples in {where} of model "
            f"{model.name!r}. Build them with synchronized=True, or as SyncBatchNormalization."
        )


def _check(backend, model, name, part, asks, is_synchronized):
    is_asked = synchronized.is_asked(model)
    layers = _layers(backend, model)
    found = [
        each
        for each, layer in layers.items()
        if (is_asked or asks(layer)) and not is_synchronized(layer)
    ]
    is_native = _keras.keras_of(model) is None
    is_unknown = is_asked and not layers and is_native and part + "s" not in backend.synchronizes
    if found or is_unknown:
        own_statistics.warn_of_layers(backend.name, name, part, found, is_asked)


def _layers(backend, model):
    """Return the layers of a model that are batch normalization, by name."""
    if _keras.keras_of(model) is None:
        return backend.batch_norm_layers(model)
    layers = _keras.layers_within(model)
    return synchronized.layers((getattr(layer, "name", ""), layer) for layer in layers)
