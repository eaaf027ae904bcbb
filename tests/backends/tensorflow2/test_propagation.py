"""TensorFlow 2: placements of variables, lists, functions, branches and loops are true.

Proved as the table of operations is: by computing the whole batch, and parts of it. What a trial
adds is left out.
"""

import numpy as np
import row_proof
import tensorflow as tf

from compat import _rows
from compat._backends.tensorflow2.graph import captures
from compat._backends.tensorflow2.propagation import Added, Propagation
from compat._backends.tensorflow2.trial import OpTrial
from compat._rows import Count, Mixed, Partial, Sharded

START = np.zeros(4, "float32")


def reversed_list(x):
    count = tf.shape(x)[0]
    items = tf.TensorArray(x.dtype, size=count).unstack(x)
    return items.gather(tf.range(count - 1, -1, -1))


def turns(limit, x):
    return tf.while_loop(lambda n, y: n < limit, lambda n, y: (n + 1, y * 1.5), [0, x])[1]


def shifted(x):
    """Each turn takes what the one before made of another input: rows come in the third."""

    def body(n, a, b, c):
        return n + 1, b, c, tf.reduce_sum(x, 0)

    return tf.while_loop(lambda n, *_: n < 2, body, [0] + [tf.zeros(4)] * 3)[1]


def floats(number):
    return tf.cast(number, tf.float32)


@tf.function
def called(x):
    return x - tf.reduce_max(x, 0), x + 1.0


#: Functions of a batch.
VALUES = {
    "map": lambda x: tf.map_fn(lambda row: row * 2, x),
    "map of others": lambda x: tf.map_fn(lambda row: row - tf.reduce_max(x), x),
    "scan": lambda x: tf.scan(lambda before, row: before + row, x),
    "fold": lambda x: tf.foldl(lambda before, row: before + row, x),
    "turns": lambda x: turns(3, x),
    "turns by the rows": lambda x: turns(tf.shape(x)[0], x),
    "turns by data": lambda x: turns(tf.cast(tf.reduce_max(x) * 9, tf.int32), x),
    "turns of a mean": lambda x: turns(3, tf.reduce_mean(x, 0)),
    "sum in a loop": lambda x: turns(3, tf.reduce_sum(x, 0)),
    "shifted": shifted,
    "reversed": reversed_list,
    "list": lambda x: tf.TensorArray(x.dtype, size=4).unstack(tf.transpose(x)).stack(),
    "one of a list": lambda x: tf.TensorArray(x.dtype, size=4).unstack(tf.transpose(x)).read(1),
    "broadcast": lambda x: tf.broadcast_to(
        x, [tf.maximum(*[tf.shape(t)[0] for t in (x, x * 2)]), 4]
    ),
    "broadcast to more": lambda x: tf.broadcast_to(x[:1], [tf.maximum(tf.shape(x)[0], 2), 4]),
    "called": called,
    "size": tf.size,
    "square of a number": lambda x: floats(tf.shape(x)[0]) * floats(tf.size(x)),
    "product of numbers": lambda x: tf.reduce_prod(tf.stack([tf.shape(x)[0]] * 2)),
    "one of products": lambda x: (floats(tf.shape(x)) * floats(tf.shape(x)))[0],
    "one of more": lambda x: (tf.shape(x) + 1)[0],
    "half of a number": lambda x: tf.cast(floats(tf.shape(x)[0]) * 0.5, tf.int32),
    "at least 2": lambda x: tf.maximum(floats(tf.shape(x)[0]), 2.0),
    "at most 2": lambda x: tf.minimum(floats(tf.shape(x)[0]), 2.0),
    "at least 1": lambda x: tf.maximum(floats(tf.shape(x)[0]), 1.0),
    "mean by size": lambda x: tf.reduce_sum(x) / tf.cast(tf.size(x), tf.float32),
    "mean by a mask": lambda x: tf.reduce_sum(x * x) / tf.reduce_sum(x),
    "branch by data": lambda x: tf.cond(tf.reduce_max(x) > 0.8, lambda: x, lambda: x * 2),
    "branch": lambda x: tf.cond(tf.shape(x)[-1] > 3, lambda: x * 2, lambda: x - tf.reduce_mean(x)),
}

