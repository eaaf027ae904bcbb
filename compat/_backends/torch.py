"""torch: under Keras 3, and models made with torch alone.

A model runs on several devices by a ``call`` (Keras) or a ``forward`` (torch) of its own: an
attribute of the instance that hides its class's method. It splits the batch, runs the class's
method on each device with weights copied there, and puts the outputs together. The copies belong
to autograd's graph, so that the gradients of all replicas reach the one set of weights. See
``ReplicatedCall`` and ``ReplicatedForward``.
"""

import functools
import os
import sys
import threading

from .. import _keras, _replicas, errors
from ..backend import Backend

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List, Mapping, Optional, Sequence

    from .._ranks import Launch, Ranks
    from .._settings import Settings

_DEVICE = "KERAS_TORCH_DEVICE"


class Torch(Backend):
    """torch."""

    name = "torch"
    framework = "torch"
    distributions = ("torch",)
    extra = "torch"
    variables = (
        "CUDA_VISIBLE_DEVICES",
        "CUDA_DEVICE_ORDER",
        _DEVICE,
        "PYTORCH_CUDA_ALLOC_CONF",
    )

    def __init__(self):
        self._simulated = 0

    # Before the first use of a GPU --------------------------------------------------------------

    def environ(
        self, settings: "Settings", environ: "Mapping[str, str]"
    ) -> "Dict[str, Optional[str]]":
        """Keras reads its device when it is imported (keras/src/backend/torch/core.py)."""
        variables = dict(super().environ(settings, environ))
        device = environ.get(_DEVICE)
        if settings.devices.declined or settings.devices.simulated:
            if device != "cpu":
                variables[_DEVICE] = "cpu"
        elif settings.devices.gpus and device:
            variables[_DEVICE] = None  # the first GPU is Keras' own choice
        return variables

    def overruled(self, settings: "Settings", environ: "Mapping[str, str]") -> "List[str]":
        device = environ.get(_DEVICE)
        if device and self.environ(settings, environ).get(_DEVICE, device) != device:
            return [errors.keras_torch_device_overruled(device, settings.devices)]
        return []

    def initialised(self) -> "Optional[str]":
        """CUDA's variables count until CUDA starts, and Keras starts it on its import."""
        if "keras.src.backend.torch.core" in sys.modules:
            return "keras was imported, which asks torch for GPUs"
        cuda = sys.modules.get("torch.cuda")
        if cuda is not None and getattr(cuda, "is_initialized", bool)():
            return "torch has started CUDA"
        return None

    # After the import -------------------------------------------------------------------------

    def configure(self, settings: "Settings") -> "List[str]":
        torch = self.import_framework()
        chosen = settings.devices
        too_late = self.initialised()
        if too_late:
            _check_devices_shown(torch, too_late, chosen)
        self._simulated = chosen.simulated or 0
        applied = []
        if chosen.gpus and settings.memory:
            applied += _limit_memory(torch, settings.memory)
        if settings.floatx:
            torch.set_default_dtype(getattr(torch, settings.floatx))
            applied.append("torch.set_default_dtype(torch.{})".format(settings.floatx))
        return applied

    def devices(self) -> "List[str]":
        """torch has one CPU: what stands in for GPUs are names, and replicas that run there."""
        torch = self.import_framework()
        if self._simulated:
            return ["cpu:{}".format(index) for index in range(self._simulated)]
        if os.environ.get(_DEVICE) == "cpu":
            return ["cpu"]
        return ["cuda:{}".format(index) for index in range(torch.cuda.device_count())] or ["cpu"]

    # Replicas ---------------------------------------------------------------------------------

    def is_native(self, model: "Any") -> bool:
        torch = sys.modules.get("torch")
        return torch is not None and isinstance(model, torch.nn.Module)

    def parallelize(self, model: "Any", devices: "Sequence[str]") -> "Any":
        """Give the instance a ``call`` or ``forward`` that is divided, or the class's one back.

        A stateful Keras model, or one with a fixed batch size, stays in one piece, with a warning.
        """
        self.import_framework()
        keras = _keras.keras_of(model)
        replicated = list(devices) != self.devices()[:1]
        replicated_function = ReplicatedForward if keras is None else ReplicatedCall
        if keras is not None and replicated:
            if _keras.compiled_with(model).get("jit_compile") is True:
                raise errors.several_devices_in_torch_compile()
            _keras.warn_of_distribution(model)
            reason = _keras.undivided(model)
            if reason:
                _keras.warn_not_divided(model, reason, self.devices()[0])
                replicated = False
        before = replicated_function.of(model)
        if before is not None:
            before.remove(model)
        if replicated:
            replicated_function(devices).install(model)
        return model

    # Ranks ------------------------------------------------------------------------------------

    def launcher(self, launch: "Launch") -> "List[str]":
        """torchrun, which has to be started on each machine where there are several."""
        if launch.hosts is not None:
            from .. import _start

            return _start.launcher(launch)
        torchrun = [launch.python, "-m", "torch.distributed.run", "--standalone", "--no-python"]
        return torchrun + ["--nproc-per-node={}".format(launch.size)]

    def distribute(self, model: "Any", ranks: "Ranks") -> "Any":
        """See ``_torch_ranks``."""
        self.import_framework()
        from . import _torch_ranks

        return _torch_ranks.distribute(model, ranks)


