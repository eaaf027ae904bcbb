"""What a graph of TensorFlow 2 has that is not computing: functions, variables, captures.

And the tables among its variables in which it looks up the same rows for any batch, such as those
of positions.
"""

import re

from ..._rows import Replicated

CALLS = {"PartitionedCall", "StatefulPartitionedCall"}
CONDITIONS = {"If", "StatelessIf"}
LOOPS = {"While", "StatelessWhile"}

#: Operations on a variable, or on a table of a lookup layer, that leave it as it is.
READS = {
    "LookupTableFindV2", "LookupTableSizeV2", "ReadVariableOp", "ResourceGather",
    "ResourceGatherNd", "VariableShape",
}  # fmt: skip

_LOOKUPS = {"Gather", "GatherV2", "GatherNd", "ResourceGather", "ResourceGatherNd"}
_RANDOM = re.compile("Multinomial|Normal|Random|Rng|Uniform")


# The attributes that name the functions an operation calls.
_BODIES = dict.fromkeys(CALLS, ["f"])
_BODIES.update(dict.fromkeys(CONDITIONS, ["then_branch", "else_branch"]))
_BODIES.update(dict.fromkeys(LOOPS, ["cond", "body"]))


def bodies_of(op):
    """The graphs of the functions that an operation calls; None: TensorFlow does not show it."""
    names = [op.get_attr(attribute).name for attribute in _BODIES.get(op.type, ())]
    return [getattr(op.graph._get_function(name), "graph", None) for name in names]


def is_compiled(op):
    """Whether XLA compiles the call of a function, as under tf.function(jit_compile=True)."""
    return op.node_def.attr["_XlaMustCompile"].b  # false where there is none


def is_random(op):
    """Whether an operation makes random numbers, or has a generator go on."""
    return _RANDOM.search(op.type) is not None


def is_resource(tensor):
    return tensor.dtype.name in ("resource", "variant")


def captures(graph):
    """Pairs of a tensor within the graph and the one outside that it stands for."""
    return [(internal, external) for external, internal in graph.captures]


def carried(known, tensors, others):
    """What is known of tensors by their names, for others, which are these in another graph."""
    pairs = zip(tensors, others)
    return {other.name: known[tensor.name] for tensor, other in pairs if tensor.name in known}


def eager(tensor):
    """What a tensor of a function being traced stands for; None for what is no value yet."""
    while tensor is not None and not hasattr(tensor, "numpy"):
        pairs = captures(tensor.graph) if hasattr(tensor.graph, "captures") else []
        tensor = next((external for internal, external in pairs if internal is tensor), None)
    return tensor


def may_be_set(handle):
    """Whether a handle's graph, or a function that it calls, may set the variable."""
    for op in handle.consumers():
        bodies, first = bodies_of(op), int(op.type in CONDITIONS)  # after what is decided by
        if None in bodies or not bodies and op.type not in READS:
            return True
        places = [n - first for n, tensor in enumerate(op.inputs) if tensor is handle]
        if any(may_be_set(body.inputs[place]) for body in bodies for place in places):
            return True
    return False


class Lookups:
    """What is looked up in variables, and in what is computed from them alone.

    Arguments:
        found: whether the numbers of the rows are the same for any batch, each answer that was
            found, by the variables' keys; is written.
        sources: the keys of the variables that a graph's inputs are computed from, by the names of
            these, and RANDOM where random numbers are in it; is written.
    """

    RANDOM = None

    def __init__(self, found=None, sources=None):
        self.found = {} if found is None else found
        self.sources = {} if sources is None else sources

    def note(self, op, given, handles):
        """Note an operation, with the placements of its inputs and the keys of handles."""
        known = [self.sources.get(tensor.name, set()) for tensor in op.inputs]
        if known and op.inputs[0].name in handles:
            known[0] = {handles[op.inputs[0].name]}
        if op.type in _LOOKUPS:
            is_same = self.RANDOM not in known[1] and isinstance(given[1], Replicated)
            for key in known[0] - {self.RANDOM}:
                self.found.setdefault(key, set()).add(is_same)
        sources = set().union(*known)
        if not all(isinstance(each, Replicated) for each in given):
            sources &= {self.RANDOM}
        if is_random(op) or op.op_def.is_stateful and op.type not in READS:
            sources.add(self.RANDOM)
        self.sources.update((output.name, sources) for output in op.outputs if sources)

    def inside(self, graph, tensors):
        """The same for the graph of a function, which is given these tensors."""
        return Lookups(self.found, carried(self.sources, tensors, graph.inputs))

    def same(self):
        """The keys of the variables in which what is looked up is the same for any batch."""
        return {key for key, answers in self.found.items() if answers == {True}}

    def are_mixed(self):
        """Whether in one variable something else is looked up besides what is the same."""
        return {True, False} in self.found.values()
