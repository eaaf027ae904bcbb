"""Replicas of a model in a static graph of TensorFlow 1: its batch part, once per device."""

import contextlib
from typing import Any, Dict, Iterator, List, Set

from ... import _keras
from ..._rows import REPLICATED, splitting
from .._tensorflow.graph import v1_names
from . import arguments, graph
from .colocation import ColocateGradients
from .copying import Copy, copy_operations
from .merging import Merging
from .propagation import is_in_order
from .reductions import BatchReductions, in_stages


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
        #: Tensors of the whole batch that replicas have, since they have reduced.
        self._reduced: "Set[Any]" = set()
        #: Tensors with rows from which they are computed.
        self._reduced_from: "List[Any]" = []
        #: Tensors of the whole batch that replicas read, and those of which they read shards.
        self.gathered: "List[Any]" = []
        self._copied: "Set[Any]" = set()
        with self._apart():
            self._checks = arguments.checks_of_rows(self.name, self.part.split_inputs)
            rows = self.tf.shape((self.part.split_inputs or self.inputs)[0])[0]
            self.merging = Merging(devices, splitting.sizes(rows, len(devices)))
            self.reductions = BatchReductions(self.merging)
            self.copies = [Copy({}, self._shards(index)) for index in range(len(devices))]
            self._copy()
        device_of = {
            copied: device
            for device, replica in zip(devices, self.copies)
            for copied in replica.operations.values()
        }
        self._copied = set(device_of)
        loops = [op for op in device_of if op.type == "Enter"]
        device_of.update((graph.loop_of(op).name, device_of[op]) for op in loops)
        self._colocate = ColocateGradients(device_of, devices)

    def _copy(self):
        """Copy the batch part to each device, in stages: after each the replicas reduce."""
        propagation = self.part.propagation
        joint, reduced = propagation.joint, propagation.reduced
        ends = set(reduced).union(tensor for op in joint for tensor in op.outputs)
        assumed = [t for t in propagation.assumed if hasattr(t, "_keras_history")]
        sources = [t for end in ends for t in end.op.inputs] + assumed if ends else []
        self._reduced_from = list(filter(self._has_rows, sources))
        stages = in_stages(self.part.needed, ends, self._sources_of_gathered())
        for number, operations in enumerate(stages):
            gathered = self._gather(operations)
            for index, copied in enumerate(self.copies):
                self._copy_stage(index, copied, operations, gathered)
            for op in operations:
                follows = (number or op in joint) and graph.is_outermost(op)
                with self.reductions.of(op):
                    if op in joint:
                        self._compute_jointly(op, joint[op])
                    for tensor in op.outputs:
                        if tensor in reduced:
                            whole = self.reductions.reduce(tensor, reduced[tensor], self.copies)
                            for copied in self.copies:
                                copied.replaced[tensor] = whole
                        is_same = propagation.placement_of(tensor) == REPLICATED
                        if tensor in reduced or follows and is_same:
                            self._reduced.add(tensor)

    def _compute_jointly(self, op, function):
        inputs = [[copied.tensor(tensor) for tensor in op.inputs] for copied in self.copies]
        for copied, outputs in zip(self.copies, function(op, inputs, self.reductions)):
            copied.replaced.update(zip(op.outputs, outputs))

    def _sources_of_gathered(self):
        """Return a function from an operation to those whose results it needs of the whole batch.

        These are the last ones that replicas run.

        Returns:
            The function; None if nothing is gathered or split again.
        """
        propagation, run = self.part.propagation, set(self.part.needed)
        if not (propagation.gathered or propagation.split_again):
            return None
        sources: "Dict[Any, List[Any]]" = {}

        def before(op):
            taken = [tensor for tensor in op.inputs if tensor in propagation.split_again]
            if op in propagation.gathered:
                taken.append(op.inputs[propagation.gathered[op]])
            for tensor in taken:
                if tensor not in sources:
                    _, consumers = graph.ancestors([tensor], run)
                    found = {getattr(source, "op", source) for source in [*consumers, tensor]}
                    sources[tensor] = list(found & run)
            return [source for tensor in taken for source in sources[tensor]]

        return before

    def _gather(self, operations):
        """Compute what operations take of the whole batch; return what each takes as it is.

        Of what is split again each replica gets its shard.
        """
        propagation, gathered = self.part.propagation, {}
        for op in operations:
            for tensor in op.inputs:
                placement = propagation.split_again.get(tensor)
                if placement is not None and tensor not in self.copies[0].replaced:
                    whole = self.whole(tensor)
                    is_same = placement == REPLICATED
                    parts = [whole] * len(self.copies) if is_same else self.merging.shards(whole)
                    for copied, part in zip(self.copies, parts):
                        copied.replaced[tensor] = part
                    self.gathered.append(tensor)
            if op in propagation.gathered:
                place = propagation.gathered[op]
                with self.tf.device(self.devices[0]):
                    gathered[op] = place, self.tf.identity(self.whole(op.inputs[place]))
                self.gathered.append(gathered[op][1])
        return gathered

    def _copy_stage(self, index, copied, operations, gathered):
        """Copy operations to the device of that index.

        Arguments:
            index: that of the replica.
            copied: what the operations take, and their copies.
            operations: the operations.
            gathered: what some take of the whole batch; see ``copy_operations``.
        """

        def controls(op):
            if op in copied.operations:
                return [copied.operations[op]]
            return [op] if op in self.part.once else []

        made = copy_operations(
            operations,
            copied.replaced,
            f"replica_{index}",
            lambda op: "" if graph.handles(op) else self.devices[index],
            seed=index,
            controls=controls,
            fixed_batch=self.part.fixed,
            local=lambda tensor: self._weights.on(index, tensor),
            gathered=gathered,
        )
        copied.operations.update(made.operations)
        for op, copy in made.operations.items():
            for pair in zip(op.outputs, copy.outputs):
                copied.replaced.setdefault(*pair)

    def _shards(self, index):
        """Return the tensors that the replica of that index has in place of the batch's."""
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
        return replaced

    def read_in_shards(self) -> "List[Any]":
        """Return the tensors of which each replica reads a shard."""
        return self.inputs + self.states + self.part.constants

    def taken(self) -> "List[Any]":
        """Return the tensors that are concatenated from those of the replicas, or reduced."""
        taken = [tensor for tensor in self._whole.replaced if self._has_rows(tensor)]
        return taken + [tensor for tensor in self._reduced_from if tensor not in taken]

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
        sources = [s for s in consumers if self._is_replicated(s) or self._leaves_replicas(s)]
        between = graph.reached(sources, consumers)
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

        Other tensors without rows are computed again, of the whole batch.
        """
        if self._is_shape(source):
            return True
        if not self._is_replicated(source):
            return False
        if isinstance(source, self.tf.Operation):
            return graph.loop_of(source) is None
        in_one = source in self.part.averaged or source in self._reduced
        return in_one or self.part.propagation.come_first(source)

    def _is_shape(self, source):
        """Return whether a tensor is the shape of rows, for which they need not be concatenated."""
        if isinstance(source, self.tf.Operation) or source.op.type != "Shape":
            return False
        tensor = source.op.inputs[0]
        known = is_in_order(self.part.propagation.placement_of(tensor))
        return known and self._has_rows(tensor) and graph.is_outermost(source.op)

    def _has_rows(self, tensor):
        """Return whether the rows of a tensor are those of the replicas, concatenated."""
        if tensor in self.part.averaged or tensor in self._reduced:
            return False
        return self._is_replicated(tensor) and self.part.propagation.come_first(tensor)

    def _control(self, op):
        """Return the operations to wait for in place of one of Keras' graph."""
        if op in self.part.operations:
            return [replica.operations[op] for replica in self.copies if op in replica.operations]
        return [self._whole.operations.get(op, op)]

    def _whole_tensor(self, tensor):
        if self._leaves_replicas(tensor) and tensor not in self._whole.replaced:
            with self._apart():
                self._whole.replaced[tensor] = self._merged(tensor)
        return self._whole.tensor(tensor)

    def _merged(self, tensor):
        if self._is_shape(tensor):
            parts = [copy.tensor(tensor.op.inputs[0]) for copy in self.copies]
            return self.merging.shape(parts, tensor.dtype)
        parts = [copy.tensor(tensor) for copy in self.copies]
        if tensor in self._reduced:
            return parts[0]
        merge = self.merging.mean if tensor in self.part.averaged else self.merging.rows_in_order
        return merge(parts)
