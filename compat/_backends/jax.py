"""JAX, under Keras 3.

A model runs on several devices by a ``call`` of its own: an attribute of the instance that hides
its class's method and tells XLA to shard the rows of inputs and outputs. The step stays one
program, in which XLA splits everything that depends on the batch, and sums the gradients. See
``ShardedCall``.
"""

import os
import sys
import types

from .. import _keras, _keras_steps, _ranks, _replicas, errors
from ..backend import Backend

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, ContextManager, Dict, List, Mapping, Optional, Sequence

    from .._launchers import Ranks
    from .._ranks import Launch
    from .._settings import Settings
    from .._verification import Verification

_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_FRACTION_SINCE_2025 = "XLA_CLIENT_MEM_FRACTION"  # both at once are an error of JAX


class JAX(Backend):
    """JAX."""

    name = "jax"
    framework = "jax"
    distributions = ("jax",)
    extra = "jax"
    variables = (
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        "JAX_PLATFORMS",
        "XLA_FLAGS",
        "XLA_PYTHON_CLIENT_PREALLOCATE",
        _FRACTION,
        _FRACTION_SINCE_2025,
    )

    # Before the first operation ---------------------------------------------------------------

    def environ(
        self, settings: "Settings", environ: "Mapping[str, str]"
    ) -> "Dict[str, Optional[str]]":
        """JAX reads them when it makes its devices ("GPU memory allocation" in its docs)."""
        variables = dict(super().environ(settings, environ))
        memory = settings.memory
        if (settings.devices.gpus or settings.devices.undecided is not None) and memory:
            if memory.grow:
                variables["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
            if memory.fraction:
                variables[_FRACTION] = "{:g}".format(memory.fraction)
            if not memory.grow and _FRACTION_SINCE_2025 in environ:
                variables[_FRACTION_SINCE_2025] = None
        return variables

    def initialised(self) -> "Optional[str]":
        """Variables and configuration count until JAX makes its devices."""
        bridge = sys.modules.get("jax._src.xla_bridge")
        if bridge is None or not getattr(bridge, "_backends", None):
            return None
        return "JAX has made its devices"

    # After the import -------------------------------------------------------------------------

    def configure(self, settings: "Settings") -> "List[str]":
        jax = self.import_framework()
        chosen = settings.devices
        changes = {}  # type: Dict[str, Any]
        applied = []
        made = bool(self.initialised())
        if made:
            chosen.settle(len(_gpus(jax)))
            _check_devices_made(jax, settings)
        elif chosen.simulated or chosen.declined:
            changes["jax_platforms"] = "cpu"
            if chosen.simulated:
                changes["jax_num_cpu_devices"] = chosen.simulated
        elif chosen.gpus:
            if settings.memory and settings.memory.size:
                os.environ[_FRACTION] = "{:g}".format(_fraction(settings))
                applied.append("{}={}".format(_FRACTION, os.environ[_FRACTION]))
            platforms = jax.config.jax_platforms or ""
            if platforms and not {"cuda", "gpu", "rocm"} & set(platforms.split(",")):
                settings.warnings.append(errors.platforms_without_gpus(platforms))
        elif chosen.wanted():
            ids = ",".join(map(str, chosen.wanted()))
            changes.update(jax_cuda_visible_devices=ids, jax_rocm_visible_devices=ids)
        if settings.floatx == "float64":
            changes["jax_enable_x64"] = True  # else JAX makes float32 of it
        for name, value in changes.items():
            jax.config.update(name, value)
            applied.append("jax.config.update({!r}, {!r})".format(name, value))
        ranks = _ranks.own_place()
        if ranks is not None:
            from . import _jax_ranks

            _jax_ranks.JaxDistributed.join(ranks)
            applied.append("jax.distributed.initialize()")
        if chosen.undecided is not None and not made:
            self._settle(jax, settings)
        return applied

    def _settle(self, jax, settings):
        """Take the GPUs that JAX lists, which makes its devices."""
        gpus = _gpus(jax)
        # Those of CUDA and ROCm are now the ones that were asked for; Apple's is one.
        settings.devices.settle(len(gpus), restricted=any(d.platform != "METAL" for d in gpus))
        if gpus and settings.memory and settings.memory.size:
            raise errors.one_fraction_for_all_gpus(settings.memory)

    def devices(self) -> "List[str]":
        """As Keras names them. Simulated ones are known before JAX makes them."""
        jax = self.import_framework()
        simulated = getattr(jax.config, "jax_num_cpu_devices", -1)
        if not self.initialised() and jax.config.jax_platforms == "cpu" and simulated > 0:
            return ["cpu:{}".format(index) for index in range(simulated)]
        return [_name(device) for device in jax.local_devices()]

    # Replicas ---------------------------------------------------------------------------------

    def parallelize(self, model: "Any", devices: "Sequence[str]") -> "Any":
        """Give the instance a ``call`` that is sharded, or the class's own one back."""
        jax = self.import_framework()
        _check_distribution(model)
        by_name = {_name(device): device for device in jax.local_devices()}
        before = ShardedCall.of(model)
        if before is not None:
            _remove(model)
        if list(devices) != self.devices()[:1]:
            _install(model, [by_name[name] for name in devices])
        if ShardedCall.of(model) is not before:
            # Keras traces its steps again: the ones it has hold the call that was.
            for name in ("train_function", "test_function", "predict_function"):
                setattr(model, name, None)
        return model

    def device(self, device: str) -> "ContextManager[Any]":
        raise errors.one_program(device)

    def verify(self, model: "Any", verification: "Optional[Verification]") -> None:
        from . import _jax_verification

        _jax_verification.VerifiedStep.install_on(model, verification)

    # Ranks ------------------------------------------------------------------------------------

    def launcher(self, launch: "Launch") -> "List[str]":
        """JAX has none of its own."""
        from .. import _start

        return _start.launcher(launch)

    def distribute(self, model: "Any", ranks: "Ranks") -> "Any":
        """See ``_jax_ranks``."""
        self.import_framework()
        from . import _jax_ranks

        _check_distribution(model)
        return _jax_ranks.distribute(model, ranks)


# Configuring ----------------------------------------------------------------------------------


def _gpus(jax):
    return [device for device in jax.local_devices() if device.platform != "cpu"]


def _name(device):
    return "{}:{}".format(device.platform, device.id)


def _check_devices_made(jax, settings):
    """Refuse what would have to change now that JAX has made its devices."""
    made, chosen = jax.local_devices(), settings.devices
    on_cpu = made[0].platform == "cpu"
    if chosen.simulated:
        as_asked = on_cpu and len(made) == chosen.simulated
    elif chosen.gpus:
        everything = list(chosen.positions) == list(range(len(made)))
        as_asked = not on_cpu and everything and not settings.memory
    else:
        as_asked = on_cpu or not chosen.declined
    if as_asked:
        return
    imported = [module.split(".")[0] for module in sys.modules]  # in the order of import
    first = next(top for top in imported if top in ("keras", "jax"))
    raise errors.jax_devices_made(first, ", ".join(map(_name, made)), settings)


def _fraction(settings):
    """The size asked for, as a fraction of each GPU."""
    totals = set(settings.devices.memory_totals())
    if len(totals) != 1 or 0 in totals:
        raise errors.one_fraction_for_all_gpus(settings.memory)
    return min(1.0, settings.memory.size / float(totals.pop()))


# Models ---------------------------------------------------------------------------------------


def _check_distribution(model):
    """Refuse a model that Keras distributes itself: each would undo what the other does."""
    keras = _keras.keras_of(model)
    laid_out = any(getattr(v, "_layout", None) is not None for v in model.variables)
    if laid_out or keras.distribution.distribution() is not None:
        raise errors.keras_distribution_is_set(model.name)


def _install(model, devices):
    """Have a model run on several devices, and what steps of its own call in its place."""
    sharded = ShardedCall(devices)
    sharded.install(model)
    if not _keras_steps.has_own_steps(model):
        return
    for part in _keras_steps.called_models(model):
        if ShardedCall.of(part) is None:
            ShardedCall(devices, belongs_to=sharded).install(part)
    for step in STEPS:
        step(sharded).install(model)


def _remove(model):
    """Make a model plain, and the models within that are sharded because it is."""
    sharded = ShardedCall.of(model)
    for part in _keras.all_layers(model):
        call = ShardedCall.of(part)
        if call is not None and (part is model or call.belongs_to is sharded):
            call.remove(part)
    for step in STEPS:
        if step.of(model) is not None:
            step.of(model).remove(model)


def _variables(model):
    """All that a step reads or writes, once each."""
    optimizer = getattr(model, "optimizer", None)
    groups = model.variables, model.metrics_variables, getattr(optimizer, "variables", ())
    return {id(variable): variable for group in groups for variable in group}.values()


def _state_on_devices(model, **which):
    """Keras' ``_get_jax_state``, with which each of its loops begins."""
    ShardedCall.of(model).place(model)
    return type(model)._get_jax_state(model, **which)


class ShardedCall(_keras.InstanceMethod):
    """The ``call`` of a model on several devices.

    Where it is traced (``jax.jit``, as in all of Keras' loops), inputs and outputs get a sharding
    of their rows, an annotation that changes no value: XLA partitions the program, and hides
    from sums, means and batch statistics the rows with which it fills up the last shards. (A
    constraint within a program may be uneven; an array that is an argument may not.) Weights
    stay replicated. So any batch gives the numbers of one device, also for whole-batch losses,
    batch normalization, dropout, stateful layers.

    What comes into a program uneven is said to be whole on each device, and what leaves it. Where
    nothing says so, XLA infers how a program's arguments and results are sharded: ten rows on four
    devices become two parts, each on two devices, which JAX fails to express (IndivisibleError).

    Called directly, outside of ``jax.jit``, a batch that divides is sharded; any other is
    computed whole on each device.
    """

    def __init__(self, devices, belongs_to=None):
        import jax
        import numpy as np

        super().__init__(devices)
        self.belongs_to = belongs_to  # that of the model whose steps call this one
        mesh = jax.sharding.Mesh(np.array(devices), ("batch",))
        self.rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("batch"))
        self.whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def install(self, model):
        super().install(model)
        model.__dict__["_get_jax_state"] = types.MethodType(_state_on_devices, model)

    def remove(self, model):
        """Give the variables back to JAX's default device, too."""
        import numpy as np

        super().remove(model)
        del model.__dict__["_get_jax_state"]
        for variable in _variables(model):
            if variable._value is not None:
                variable.assign(np.asarray(variable._value))

    def place(self, model):
        """Replicate the variables: also those that are new, or that were set since."""
        import jax

        _check_distribution(model)
        for variable in _variables(model):
            value = variable._value  # None: a variable whose making is deferred
            if isinstance(value, jax.Array) and value.sharding != self.whole:
                variable.assign(jax.device_put(value, self.whole))

    def __call__(self, model, *args, **kwargs):
        import jax

        call = self.plain(model)
        tree = _keras.keras_of(model).tree
        batch = next(filter(_has_rows, tree.flatten((args, kwargs))), None)
        # Not where a model is exported: a batch of unknown size names no machine's devices.
        if batch is None or _replicas.runs_undivided() or not isinstance(batch.shape[0], int):
            return call(*args, **kwargs)
        if not isinstance(batch, jax.core.Tracer):
            self.place(model)

        rows = batch.shape[0]
        args, kwargs = self.shard((args, kwargs), rows, tree)
        with _replicas.undivided():
            outputs = call(*args, **kwargs)
        return self.replicate_uneven(self.shard(outputs, rows, tree), rows, tree)

    def shard(self, values, rows, tree):
        """The same nested values, with the arrays of so many rows sharded."""
        import jax

        def shard(value):
            if not _has_rows(value) or value.shape[0] != rows:
                return value
            if _is_staged(value):
                sharded = jax.lax.with_sharding_constraint(value, self.rows)
            else:
                # Of run_eagerly: an array by itself cannot be uneven.
                sharded = jax.device_put(value, self.rows if self.divides(rows) else self.whole)
            return _with_mask_of(value, sharded)

        return tree.map_structure(shard, self.replicate_uneven(values, rows, tree))

    def divides(self, rows):
        return rows % len(self.devices) == 0

    def replicate_uneven(self, values, rows, tree):
        """The same nested values, whole on each device if so many rows do not divide."""
        import jax

        def replicate(value):
            if not _is_staged(value) or not _has_rows(value):
                return value
            whole = jax.lax.with_sharding_constraint(value, self.whole)
            return _with_mask_of(value, whole)

        return values if self.divides(rows) else tree.map_structure(replicate, values)


