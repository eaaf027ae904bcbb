"""Replicas of a model in a static graph of TensorFlow 1.

The *batch part* of the graph, which computes the model's outputs from its inputs, each row from
that row alone, is copied once per device. All else is computed once, of the whole batch: losses,
metrics, updates of layers, and what computes across rows. It takes from the batch part nothing but
tensors with rows, which are put together in order, so it may be any function of them: sums are
sums, counts count once.

BatchNorm is the exception, as everywhere: each replica normalises by its own rows, and a moving
average becomes the mean of what the replicas would write.
"""

import contextlib
import warnings

from .. import _replicas, errors
from ._tensorflow1_device import Beside
from ._tensorflow1_graph import (
    ancestors,
    copy_operations,
    dense_parts,
    follows_its_input,
    has_custom_gradient,
    is_shared,
    loop_of,
    operations_of,
    reached,
    v1_names,
    value_of,
    writes,
    written_variable,
)
from ._tensorflow1_rows import MIXED, UNKNOWN, Rows

#: Operations worth running on all devices, also where only a loss needs them.
_COSTLY = ("MatMul", "BatchMatMul", "Conv", "DepthwiseConv", "SparseTensorDenseMatMul")


class Replicas:
    """The batch part of a model's graph, copied once per device.

    Arguments:
        name: the model's, for messages.
        inputs: the model's input tensors; their first dimension is the batch.
        outputs: the model's output tensors.
        losses: the losses it trains on, as far as known.
        updates: the updates of the model's layers, as Keras has them.
        states: variables that hold a row for each row of the batch.
        normalizing: variables of BatchNorm layers.
        devices: the devices, as TensorFlow names them.
    """

    def __init__(self, name, inputs, outputs, losses, updates, states, normalizing, devices):
        import tensorflow

        self.name = name
        self.tf = v1_names(tensorflow)
        self.devices = devices
        self.graph = outputs[0].graph
        self.inputs = list(inputs)
        for tensor in self.inputs:
            if not isinstance(tensor, (self.tf.Tensor, self.tf.SparseTensor)):
                raise errors.UnsupportedError(
                    "parallelize() divides the inputs of model {!r} by rows, and cannot divide a "
                    "variable: {}. Give its value: Input(tensor=tf.identity(variable)).".format(
                        name, tensor.name
                    )
                )
        self.states = [value_of(state.handle) for state in states]
        self._replaced = {}  # type: Dict[Any, Any]
        self._merged = {}  # type: Dict[Any, Any]
        values = [update[1] if isinstance(update, tuple) else update for update in updates]
        starts = operations_of(inputs)
        _, consumers = ancestors(list(outputs) + list(losses) + values, starts)
        self._consumers = consumers
        depending = reached(starts, consumers) - starts
        dense = [t for t in inputs if not isinstance(t, self.tf.SparseTensor)]
        sparse = [part for t in inputs if t not in dense for part in dense_parts(t)]
        shapes = [tensor.get_shape() for tensor in inputs]
        sizes = [shape.as_list()[0] for shape in shapes if shape.ndims]
        fixed = next((size for size in sizes if size is not None), None)
        self._rows = Rows(dense, sparse, depending, fixed)
        averaged = _values_written(updates, starts, normalizing)
        mixing = self._mixing(averaged, normalizing)
        #: Operations of the whole batch: those that compute across rows, and all that need them.
        self._mixed = reached(mixing, consumers)
        averaged = [tensor for tensor in averaged if tensor.op not in self._mixed]
        #: What BatchNorm writes: each replica by the rows it has.
        self._averaged = {tensor for tensor in averaged if tensor.op in depending}
        targets = self._rows_nearest_to(outputs, depending) + averaged
        needed, consumers = ancestors(targets, starts)
        self._refuse_writes(needed, reached(starts, consumers))
        #: Run once, not by each replica: counters.
        self._once = {op for op in needed if writes(op)}
        costly = self._costly_besides(set(needed), starts, depending)
        divided = self._rows_of(costly, set(needed) | starts)
        if divided or self._once:
            needed, consumers = ancestors(targets + divided, starts | self._once)
        self._warn_of_undivided(outputs, starts, mixing, set(costly) - set(needed))
        needed = [op for op in needed if not is_shared(op)]
        for op in needed:
            if has_custom_gradient(op) and loop_of(op) is not None:
                raise errors.custom_gradient(op.name)
        #: The operations that depend on the batch; what they need besides is copied, too.
        self.batch_part = reached(starts, consumers) - starts
        self._constants = list(self._rows.constants) + self._constants_of_loops(needed)
        #: The inputs that replicas read shards of.
        self.divided = [
            tensor
            for tensor in self.inputs
            if any(c in self.batch_part for part in dense_parts(tensor) for c in part.consumers())
        ]
        with self._apart():
            self._check_rows_of_tensors()
            self.sizes = _replicas.sizes(
                self._count((self.divided or self.inputs)[0]), len(devices)
            )
            self.copies = [self._replica(index, needed, fixed) for index in range(len(devices))]
        device_of = {
            copied: device
            for device, replica in zip(devices, self.copies)
            for copied in replica.operations.values()
        }
        loops = [op for op in device_of if op.type == "Enter"]
        device_of.update((loop_of(op).name, device_of[op]) for op in loops)
        self._beside = Beside(device_of, sums=True)

    # What is divided --------------------------------------------------------------------------

    def _mixing(self, averaged, normalizing):
        """The operations that compute across rows, BatchNorm's left out."""
        if not self._rows.mixing:
            return []
        layers = {part for v in normalizing for part in v.op.name.split("/")[-2:-1]}
        own = _operations_after_rows(averaged, self._rows)
        return [
            op
            for op in self._rows.mixing
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
            if ends_layer and tensor.op not in self._mixed and self._rows.come_first(tensor):
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
            if self._rows.known(tensor) == 0
            and tensor.op not in self._mixed
            and not _read_other_rows(ancestors([tensor], stop)[0])
        ]

    def _warn_of_undivided(self, outputs, starts, mixing, costly):
        """Tell of costly operations that run on one device."""
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
            warnings.warn(text, errors.CompatWarning, stacklevel=2)
        others = costly - self._mixed
        if others:
            text = (
                "A loss or an update of model {!r} needs operations that its outputs do not need "
                "and that parallelize() cannot divide, so they run on one device: {}. To have "
                "them divided, make what they compute an output of the model.".format(
                    self.name, _list_of(others)
                )
            )
            warnings.warn(text, errors.CompatWarning, stacklevel=2)

    def _refuse_writes(self, needed, batch_part):
        for op in needed:
            if writes(op) and op in batch_part:
                raise errors.UnsupportedError(
                    "Model {!r} writes the variable {} while it computes its outputs, and what it "
                    "writes depends on the batch: each device would write another value. Make it "
                    "an update of the layer, layer.add_update(), which parallelize() runs once a "
                    "step, of the whole batch.".format(self.name, written_variable(op).name)
                )

    # Replicas -----------------------------------------------------------------------------------

    def _replica(self, index, needed, fixed):
        """Copy the operations ``needed`` to the device, there to compute its shard."""
        tf = self.tf
        replaced = {}  # type: dict
        for shape, sizes in self._rows.shapes.items():
            if None not in sizes:
                replaced[shape] = tf.constant(sizes, shape.dtype)
        for tensor in self.inputs + self.states + self._constants:
            with self._where_it_lies(tensor), tf.control_dependencies(self._checks):
                count = tf.identity(self._count(tensor)) if self._checks else self._count(tensor)
                first, end = _replicas.run_bounds(count, len(self.devices), index, tf.maximum)
                shard = self._shard(tensor, first, end)
                replaced.update(zip(dense_parts(tensor), dense_parts(shard)))
        return copy_operations(
            needed,
            replaced,
            "replica_{}".format(index),
            lambda op: "" if follows_its_input(op) else self.devices[index],
            seed=index,
            controls=lambda op: [op] if op in self._once else [],
            fixed_batch=fixed,
        )

    def _constants_of_loops(self, needed):
        """What loops begin with, weights left out, that has a fixed number of rows: zeros."""
        begin = [op.inputs[0] for op in needed if op.type == "Enter" and op not in self.batch_part]
        return [
            tensor
            for tensor in begin
            if tensor.dtype.is_floating
            and self._rows.has_fixed(tensor)
            and not any(op.type.startswith("Var") for op in ancestors([tensor], ())[0])
        ]

    def _check_rows_of_tensors(self):
        """Check at run time that inputs that are not fed have as many rows as the others."""
        tf = self.tf
        fed = [dense_parts(t)[0].op.type.startswith("Placeholder") for t in self.divided]
        self._checks = []
        if len(fed) < 2 or all(fed):
            return
        with tf.device("/cpu:0"):
            counts = [self._count(tensor) for tensor in self.divided]
            text = (
                "parallelize() divides each input of model {!r} by its rows, but they do not have "
                "as many. Give each input a row for each row of the batch, or use one device: "
                "parallelize(model, gpus=1). Rows:".format(self.name)
            )
            same = tf.reduce_all(tf.equal(counts, counts[0]))
            self._checks.append(tf.Assert(same, [text] + counts))

    @contextlib.contextmanager
    def _apart(self):
        """Within, operations are made apart from where Keras is just making its own."""
        with self.graph.as_default(), self.graph.name_scope(None):
            with self.tf.control_dependencies(None), self.tf.device(None):
                yield

    def _where_it_lies(self, tensor):
        # Slicing on the replica would send the whole batch to every device.
        if tensor.op.type.startswith("Placeholder"):
            return self.tf.device("/cpu:0")
        return self.tf.colocate_with(tensor.op)

    def _count(self, tensor):
        if isinstance(tensor, self.tf.SparseTensor):
            return self.tf.cast(tensor.dense_shape[0], self.tf.int32)
        return self.tf.shape(tensor)[0]

    def _shard(self, tensor, first, end):
        tf = self.tf
        if not isinstance(tensor, tf.SparseTensor):
            return tensor[first:end]
        first, rows = tf.cast(first, tf.int64), tf.cast(end - first, tf.int64)
        start = tf.concat([[first], tf.zeros_like(tensor.dense_shape[1:])], axis=0)
        size = tf.concat([[rows], tensor.dense_shape[1:]], axis=0)
        return tf.sparse_slice(tensor, start, size)

    @contextlib.contextmanager
    def gradients_beside_forward(self):
        """Within, a gradient's operations go where the operation ran that they belong to.

        Keras 2 asks TensorFlow for that (``colocate_gradients_with_ops``), tf.keras does not.
        """
        with self.graph.as_default(), self.tf.device(self._beside):
            yield

    # Tensors of the whole batch -----------------------------------------------------------------

    def whole(self, fetch):
        """The tensor or operation, computed from the replicas' batch parts.

        What lies between rows of the batch part and ``fetch`` is copied; so it is computed once,
        of the whole batch.
        """
        if self._leaves_replicas(fetch):
            return self._whole_tensor(fetch)
        ops, consumers = ancestors([fetch], (), self._leaves_replicas)
        between = reached([source for source in consumers if self._is_divided(source)], consumers)
        new = [op for op in ops if op in between and op not in self._replaced]
        if new:
            boundary = {
                tensor: self._whole_tensor(tensor)
                for op in new
                for tensor in op.inputs
                if self._leaves_replicas(tensor) or tensor.op in self._replaced
            }
            copies = copy_operations(new, boundary, "whole_batch", None, controls=self._control)
            self._replaced.update(copies.operations)
        if isinstance(fetch, self.tf.Operation):
            return self._replaced.get(fetch, fetch)
        return self._whole_tensor(fetch)

    def _is_divided(self, source):
        return getattr(source, "op", source) in self.batch_part

    def _leaves_replicas(self, source):
        """Whether what needs ``source``, a tensor or an operation, takes the replicas'.

        A tensor without rows is computed again, of the whole batch.
        """
        if not self._is_divided(source):
            return False
        if isinstance(source, self.tf.Operation):
            return True
        if source in self._averaged or self._rows.come_first(source):
            return True
        if loop_of(source.op) is not None:
            raise errors.UnsupportedError(
                "A loss, a metric or an update of model {!r} needs {!r}, which a loop computes "
                "and which has no rows, so parallelize() does not know what it is of the whole "
                "batch. Compute it from the loop's rows, or train on one device, with "
                "parallelize(model, gpus=1).".format(self.name, source.op.name)
            )
        return False

    def _control(self, op):
        """Operations to wait for where the undivided graph waits for ``op``."""
        if op in self.batch_part:
            return [replica.operations[op] for replica in self.copies if op in replica.operations]
        return [self._replaced.get(op, op)]

    def _whole_tensor(self, tensor):
        if self._leaves_replicas(tensor):
            if tensor not in self._merged:
                with self._apart():
                    merge = self._mean if tensor in self._averaged else self._rows_in_order
                    self._merged[tensor] = merge([copy.tensor(tensor) for copy in self.copies])
            return self._merged[tensor]
        if tensor.op in self._replaced:
            return self._replaced[tensor.op].outputs[tensor.value_index]
        return tensor

    def _rows_in_order(self, parts):
        tf = self.tf
        kept = []
        for part, size, device in zip(parts, self.sizes, self.devices):
            with tf.device(device):
                # A replica without rows of its own has computed one, to be dropped.
                kept.append(part[: tf.shape(part)[0] * tf.minimum(size, 1)])
        return tf.concat(kept, axis=0, name="rows_in_order")

    def _mean(self, parts):
        """The replicas' mean, weighted by their rows."""
        tf = self.tf
        if not parts[0].dtype.is_floating:
            return parts[0]
        rows = tf.cast(sum(self.sizes), parts[0].dtype)
        weights = [tf.cast(size, parts[0].dtype) / rows for size in self.sizes]
        return tf.add_n([w * part for w, part in zip(weights, parts)], name="mean_by_rows")


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
