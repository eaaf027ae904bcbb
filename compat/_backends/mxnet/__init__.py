"""MXNet, under keras-mxnet (Keras 2.2.4 as its last release has it) and by itself.

``configure`` fixes the context of models built later, and two faults of keras-mxnet that make a
model lose its weights (``keras_mxnet_fixes.py``); ``parallelize`` gives a Keras model replicas
(``keras_replicas.py``), or a native model (``native.py`` a Gluon block, ``module.py`` a Module).
"""

import contextlib
import os
import sys

from ... import _keras, errors
from ..._configuration import packages
from ...backend import Backend
from . import configuration
from .configuration import RESERVE, context_named
from .model_kinds import blocks_within, is_block, is_module, nodes_within


class MXNet(Backend):
    """MXNet contexts as devices: ``gpu(0)``, or ``cpu(0)``, ``cpu(1)``... where simulated.

    A model that is not parallelized runs on the first configured device, whenever it was built,
    loaded or cloned. A context passed to Keras by name is used as it is.

    ``memory=``: MXNet allocates GPU memory as it needs it, so "grow" changes nothing. For a
    fraction its pool releases cached memory while less than the rest is free; no allocation fails
    because of it. MXNet has no limit by size: a warning says so.
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
    synchronizes = ("devices", "ranks")
    variables = (
        "MXNET_CPU_WORKER_NTHREADS", "MXNET_GPU_WORKER_NTHREADS", RESERVE,
        "MXNET_GPU_MEM_POOL_TYPE", "MXNET_ENGINE_TYPE", "DMLC_ROLE", "CUDA_VISIBLE_DEVICES",
    )  # fmt: skip

    # Configuring ------------------------------------------------------------------------------

    def environ(self, settings, environ):
        """Return the variables that MXNet reads when it is imported."""
        return configuration.variables(settings, environ)

    def initialised(self):
        """Return why it is too late: MXNet is imported, and reads its variables then."""
        return "mxnet is imported, and reads its variables then" if "mxnet" in sys.modules else None

    def configure(self, settings):
        """Choose the contexts, and fix keras-mxnet where it is installed."""
        reserve = self.environ(settings, os.environ).get(RESERVE)
        if reserve is not None:
            raise errors.too_late(
                self.framework,
                f"it reads {RESERVE}={reserve} only when it is imported, and is imported already",
                "Call it before the first `import mxnet` or `import keras`.",
            )
        mx = self.import_framework()
        self.kept["names"] = configuration.contexts(mx, settings.devices)
        lines, warnings = configuration.report_lines(mx, settings, self.kept["names"][0])
        if "keras" in _keras.keras_packages(self):
            lines += self._fix_keras()
        return lines, warnings

    def devices(self):
        """Return the names of the configured contexts, or of all GPUs."""
        if "names" not in self.kept:  # nothing was configured: what MXNet sees
            self.kept["names"] = configuration.all_contexts(self.import_framework())
        return list(self.kept["names"])

    def profiled(self):
        """Record by the profiler of MXNet's engine."""
        from . import profiler  # it imports mxnet

        return profiler.profiled(self.devices())

    def executed(self, model):
        """Count by the contexts of the results of operations and of executors."""
        from . import executions  # it imports mxnet

        return executions.executed(model, self.devices())

    def watch(self, model, check):
        """Observe calls by Gluon's hooks; those of a ``Module`` by its ``forward``."""
        from . import watched_calls  # it imports mxnet

        kind = watched_calls.WatchedForward if is_module(model) else watched_calls.WatchedBlock
        kind.install_on(model, check)

    def problems(self, environ):
        """Return installed packages with which keras-mxnet cannot load models."""
        h5py = packages.version("h5py")
        if not h5py or packages.release(h5py) < (3,):
            return []
        return [
            f"h5py {h5py} is installed, but load_model() of keras-mxnet needs an older one: "
            'pip install "h5py<3"'
        ]

    # Parallelizing ----------------------------------------------------------------------------

    def is_native(self, model):
        """Return whether a model is a Gluon block or a ``Module``."""
        return is_block(model) or is_module(model)

    def batch_norm_layers(self, model):
        """Return blocks, or nodes of a module's symbol, that are batch normalization, by name."""
        from ..._runtime import synchronized  # not at start-up

        if is_block(model):
            return synchronized.layers((block.name, block) for block in blocks_within(model))
        return synchronized.layers(nodes_within(model))

    def synchronizes_on_ranks(self, layer):
        """Return whether a layer can use the statistics of the whole batch on several ranks."""
        return _keras.has_keras_methods(layer, ["call"])

    def parallelize(self, model, devices):
        """Run ``model`` on ``devices``; see ``keras_replicas``.

        keras-mxnet's own several contexts are not used: they sum gradients of shard means, drop
        weights set after compile, and fail on a batch smaller than their number.
        """
        if is_block(model):
            from .native import parallelize  # it imports mxnet
        elif is_module(model):
            from .module import parallelize  # it imports mxnet
        else:
            self._fix_keras()
            from .keras_replicas import parallelize  # it imports Keras

        parallelize(model, [context_named(name) for name in devices])
        return model

    def _fix_keras(self):
        from . import keras_mxnet_fixes  # it imports Keras

        return keras_mxnet_fixes.fix(lambda: self.devices()[0])

    # Ranks ------------------------------------------------------------------------------------

    def verify(self, model, verification):
        """Compare the first steps with those of one device; see ``verification``."""
        replicas = getattr(model, "_compat_replicas", None)
        if is_module(model):
            super().verify(model, verification)
        elif not is_block(model):
            from ..._verification import keras2  # it imports numpy
            from .verification import VerifiedStep  # it imports mxnet

            wanted = None if replicas is None else verification
            keras2.verify(VerifiedStep, model, replicas, wanted)
        elif replicas is not None:
            replicas.verification = verification

    def launcher(self, job):
        """Return the launcher of Horovod."""
        from ..._ranks.engines import horovod  # here for start-up time

        return horovod.launcher(job, self.framework)

    def distribute(self, model, place):
        """Have the ranks train a Keras model together; see ``ranks`` and ``keras2.install``."""
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

        Symbols of Keras layers get the attribute ``ctx_group``, the name of the device, which the
        executors of the model follow; MXNet copies between devices, and the backward pass runs
        where the forward pass did. Arrays, and Gluon parameters that are initialised here, are
        created on the device; a custom symbol needs ``group2ctxs=`` in its ``Module``, with the
        names of devices as keys.
        """
        from . import device_scope  # it imports mxnet

        if "keras" in _keras.keras_packages(self):
            self._fix_keras()
        with device_scope.placed_on(device):
            yield


backend = MXNet()
