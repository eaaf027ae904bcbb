"""Warnings of batch normalization by each device's, or rank's, own samples."""

from typing import Collection

from .. import errors
from .._runtime.process import process


def warn_of_layers(
    backend: str, name: str, part: str, layers: "Collection[str]", by_argument: bool
) -> None:
    """Warn that layers use the statistics of the samples of each device, or rank.

    Arguments:
        backend: the name of the backend.
        name: that of the model.
        part: "device" or "rank".
        layers: the names of the layers; empty: unknown.
        by_argument: whether the model is to synchronize them, or they ask for it by themselves.

    Raises:
        UnsupportedError: under ``configure_gpu(strict=True)``.
    """
    why = "sync_batch_norm=True" if by_argument else "as some of its layers do by themselves"
    where = listed(layers) if layers else "any batch normalization in it"
    warn(
        f"Model {name!r} is to normalize by the statistics of the whole batch ({why}), which "
        f"{backend} cannot do on several {part}s: each {part} uses those of its own samples in "
        f"{where}."
    )


def warn(text: str) -> None:
    """Warn of layers that do not use the whole batch's statistics.

    Raises:
        UnsupportedError: under ``configure_gpu(strict=True)``.
    """
    configuration = process.configuration
    if configuration is not None and configuration.settings.strict:
        raise errors.UnsupportedError(
            f"{text} strict=True makes that an error: run the model on one device, with "
            "parallelize(model, gpus=1); leave out what asks for it; or drop strict=True."
        )
    errors.warn(text)


def listed(layers: "Collection[str]") -> str:
    """Return the names of layers as a phrase."""
    return "layer{} {}".format("s" * (len(layers) > 1), ", ".join(map(repr, layers)))
