"""Where TensorFlow 1 ran the operations of a step: from the graphs that its sessions record."""

# How operations are called, also after Grappler ("_FusedMatMul") and, in TensorFlow 2's v1 mode on
# CPUs that have what it wants, oneDNN ("_MklMatMul", "_MklNativeFusedMatMul").
MATRIX_PRODUCTS = ("MatMul", "Conv2D")
BACKWARD_PRODUCT = "Conv2DBackprop"


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
