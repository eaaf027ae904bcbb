"""The trace of a call, which shows how its results depend on the rows of the batch."""

from .graph_walk import Walk
from .row_kinds import BATCH, FIXED_VALUE, Handle


class Trace:
    """The plain call, traced with an unknown number of rows, and the kinds of its results.

    Arguments:
        function: takes the tensors, returns lists of tensors by name; None stands for none.
        tensors: what the call gets.
        rows: for each of them, whether it has the batch along its first axis. (``None``: yes,
            but not as many elements for each row; ``Sizes``: it is a shape.)
        alone: as for ``Walk``; filled while the function runs.
    """

    def __init__(self, tf, function, tensors, rows, alone=()):
        from tensorflow.python.autograph.core import ag_ctx

        self.tf = tf
        specs = []
        for tensor, has_rows in zip(tensors, rows):
            shape = tensor.shape
            if has_rows in (True, None):
                shape = tf.TensorShape([None] + shape.as_list()[1:])
            specs.append(tf.TensorSpec(shape, tensor.dtype))
        made = []

        def traced(*placeholders):
            made.append((placeholders, function(*placeholders)))
            return list(placeholders) or tf.constant(0)

        # Code that ran eagerly so far has its branches converted, as within a tf.function.
        # Nothing here is computed, so no tape records it.
        with _stop_recording(), ag_ctx.ControlStatusCtx(status=ag_ctx.Status.ENABLED):
            self.function = _wrapped(traced, specs)
        self.placeholders, results = made[-1]
        graph = self.function.graph
        kinds = {}
        for internal, external in _captures(graph):
            kind = Handle(_key(external)) if internal.dtype.name == "resource" else FIXED_VALUE
            kinds[internal.name] = kind
        for tensor, has_rows in zip(self.placeholders, rows):
            if has_rows in (True, None):
                kinds[tensor.name] = BATCH._replace(even=bool(has_rows))
            elif has_rows:
                kinds[tensor.name] = has_rows
        self.state = {}  # key of a variable -> kind of its new value
        walk = Walk(graph, kinds, self.state, alone)
        self.kinds = {
            name: [walk.kind(value) if hasattr(value, "name") else FIXED_VALUE for value in found]
            for name, found in results.items()
        }

    def of_variable(self, variable):
        """The kind of a variable's value after the call; None if the call does not set it."""
        return self.state.get(_key(variable.handle))

    def weights(self, weight, shard):
        """A mean's denominator on the rows of a shard, and the sum it is computed from."""
        graph = self.function.graph
        fetches = [graph.get_tensor_by_name(name) for name in weight]
        return self.function.prune(list(self.placeholders), fetches)(*shard)

    def total(self, weight, sums):
        """The denominator on all rows, from the replicas' sums."""
        graph, total = self.function.graph, self.tf.add_n(sums)
        if weight.tensor == weight.sum:
            return total
        fetched = graph.get_tensor_by_name(weight.tensor)
        return self.function.prune([graph.get_tensor_by_name(weight.sum)], fetched)(total)


def _stop_recording():
    """What a tape's method of this name returns, for all tapes."""
    try:
        from tensorflow.python.eager import record
    except ImportError:  # up to TensorFlow 2.12
        from tensorflow.python.eager import tape as record
    return record.stop_recording()


def _wrapped(function, specs):
    """``tf.compat.v1.wrap_function``: in a graph of its name Keras takes no losses."""
    from tensorflow.python.eager import wrap_function
    from tensorflow.python.framework import func_graph

    holder = wrap_function.VariableHolder(function)
    graph = func_graph.func_graph_from_py_func(
        "compat_trace", holder, args=None, kwargs=None, signature=specs,
        add_control_dependencies=False,
    )  # fmt: skip
    return wrap_function.WrappedFunction(graph, variable_holder=holder, signature=specs)


def _captures(graph):
    """Pairs of a tensor within the graph and the one outside that it stands for."""
    return [(internal, external) for external, internal in graph.captures]


def _key(handle):
    """Handles of variables are compared by identity: TensorFlow has no other."""
    return id(handle)
