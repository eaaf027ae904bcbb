"""Gradients of tables in which replicas look up the same rows, joined as one device has them."""

import tensorflow as tf


def joining_tables(lookups, count):
    """Return a function of the replicas' gradients of tables in which all look up the same rows.

    One device has one gradient for each lookup. TensorFlow would put those of the replicas side by
    side, and Keras 3 squares one by one what there is of a row. So the replica whose gradient is
    computed last has the sum of all, and the others have none.

    TensorFlow never lets go of a gradient's function, so that nothing here may hold the model.

    Arguments:
        lookups: those of the ``Trace``.
        count: how many replicas there are.

    Returns:
        What tells, of a replica, counted from 0, a variable and its gradient, what that is to be.
    """
    keys = {key for key, answers in lookups.items() if answers == {True}}
    waiting = {}  # type: dict  # id of a variable -> replica -> its gradient

    def join(replica, variable, gradient):
        if not isinstance(gradient, tf.IndexedSlices) or id(variable.handle) not in keys:
            return gradient
        found = waiting.setdefault(id(variable), {})
        if replica in found:  # of a pass that did not come to its end
            found.clear()
        found[replica] = gradient
        if len(found) < count:
            return None
        del waiting[id(variable)]
        total = tf.add_n([each.values for each in found.values()])
        return tf.IndexedSlices(total, gradient.indices, gradient.dense_shape)

    return join


def dense(gradient):
    """Return the gradient of a table's rows, each looked up once, as that of the whole table.

    Other replicas have looked up some of the same rows. Keras 3 squares what there is of a row one
    by one, as it does where one device looks a row up several times.
    """
    if not isinstance(gradient, tf.IndexedSlices) or tf.executing_eagerly():
        return gradient
    op = gradient.indices.op
    while op.type in ("Cast", "Identity", "Reshape"):
        op = op.inputs[0].op
    return tf.convert_to_tensor(gradient) if op.type.startswith("Unique") else gradient