class ShardedStep(_keras.InstanceMethod):
    """A step of the user's, which may call anything: XLA then splits all that the data reaches."""

    def __init__(self, sharded):
        super().__init__(sharded.devices)
        self.sharded = sharded

    def __call__(self, model, state, data):
        tree = _keras.keras_of(model).tree
        batch = next(filter(_has_rows, tree.flatten(data)), None)
        if batch is None or _replicas.runs_undivided():
            return self.plain(model)(state, data)
        rows = batch.shape[0]
        data = self.sharded.shard(data, rows, tree)
        results = self.plain(model)(state, data)
        return self.sharded.replicate_uneven(results, rows, tree)


STEPS = [
    type("ShardedStep", (ShardedStep,), {"method": name})
    for name in ("train_step", "test_step", "predict_step")
]


def _with_mask_of(value, other):
    """Keep what losses and metrics look for at an output."""
    mask = _masking().get_keras_mask(value)
    if mask is not None:
        _masking().set_keras_mask(other, mask)
    return other


def _masking():
    return sys.modules["keras.src.backend.common.masking"]


def _is_staged(value):
    """Whether a program is being traced, and not an array differentiated where it is."""
    tracer = sys.modules["jax"].core.Tracer
    while isinstance(value, tracer) and hasattr(value, "primal"):
        value = value.primal
    return isinstance(value, tracer)


def _has_rows(value):
    """Whether this is a dense array (sparse ones stay whole) with a first dimension."""
    jax = sys.modules["jax"]
    return isinstance(value, (jax.Array, jax.core.Tracer)) and value.ndim > 0


backend = JAX()
