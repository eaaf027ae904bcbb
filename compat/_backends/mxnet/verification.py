"""Verification: steps on all contexts are compared with steps on one context.

For a Keras model, a single replica then runs the whole batch. For a Gluon block, whose training
loop is unknown here, a step is a call, repeated on one context from the same state: compared are
its results, the states that its forward pass sets, and the gradients of its parameters for a random
upstream gradient.

Not covered are values that a block's backward pass sets (batch normalization's running statistics),
which differ by design; and MXNet's random numbers, whose state cannot be read or set: they continue
from the verified calls.
"""

import contextlib
import functools

import mxnet as mx
import numpy as np

from ... import _keras, _verification
from ..._runtime import synchronized, work
from ..._verification import keras2, keras_steps
from .arrays import leaves, like, mapped
from .custom_gradients import gradients_kept
from .profiler import products
from .side_effects import BlockState
from .state import blocks, parameters_of
from .synchronization import wait_for_updates

# The replicas' name for each kind of step.
_PHASES = {"train": "train", "evaluate": "test", "predict": "predict"}


class _MXNetStep(keras2.ArraysStep):
    def by_design(self, inference, changed):
        is_synchronized = synchronized.is_asked(self.model)
        training = self.kind == "train" and not inference and not is_synchronized
        layers = _keras.all_layers_of_keras2(self.model)
        return keras_steps.normalized(layers, self.model) if training else None

    def _arrays(self):
        """Return the arrays of weights and auxiliary states in Keras' hands, by label."""
        model = self.model
        trained = {weight.name for weight in model.trainable_weights}
        held = list(model._args.items()) + list(model._auxs.items())
        return {("weight " if name in trained else "state ") + name: array for name, array in held}

    def read(self):
        self.model._sync_weights()
        values = {label: array.asnumpy() for label, array in self._arrays().items()}
        optimizer = getattr(self.model, "optimizer", None)
        for place, array in enumerate(optimizer.weights if optimizer is not None else ()):
            values[f"slot {place}"] = array.asnumpy()
        return values

    def write(self, values):
        self.model._compat_replicas.set_weights()  # which copies Keras' arrays at the next batch
        for label, array in self._arrays().items():
            if label in values:
                array[:] = values[label]
        if self.kind == "train":
            slots = [f"slot {place}" for place in range(len(values))]
            # Without any, as before the first step, set_weights() sets them to 0, as they begin.
            self.model.optimizer.set_weights([values[label] for label in slots if label in values])

    def operations(self):
        return products(lambda: self.function.made(self.data))

    def outputs(self, is_unsplit):
        replicas = self.model._compat_replicas
        with replicas.unsplit() if is_unsplit else contextlib.ExitStack():
            run = replicas.run
            return self.in_inference(lambda kind, rows: run(_PHASES[kind], rows), self.data)


class VerifiedStep(keras_steps.Verified):
    """The method by which keras-mxnet makes the function of a step."""

    prefix = "_make_"
    step = _MXNetStep

    def make_unsplit(self, model):
        replicas = model._compat_replicas
        return replicas.unsplit()(functools.partial(replicas.run, _PHASES[self.kind]))


class BlockCall(_verification.Step):
    """A call of a block that runs on several contexts, for ``native.BlockReplicas``."""

    input_attributes = ("args",)
    part = "block"

    def __init__(self, replicas, args):
        self.replicas = replicas
        self.block = replicas.block
        self.args = args
        self.is_training = mx.autograd.is_training()
        self.is_recording = mx.autograd.is_recording()
        self.dtype = keras_steps.coarsest({np.dtype(p.dtype).name for p in self.made.values()})

    @property
    def made(self):
        """The parameters that have values, by label; the step may initialize more."""
        made = [p for p in parameters_of(self.block) if p._data is not None]
        return {("state " if p.grad_req == "null" else "weight ") + p.name: p for p in made}

    def by_design(self, inference, changed):
        if inference or not self.is_training:
            return None
        # Operations of a traced block are known once it has run on all contexts.
        if not self.replicas.normalized_apart():
            return None
        return _verification.normalized(self.part, self.block.name, self.block)

    def random_rates(self):
        return _verification.rates((block.name, block) for block in blocks(self.block))

    def attributes(self):
        return BlockState(self.block)

    def read(self):
        self.replicas._unite_statistics()  # then all contexts have the same
        return {label: p.list_data()[0].asnumpy() for label, p in self.made.items()}

    def write(self, values):
        """Write the values, and wait: batch normalization's backward pass would not."""
        with mx.autograd.pause():
            for label, parameter in self.made.items():
                if label in values:
                    for array in self.replicas.arrays_of(parameter):
                        like(values[label], array).copyto(array)
        wait_for_updates()

    # Running it ---------------------------------------------------------------------------------

    def on_one_device(self):
        run = self.replicas.run_unsplit
        return self._differentiated(run) if self.is_recording else self._outputs(run(self.args))

    def on_all_devices(self):
        if self.is_recording:
            with work.uncounted:  # it runs once more
                return None, self._differentiated(self.replicas.run)
        result = self.replicas.run(self.args)
        return result, self._outputs(result)

    def finish(self, given, start):
        if not self.is_recording:
            return given
        # A separate run: a CachedOp with static_alloc=True whose gradients were computed before, by
        # retain_graph=True, computes wrong ones in the caller's backward pass. And the last run:
        # runs share autograd's records of arrays without a gradient, such as running statistics,
        # and each backward pass clears them; that of an earlier run would then fail.
        self.write(start)
        return self.replicas.run(self.args)

    def _outputs(self, result):
        return _verification.numbered(array.asnumpy() for array in leaves(result))

    def _differentiated(self, run):
        """Run the block, and its backward pass for random upstream gradients.

        The parameters' gradients, autograd's records, and the states that the backward pass sets
        are restored.

        Returns:
            Results, and gradients summed over the contexts, as a trainer sums them.
        """
        args = mapped(lambda _, array: array.detach(), self.args)
        with self.attributes_kept():
            result = run(args)
        named = self._outputs(result)
        heads = [array for array in leaves(result) if np.dtype(array.dtype).kind == "f"]
        weights = [p for label, p in self.made.items() if self.is_weight(label)]
        if not heads or not weights:
            return named
        random = np.random.RandomState(0)
        upstream = [like(random.normal(size=array.shape), array) for array in heads]
        after = {label: value for label, value in self.read().items() if label[:6] == "state "}
        with mx.autograd.pause(), gradients_kept(weights):
            # In a call under record(train_mode=False) the backward pass is one of inference.
            mx.autograd.backward(heads, upstream, train_mode=self.is_training)
            for parameter in weights:
                gradients = [gradient.asnumpy() for gradient in parameter.list_grad()]
                named["gradient of " + parameter.name] = sum(gradients)
            wait_for_updates()
        self.write(after)
        return named

    def operations(self):
        return products(lambda: self._differentiated(self.replicas.run))

    def outputs(self, is_unsplit):
        with mx.autograd.pause(train_mode=False):
            run = self.replicas.run_unsplit if is_unsplit else self.replicas.run
            return self._outputs(run(self.args))
