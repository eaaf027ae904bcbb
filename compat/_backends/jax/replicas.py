"""A model on several devices: a ``call`` that tells XLA to shard the rows of a batch.

It is an attribute of the instance that hides its class's method. The step stays one program, in
which XLA splits everything that depends on the batch, and sums the gradients. See
``ShardedCall``.
"""

import sys
import threading

import jax
import numpy as np
from jax.interpreters import ad

from ... import _keras, _rows, errors
from ..._keras import steps
from ..._rows import split_rows
from ..._runtime import patching, work
from . import counted_steps
from .programs import device_name

_patching = threading.Lock()


def check_distribution(model):
    """Refuse a model that Keras distributes itself: each would undo what the other does."""
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
    """Have a model run on several devices, and what steps of its own call in its place."""
    with _patching:
        if patching.find(ad.primitive_jvps, jax.lax.sort_p) is None:
            patching.Patch(ad.primitive_jvps, jax.lax.sort_p, _differentiate_sort)
            jax.clear_caches()  # also of what it has differentiated so far
    sharded = ShardedCall(devices)
    sharded.install(model)
    counted_steps.install(model, sharded)
    for part in steps.called_models(model):
        if ShardedCall.of(part) is None:
            ShardedCall(devices, belongs_to=sharded).install(part)
    for step in _STEPS:
        if any(_keras.is_users(getattr(type(model), name, None)) for name in step.owns):
            step(devices).install(model)


def _differentiate_sort(primals, tangents, dimension, **options):
    """Differentiate sorts by signed indices of 32 bits.

    JAX's own rule gathers by unsigned ones, and promises that they are in bounds. XLA's
    partitioner fails a check at that, and ends the process, where a dimension does not divide
    among the devices.
    """
    order = jax.lax.broadcasted_iota("int32", primals[0].shape, dimension)
    *found, order = jax.lax.sort_p.bind(*primals, order, dimension=dimension, **options)

    def sort(tangent):
        along = jax.numpy.take_along_axis
        return along(tangent, order, dimension, mode="promise_in_bounds")

    return found, [t if isinstance(t, ad.Zero) else sort(t) for t in tangents]


def remove(model):
    """Make a model plain, and the models within that are sharded because it is."""
    sharded = ShardedCall.of(model)
    for part in _keras.all_layers(model):
        call = ShardedCall.of(part)
        if call is not None and (part is model or call.belongs_to is sharded):
            call.remove(part)
    for step in _STEPS:
        if step.of(model) is not None:
            step.of(model).remove(model)
    counted_steps.remove(model)


def variables_of(model):
    """All that a step reads or writes, once each."""
    optimizer = getattr(model, "optimizer", None)
    groups = model.variables, model.metrics_variables, getattr(optimizer, "variables", ())
    return {id(variable): variable for group in groups for variable in group}.values()


