"""Gradients of one output of a model by another one, as Grad-CAM wants them.

A replica is one function of its inputs for a gradient tape, which therefore sees no way from one
of its outputs to another. So a tape that is asked for the gradient by an output asks the replicas,
too: what the target's gradient by each of their outputs adds to that.
"""

import functools

import tensorflow as tf

from ..._rows import Sharded
from ..._runtime import patching


class InnerGradients:
    """The gradients between a replica's results.

    Arguments:
        results: all tensors that it has computed, as its device has them.
        gradients_of: of heads, sources and upstream gradients, as of ``_differentiable``.
    """

    def __init__(self, device, results, gradients_of):
        self.device, self.results, self.gradients_of = device, results, gradients_of

    def by(self, place, upstream):
        """Return the gradient by one output of what has these gradients by the outputs; or None.

        Arguments:
            place: that of the output among all, which are the last results.
            upstream: for each output a tensor, or None.
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
            (found,) = self.gradients_of(heads, [outputs[place]], upstream)
        return None if found is None else tf.convert_to_tensor(found)


class _Family:
    """The outputs of one call of a model, and the replicas' that they are merged from.

    Arguments:
        replicas: pairs of an ``InnerGradients``, as a weak reference, and its outputs for the tape.
        outputs: of the call.
        are_rows: for each of them, whether the replicas' are concatenated.
    """

    def __init__(self, replicas, outputs, are_rows):
        self.replicas, self.are_rows = replicas, are_rows
        for place, output in enumerate(outputs):
            if tf.is_tensor(output) and output.dtype.is_floating:
                output._compat_family = self, place

    def by(self, place, upstream):
        """Return the gradient by an output of what has these gradients by the replicas' results."""
        found, results = [], iter(upstream)
        for inner, tensors in self.replicas:
            given = [next(results) for _ in tensors]
            if inner() is None:  # the tape that recorded it is gone
                return None
            found.append(inner().by(place, given))
        if all(gradient is None for gradient in found):
            return None
        found = [
            tf.zeros_like(tensors[place]) if gradient is None else gradient
            for gradient, (_, tensors) in zip(found, self.replicas)
        ]
        return tf.concat(found, 0) if self.are_rows[place] else tf.add_n(found)


def relate(replicas, results, placements):
    """Have tapes find the gradients of a call's outputs, and what it has noted, by each other.

    Arguments:
        replicas: each ``Replica`` of the call.
        results, placements: of the call, by name.
    """
    outputs, placements = [found["noted"] + found["outputs"] for found in (results, placements)]
    if len(outputs) < 2 or replicas[0].inner is None:
        return
    are_rows = [isinstance(placement, Sharded) for placement in placements]
    tensors = [each.values["noted"] + each.values["outputs"] for each in replicas]
    tensors = [[tensor for tensor in each if tf.is_tensor(tensor)] for each in tensors]
    if not all(len(each) == len(outputs) for each in tensors):
        return  # one that is no tensor, or made of several
    _Family([(each.inner, own) for each, own in zip(replicas, tensors)], outputs, are_rows)
    have_tapes_ask()


#: Called with the sources of each gradient that a tape is asked for.
listeners = []  # type: list


def have_tapes_ask():
    """From now on, have tapes ask replicas for gradients between their outputs."""
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
        asked = [getattr(source, "_compat_family", None) for source in flat]
        families = {id(each[0]): each[0] for each in asked if each is not None}
        if not families:
            return plain(self, target, sources, output_gradients, unconnected_gradients)
        results = {
            key: [tensor for _, tensors in family.replicas for tensor in tensors]
            for key, family in families.items()
        }
        everything = flat + [tensor for tensors in results.values() for tensor in tensors]
        found = plain(self, target, everything, output_gradients)
        upstream = dict(zip(map(id, everything[len(flat) :]), found[len(flat) :]))
        own = found[: len(flat)]
        for place, each in enumerate(asked):
            if each is not None:
                family, output = each
                given = [upstream[id(tensor)] for tensor in results[id(family)]]
                more = family.by(output, given)
                known = [g for g in (own[place], more) if g is not None]
                own[place] = tf.add_n(known) if known else None
            if own[place] is None and unconnected_gradients == tf.UnconnectedGradients.ZERO:
                own[place] = tf.zeros_like(flat[place])
        return tf.nest.pack_sequence_as(sources, own)

    gradient.autograph_info__ = {}  # as in ReplicatedCall
    return gradient
