"""A model on several devices: a ``call`` by which XLA shards the batch dimension.

It is an attribute of the instance that hides its class's method. The step stays one program, in
which XLA splits everything that depends on the batch, and sums the gradients. See
``ReplicatedCall``.
"""

from typing import Any, Dict, Set

import jax
import numpy as np

from ... import _keras, _rows, errors
from ..._keras import steps
from ..._rows import Fallback, Reason
from ..._rows.splitting import unsplit
from ..._runtime import patching, work
from . import arguments, counted_steps, partitioner_fixes
from .configuration import device_name


def check_distribution(model):
    """Raise an error if Keras distributes the model itself: one would undo the other."""
    keras = _keras.keras_of(model)
    laid_out = any(getattr(v, "_layout", None) is not None for v in model.variables)
    if laid_out or keras.distribution.distribution() is not None:
        raise errors.UnsupportedError(
            f"parallelize() cannot shard the batches of model {model.name!r}: a keras.distribution "
            "is set, or was when the model was built, and Keras shards them itself, with an error "
            "for batches that do not divide. Use one of the two: call "
            "keras.distribution.set_distribution(None) before the model is built, or leave "
            "parallelize() out."
        )


def install(model, devices):
    """Have a model run on several devices, and models that its custom steps call in its place."""
    partitioner_fixes.install()
    replicated = ReplicatedCall(devices)
    replicated.install(model)
    counted_steps.install(model, replicated)
    for part in steps.called_models(model):
        if ReplicatedCall.of(part) is None:
            ReplicatedCall(devices, belongs_to=replicated).install(part)
    for step in _STEPS:
        if any(_keras.is_users(getattr(type(model), name, None)) for name in step.owns):
            step(devices).install(model)


def remove(model):
    """Restore a model's own methods, and those of models within that were sharded with it."""
    replicated = ReplicatedCall.of(model)
    for part in _keras.all_layers(model):
        call = ReplicatedCall.of(part)
        if call is not None and (part is model or call.belongs_to is replicated):
            call.remove(part)
    for step in _STEPS:
        if step.of(model) is not None:
            step.of(model).remove(model)
    counted_steps.remove(model)


def variables_of(model):
    """Return all variables that a step reads or writes, once each."""
    optimizer = getattr(model, "optimizer", None)
    groups = model.variables, model.metrics_variables, getattr(optimizer, "variables", ())
    return {id(variable): variable for group in groups for variable in group}.values()


