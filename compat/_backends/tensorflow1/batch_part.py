"""Which part of a model's graph is divided: the *batch part*.

It computes the model's outputs from its inputs, each row from that row alone, and what computes as
much besides: losses for example. ``across_rows`` finds out which that is.
"""

from ... import errors
from .across_rows import Rows
from .graph import (
    ancestors,
    dense_parts,
    has_custom_gradient,
    is_shared,
    loop_of,
    operations_of,
    reached,
    v1_names,
    writes,
    written_variable,
)
from .row_rules import MIXED, UNKNOWN

#: Operations worth running on all devices, also where only a loss needs them.
_COSTLY = ("MatMul", "BatchMatMul", "Conv", "DepthwiseConv", "SparseTensorDenseMatMul")


class BatchPart:
    """What replicas of a model run, and what they take.

    Arguments:
        name: the model's, for messages.
        inputs: the model's input tensors; their first dimension is the batch.
        outputs: the model's output tensors.
        losses: the losses it trains on, as far as known.
        updates: the updates of the model's layers, as Keras has them.
        normalizing: variables of BatchNorm layers.

    Attributes:
        rows: the ``Rows`` of the graph.
        fixed: the number of rows, where it is fixed.
        needed: the operations that replicas run.
        operations: those among them that depend on the batch.
        once: operations run once, not by each replica: counters.
        averaged: the tensors that BatchNorm writes, each replica by the rows it has.
        constants: constant tensors that have a row for each row of the batch.
        divided: the inputs that replicas read shards of.
    """

    def __init__(self, name, inputs, outputs, losses, updates, normalizing):
        import tensorflow

        sparse_tensor = v1_names(tensorflow).SparseTensor
        self.name = name
        values = [update[1] if isinstance(update, tuple) else update for update in updates]
        starts = operations_of(inputs)
        _, consumers = ancestors(list(outputs) + list(losses) + values, starts)
        self._consumers = consumers
        depending = reached(starts, consumers) - starts
        dense = [t for t in inputs if not isinstance(t, sparse_tensor)]
        sparse = [part for t in inputs if t not in dense for part in dense_parts(t)]
        shapes = [tensor.get_shape() for tensor in inputs]
        sizes = [shape.as_list()[0] for shape in shapes if shape.ndims]
        self.fixed = next((size for size in sizes if size is not None), None)
        self.rows = Rows(dense, sparse, depending, self.fixed)
        averaged = _values_written(updates, starts, normalizing)
        mixing = self._mixing(averaged, normalizing)
        #: Operations of the whole batch: those that compute across rows, and all that need them.
        self._mixed = reached(mixing, consumers)
        averaged = [tensor for tensor in averaged if tensor.op not in self._mixed]
        self.averaged = {tensor for tensor in averaged if tensor.op in depending}
        targets = self._rows_nearest_to(outputs, depending) + averaged
        needed, consumers = ancestors(targets, starts)
        self._refuse_writes(needed, reached(starts, consumers))
        self.once = {op for op in needed if writes(op)}
        costly = self._costly_besides(set(needed), starts, depending)
        divided = self._rows_of(costly, set(needed) | starts)
        if divided or self.once:
            needed, consumers = ancestors(targets + divided, starts | self.once)
        self._warn_of_undivided(outputs, starts, mixing, set(costly) - set(needed))
        self.needed = [op for op in needed if not is_shared(op)]
        self._refuse_custom_gradients_in_loops()
        # What these need besides is copied, too.
        self.operations = reached(starts, consumers) - starts
        self.constants = list(self.rows.constants) + self._constants_of_loops()
        self.divided = [
            tensor
            for tensor in inputs
            if any(c in self.operations for part in dense_parts(tensor) for c in part.consumers())
        ]

    def _mixing(self, averaged, normalizing):
        """The operations that compute across rows, BatchNorm's left out."""
        if not self.rows.mixing:
            return []
        layers = {part for v in normalizing for part in v.op.name.split("/")[-2:-1]}
        own = _operations_after_rows(averaged, self.rows)
        return [
            op
            for op in self.rows.mixing
            if op not in own and not any(_is_within(op, layer) for layer in layers)
        ]

    def _rows_nearest_to(self, outputs, depending):
        """The outputs, each computed from its row alone, or what layers before them put out."""
        pending, seen, found, outputs = list(outputs), set(), [], set(outputs)
        while pending:
            tensor = pending.pop()
            if tensor in seen or tensor.op not in depending:
                continue
            seen.add(tensor)
            ends_layer = tensor in outputs or hasattr(tensor, "_keras_history")
            if ends_layer and tensor.op not in self._mixed and self.rows.come_first(tensor):
                found.append(tensor)
            else:
                pending.extend(tensor.op.inputs)
        return found

    def _costly_besides(self, needed, starts, depending):
        """Operations worth dividing that the outputs do not need; those of targets left out."""
        return [
            op
            for op in depending
            if op.type.startswith(_COSTLY)
            and op not in needed
            and not _read_other_rows(ancestors([op], needed | starts)[0])
        ]

    def _rows_of(self, costly, stop):
        """The tensors with rows that can be divided, too, of those that costly operations make."""
        ends = [op.outputs[0] for op in costly]
        if any(loop_of(op) is not None for op in costly):
            after = reached(costly, self._consumers)
            ends += [t for op in after for t in op.outputs if hasattr(t, "_keras_history")]
        return [
            tensor
            for tensor in ends
            if self.rows.known(tensor) == 0
            and tensor.op not in self._mixed
            and not _read_other_rows(ancestors([tensor], stop)[0])
        ]

    def _warn_of_undivided(self, outputs, starts, mixing, costly):
        """Warn of costly operations that run on one device."""
        after = costly & self._mixed - set(mixing)
        inside = set(ancestors(outputs, starts)[0]) if after else set()
        after &= inside
        if after:
            text = (
                "Model {!r} computes across the rows of a batch on the way to its outputs: {}. "
                "That, and all that needs it, parallelize() runs of the whole batch, on one "
                "device: {}. To have these divided, compute across rows after them, or in the "
                "loss.".format(
                    self.name, _list_of(op for op in mixing if op in inside), _list_of(after)
                )
            )
            errors.warn(text)
        others = costly - self._mixed
        if others:
            text = (
                "A loss or an update of model {!r} needs operations that its outputs do not need "
                "and that parallelize() cannot divide, so they run on one device: {}. To have "
                "them divided, make what they compute an output of the model.".format(
                    self.name, _list_of(others)
                )
            )
            errors.warn(text)

    def _refuse_writes(self, needed, batch_part):
        for op in needed:
            if writes(op) and op in batch_part:
                raise errors.UnsupportedError(
                    "Model {!r} writes the variable {} while it computes its outputs, and what it "
                    "writes depends on the batch: each device would write another value. Make it "
                    "an update of the layer, layer.add_update(), which parallelize() runs once a "
                    "step, of the whole batch.".format(self.name, written_variable(op).name)
                )

    def _refuse_custom_gradients_in_loops(self):
        for op in self.needed:
            if has_custom_gradient(op) and loop_of(op) is not None:
                raise errors.unsupported(
                    "tensorflow",
                    "run {} on several devices: it is in a loop and has a gradient by "
                    "tf.custom_gradient, which is bound to the undivided batch".format(op.name),
                    "Use one device: gpus=1, or give the operation TensorFlow's own gradient.",
                )

    def _constants_of_loops(self):
        """What loops begin with, weights left out, that has a fixed number of rows: zeros."""
        begin = [
            op.inputs[0] for op in self.needed if op.type == "Enter" and op not in self.operations
        ]
        return [
            tensor
            for tensor in begin
            if tensor.dtype.is_floating
            and self.rows.has_fixed(tensor)
            and not any(op.type.startswith("Var") for op in ancestors([tensor], ())[0])
        ]


