"""Where TensorFlow 2 ran the operations of a step: from the graphs that its runtime records."""

import collections
import contextlib

# How operations are called, also after Grappler ("_FusedMatMul") and, on CPUs that have what it
# wants, oneDNN ("_MklMatMul", "_MklNativeFusedMatMul").
PRODUCTS = ("MatMul", "BatchMatMulV2", "Conv2D")
BACKWARD = ("gradient_tape", "gradients", "_grad", "Backprop")


@contextlib.contextmanager
def recorded():
    """Within, TensorFlow's runtime records; yields a list, to which it then adds the record."""
    from tensorflow.python.eager import context

    records = []  # type: list
    context.enable_run_metadata()
    try:
        context.export_run_metadata()  # drop what others left
        yield records
    finally:
        records.append(context.export_run_metadata())
        context.disable_run_metadata()


def executed(step):
    """Do a step, and return the nodes of every graph partition that TensorFlow executed.

    A graph is recorded when it is first made: ``step()`` is to trace its functions.
    """
    with recorded() as records:
        step()
    graphs = [function.partition_graphs for function in records[0].function_graphs]
    graphs = [partitions for partitions in graphs if not all(map(_is_one_operation, partitions))]
    return [node for partitions in graphs for partition in partitions for node in partition.node]


def _is_one_operation(partition):
    """Whether this is an operation that ran eagerly, and that oneDNN's rewriting makes a graph."""
    return sum(node.op not in ("_Arg", "_Retval") for node in partition.node) == 1


def products(nodes):
    """Matrix products and convolutions by device, forward and backward."""
    counts = collections.defaultdict(lambda: [0, 0])  # type: dict
    for node in nodes:
        # A recurrent layer of tf.keras runs as one function call on one device.
        computing = node.op.endswith(PRODUCTS) or node.op == "PartitionedCall"
        if computing or "Backprop" in node.op:
            name = node.name + node.op
            # The gradient of a product is a product with a transposed matrix.
            transposed = node.attr["transpose_a"].b or node.attr["transpose_b"].b
            backward = transposed or any(mark in name for mark in BACKWARD)
            counts[short(node.device)][backward] += 1
    return {device: tuple(count) for device, count in counts.items()}


def short(device):
    """/job:localhost/replica:0/task:0/device:CPU:1 as compat names it."""
    return "/" + device.split("device:")[-1].lower()