class ReplicatedCall(patching.InstanceMethod):
    """The ``call`` of a model on several devices.

    Where it is traced (``jax.jit``, as in all of Keras' loops), inputs and outputs get a sharding
    constraint along their batch dimension, which changes no value: XLA partitions the program, and
    masks the rows with which it pads the last shards in sums, means and batch statistics. (A
    constraint within a program may be uneven; an array that is an argument may not.) Weights stay
    replicated. So the results of any batch are numerically equal to those of one device, also for
    whole-batch losses, batch normalization, dropout and stateful layers.

    Arguments and results of a program that do not divide evenly are declared replicated. Otherwise
    XLA infers a sharding for them: ten rows on four devices become two shards, each on two devices,
    which JAX fails to express (IndivisibleError).

    Called directly, outside of ``jax.jit``, a batch that divides evenly is sharded; any other is
    computed as a whole on each device.
    """

    def __init__(self, devices, belongs_to=None):
        super().__init__(devices)
        self.belongs_to = belongs_to  # that of the model whose steps call this one
        self.names = [device_name(device) for device in devices]
        # By kind of step: the batch sizes that its programs split.
        self.split: "Dict[str, Set[int]]" = {}
        self.running = counted_steps.Running() if belongs_to is None else belongs_to.running
        mesh = jax.sharding.Mesh(np.array(devices), ("batch",))
        self.rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
        self.whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def install(self, model):
        """Have the model call this method, and place its variables on all devices."""
        super().install(model)
        for state in _STATE:
            if hasattr(type(model), state.method):
                state(self.devices).install(model)

    def remove(self, model):
        """Restore the model's own method; move the variables to JAX's default device."""
        super().remove(model)
        for state in _STATE:
            if state.of(model) is not None:
                state.of(model).remove(model)
        for variable in variables_of(model):
            if variable._value is not None:
                variable.assign(np.asarray(variable._value))

    def place(self, model):
        """Replicate the variables, including those that are new or were set since."""
        check_distribution(model)
        for variable in variables_of(model):
            value = variable._value  # None: a variable whose making is deferred
            if isinstance(value, jax.Array) and value.sharding != self.whole:
                variable.assign(jax.device_put(value, self.whole))

    def invoke(self, model, *args, **kwargs):
        """Call the model with sharded inputs; shard its outputs."""
        call = self.plain(model)
        args, kwargs = arguments.mapped(arguments.as_array, (args, kwargs))
        batch = next(filter(arguments.has_rows, arguments.leaves((args, kwargs))), None)
        # Not where a model is exported: a batch of unknown size names no machine's devices.
        if batch is None or unsplit.here() or not isinstance(batch.shape[0], int):
            return call(*args, **kwargs)
        rows = batch.shape[0]
        if not arguments.is_staged(batch):
            if rows > 1 and not self.divides(rows):
                _rows.warn_unsplit(model, model.name, _EAGER, "every device", "The model", self)
        if not isinstance(batch, jax.core.Tracer):
            self.place(model)
            if not self.running.steps:  # which count
                self.count(rows, self.divides(rows), False)
        args, kwargs = self.shard((args, kwargs), rows)
        with unsplit:
            outputs = call(*args, **kwargs)
        return self.replicate_uneven(self.shard(outputs, rows), rows)

    def shard(self, values: "Any", rows: int) -> "Any":
        """Return nested values with the arrays of so many rows sharded."""

        def shard(value):
            if not arguments.has_rows(value) or value.shape[0] != rows:
                return value
            # Not staged, of run_eagerly: an array by itself cannot be uneven.
            is_split = arguments.is_staged(value) or self.divides(rows)
            if is_split:
                self.running.note_split(rows)
            return arguments.put(value, self.rows if is_split else self.whole)

        return arguments.mapped(shard, self.replicate_uneven(values, rows))

    def count(self, rows: int, is_split: bool, training: bool) -> None:
        """Count a batch that was computed. XLA's shards have one size, the last ones fewer rows."""
        sizes, shard_size = work.unsplit_sizes(self.names, rows), -(-rows // len(self.names))
        if is_split:
            places = range(len(self.names))
            sizes = [min(shard_size, max(0, rows - i * shard_size)) for i in places]
        work.count(self.names, sizes, training)

    def count_step(self, data: "Any", split: "Set[int]", training: bool) -> None:
        """Count the batch of a step of Keras' loops, which splits these batch sizes."""
        arrays = (leaf for leaf in arguments.leaves(data) if getattr(leaf, "shape", None))
        rows = next((array.shape[0] for array in arrays), None)
        if rows is not None:
            self.count(rows, rows in split, training)

    def divides(self, rows: int) -> bool:
        """Return whether a batch divides evenly among the devices."""
        return rows % len(self.devices) == 0

    def replicate_uneven(self, values: "Any", rows: int) -> "Any":
        """Return nested values, replicated if so many rows do not divide evenly."""

        def replicate(value):
            is_one = arguments.is_staged(value) and arguments.has_rows(value)
            # Twice, since XLA up to JAX 0.4.25 gives a result the sharding of its operand.
            return arguments.put(arguments.put(value, self.whole), self.whole) if is_one else value

        return values if self.divides(rows) else arguments.mapped(replicate, values)


class StateOnDevices(patching.InstanceMethod):
    """Method by which each of Keras' loops reads the variables' values when it begins."""

    def invoke(self, model, *args, **kwargs):
        ReplicatedCall.of(model).place(model)
        return self.plain(model)(*args, **kwargs)


# The second one records on which devices the values are. Keras 3.12 has no such method.
_STATE = [
    type("StateOnDevices", (StateOnDevices,), {"method": name})
    for name in ("_get_jax_state", "_record_training_state_sharding_spec")
]


class ReplicatedStep(patching.InstanceMethod):
    """User-defined step, which may call anything: XLA splits all that the data reaches."""

    def invoke(self, model, state, data):
        data = arguments.mapped(arguments.as_array, data)
        batch = next(filter(arguments.has_rows, arguments.leaves(data)), None)
        if batch is None or unsplit.here():
            return self.plain(model)(state, data)
        replicated, rows = ReplicatedCall.of(model), batch.shape[0]
        results = self.plain(model)(state, replicated.shard(data, rows))
        return replicated.replicate_uneven(results, rows)


# An array by itself cannot be uneven.
_EAGER = Fallback(Reason.UNEVEN_EAGER)

# A step, and the methods that it calls: where one is the user's, it may call parts of the model.
_STEPS = [
    type("ReplicatedStep", (ReplicatedStep,), {"method": name, "owns": (name, *called)})
    for name, called in {
        "train_step": ("compute_loss_and_updates", "compute_loss"),
        "test_step": ("compute_loss_and_updates", "compute_loss"),
        "predict_step": (),
    }.items()
]