def _values_written(updates, stop, variables):
    """The tensors that updates write into some variables, or derive from the batch for it."""
    names = {variable.op.name for variable in variables}
    # Keras' moving averages have variables besides: "moving_mean/biased".
    scopes = tuple(name + "/" for name in names)

    def is_one(variable):
        return variable.name in names or variable.name.startswith(scopes)

    pairs = [update for update in updates if isinstance(update, tuple)]
    ops, consumers = ancestors([u for u in updates if not isinstance(u, tuple)], stop)
    writing = reached([op for op in ops if writes(op) and is_one(written_variable(op))], consumers)
    values = [value for variable, value in pairs if is_one(variable.op)]
    return values + [t for op in writing for t in op.inputs if t.op not in writing]


def _read_other_rows(operations):
    """Whether these operations read rows that are no input's of the model, such as targets."""
    return any(
        tensor.dtype.name not in ("bool", "resource") and not tensor.shape.is_fully_defined()
        for op in operations
        if op.type.startswith(("Placeholder", "IteratorGetNext"))
        for tensor in op.outputs
    )


def _operations_after_rows(tensors, rows):
    """The operations that compute these tensors from rows."""
    found, pending = set(), list(tensors)
    while pending:
        tensor = pending.pop()
        if tensor.op not in found and rows.known(tensor) in (MIXED, UNKNOWN):
            found.add(tensor.op)
            pending.extend(tensor.op.inputs)
    return found


def _is_within(op, scope):
    """Whether ``op`` was made by the layer of this name, used once or more often."""
    return any(
        part == scope or part.startswith(scope + "_") and part[len(scope) + 1 :].isdigit()
        for part in op.name.split("/")
    )


def _list_of(operations):
    """Operations by name and type, as a text."""
    ordered = sorted(operations, key=lambda op: op._id)
    names = ["{} ({})".format(op.name, op.type) for op in ordered[:4]]
    return ", ".join(names) + (" and others" if len(ordered) > 4 else "")
