"""Replicas of a model in a static graph of TensorFlow 1.

The *batch part* of the graph, which computes the model's outputs from its inputs, each row from
that row alone, is copied once per device, and what computes as much besides: losses for example.
``graph_rows`` finds out which that is. All else is computed once, of the whole batch: losses,
metrics, updates of layers, and what computes across rows. It takes from the batch part nothing but
tensors with rows, which are put together in order, so it may be any function of them: sums are
sums, counts count once.

BatchNorm is the exception, as everywhere: each replica normalises by its own rows, and a moving
average becomes the mean of what the replicas would write.
"""

import contextlib

from ... import _keras, _rows
from ..._rows import split_rows
from . import graph
from .graph_changes import ColocateGradients, Copy, copy_operations
from .graph_rows import TensorRows
from .python_functions import is_call

_COSTLY = ("MatMul", "BatchMatMul", "Conv", "DepthwiseConv", "SparseTensorDenseMatMul")


class BatchPart:
    """What replicas of a model run, and what they take.

    Arguments:
        model: the model of Keras; the first dimension of its input tensors is the batch.
        losses: the losses it trains on, as far as known.
        updates: the updates of the model's layers, as Keras has them.
        tried: placements of tensors that trials found.

    Attributes:
        rows: the ``TensorRows`` of the graph.
        fixed: the number of rows, where it is fixed.
        needed: the operations that replicas run.
        operations: those among them that depend on the batch.
        once: operations run once, not by each replica: counters, and Python functions that are not
            called with rows.
        averaged: the tensors that BatchNorm writes, each replica by the rows it has.
        constants: constant tensors that have a row for each row of the batch.
        divided: the inputs that replicas read shards of.
        across: what runs whole on the way to the outputs, where that costs something: an
            ``Across``, or None.
    """

    def __init__(self, model, losses, updates, tried):
        inputs, outputs = list(model.inputs), list(model.outputs)
        values = [update[1] if isinstance(update, tuple) else update for update in updates]
        starts = {part.op for part in graph.dense_parts(*inputs)}
        _, self._consumers = graph.ancestors(outputs + losses + values, starts)
        depending = graph.reached(starts, self._consumers) - starts
        shapes = [tensor.get_shape() for tensor in inputs]
        self.fixed = next((s.as_list()[0] for s in shapes if s.ndims and s.as_list()[0]), None)
        normalizing = _variables_of_batchnorm(model)
        layers = {part for v in normalizing for part in v.op.name.split("/")[-2:-1]}
        self.rows = TensorRows(inputs, depending, self.fixed, layers, tried)
        self._starts, inside = starts, set(graph.ancestors(outputs, starts)[0])
        # Each device would write another value.
        mixing = self.rows.mixing + [op for op in inside & depending if graph.writes(op)]
        #: Operations of the whole batch: those that compute across rows, and all that need them.
        self._mixed = graph.reached(mixing, self._consumers)
        written = _values_written(updates, starts, normalizing)
        averaged = [t for t in written if t.op in depending and t.op not in self._mixed]
        self.averaged = set(averaged)
        targets = self._rows_nearest_to(outputs, losses + values, depending) + averaged
        needed, _ = graph.ancestors(targets, starts)
        self.across = self._costly_after(mixing, inside & depending.difference(needed))
        self.once = {op for op in needed if graph.writes(op) or _calls_once(op, depending)}
        needed, consumers = graph.ancestors(targets, starts | self.once)
        # A gradient of the user's own is computed once of all that comes back to a weight.
        self.needed = [
            op
            for op in needed
            if not (graph.is_shared(op) or op not in depending and graph.has_own_gradient(op))
        ]
        # What these need besides is copied, too.
        self.operations = graph.reached(starts, consumers) - starts
        self.constants = list(self.rows.constants) + self._constants_of_loops()
        taken = {tensor for op in self.operations for tensor in op.inputs}
        self.divided = [t for t in inputs if not taken.isdisjoint(graph.dense_parts(t))]

    def before(self, tensor):
        """The tensors from which a tensor is computed, and itself."""
        return {t for op in graph.ancestors([tensor], self._starts)[0] for t in op.outputs}

    def drawn(self):
        """Random numbers, and the statistics of batch normalization, that replicas make."""
        random = [op.outputs[0] for op in self.needed if "seed2" in op.node_def.attr]
        return random + [t for t in self.rows.statistics if t.op in self.operations]

    def _rows_nearest_to(self, outputs, others, depending):
        """The outputs, each computed from its row alone, or what layers before them put out.

        And what others, losses and updates, take of layers and of costly operations.
        """
        wanted = list(outputs)
        for other in others:  # an operation, or a tensor
            wanted += getattr(other, "inputs", [other])

        def is_found(tensor):
            ends = tensor in outputs or hasattr(tensor, "_keras_history") or _is_costly(tensor.op)
            ends = ends and tensor.op in depending and tensor.op not in self._mixed
            return ends and self.rows.come_first(tensor) and not self._needs_other_rows(tensor)

        return _rows.nearest(wanted, is_found, lambda t: t.op.inputs if t.op in depending else ())

    def _needs_other_rows(self, target):
        """Whether it needs rows that are no input's of the model, such as those to predict."""
        return any(
            tensor.dtype.name not in ("bool", "resource") and not tensor.shape.is_fully_defined()
            for op in graph.ancestors([target], self._starts)[0]
            if op.type.startswith(("Placeholder", "IteratorGetNext"))
            for tensor in op.outputs
        )

    def _costly_after(self, mixing, operations):
        """What makes costly ones among operations run whole, as an ``Across``, or None."""
        after = filter(_is_costly, operations.intersection(self._mixed).difference(mixing))
        needed = set(graph.ancestors(after, self._starts)[0]).intersection(mixing)
        if not needed:
            return None
        op = min(needed, key=lambda op: op._id)
        whys = [getattr(self.rows.known(tensor), "why", None) for tensor in op.outputs]
        why = next((each for each in whys if each in _rows.REASONS), "mixed")
        return _rows.Across(f"{op.name} ({op.type})", self._layer_of(op), graph.line_of(op), why)

    def _layer_of(self, op):
        """The name of the layer whose output is the next one after an operation, or None."""
        pending = [op]
        for each in pending:  # which grows meanwhile
            for tensor in each.outputs:
                if hasattr(tensor, "_keras_history"):
                    return tensor._keras_history[0].name
            pending += [user for user in self._consumers.get(each, ()) if user not in pending]
        return None

    def _constants_of_loops(self):
        """What loops begin with, weights left out, that has a fixed number of rows: zeros."""
        entering = [op for op in self.needed if op.type == "Enter" and op not in self.operations]
        return [
            tensor
            for tensor in (op.inputs[0] for op in entering)
            if tensor.dtype.is_floating
            and self.rows.has_fixed(tensor)
            and not any(op.type.startswith("Var") for op in graph.ancestors([tensor], ())[0])
        ]


