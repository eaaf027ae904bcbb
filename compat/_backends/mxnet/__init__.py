"""MXNet, under keras-mxnet (Keras 2.2.4 as its last release has it) and by itself.

``configure`` fixes the context of models built later, and two faults of keras-mxnet that make a
model lose its weights (``keras_mxnet_fixes.py``); ``parallelize`` gives a Keras model replicas
(``keras_replicas.py``), or a model of MXNet's own (``native.py``, ``module.py``).
"""

import contextlib
import os
import sys

from ... import _keras, errors
from ..._configuration import packages
from ...backend import Backend

# MXNet reads it when it is imported (its documentation, "Environment Variables").
_RESERVE = "MXNET_GPU_MEM_POOL_RESERVE"


class MXNet(Backend):
    """MXNet contexts as devices: ``gpu(0)``, or ``cpu(0)``, ``cpu(1)``... where simulated.

    A model that is not parallelized runs on the first device configured, whenever it was built,
    loaded or cloned. A context given to Keras by name is taken as it is.

    ``memory=``: MXNet takes GPU memory as it needs it, so "grow" is what it always does. For a
    fraction its pool gives cached memory back while less than the rest is free; it refuses no
    allocation. A limit by size it does not have: a warning says so.
    """

    name = "mxnet"
    framework = "mxnet"
    recording = {"MXNET_EXEC_BULK_EXEC_TRAIN": "0"}
    distributions = ("mxnet", "mxnet-mkl", "mxnet-native") + tuple(
        "mxnet-cu" + cuda
        for cuda in "117 116 115 114 113 112 110 102 101 100 102mkl 101mkl 100mkl 92mkl 91mkl "
        "90mkl 80mkl 75mkl 92 91 90 80 75".split()
    )
    extra = "mxnet"
    variables = (
        "MXNET_CPU_WORKER_NTHREADS", "MXNET_GPU_WORKER_NTHREADS", _RESERVE,
        "MXNET_GPU_MEM_POOL_TYPE", "MXNET_ENGINE_TYPE", "DMLC_ROLE", "CUDA_VISIBLE_DEVICES",
    )  # fmt: skip

    # Configuring ------------------------------------------------------------------------------

    def environ(self, settings, environ):
        changed = settings.devices.environ(environ)
        if settings.memory is not None and settings.memory.fraction:
            reserve = str(int(round(100 * (1 - settings.memory.fraction))))
            if environ.get(_RESERVE) != reserve:
                changed[_RESERVE] = reserve
        return changed

    def initialised(self):
        return "mxnet is imported, and reads its variables then" if "mxnet" in sys.modules else None

    def configure(self, settings):
        reserve = self.environ(settings, os.environ).get(_RESERVE)
        if reserve is not None:
            raise errors.too_late(
                self.framework,
                f"it reads {_RESERVE}={reserve} only when it is imported, and is imported already",
                "Call it before the first `import mxnet` or `import keras`.",
            )
        mx = self.import_framework()
        self.kept["names"] = self._contexts(mx, settings.devices)
        lines, warnings = [f"models not parallelized run on {self.kept['names'][0]}"], []
        if settings.devices.gpus and not _visible_gpus(mx):
            lines.append(_no_gpu())
        elif settings.devices.gpus and not settings.devices.are_shown_by(os.environ):
            lines.append("other GPUs stay visible: mxnet was imported before")
        if settings.memory is not None:
            lines.append(_memory_line(settings.memory, warnings))
        if "keras" in _keras.keras_packages(self):
            lines += self._fix_keras()
        return lines, warnings

    def _contexts(self, mx, devices):
        if devices.undecided is not None:
            devices.settle(_visible_gpus(mx))
        if devices.simulated:
            return [f"cpu({index})" for index in range(devices.simulated)]
        visible = _visible_gpus(mx) if devices.gpus else 0
        ids = [index for index in devices.ordinals(os.environ) if index < visible]
        return [f"gpu({index})" for index in ids] or ["cpu(0)"]

    def devices(self):
        if "names" not in self.kept:  # nothing was configured: what MXNet sees
            mx = self.import_framework()
            gpus = [f"gpu({i})" for i in range(_visible_gpus(mx))]
            self.kept["names"] = gpus or ["cpu(0)"]
        return list(self.kept["names"])

    def profiled(self):
        """From the profiler of MXNet's engine."""
        from . import verification  # it imports mxnet

        return verification.profiled(self.devices())

    def executed(self, model):
        """From the contexts of the results of operations and of executors."""
        from . import executions  # it imports mxnet

        return executions.executed(model, self.devices())

    def watch(self, model, check):
        """By hooks of Gluon's own; of a ``Module`` by its ``forward``."""
        from . import executions  # it imports mxnet

        kind = executions.WatchedForward if _is_module(model) else executions.WatchedBlock
        kind.install_on(model, check)

    def problems(self, environ):
        h5py = packages.version("h5py")
        if not h5py or packages.release(h5py) < (3,):
            return []
        return [
            f"h5py {h5py} is installed, but load_model() of keras-mxnet needs an older one: "
            'pip install "h5py<3"'
        ]

    # Parallelizing ----------------------------------------------------------------------------

    def is_native(self, model):
        return _is_block(model) or _is_module(model)

    def parallelize(self, model, devices):
        """Run ``model`` on ``devices``; see ``keras_replicas`` for what that means.

        keras-mxnet's own several contexts are not used: they sum gradients of shard means, drop
        weights set after compile, and fail on a batch smaller than their number.
        """
        if _is_block(model):
            from .native import parallelize  # it imports mxnet
        elif _is_module(model):
            from .module import parallelize  # it imports mxnet
        else:
            self._fix_keras()
            from .keras_replicas import parallelize  # it imports Keras
        from .propagation import context_named

        parallelize(model, [context_named(name) for name in devices])
        return model

    def _fix_keras(self):
        from . import keras_mxnet_fixes  # it imports Keras

        return keras_mxnet_fixes.fix(lambda: self.devices()[0])

    # Ranks ------------------------------------------------------------------------------------

    def verify(self, model, verification):
        replicas = getattr(model, "_compat_replicas", None)
        if _is_module(model):
            super().verify(model, verification)
        elif not _is_block(model):
            from .verification import VerifiedMXNetStep  # it imports mxnet

            wanted = None if replicas is None else verification
            VerifiedMXNetStep.install_on(model, wanted)
        elif replicas is not None:
            replicas.verification = verification

    def launcher(self, job):
        from ..._ranks.engines import horovod  # here for start-up time

        return horovod.launcher(job, self.framework)

    def distribute(self, model, place):
        """See ``ranks`` and ``keras2.install``; for models of Keras."""
        if self.is_native(model):
            raise self._cannot(
                f"train a {type(model).__name__} of MXNet's own as one of several ranks",
                "Use a model of Keras, or start the script without a launcher.",
            )
        from ..._ranks import keras2  # here for start-up time
        from . import ranks

        engine = ranks.MXNetHorovod.join(place)
        self.parallelize(model, self.devices()[:1])
        keras2.install(model, engine, (ranks.MakeMXNetTrainFunction, keras2.MakeTestFunction))
        return model

    # Placing parts of a model -----------------------------------------------------------------

    @contextlib.contextmanager
    def device(self, device):
        """Build Keras layers, symbols, parameters and arrays for ``device``.

        What Keras layers compute gets the attribute ``ctx_group``, which names the device, and
        which the executors of the model follow; MXNet copies between them, and the backward pass
        runs where the forward pass did. Arrays, and Gluon's parameters that are initialised
        here, lie on the device themselves; a symbol of one's own needs ``group2ctxs=`` in its
        ``Module``, with the names of devices as keys.
        """
        import mxnet as mx

        from .propagation import context_named  # it imports mxnet

        if "keras" in _keras.keras_packages(self):
            self._fix_keras()
        name = "cpu(0)" if device == "cpu" else device
        with mx.AttrScope(ctx_group=name), context_named(name):
            yield


