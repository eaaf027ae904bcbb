"""Verification of Gluon blocks: a call done on one context, from the same state.

What a block is trained with is not known here, so a step is a call: its results, the states that
its forward pass sets, and the gradients of its parameters for a random gradient of its results.

Not covered: what the backward pass sets (batch normalization's running statistics), whose two
ways differ by design; and MXNet's random numbers, whose state nothing can read or set: they go on
from where the verified calls left them.
"""

import mxnet as mx
import numpy as np

from ... import _verification
from ..._runtime import work
from ..._verification import keras_steps
from . import gluon_replicas, op_placement, own_gradients
from .gluon_states import own_attributes, states_of
from .running_statistics import wait_for_updates


class VerifiedBlockForward:
    """What a block's replicas call in place of their own run, for the block's first calls.

    Arguments:
        replicas: the block's ``gluon_replicas.BlockReplicas``.
        verification: the calls to verify.
    """

    def __init__(self, replicas, verification):
        self.replicas = replicas
        self.verification = verification
        self._waited = False

    @classmethod
    def install_on(cls, block, verification):
        """Verify calls of ``block``, if it runs on several contexts; None: no more."""
        replicas = vars(block).get("_compat_replicas")
        if replicas is not None:
            replicas.verified = cls(replicas, verification) if verification is not None else None

    def __call__(self, args):
        # Batch normalization and dropout go by this, not by whether gradients are wanted.
        kind = "train" if mx.autograd.is_training() else "predict"
        if not self.verification.wants(kind):
            return self.replicas.run(args)
        block = self.replicas.block
        made = [p._data is not None for p in gluon_replicas._parameters(block)]
        waits = not self._waited and not all(made)
        self._waited = True  # parameters that a call does not use are never made
        if waits or not self.verification.is_due(kind):
            return self.replicas.run(args)
        try:
            return self.verification.verify(kind, _BlockCall(self.replicas, args))
        finally:
            if kind == "train":
                # The caller's backward pass is yet to come; what ran last may have been inference.
                self.replicas.note_training(args)


class _BlockCall(_verification.Step):
    given = ("args",)

    def __init__(self, replicas, args):
        self.replicas = replicas
        self.block = replicas.block
        self.args = args
        self.is_training = mx.autograd.is_training()
        self.is_recording = mx.autograd.is_recording()
        self.parameters = [p for p in gluon_replicas._parameters(self.block) if p._data is not None]
        self.dtype = keras_steps.coarsest({np.dtype(p.dtype).name for p in self.parameters})

    def by_design(self, inference, changed):
        if inference or not self.is_training:
            return None
        # Of what is traced, the operations are known once it ran on all contexts.
        means, _ = states_of(self.block, self.replicas._operations)
        return _verification.NORMALISED.format("block", self.block.name) if means else None

    def attributes(self):
        return own_attributes(self.block)

    def _labelled(self):
        for parameter in self.parameters:
            word = "state" if parameter.grad_req == "null" else "weight"
            yield f"{word} {parameter.name}", parameter

    def read(self):
        self.replicas._unite_statistics()  # then all contexts have the same
        return {label: p.list_data()[0].asnumpy() for label, p in self._labelled()}

    def write(self, values):
        with mx.autograd.pause():
            for label, parameter in self._labelled():
                if label in values:
                    arrays = parameter.list_data()
                    _set(arrays, [values[label]] * len(arrays))

    # Doing it -----------------------------------------------------------------------------------

    def on_one_device(self):
        run = self.replicas.run_undivided
        named = self._differentiated(run) if self.is_recording else self._outputs(run(self.args))
        # A state set in place was set on the first context only.
        self._write_states([values[:1] * len(values) for values in self._read_states()])
        return named

    def on_all_devices(self):
        if self.is_recording:
            with work.uncounted:  # it is done once more
                return None, self._differentiated(self.replicas.run)
        result = self.replicas.run(self.args)
        return result, self._outputs(result)

    def finish(self, given, start):
        if not self.is_recording:
            return given
        # A run of its own: a CachedOp with static_alloc=True, whose gradients were had once (by
        # retain_graph=True), gives the caller's backward pass wrong ones. And the last one: the
        # runs share the records of arrays that have no gradient, such as running statistics, and
        # each backward pass clears them; that of a run before would then fail.
        self.write(start)
        return self.replicas.run(self.args)

    def _outputs(self, result):
        arrays = gluon_replicas._arrays(result)
        return _verification.numbered(array.asnumpy() for array in arrays)

    def _differentiated(self, run):
        """Run the block, and its backward pass for random gradients of the results.

        Neither gradients that the parameters have change, nor what autograd has recorded before,
        nor the states that the backward pass sets.

        Returns:
            Results, and gradients summed over the contexts, as a trainer sums them.
        """
        args = gluon_replicas._mapped(lambda _, array: array.detach(), self.args)
        with self.attributes_kept():
            result = run(args)
        named = self._outputs(result)
        arrays = gluon_replicas._arrays(result)
        heads = [array for array in arrays if np.dtype(array.dtype).kind == "f"]
        trained = [p for p in self.parameters if p.grad_req != "null"]
        if not heads or not trained:
            return named
        random = np.random.RandomState(0)
        upstream = [_like(random.normal(size=array.shape), array) for array in heads]
        after = self._read_states()
        with mx.autograd.pause(), own_gradients.gradients_kept(trained):
            # In a call under record(train_mode=False) the backward pass is one of inference.
            mx.autograd.backward(heads, upstream, train_mode=self.is_training)
            for parameter in trained:
                gradients = [gradient.asnumpy() for gradient in parameter.list_grad()]
                named["gradient of " + parameter.name] = sum(gradients)
            wait_for_updates()
        self._write_states(after)
        return named

    def _states(self):
        return [p.list_data() for p in self.parameters if p.grad_req == "null"]

    def _read_states(self):
        wait_for_updates()
        return [[array.asnumpy() for array in arrays] for arrays in self._states()]

    def _write_states(self, values):
        with mx.autograd.pause():
            for arrays, each in zip(self._states(), values):
                _set(arrays, each)

    def operations(self):
        return op_placement.products(lambda: self._differentiated(self.replicas.run))

    def outputs(self, undivided):
        with mx.autograd.pause(train_mode=False):
            run = self.replicas.run_undivided if undivided else self.replicas.run
            return self._outputs(run(self.args))


def _like(values, array):
    """An array of the kind, the type and the context of ``array``."""
    made = mx.nd.array(values, ctx=array.context, dtype=array.dtype)
    return made if type(array) is mx.nd.NDArray else made.as_np_ndarray()


def _set(arrays, values):
    """Now: the backward pass of batch normalization waits for nothing that is being written."""
    for array, value in zip(arrays, values):
        plain = array.as_nd_ndarray() if hasattr(array, "as_nd_ndarray") else array
        mx.nd.array(value, ctx=array.context, dtype=array.dtype).copyto(plain)
    wait_for_updates()
