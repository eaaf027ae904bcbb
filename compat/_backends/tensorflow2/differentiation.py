"""A function together with its gradient, eagerly or in a graph."""

from typing import Any, Callable, Sequence, Tuple

import tensorflow as tf


def differentiable(
    compute: "Callable[..., Any]", values: "Sequence[tf.Tensor]", watched: "Sequence[tf.Tensor]"
) -> "Tuple[Any, Callable[..., Any]]":
    """Return ``compute(*values)``, and a function that differentiates it.

    The function's arguments are some of the results, the sources, and the upstream gradients.
    Sources are among ``watched``, the values and the tensors that are read within, or variables.
    """
    graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()
    # Loops and branches make their variables inputs of another name; the tape knows them.
    if type(graph).__name__ != "FuncGraph":
        with tf.GradientTape(persistent=True) as tape:
            tape.watch([value for value in watched if value.dtype.is_floating])
            results = compute(*values)
        return results, tape.gradient

    # Within the caller's tape another one would have TensorFlow trace gradients of gradients of
    # the functions in the model (an LSTM's): twice the time, and in 2.3 without an end where the
    # number of rows is unknown. So a function's graph is traversed. This is what tf.gradients()
    # calls, which has no argument for a graph other than the one that gets the gradients.
    from tensorflow.python.ops import gradients_util

    def gradients_of(results, sources, upstream):
        inner = [graph.capture(getattr(source, "handle", source)) for source in sources]
        # Copies of weights are computed from these: the way ends there.
        return gradients_util._GradientsHelper(
            results, inner, upstream, stop_gradients=watched, src_graph=graph
        )

    return compute(*values), gradients_of