backend = MXNet()


def _is_block(model):
    return _is_a(model, "mxnet.gluon.", "Block")


def _is_module(model):
    return _is_a(model, "mxnet.module.", "BaseModule")


def _is_a(model, prefix, name):
    return any(c.__name__ == name and c.__module__.startswith(prefix) for c in type(model).__mro__)


def _visible_gpus(mx):
    try:
        return mx.context.num_gpus()
    except mx.base.MXNetError:  # built with CUDA, and no driver there
        return 0


def _no_gpu():
    from mxnet.runtime import Features  # no attribute of mxnet before 1.6

    if Features().is_enabled("CUDA"):
        return "mxnet was built with CUDA, but finds no GPU: look at the driver and its version"
    return "this mxnet was built without CUDA: install the mxnet-cu package for your CUDA"


def _memory_line(memory, warnings):
    if memory.grow:
        return "memory: MXNet takes it as it is needed, always"
    if memory.size:
        warnings.append(
            f"memory={memory} was asked for, but mxnet limits GPU memory by no size. It takes "
            "memory as it is needed; memory=0.5 makes it give cached memory back while less than "
            "half of a GPU is free."
        )
        return "memory: no limit (MXNet has none by size)"
    free = 1 - memory.fraction
    return f"memory: cached memory is given back while less than {free:.0%} of a GPU is free"