class ShardedCall(patching.InstanceMethod):
    """The ``call`` of a model on several devices.

    Where it is traced (``jax.jit``, as in all of Keras' loops), inputs and outputs get a sharding
    of their rows, an annotation that changes no value: XLA partitions the program, and hides
    from sums, means and batch statistics the rows with which it fills up the last shards. (A
    constraint within a program may be uneven; an array that is an argument may not.) Weights
    stay replicated. So any batch gives the numbers of one device, also for whole-batch losses,
    batch normalization, dropout, stateful layers.

    What comes into a program uneven is declared whole on each device, and what leaves it. Where
    nothing says so, XLA infers how a program's arguments and results are sharded: ten rows on four
    devices become two parts, each on two devices, which JAX fails to express (IndivisibleError).

    Called directly, outside of ``jax.jit``, a batch that divides is sharded; any other is
    computed whole on each device.
    """

    def __init__(self, devices, belongs_to=None):
        super().__init__(devices)
        self.belongs_to = belongs_to  # that of the model whose steps call this one
        self.names = [device_name(device) for device in devices]
        # The numbers of rows of the batches that the programs of each kind of step split.
        self.split = {}  # type: dict
        self.running = counted_steps.Running() if belongs_to is None else belongs_to.running
        mesh = jax.sharding.Mesh(np.array(devices), ("batch",))
        self.rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
        self.whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def install(self, model):
        super().install(model)
        for state in _STATE:
            if hasattr(type(model), state.method):
                state(self.devices).install(model)

    def remove(self, model):
        """Give the variables back to JAX's default device, too."""
        super().remove(model)
        for state in _STATE:
            if state.of(model) is not None:
                state.of(model).remove(model)
        for variable in variables_of(model):
            if variable._value is not None:
                variable.assign(np.asarray(variable._value))

    def place(self, model):
        """Replicate the variables: also those that are new, or that were set since."""
        check_distribution(model)
        for variable in variables_of(model):
            value = variable._value  # None: a variable whose making is deferred
            if isinstance(value, jax.Array) and value.sharding != self.whole:
                variable.assign(jax.device_put(value, self.whole))

    def invoke(self, model, *args, **kwargs):
        call = self.plain(model)
        args, kwargs = _map(_as_array, (args, kwargs))
        batch = next(filter(_has_rows, _leaves((args, kwargs))), None)
        # Not where a model is exported: a batch of unknown size names no machine's devices.
        if batch is None or split_rows.runs_undivided() or not isinstance(batch.shape[0], int):
            return call(*args, **kwargs)
        rows = batch.shape[0]
        if not _is_staged(batch):
            if rows > 1 and not self.divides(rows):
                _rows.runs_whole(model.name, _EAGER, "every device", "The model", self)
        if not isinstance(batch, jax.core.Tracer):
            self.place(model)
            if not self.running.steps:  # which count
                self.count(rows, self.divides(rows), False)
        args, kwargs = self.shard((args, kwargs), rows)
        with split_rows.undivided():
            outputs = call(*args, **kwargs)
        return self.replicate_uneven(self.shard(outputs, rows), rows)

    def shard(self, values, rows):
        """The same nested values, with the arrays of so many rows sharded."""

        def shard(value):
            if not _has_rows(value) or value.shape[0] != rows:
                return value
            # Not staged, of run_eagerly: an array by itself cannot be uneven.
            is_split = _is_staged(value) or self.divides(rows)
            if is_split:
                self.running.note_split(rows)
            return _put(value, self.rows if is_split else self.whole)

        return _map(shard, self.replicate_uneven(values, rows))

    def count(self, rows, is_split, training):
        """Count a batch that has been computed: XLA's shards are of one size, the last shorter."""
        sizes, each = work.undivided(self.names, rows), -(-rows // len(self.names))
        if is_split:
            sizes = [min(each, max(0, rows - i * each)) for i in range(len(self.names))]
        work.count(self.names, sizes, training)

    def count_step(self, data, split, training):
        """Count the batch of a step of Keras' loops, with the numbers of rows that it splits."""
        arrays = (leaf for leaf in _leaves(data) if getattr(leaf, "shape", None))
        rows = next((array.shape[0] for array in arrays), None)
        if rows is not None:
            self.count(rows, rows in split, training)

    def divides(self, rows):
        return rows % len(self.devices) == 0

    def replicate_uneven(self, values, rows):
        """The same nested values, whole on each device if so many rows do not divide."""

        def replicate(value):
            is_one = _is_staged(value) and _has_rows(value)
            return _put(value, self.whole) if is_one else value

        return values if self.divides(rows) else _map(replicate, values)


class StateOnDevices(patching.InstanceMethod):
    """A method with which each of Keras' loops begins: it hands out the variables' values."""

    def invoke(self, model, *args, **kwargs):
        ShardedCall.of(model).place(model)
        return self.plain(model)(*args, **kwargs)


# The second one notes on which devices the values are. Keras 3.12 does not need it any more.
_STATE = [
    type("StateOnDevices", (StateOnDevices,), {"method": name})
    for name in ("_get_jax_state", "_record_training_state_sharding_spec")
]


class ShardedStep(patching.InstanceMethod):
    """A step of the user's, which may call anything: XLA then splits all that the data reaches."""

    def invoke(self, model, state, data):
        data = _map(_as_array, data)
        batch = next(filter(_has_rows, _leaves(data)), None)
        if batch is None or split_rows.runs_undivided():
            return self.plain(model)(state, data)
        sharded, rows = ShardedCall.of(model), batch.shape[0]
        results = self.plain(model)(state, sharded.shard(data, rows))
        return sharded.replicate_uneven(results, rows)


# An array by itself cannot be uneven.
_EAGER = _rows.Across(None, why="eager")

# A step, and the methods that it calls: where one is the user's, it may call parts of the model.
_STEPS = [
    type("ShardedStep", (ShardedStep,), {"method": name, "owns": (name, *called)})
    for name, called in {
        "train_step": ("compute_loss_and_updates", "compute_loss"),
        "test_step": ("compute_loss_and_updates", "compute_loss"),
        "predict_step": (),
    }.items()
]


def _leaves(values):
    """By Keras, for which a sparse array is one, as it is for ``_map``: JAX takes it apart."""
    return sys.modules["keras"].tree.flatten(values)


def _map(function, values):
    """By Keras, which leaves dictionaries in their order: JAX sorts them."""
    return sys.modules["keras"].tree.map_structure(function, values)


def _as_array(value):
    """An array of numpy, which eager steps and direct calls may get, as one of JAX's."""
    is_array = isinstance(value, np.ndarray) and value.dtype.kind in "biufc"
    return jax.numpy.asarray(value) if is_array else value


def _put(value, sharding):
    """A value by a sharding, with the mask that losses and metrics look for at an output."""
    put = jax.lax.with_sharding_constraint if _is_staged(value) else jax.device_put
    masking, result = sys.modules["keras.src.backend.common.masking"], put(value, sharding)
    mask = masking.get_keras_mask(value)
    if mask is not None:
        masking.set_keras_mask(result, mask)
    return result


def _is_staged(value):
    """Whether a program is being traced, and not an array differentiated where it is."""
    while isinstance(value, jax.core.Tracer) and hasattr(value, "primal"):
        value = value.primal
    return isinstance(value, jax.core.Tracer)


def _has_rows(value):
    """Whether this is a dense array (sparse ones stay whole) with a first dimension."""
    return isinstance(value, (jax.Array, jax.core.Tracer)) and value.ndim > 0
