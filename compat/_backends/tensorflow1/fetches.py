"""Outputs and fetches of a Keras function, taken from replicas: for callers and callbacks."""

from typing import Any, Dict


class ReplicatedResults:
    """The outputs and fetches of a function that Keras has made, taken from the replicas.

    Callbacks may add to both at any time, and take out what they have added.

    Arguments:
        replicas: the ``Replicas``.
        made: the function that ``K.function`` returned.

    Attributes:
        fetches: the tensors that are computed besides the outputs, as Keras or callbacks gave them.
        fetch_callbacks: tf.keras' functions that take their values.
    """

    #: Attributes of a Keras function that callbacks add to.
    added = ("fetches", "fetch_callbacks")

    def __init__(self, replicas, made):
        self._replicas, self._made = replicas, made
        # Tensors of the whole batch by those of Keras' graph, and the reverse.
        self._merged: "Dict[Any, Any]" = {}
        self._originals: "Dict[Any, Any]" = {}
        for name in self.added:
            if hasattr(made, name):
                setattr(self, name, getattr(made, name))
        self.wire()

    def wire(self) -> bool:
        """Take from the replicas what was added since the last call.

        Returns:
            Whether anything was added.
        """
        made, before = self._made, len(self._merged)
        made.outputs = list(map(self._of_replicas, made.outputs))
        if hasattr(self, "fetches"):  # from Keras 2.1 on
            made.fetches = list(map(self._of_replicas, self.fetches))
        if hasattr(self, "fetch_callbacks"):
            made.fetch_callbacks = {
                self._of_replicas(tensor): call for tensor, call in self.fetch_callbacks.items()
            }
        return len(self._merged) > before

    def _of_replicas(self, tensor):
        if tensor in self._originals:
            return tensor
        if tensor not in self._merged:
            self._merged[tensor] = merged = self._replicas.whole(tensor)
            self._originals[merged] = tensor
        return self._merged[tensor]

    def give_to(self, function: "Any") -> None:
        """Have another function compute the same outputs and fetches, without callbacks."""
        function.outputs = [self._originals.get(tensor, tensor) for tensor in self._made.outputs]
        if hasattr(self, "fetches"):
            function.fetches = self.fetches
