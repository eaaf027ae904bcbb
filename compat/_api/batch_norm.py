"""Checks that batch normalization can use the statistics of the whole batch where it is to."""

from .. import _keras, errors
from .._runtime import synchronized
from .._runtime.process import process

_BY_ARGUMENT = "sync_batch_norm=True"
_BY_LAYER = "as some of its layers do by themselves"
# Horovod's and torch's own layers communicate with the other ranks by themselves.
_RANKED = ("horovod", "torch")


def check_devices(backend, model, name, devices):
    """Warn of layers that are to use the whole batch's statistics, and do not on several devices.

    Raises:
        UnsupportedError: under ``configure_gpu(strict=True)``.
    """
    if len(devices) > 1 and "devices" not in backend.synchronizes:
        _check(backend, model, name, "device", synchronized.asks)


def check_ranks(backend, model, name, place):
    """Warn of layers that are to use the statistics of all ranks' samples, and do not.

    Raises:
        UnsupportedError: under ``configure_gpu(strict=True)``.
    """

    def asks(layer):
        by_itself = type(layer).__module__.partition(".")[0] in _RANKED
        return synchronized.asks(layer) and not by_itself

    if place.size > 1 and "ranks" not in backend.synchronizes:
        _check(backend, model, name, "rank", asks)


def check_built(backend, model, devices):
    """Warn of layers built under a framework's strategy, which ask for it only by themselves.

    Raises:
        UnsupportedError: under ``configure_gpu(strict=True)``.
    """
    layers = _layers(backend, model).items()
    own = [name for name, layer in layers if not synchronized.asks(layer)]
    if own and len(devices) > 1:
        _warn(
            "sync_batch_norm=True does not change a model that is built under a strategy of the "
            f"framework: each device uses the statistics of its own samples in {_listed(own)} of "
            f"model {model.name!r}. Build them with synchronized=True, or as "
            "SyncBatchNormalization."
        )


def _check(backend, model, name, part, asks):
    is_asked = synchronized.is_asked(model)
    layers = _layers(backend, model)
    found = [each for each, layer in layers.items() if is_asked or asks(layer)]
    is_unknown = is_asked and not layers and _keras.keras_of(model) is None
    if found or is_unknown:
        why = _BY_ARGUMENT if is_asked else _BY_LAYER
        where = _listed(found) if found else "any batch normalization in it"
        _warn(
            f"Model {name!r} is to normalize by the statistics of the whole batch ({why}), which "
            f"{backend.name} cannot do on several {part}s: each {part} uses those of its own "
            f"samples in {where}."
        )


def _layers(backend, model):
    """Return the layers of a model that are batch normalization, by name."""
    if _keras.keras_of(model) is None:
        return backend.batch_norm_layers(model)
    layers = _keras.layers_within(model)
    return synchronized.layers((getattr(layer, "name", ""), layer) for layer in layers)


def _listed(layers):
    return "layer{} {}".format("s" * (len(layers) > 1), ", ".join(map(repr, layers)))


def _warn(text):
    configuration = process.configuration
    if configuration is not None and configuration.settings.strict:
        raise errors.UnsupportedError(
            f"{text} strict=True makes that an error: run the model on one device, with "
            "parallelize(model, gpus=1); leave out what asks for it; or drop strict=True."
        )
    errors.warn(text)
