"""Outputs and fetches of a Keras function, of replicas: for its caller and for callbacks."""


class ReplicatedResults:
    """The outputs and fetches of a function that Keras has made, taken from the replicas.

    Callbacks may add to both at any time, and take out what they have added.

    Arguments:
        replicas: the ``Replicas``.
        made: what ``K.function`` returned.

    Attributes:
        fetches: the tensors that are computed besides the outputs, as Keras or callbacks gave them.
        fetch_callbacks: tf.keras' functions that take their values.
    """

    #: What callbacks add to by these names.
    added = ("fetches", "fetch_callbacks")

    def __init__(self, replicas, made):
        self._replicas, self._made = replicas, made
        self._whole = {}  # type: Dict[Any, Any]
        self._given = {}  # type: Dict[Any, Any]  # by what is computed in its place
        for name in self.added:
            if hasattr(made, name):
                setattr(self, name, getattr(made, name))
        self.wire()

    def wire(self):
        """Take from the replicas what was added since the last call.

        Returns:
            Whether anything was.
        """
        made, before = self._made, len(self._whole)
        made.outputs = list(map(self._of_replicas, made.outputs))
        if hasattr(self, "fetches"):  # from Keras 2.1 on
            made.fetches = list(map(self._of_replicas, self.fetches))
        if hasattr(self, "fetch_callbacks"):
            made.fetch_callbacks = {
                self._of_replicas(tensor): call for tensor, call in self.fetch_callbacks.items()
            }
        return len(self._whole) > before

    def _of_replicas(self, tensor):
        if tensor in self._given:
            return tensor
        if tensor not in self._whole:
            self._whole[tensor] = whole = self._replicas.whole(tensor)
            self._given[whole] = tensor
        return self._whole[tensor]

    def give_to(self, function):
        """Have another function compute what this one does, callbacks left out."""
        function.outputs = [self._given.get(tensor, tensor) for tensor in self._made.outputs]
        if hasattr(self, "fetches"):
            function.fetches = self.fetches