# Configuring ----------------------------------------------------------------------------------


def _check_devices_shown(torch, reason, chosen):
    """Refuse what would have to change now that the GPUs that torch shows are fixed."""
    shown = torch.cuda.device_count()
    everything = list(chosen.positions or ()) == list(range(shown))
    if (everything or not shown) if chosen.gpus else (not shown or not chosen.declined):
        return
    raise errors.too_late(
        "torch",
        "{}; it shows {} GPUs, and {} was asked for".format(reason, shown, chosen),
        "Call it before the first `import keras`, and before anything runs on a GPU.",
    )


def _limit_memory(torch, memory):
    """torch takes memory as it is needed; a limit is a fraction of each GPU."""
    if memory.grow:
        return ["memory: torch takes it as it is needed"]
    applied = []
    for index in range(torch.cuda.device_count()):
        total = torch.cuda.get_device_properties(index).total_memory
        fraction = memory.fraction or min(1.0, memory.size / float(total))
        torch.cuda.set_per_process_memory_fraction(fraction, index)
        applied.append(
            "torch.cuda.set_per_process_memory_fraction({:g}, {})".format(fraction, index)
        )
    return applied


# Replicas -------------------------------------------------------------------------------------

_running = threading.local()


class Replicated(_keras.InstanceMethod):
    """A method of a model that runs on several devices.

    Replica i computes the rows ``_replicas.run_bounds`` gives it, on its device, one after the
    other: work on GPUs is queued, so that they compute at the same time, and autograd runs the
    backward pass of each device in a thread of its own.

    Arguments with as many rows as the batch, the first tensor among them, are sliced; all else
    is passed whole. Outputs are concatenated where the model's own would be; a scalar output is
    the mean weighted by the replicas' shares of the batch.
    """

    def most_replicas(self, model, rows):
        """How many replicas a batch of so many rows can be split over."""
        return len(self.devices)

    def __call__(self, model, *args, **kwargs):
        torch = sys.modules["torch"]
        tree = torch.utils._pytree
        args, kwargs = tree.tree_map(self.converter(model), (args, kwargs))
        batch = next(filter(_has_rows, tree.tree_leaves((args, kwargs))), None)
        if batch is None or getattr(_running, "now", False) or self.is_only_traced(model, batch):
            return self.plain(model)(*args, **kwargs)
        rows = batch.shape[0]
        devices = self.devices[: self.most_replicas(model, rows)]
        count = len(devices)
        sizes, results = _replicas.sizes(rows, count), []
        state = self.state(model)
        for index, name in enumerate(devices):
            # On the CPU "cpu:1" is a name only.
            device = torch.device(name if name.startswith("cuda") else "cpu")
            start, stop = _replicas.run_bounds(rows, count, index)
            shard = functools.partial(_shard, rows, start, stop, device)
            with torch.profiler.record_function("replica on {}".format(name)):
                arguments = tree.tree_map(shard, (args, kwargs))
                _running.now = True
                try:
                    result = state.run(self.plain(model), device, index > 0, *arguments)
                finally:
                    _running.now = False
            leaves, structure = tree.tree_flatten(result)
            results.append([_kept(leaf, stop - start, sizes[index]) for leaf in leaves])
        shares = [size / float(rows) for size in sizes]
        home = self.home(model, batch)
        state.finish(shares)
        merged = [_merged(torch, values, shares, home) for values in zip(*results)]
        return state.result(tree.tree_unflatten(merged, structure))


def _has_rows(value):
    return isinstance(value, sys.modules["torch"].Tensor) and value.dim() > 0


def _shard(rows, start, stop, device, value):
    """A replica's rows of an argument, on its device."""
    if not isinstance(value, sys.modules["torch"].Tensor):
        return value
    mask = getattr(value, "_keras_mask", None)
    if value.dim() and value.shape[0] == rows:
        value = value[start:stop]
    value = value.to(device)
    if mask is not None:
        value = value.view_as(value)  # another object: the mask is not for the argument itself
        value._keras_mask = mask[start:stop].to(device)
    return value


def _kept(value, computed, size):
    """The rows of a result that are this replica's own: all, or none of the one computed."""
    if size or not _has_rows(value) or value.shape[0] != computed:
        return value
    mask = getattr(value, "_keras_mask", None)
    value = value[:0]
    if mask is not None:
        value._keras_mask = mask[:0]
    return value