def _values_written(updates, stop, variables):
    """The tensors that updates write into some variables, or derive from the batch for it."""
    # Keras' moving averages have variables besides: "moving_mean/biased".
    scopes = tuple(variable.op.name + "/" for variable in variables)

    def is_one(variable):
        return (variable.name + "/").startswith(scopes)

    pairs = [update for update in updates if isinstance(update, tuple)]
    ops, consumers = graph.ancestors([u for u in updates if not isinstance(u, tuple)], stop)
    own = [op for op in ops if graph.writes(op) and is_one(graph.source_of(op.inputs[0]))]
    writing = graph.reached(own, consumers)
    values = [value for variable, value in pairs if is_one(variable.op)]
    return values + [t for op in writing for t in op.inputs if t.op not in writing]


def _calls_once(op, depending):
    return is_call(op) and op not in depending and graph.is_outermost(op)


def _is_costly(op):
    """Whether an operation is worth running on all devices, also where only a loss needs it."""
    return op.type.startswith(_COSTLY)


class GraphReplicas:
    """The batch part of a model's graph, copied once per device.

    Arguments:
        model, losses, updates, tried: as ``BatchPart`` takes them.
        devices: the devices, as TensorFlow names them.
    """

    def __init__(self, model, losses, updates, tried, devices):
        self.name, self.inputs = model.name, list(model.inputs)
        self.tf, self.graph = graph.v1_names(), model.outputs[0].graph
        self.devices = devices
        # A row for each row of the batch.
        self.states = [graph.value_of(state.handle) for state in _keras.states(model, "handle")]
        # What is computed again, of the whole batch, and in place of what leaves the replicas.
        self._whole = Copy({}, {})
        self._weights = {}  # type: Dict[Any, Any]  # of the replicas' rows in a mean, by dtype
        self.tried = set()  # type: Set[Any]
        self.part = BatchPart(model, losses, updates, tried)
        with self._apart():
            self._checks = self._checks_of_rows()
            rows = self.tf.shape((self.part.divided or self.inputs)[0])[0]
            self.sizes = split_rows.sizes(rows, len(devices))
            self.copies = [self._replica(index) for index in range(len(devices))]
        device_of = {
            copied: device
            for device, replica in zip(devices, self.copies)
            for copied in replica.operations.values()
        }
        self._copied = set(device_of)
        loops = [op for op in device_of if op.type == "Enter"]
        device_of.update((graph.loop_of(op).name, device_of[op]) for op in loops)
        self._colocate = ColocateGradients(device_of, sums=True)

    def _replica(self, index):
        """Copy the batch part to the device, there to compute its shard."""
        tf = self.tf
        shapes = self.part.rows.shapes.items()
        replaced = {t: tf.constant(sizes, t.dtype) for t, sizes in shapes if None not in sizes}
        for tensor in self.read_in_shards():
            # Slicing on the replica would send the whole batch to every device.
            is_fed = tensor.op.type.startswith("Placeholder")
            where = tf.device("/cpu:0") if is_fed else tf.colocate_with(tensor.op)
            with where, tf.control_dependencies(self._checks):
                # Of a fixed number, a replica could only compute as many rows as it always has.
                count = tf.placeholder_with_default(tf.shape(tensor)[0], ())
                first, end = split_rows.run_bounds(count, len(self.devices), index, tf.maximum)
                shard = self._shard(tensor, first, end)
                replaced.update(zip(graph.dense_parts(tensor), graph.dense_parts(shard)))
        return copy_operations(
            self.part.needed,
            replaced,
            f"replica_{index}",
            lambda op: "" if graph.handles(op) else self.devices[index],
            seed=index,
            controls=lambda op: [op] if op in self.part.once else [],
            fixed_batch=self.part.fixed,
        )

    def read_in_shards(self):
        """The tensors of whose rows each replica reads its own."""
        return self.inputs + self.states + self.part.constants

    def taken(self):
        """The tensors of which others take the replicas' rows."""
        return [tensor for tensor in self._whole.replaced if tensor not in self.part.averaged]

    def _checks_of_rows(self):
        """Check at run time that inputs that are not fed have as many rows as the others."""
        tf = self.tf
        fed = [t.op.type.startswith("Placeholder") for t in self.part.divided]
        if len(fed) < 2 or all(fed):
            return []
        with tf.device("/cpu:0"):
            counts = [tf.shape(tensor)[0] for tensor in self.part.divided]
            same = tf.reduce_all(tf.equal(counts, counts[0]))
            return [tf.Assert(same, [rows_differ(self.name) + " Rows:"] + counts)]

    @contextlib.contextmanager
    def _apart(self):
        """Within, operations are made apart from where Keras is just making its own."""
        with self.graph.as_default(), self.graph.name_scope(None):
            with self.tf.control_dependencies(None), self.tf.device(None):
                yield

    def _shard(self, tensor, first, end):
        tf = self.tf
        if not isinstance(tensor, tf.SparseTensor):
            return tensor[first:end]
        bounds, others = tf.cast([first, end - first], tf.int64), tensor.dense_shape[1:]
        start = tf.concat([bounds[:1], tf.zeros_like(others)], axis=0)
        return tf.sparse_slice(tensor, start, tf.concat([bounds[1:], others], axis=0))

    @contextlib.contextmanager
    def gradients_colocated(self):
        """Within, a gradient's operations go where the operation ran that they belong to.

        Keras 2 asks TensorFlow for that (``colocate_gradients_with_ops``), tf.keras does not.
        """
        with self.graph.as_default(), self.tf.device(self._colocate):
            yield

    # Tensors of the whole batch -----------------------------------------------------------------

    def whole(self, fetch):
        """The tensor or operation, computed from the replicas' batch parts.

        What lies between rows of the batch part and ``fetch`` is copied; so it is computed once,
        of the whole batch.
        """
        if self._leaves_replicas(fetch):
            return self._whole_tensor(fetch)
        ops, consumers = graph.ancestors([fetch], self._copied, self._leaves_replicas)
        between = graph.reached(filter(self._is_divided, consumers), consumers)
        between.update(graph.whole_loops([op for op in ops if op in between], ops))
        new = [op for op in ops if op in between and op not in self._whole.operations]
        boundary = {
            tensor: self._whole_tensor(tensor)
            for op in new
            for tensor in op.inputs
            if self._leaves_replicas(tensor) or tensor.op in self._whole.operations
        }
        copies = copy_operations(new, boundary, "whole_batch", None, controls=self._control)
        self._whole.operations.update(copies.operations)
        if isinstance(fetch, self.tf.Operation):
            return self._whole.operations.get(fetch, fetch)
        return self._whole_tensor(fetch)

    def _is_divided(self, source):
        return getattr(source, "op", source) in self.part.operations

    def _leaves_replicas(self, source):
        """Whether what needs ``source``, a tensor or an operation, takes the replicas'.

        A tensor without rows is computed again, of the whole batch.
        """
        if not self._is_divided(source):
            return False
        if isinstance(source, self.tf.Operation):
            return graph.loop_of(source) is None
        return source in self.part.averaged or self.part.rows.come_first(source)

    def _control(self, op):
        """Operations to wait for where the undivided graph waits for ``op``."""
        if op in self.part.operations:
            return [replica.operations[op] for replica in self.copies if op in replica.operations]
        return [self._whole.operations.get(op, op)]

    def _whole_tensor(self, tensor):
        if self._leaves_replicas(tensor) and tensor not in self._whole.replaced:
            merge = self._mean if tensor in self.part.averaged else self._rows_in_order
            with self._apart():
                merged = merge([copy.tensor(tensor) for copy in self.copies])
            self._whole.replaced[tensor] = merged
        return self._whole.tensor(tensor)

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
        dtype = parts[0].dtype
        if dtype not in self._weights:
            rows = tf.cast(sum(self.sizes), dtype)
            self._weights[dtype] = [tf.cast(size, dtype) / rows for size in self.sizes]
        weighted = [w * part for w, part in zip(self._weights[dtype], parts)]
        return tf.add_n(weighted, name="mean_by_rows")


def _variables_of_batchnorm(model):
    """The variables of the BatchNorm layers that a model consists of, at any depth."""
    return [
        weight
        for layer in _keras.all_layers_of_keras2(model)
        if any(parent.__name__.startswith("BatchNormalization") for parent in type(layer).__mro__)
        for weight in layer.weights
    ]


def rows_differ(model, found=""):
    return (
        f"parallelize() divides each input of model {model!r} by its rows, but they do not have as "
        f"many{found}. Give each input a row for each row of the batch, or use one device: "
        "parallelize(model, gpus=1)."
    )
