"""Where TensorFlow 1 ran the operations of a step: from the graphs that its sessions record."""

# How operations are called, also after Grappler ("_FusedMatMul") and, in TensorFlow 2's v1 mode on
# CPUs that have what it wants, oneDNN ("_MklMatMul", "_MklNativeFusedMatMul").
MATRIX_PRODUCTS = ("MatMul", "Conv2D")
BACKWARD_PRODUCT = "Conv2DBackprop"


def record(tf, function, step):
    """Do a step, and return TensorFlow's record: the graphs that it ran, and their statistics.

    Arguments:
        tf: TensorFlow under its 1.x names.
        function: the ``K.function`` of Keras that ``step()`` calls.
    """
    metadata = tf.RunMetadata()
    options = tf.RunOptions(output_partition_graphs=True, trace_level=tf.RunOptions.FULL_TRACE)
    if hasattr(function, "_callable_fn"):  # made once, for many runs
        function.run_options, function.run_metadata = options, metadata
        function._callable_fn = None
    else:  # keras before 2.2
        function.session_kwargs = {"options": options, "run_metadata": metadata}
    try:
        step()
    finally:
        function.run_options = function.run_metadata = function._callable_fn = None
        function.session_kwargs = {}
    return metadata


def partitions(metadata):
    """The operations that ran, by device, constants left out."""
    graphs = [list(graph.node) for graph in metadata.partition_graphs if len(graph.node)]
    return {nodes[0].device[nodes[0].device.index("/device:") :]: nodes for nodes in graphs}


def products(ran):
    """Matrix products and convolutions by device, forward and backward."""
    found = {}
    for device, nodes in ran.items():
        here = [n for n in nodes if is_product(n) or BACKWARD_PRODUCT in n.op]
        backward = sum("gradients" in n.name or BACKWARD_PRODUCT in n.op for n in here)
        if here:
            found[device] = len(here) - backward, backward
    return found


def is_product(node):
    return node.op.endswith(MATRIX_PRODUCTS)


def as_configured(devices, configured):
    """The devices by the names that were configured.

    In TensorFlow 2's v1 mode "/device:CPU:0" is configured by the name "/cpu:0".
    """
    names = {_plain(name): name for name in configured}
    return [names.get(_plain(device), device) for device in devices]


def _plain(device):
    return device.lower().replace("device:", "")
