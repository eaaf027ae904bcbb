"""An eager call that reduces values of the whole batch, as a function.

Replicas find the operations after which they reduce in a graph, by their order; see
``call_reductions``. So the split call is traced, and the function is called with each batch.
"""

from typing import Any, Callable

import tensorflow as tf

from .arguments import ShardedArguments, tensors_of, with_tensors
from .functional_call import as_function, converting
from .state import ModelState


class NotSplit(Exception):
    """The call could not be split.

    Attributes:
        fallback: the reason why it runs unsplit.
    """

    def __init__(self, fallback: "Any") -> None:
        super().__init__()
        self.fallback = fallback


class CallFunction:
    """The function of an eager call that is split.

    Arguments:
        split: the call on all devices, within a graph. It raises ``NotSplit``.
        arguments: its ``ShardedArguments``; others have as many tensors of the same kinds.
        state: the ``ModelState`` of the model.
    """

    def __init__(
        self, split: "Callable[..., Any]", arguments: ShardedArguments, state: ModelState
    ) -> None:
        compute, made = as_function(split, state.collected, arguments.tree, None), []

        def computed(*tensors):
            with converting():
                made.append(compute(*tensors))
            return tensors_of(made[-1][1])

        function = tf.function(computed, autograph=False)
        self._function = function.get_concrete_function(*arguments.specs())
        self._structure, self._results = made[-1]
        self._places = [state.layers.index(layer) for layer in state.added]

    def __call__(self, arguments: ShardedArguments, state: ModelState) -> "Any":
        """Return the structure of the results, and these, as the function of ``as_function``."""
        tensors = self._function(*map(tf.convert_to_tensor, tensors_of(arguments.tree)))
        state.added = [state.layers[place] for place in self._places]
        return self._structure, with_tensors(self._results, tensors)
