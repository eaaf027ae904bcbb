"""What a graph of TensorFlow 2 has that is not computing: functions, variables, captures."""

CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
CONDITIONS = {"If", "StatelessIf"}
LOOPS = {"While", "StatelessWhile"}

#: Operations on a variable that leave it as it is.
READS = {"ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape"}


def body_of(op, attribute):
    """The graph of a function that an operation calls; None where TensorFlow does not show it."""
    function = op.graph._get_function(op.get_attr(attribute).name)
    return getattr(function, "graph", None)


def bodies_of(op):
    """The functions that an operation calls, each with the place of its first argument."""
    if op.type in CALLS:
        return [(body_of(op, "f"), 0)]
    if op.type in CONDITIONS:
        return [(body_of(op, name), 1) for name in ("then_branch", "else_branch")]
    if op.type in LOOPS:
        return [(body_of(op, name), 0) for name in ("cond", "body")]
    return []


def is_resource(tensor):
    return tensor.dtype.name in ("resource", "variant")


def captures(graph):
    """Pairs of a tensor within the graph and the one outside that it stands for."""
    return [(internal, external) for external, internal in graph.captures]


def eager(tensor):
    """What a tensor of a function being traced stands for; None for what is no value yet."""
    while tensor is not None and not hasattr(tensor, "numpy"):
        pairs = captures(tensor.graph) if hasattr(tensor.graph, "captures") else []
        tensor = next((external for internal, external in pairs if internal is tensor), None)
    return tensor


def may_be_set(handle):
    """Whether a handle's graph, or a function that it calls, may set the variable."""
    for op in handle.consumers():
        called = bodies_of(op)
        for body, first in called:
            if body is None:
                return True
            places = [n - first for n, tensor in enumerate(op.inputs) if tensor is handle]
            if any(may_be_set(body.inputs[place]) for place in places):
                return True
        if not called and op.type not in READS:
            return True
    return False