def _merged(torch, values, shares, home):
    """The replicas' rows together; a scalar is the mean of theirs."""
    if not isinstance(values[0], torch.Tensor):
        return values[0]
    values = [value.to(home) for value in values]
    if not values[0].dim():
        return _mean(values, shares) if values[0].is_floating_point() else values[0]
    merged = torch.cat(values)
    masks = [getattr(value, "_keras_mask", None) for value in values]
    if masks[0] is not None:
        merged._keras_mask = torch.cat([mask.to(home) for mask in masks])
    return merged


def _mean(values, shares):
    """The mean weighted by the replicas' shares of the batch, where the first value lies."""
    return sum(value.to(values[0].device) * share for value, share in zip(values, shares))


# Keras ----------------------------------------------------------------------------------------


class ReplicatedCall(Replicated):
    """The ``call`` of a Keras model on several devices."""

    def converter(self, model):
        """Keras hands arrays to a model, too."""
        numpy = sys.modules["numpy"]
        convert = _keras.keras_of(model).ops.convert_to_tensor
        return lambda value: convert(value) if isinstance(value, numpy.ndarray) else value

    def is_only_traced(self, model, batch):
        """Keras runs a model on the device "meta" to learn shapes, and in scopes of its own."""
        return batch.is_meta or _keras.in_stateless_scope(_keras.keras_of(model))

    def home(self, model, batch):
        keras = _keras.keras_of(model)
        return keras.ops.convert_to_tensor(0).device  # where Keras computes

    def state(self, model):
        return KerasReplicas(_keras.keras_of(model), model, _mean)


class KerasReplicas(_keras.StatelessReplicas):
    """Runs the replicas of a Keras model, each with the variables on its device.

    All but the first get copies even on the CPU, so that simulated devices do what GPUs would.
    """

    def run(self, call, device, copy, args, kwargs):
        with self.keras.device(str(device)):
            values = [
                (variable, variable._value.to(device, copy=copy))
                for variable in self.model.variables
                if variable._value is not None
            ]
            with self.replica(values) as losses:
                outputs = call(*args, **kwargs)
        return outputs, list(losses)

    def result(self, merged):
        outputs, losses = merged
        for loss in losses:
            self.add_loss(None, loss)
        return outputs


# torch ----------------------------------------------------------------------------------------


class ReplicatedForward(Replicated):
    """The ``forward`` of a torch module on several devices."""

    method = "forward"

    def converter(self, model):
        return lambda value: value

    def is_only_traced(self, model, batch):
        return batch.is_meta or sys.modules["torch"].jit.is_tracing()

    def most_replicas(self, model, rows):
        """In training torch's batch normalization refuses a batch of one row."""
        kind = sys.modules["torch"].nn.modules.batchnorm._BatchNorm
        normalised = any(isinstance(part, kind) and part.training for part in model.modules())
        return max(1, rows // 2) if normalised else len(self.devices)

    def home(self, model, batch):
        """Where the module's weights lie, as the plain module's outputs would."""
        weight = next(model.parameters(), None)
        return batch.device if weight is None else weight.device

    def state(self, model):
        return ModuleReplicas(model)


class ModuleReplicas:
    """Runs the replicas of a torch module, each with weights and buffers of its own.

    Buffers (moving averages) start from the same value in each replica, and are set once, to the
    mean weighted by the replicas' shares of the batch; integers (counters) to the last.
    """

    def __init__(self, module):
        self.module = module
        self.before = dict(module.named_buffers())
        self.after = []  # for each replica, name of buffer -> its value

    def run(self, forward, device, copy, args, kwargs):
        torch = sys.modules["torch"]
        tensors = {
            name: parameter.to(device, copy=copy)
            for name, parameter in self.module.named_parameters()
        }
        buffers = {name: buffer.to(device, copy=True) for name, buffer in self.before.items()}
        tensors.update(buffers)
        body = _body(self.module, forward)
        named = {"module." + name: tensor for name, tensor in tensors.items()}
        result = torch.func.functional_call(body, named, args, kwargs)
        self.after.append({name: named["module." + name] for name in buffers})
        return result

    def finish(self, shares):
        torch = sys.modules["torch"]
        with torch.no_grad():
            for name, buffer in self.before.items():
                values = [after[name] for after in self.after]
                mean = _mean(values, shares) if buffer.is_floating_point() else values[-1]
                buffer.copy_(mean)

    def result(self, merged):
        return merged


def _body(module, forward):
    """A module whose forward is ``forward``: the hooks of ``module`` itself run once, outside."""
    torch = sys.modules["torch"]

    class Body(torch.nn.Module):
        def forward(self, *args, **kwargs):
            return forward(*args, **kwargs)

    body = Body()
    body.module = module
    return body


backend = Torch()
