"""Batch normalization in evaluation, in which ranks exchange no statistics."""

import contextlib
from typing import Any, Dict, Iterable, Iterator, List

from .._rows import own_statistics
from .._runtime import patching


def warn(layer: "Any", name: str) -> None:
    """Warn of a layer that is called in training mode in evaluation.

    Arguments:
        layer: one that is to use the statistics of the whole batch.
        name: that of its model.
    """
    own_statistics.warn(
        f"Layer {layer.name!r} of model {name!r} is to normalize by the statistics of the whole "
        "batch, and is called in training mode in evaluation, in which ranks exchange none: each "
        "rank uses those of its own samples. Call it with training=False there."
    )


class Watch:
    """Warnings of a model's layers that use statistics of samples in evaluation.

    They are to use those of the whole batch, and a ``test_step``, or the model, calls them in
    training mode.

    Arguments:
        model: the model, of tf.keras 2 or Keras 3.
    """

    def __init__(self, model: "Any") -> None:
        self.name = model.name
        self.warned: "List[Any]" = []

    @contextlib.contextmanager
    def watching(self, layers: "Iterable[Any]") -> "Iterator[None]":
        """Return the context of a step of evaluation.

        Arguments:
            layers: those that are to use the statistics of the whole batch.
        """
        with contextlib.ExitStack() as patched:
            for layer in layers:
                patched.enter_context(patching.replaced(layer, **self._methods(layer)))
            yield

    def _methods(self, layer):
        """Return its methods for statistics of samples; the second one is called in inference, too.

        Horovod's own layer exchanges them by itself.
        """
        methods: "Dict[str, Any]" = {}
        if type(layer).__module__.startswith("horovod."):
            return methods
        for name in "_moments", "_fused_batch_norm":
            if hasattr(layer, name) and patching.find(layer, name) is None:
                methods[name] = self._watched(layer, getattr(layer, name), name == "_moments")
        return methods

    def _watched(self, layer, plain, is_of_training):
        def method(*args, **kwargs):
            training = True if is_of_training else kwargs.get("training")
            is_training = isinstance(training, (bool, int)) and training
            if is_training and not any(layer is other for other in self.warned):
                self.warned.append(layer)
                warn(layer, self.name)
            return plain(*args, **kwargs)

        return method
