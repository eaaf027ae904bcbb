"""Replicas of a model in a static graph of TensorFlow 1: its batch part, once per device."""

import contextlib
from typing import Any, Iterator, List

from ... import _keras
from ..._rows import splitting
from .._tensorflow.graph import v1_names
from . import arguments, graph
from .colocation import ColocateGradients
from .copying import Copy, copy_operations
from .merging import Merging


class Replicas:
    """Copies of the batch part of a model's graph, one on each device.

    Arguments:
        model: the model.
        part: its ``BatchPart``.
        weights: the weights on each device, a ``WeightChain``.
    """

    def __init__(self, model, part, weights):
        self.name, self.inputs = model.name, list(model.inputs)
        self.tf, self.graph = v1_names(), model.outputs[0].graph
        self.part, self._weights = part, weights
        self.devices = devices = weights.devices
        # A row for each row of the batch.
        self.states = [graph.value_of(state.handle) for state in _keras.states(model, "handle")]
        # Operations that are copied to compute with the whole batch, and the merged tensors in
        # place of those that leave the replicas.
        self._whole = Copy({}, {})
        with self._apart():
            self._checks = arguments.checks_of_rows(self.name, self.part.split_inputs)
            rows = self.tf.shape((self.part.split_inputs or self.inputs)[0])[0]
            self.merging = Merging(devices, splitting.sizes(rows, len(devices)))
            self.copies = [self._replica(index) for index in range(len(devices))]
        device_of = {
            copied: device
            for device, replica in zip(devices, self.copies)
            for copied in replica.operations.values()
        }
        self._copied = set(device_of)
        loops = [op for op in device_of if op.type == "Enter"]
        device_of.update((graph.loop_of(op).name, device_of[op]) for op in loops)
        self._colocate = ColocateGradients(device_of, devices)

    def _replica(self, index):
        """Copy the batch part to a device, to compute the shard of that index."""
        tf = self.tf
        shapes = self.part.propagation.shapes.items()
        replaced = {t: tf.constant(sizes, t.dtype) for t, sizes in shapes if None not in sizes}
        for tensor in self.read_in_shards():
            # A slice on the replica's device would send the whole batch to every device.
            is_fed = arguments.is_fed(tensor)
            where = tf.device("/cpu:0") if is_fed else tf.colocate_with(tensor.op)
            with where, tf.control_dependencies(self._checks):
                # A placeholder, since sizes that are constants would fix the number of rows.
                count = tf.placeholder_with_default(tf.shape(tensor)[0], ())
                first, end = splitting.run_bounds(count, len(self.devices), index, tf.maximum)
                shard = arguments.shard(tensor, first, end)
                replaced.update(zip(graph.dense_parts(tensor), graph.dense_parts(shard)))
        return copy_operations(
            self.part.needed,
            replaced,
            f"replica_{index}",
            lambda op: "" if graph.handles(op) else self.devices[index],
            seed=index,
            controls=lambda op: [op] if op in self.part.once else [],
            fixed_batch=self.part.fixed,
            local=lambda tensor: self._weights.on(index, tensor),
        )

    def read_in_shards(self) -> "List[Any]":
        """Return the tensors of which each replica reads a shard."""
        return self.inputs + self.states + self.part.constants

    def taken(self) -> "List[Any]":
        """Return the tensors that are concatenated from those of the replicas."""
        return [tensor for tensor in self._whole.replaced if tensor not in self.part.averaged]

    @contextlib.contextmanager
    def _apart(self):
        """Make operations in a block outside of Keras' current scopes and devices."""
        with self.graph.as_default(), self.graph.name_scope(None):
            with self.tf.control_dependencies(None), self.tf.device(None):
                yield

    @contextlib.contextmanager
    def gradients_colocated(self) -> "Iterator[None]":
        """Place gradients that are made in a block beside the operations that they differentiate.

        Keras 2 requests that of TensorFlow (``colocate_gradients_with_ops``), tf.keras does not.
        """
        with self.graph.as_default(), self.tf.device(self._colocate):
            yield

    # Tensors of the whole batch -----------------------------------------------------------------

    def whole(self, fetch: "Any") -> "Any":
        """Return a tensor or operation, computed once, of the whole batch of the replicas.

        The operations between the batch part and ``fetch`` are copied.
        """
        if self._leaves_replicas(fetch):
            return self._whole_tensor(fetch)
        ops, consumers = graph.ancestors([fetch], self._copied, self._leaves_replicas)
        between = graph.reached(filter(self._is_replicated, consumers), consumers)
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

    def whole_update(self, operation: "Any") -> "Any":
        """Return an operation, computed once, that has devices keep the weights as well."""
        operation = self.whole(operation)
        with self._apart():
            return self._weights.stored(operation)

    def _is_replicated(self, source):
        """Return whether a tensor or an operation is computed by the replicas."""
        return getattr(source, "op", source) in self.part.operations

    def _leaves_replicas(self, source):
        """Return whether consumers of a tensor or an operation take those of the replicas.

        A tensor without rows is computed again, of the whole batch.
        """
        if not self._is_replicated(source):
            return False
        if isinstance(source, self.tf.Operation):
            return graph.loop_of(source) is None
        return source in self.part.averaged or self.part.propagation.come_first(source)

    def _control(self, op):
        """Return the operations to wait for in place of one of Keras' graph."""
        if op in self.part.operations:
            return [replica.operations[op] for replica in self.copies if op in replica.operations]
        return [self._whole.operations.get(op, op)]

    def _whole_tensor(self, tensor):
        if self._leaves_replicas(tensor) and tensor not in self._whole.replaced:
            is_averaged = tensor in self.part.averaged
            merge = self.merging.mean if is_averaged else self.merging.rows_in_order
            with self._apart():
                merged = merge([copy.tensor(tensor) for copy in self.copies])
            self._whole.replaced[tensor] = merged
        return self._whole.tensor(tensor)
