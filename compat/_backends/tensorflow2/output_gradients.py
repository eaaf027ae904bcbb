"""Gradients of one output of a model by another one, as Grad-CAM needs them.

For a gradient tape a replica is one function of its inputs, so that the tape sees no path from one
of its outputs to another. Where a gradient by an output is requested, the tape therefore adds the
gradients along the paths within the replicas.
"""

import functools
from typing import Any, Callable, Dict, List, Optional, Sequence

import tensorflow as tf

from ..._rows import Placement, Sharded
from ..._runtime import patching


class InnerGradients:
    """The gradients between a replica's results.

    Arguments:
        results: all tensors that it has computed, as its device has them.
        gradients_of: the function that ``differentiable`` returns.
    """

    def __init__(self, device, results, gradients_of):
        self.device, self.results, self.gradients_of = device, results, gradients_of

    def by(self, place: int, upstream: "Sequence[Any]") -> "Optional[tf.Tensor]":
        """Return the gradient of a target by one output, along paths through others, or None.

        Arguments:
            place: the output's index among all outputs, which are the last results.
            upstream: the target's gradient by each output, or None.
        """
        outputs = self.results[-len(upstream) :]
        pairs = [
            (result, gradient)
            for other, (result, gradient) in enumerate(zip(outputs, upstream))
            if gradient is not None and other != place and result.dtype.is_floating
        ]
        if not pairs:
            return None
        heads, upstream = map(list, zip(*pairs))
        with tf.device(self.device):
            (gradient,) = self.gradients_of(heads, [outputs[place]], upstream)
        return None if gradient is None else tf.convert_to_tensor(gradient)


class _Family:
    """The outputs of one call of a model, and those of the replicas, from which they are merged.

    Arguments:
        replicas: pairs of a weak reference to an ``InnerGradients`` and the outputs that the tape
            has recorded of that replica.
        outputs: those of the call.
        are_rows: whether each output is the concatenation of those of the replicas.
    """

    def __init__(self, replicas, outputs, are_rows):
        self.replicas, self.are_rows = replicas, are_rows
        for place, output in enumerate(outputs):
            if tf.is_tensor(output) and output.dtype.is_floating:
                output._compat_family = self, place

    def by(self, place, upstream):
        """Return a target's gradient by an output, by those by all outputs of all replicas."""
        gradients, results = [], iter(upstream)
        for inner, tensors in self.replicas:
            of_replica = [next(results) for _ in tensors]
            if inner() is None:  # the tape that recorded it is gone
                return None
            gradients.append(inner().by(place, of_replica))
        if all(gradient is None for gradient in gradients):
            return None
        gradients = [
            tf.zeros_like(tensors[place]) if gradient is None else gradient
            for gradient, (_, tensors) in zip(gradients, self.replicas)
        ]
        return tf.concat(gradients, 0) if self.are_rows[place] else tf.add_n(gradients)


def relate(
    replicas: "Sequence[Any]", results: "Dict[str, Any]", placements: "Dict[str, List[Placement]]"
) -> None:
    """Let tapes find the gradients of a call's outputs, and of the tensors it keeps, by each other.

    Arguments:
        replicas: each ``Replica`` of the call.
        results: those of the call, by name.
        placements: theirs, by the same names.
    """
    outputs = results["noted"] + results["outputs"]
    if len(outputs) < 2 or replicas[0].inner is None:
        return
    merged_by = placements["noted"] + placements["outputs"]
    are_rows = [isinstance(placement, Sharded) for placement in merged_by]
    values = [replica.values["noted"] + replica.values["outputs"] for replica in replicas]
    tensors = [[value for value in of_replica if tf.is_tensor(value)] for of_replica in values]
    if not all(len(of_replica) == len(outputs) for of_replica in tensors):
        return  # one that is not a tensor, or is made of several
    inner = [replica.inner for replica in replicas]
    _Family(list(zip(inner, tensors)), outputs, are_rows)
    have_tapes_ask()


#: Called with the sources of each gradient that a tape computes.
listeners: "List[Callable[[List[Any]], None]]" = []


def have_tapes_ask() -> None:
    """Have tapes request gradients between outputs from replicas, from now on."""
    if patching.find(tf.GradientTape, "gradient") is None:
        plain = tf.GradientTape.gradient
        patching.WatchingPatch(tf.GradientTape, "gradient", _asking_replicas(plain))


def _asking_replicas(plain):
    @functools.wraps(plain)
    def gradient(
        self,
        target,
        sources,
        output_gradients=None,
        unconnected_gradients=tf.UnconnectedGradients.NONE,
    ):
        flat = tf.nest.flatten(sources)
        for listener in listeners:
            listener(flat)
        members = [getattr(source, "_compat_family", None) for source in flat]
        families = {id(member[0]): member[0] for member in members if member is not None}
        if not families:
            return plain(self, target, sources, output_gradients, unconnected_gradients)
        results = {
            key: [tensor for _, tensors in family.replicas for tensor in tensors]
            for key, family in families.items()
        }
        everything = flat + [tensor for tensors in results.values() for tensor in tensors]
        computed = plain(self, target, everything, output_gradients)
        upstream = dict(zip(map(id, everything[len(flat) :]), computed[len(flat) :]))
        gradients = computed[: len(flat)]
        for place, member in enumerate(members):
            if member is not None:
                family, output = member
                within = family.by(output, [upstream[id(t)] for t in results[id(family)]])
                terms = [term for term in (gradients[place], within) if term is not None]
                gradients[place] = tf.add_n(terms) if terms else None
            if gradients[place] is None and unconnected_gradients == tf.UnconnectedGradients.ZERO:
                gradients[place] = tf.zeros_like(flat[place])
        return tf.nest.pack_sequence_as(sources, gradients)

    gradient.autograph_info__ = {}  # as in ReplicatedCall
    return gradient