#: What is done to a variable of four elements.
CHANGES = {
    "add": lambda v, x: v.assign_add(tf.reduce_sum(x, 0)),
    "subtract": lambda v, x: v.assign_sub(tf.reduce_sum(x, 0)),
    "add a mean": lambda v, x: v.assign_add(tf.reduce_mean(x, 0)),
    "add the same": lambda v, x: v.assign_add(tf.ones(4)),
    "add the largest": lambda v, x: v.assign_add(tf.reduce_max(x, 0)),
    "moving average": lambda v, x: v.assign(0.5 * v + 0.5 * tf.reduce_mean(x, 0)),
    "sum": lambda v, x: v.assign(tf.reduce_sum(x, 0)),
    "old and sum": lambda v, x: v.assign(v + tf.reduce_sum(x, 0)),
    "halved, and sum": lambda v, x: v.assign(v * 0.5 + tf.reduce_sum(x, 0)),
    "largest": lambda v, x: v.assign(tf.reduce_max(x, 0)),
    "add twice": lambda v, x: [v.assign_add(tf.reduce_sum(x, 0)), v.assign_add(x[0] * 0 + 1)],
    "add, and read": lambda v, x: v.assign(v.assign_add(tf.reduce_sum(x, 0)) * 2),
    "sum, and add": lambda v, x: [v.assign(tf.reduce_sum(x, 0)), v.assign_add(tf.ones(4))],
    "squared": lambda v, x: v.assign(tf.reduce_sum(x, 0) ** 2),
    "spread": lambda v, x: v.assign(tf.reduce_max(x, 0) - tf.reduce_min(x, 0)),
    "count": lambda v, x: v.assign_add(tf.ones(4) * tf.cast(tf.shape(x)[0], tf.float32)),
    "counts": lambda v, x: v.assign_add(tf.tile(floats(tf.shape(x)) * 2.0, [2])),
    "set to counts": lambda v, x: v.assign(tf.tile(floats(tf.shape(x)) * 2.0, [2])),
    "scattered": lambda v, x: v.scatter_add(
        tf.IndexedSlices(x[:, 0], tf.cast(x[:, 1] * 4, "int32"))
    ),
    "scattered the same": lambda v, x: v.scatter_add(tf.IndexedSlices(tf.ones(1), [2])),
    "in a loop": lambda v, x: tf.while_loop(
        lambda n: n < 3, lambda n: v.assign_add(tf.reduce_sum(x, 0))[0] * 0 + n + 1, [0.0]
    ),
    "in a branch": lambda v, x: tf.cond(
        tf.reduce_max(x) > 0.8, lambda: v.assign_add(tf.reduce_sum(x, 0)), lambda: v.assign_add(v)
    ),
}  # fmt: skip


class Traced:
    """A function of a batch, which may change a variable, computed and traced."""

    def __init__(self, function):
        self.variable = tf.Variable(START)

        def results(x):
            found = tf.nest.flatten(function(self.variable, x))
            return found if isinstance(found[0], tf.Tensor) else []

        self.function = tf.function(results)

    def compute(self, arrays):
        self.variable.assign(START)
        found = [each.numpy() for each in self.function(*arrays)]
        return found + [self.variable.numpy()]

    def claim(self, given):
        shape = [None if given[0] == Sharded(axis) else size for axis, size in enumerate((3, 4))]
        concrete = self.function.get_concrete_function(tf.TensorSpec(shape))
        graph = concrete.graph
        handles = {inner.name: id(outer) for inner, outer in captures(graph)}
        propagation = Propagation(
            graph, dict(zip([graph.inputs[0].name], given)), handles,
            lambda op, _: _rows.Fallback(_rows.Reason.CROSS_BATCH, op.name), OpTrial({}, {}),
        )  # fmt: skip
        found = [propagation.placement_of(tensor) for tensor in concrete.outputs]
        numbers = [tensor.shape.rank == 0 for tensor in concrete.outputs]
        found = [Partial("sum") if n and p == Count() else p for n, p in zip(numbers, found)]
        found.append(propagation.state.get(id(self.variable.handle), _rows.REPLICATED))
        # It starts from zero.
        return [Partial("sum") if isinstance(p, Added) else p for p in found]


def test_no_walk_claims_what_is_not_true():
    x = np.random.RandomState(0).uniform(0.2, 0.9, (3, 4)).astype("float32")
    cases = {name: lambda v, x, f=function: f(x) for name, function in VALUES.items()}
    cases.update(CHANGES)
    found, claimed = row_proof.Found(), {}
    for name, function in cases.items():
        traced = Traced(function)
        row_proof.prove(name, [x], traced.compute, traced.claim, found=found)
        claimed[name] = traced.claim([Sharded(0)])
    assert not found.wrong
    assert found.claimed > 100
    for name in ("add", "subtract", "count", "scattered", "sum"):
        assert claimed[name][-1] == Partial("sum"), name
    assert claimed["moving average"][-1] == Partial("mean")
    assert claimed["broadcast"][0] == Sharded(0)  # as take_along_axis() of Keras 3 has it
    assert claimed["turns"] == [Sharded(0), _rows.REPLICATED]
    assert claimed["at least 1"][0] == claimed["size"][0] == Partial("sum")
    assert claimed["mean by size"] == [Partial("mean"), _rows.REPLICATED]


def test_a_division_is_found_before_any_number_of_operations():
    def divided(_, x):
        x = x / tf.reduce_sum(x, 0)
        for _ in range(1100):
            x = -x
        return tf.sort(x, 0)

    (claimed, _) = Traced(divided).claim([Sharded(0)])
    assert isinstance(claimed, Mixed) and claimed.fallback.operation == "truediv"
