"""TensorFlow 2: tf.keras up to 2.15 (and tf_keras), and Keras 3 on TensorFlow.

Devices are chosen through ``tf.config`` before TensorFlow's runtime starts. A model runs on
several devices by a ``call`` of its own: an attribute of the instance that hides its class's
method. It splits the batch, runs the class's ``call`` on each device, and puts the outputs
together, so that loss, metrics and update see the whole batch. See ``replicas``.
"""

import functools

from ... import _keras, errors
from ..._keras import steps
from ..._ranks.tf_config import TF_CONFIG
from ...backend import Backend
from .. import tensorflow1
from ..tensorflow1 import configuration as v1_configuration
from . import configuration, native_kinds, refusals
from .configuration import OPTIONS, apply_setting, full_name, in_v1_mode, runs_eagerly, unsupported


class TensorFlow2(Backend):
    """TensorFlow from 2.0."""

    name = "tensorflow2"
    framework = "tensorflow"
    distributions = (
        "tensorflow", "tensorflow-cpu", "tensorflow-gpu", "tensorflow-intel", "tensorflow-macos",
        "tensorflow-rocm",
    )  # fmt: skip
    extra = "tensorflow"
    strategies = {
        "mirrored": "TensorFlow 2's MirroredStrategy, for a function that builds the model"
    }
    options = tuple(sorted(OPTIONS))
    variables = tensorflow1.backend.variables + ("TF_USE_LEGACY_KERAS",)

    def accepts(self, version):
        return version.startswith("2.")

    # Before the import ------------------------------------------------------------------------

    def environ(self, settings, environ):
        variables = dict(super().environ(settings, environ))
        memory = settings.memory
        # TensorFlow lets this variable beat tf.config ("Limiting GPU memory growth").
        growth = environ.get("TF_FORCE_GPU_ALLOW_GROWTH")
        gpus = settings.devices.gpus or (growth and settings.devices.undecided is not None)
        if gpus and memory and memory.grow and growth != "true":
            variables["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
        return variables

    def initialised(self):
        """CUDA's variables count until TensorFlow lists its devices for the first time."""
        return "TensorFlow has listed its devices" if configuration.has_listed_devices() else None

    # After the import -------------------------------------------------------------------------

    def configure(self, settings):
        tf = self.import_framework()
        # Apple's and AMD's GPUs have the type "GPU", too.
        physical = tf.config.experimental.list_physical_devices
        settings.devices.settle(len(physical("GPU")))
        if in_v1_mode(tf) and v1_configuration.sessions_made():
            v1 = tf.compat.v1
            config = v1_configuration.session_config(v1, settings, None)
            v1_configuration.ensure_no_other_session(v1, config)
        gpus = configuration.chosen_gpus(tf, settings.devices)
        visible = apply_setting(tf, "config.set_visible_devices", gpus, "GPU")
        applied = [visible] if physical("GPU") else []
        if settings.devices.simulated:
            cpu, limits = physical("CPU")[0], [None] * settings.devices.simulated
            applied.append(configuration.split_device(tf, cpu, limits))
        elif gpus and settings.memory:
            applied += configuration.limit_memory(tf, gpus, settings)
        for option in sorted(set(settings.options) & set(OPTIONS)):
            applied.append(apply_setting(tf, OPTIONS[option], settings.options[option]))
        # V1 mode may come later.
        soft = settings.options.get("allow_soft_placement", True)
        v1_configuration.set_session_defaults(functools.partial(configuration.session_config, soft))
        # TensorFlow numbers the GPUs it shows in the driver's order, not in the configured one.
        numbered = sorted(gpus, key=physical("GPU").index)
        self.kept["gpus"] = [f"/gpu:{numbered.index(gpu)}" for gpu in gpus]
        return applied, []

    def devices(self):
        """Reads the configuration; starting the runtime would fix it."""
        config = self.import_framework().config.experimental
        for kind in ("GPU", "CPU"):
            made = map(config.get_virtual_device_configuration, config.get_visible_devices(kind))
            count = sum(len(each or [None]) for each in made)
            named = self.kept.get("gpus")  # in the order configured
            if kind == "GPU" and named and len(named) == count:
                return list(named)
            if count:
                return [f"/{kind.lower()}:{index}" for index in range(count)]
        return ["/cpu:0"]

    def memory_peaks(self):
        """``tf.config.experimental.get_memory_info()``, from TensorFlow 2.5."""
        tf = self.import_framework()
        told = getattr(tf.config.experimental, "get_memory_info", None)
        names = [name for name in self.devices() if "gpu" in name.lower()]
        return {name: told(name.lstrip("/"))["peak"] for name in names} if told else {}

    def profiled(self):
        devices = self.devices()
        from . import profiler  # here for start-up time

        return profiler.profiled(devices)

    def executed(self, model):
        """Partitions of graphs, and operations that run eagerly; see ``executions``."""
        if in_v1_mode(self.import_framework()):
            return tensorflow1.backend.executed(model)
        from . import executions, replicas  # here for start-up time

        call = replicas.of(model)
        return executions.executed(call.devices if call else self.devices())

    def watch(self, model, check):
        """At the model's ``__call__``, and where tapes are asked; see ``watched_loops``."""
        if not in_v1_mode(self.import_framework()):
            from . import watched_loops  # here for start-up time

            watched_loops.watch(model, check)

    watch_loops = watch

    # Ranks ------------------------------------------------------------------------------------

    def launcher(self, job):
        """horovodrun where Horovod is installed; else what starts TF_CONFIG's workers."""
        # Both here for start-up time.
        from ..._ranks.engines import horovod  # for start-up time
        from ..._ranks.launch import starter

        if horovod.is_missing(job.python):
            return starter.launcher(job, "--cluster")
        return horovod.launcher(job, self.framework)

    def join(self, place):
        """TensorFlow's workers are joined as TensorFlow starts, in versions whose Keras can."""
        tf = self.import_framework()
        has_workers = hasattr(tf.distribute, "MultiWorkerMirroredStrategy") and runs_eagerly(tf)
        if place.launcher == TF_CONFIG and has_workers:
            from ..._ranks.engines import tensorflow_collectives  # for start-up time

            tensorflow_collectives.join_at_start(place)

    def ranks_train_under(self, strategy, place):
        """Workers of ``TF_CONFIG`` are mirrored over all devices of all of them."""
        return strategy == "mirrored" and place.launcher == TF_CONFIG

    def distribute(self, model, place):
        """See ``ranks``; after ``disable_v2_behavior()``, ``tensorflow1.ranks``."""
        tf = self.import_framework()
        if self.is_native(model):
            raise unsupported(
                "train a model without Keras as one of several ranks",
                "Use a Keras model, or start the script without a launcher.",
            )
        refusals.refuse_workers(tf, place)
        if in_v1_mode(tf):
            return tensorflow1.backend.distribute(model, place)
        if not runs_eagerly(tf):
            raise unsupported(
                "train as one of several ranks after tf.compat.v1.disable_eager_execution()",
                "Remove that call.",
            )
        refusals.refuse_strategies(tf, model)
        from . import ranks  # here for start-up time

        return ranks.distribute(model, place)

    # Replicas ---------------------------------------------------------------------------------

    def parallelize(self, model, devices):
        """Replace the instance's ``call``, or give the class's own one back.

        A stateful model, or one with a fixed batch size, stays in one piece on the first device,
        with a warning: its state has a row for each row of the batch. One device other than
        the first gets the whole model, as a single replica.
        """
        tf = self.import_framework()
        is_native = self.is_native(model)
        if in_v1_mode(tf) and not is_native:
            return tensorflow1.backend.parallelize(model, list(map(full_name, devices)))
        if in_v1_mode(tf) and len(devices) > 1:
            raise unsupported(
                "run a model without Keras on several devices after "
                "tf.compat.v1.disable_v2_behavior()",
                "Use a Keras model, or place the model's parts by compat.device().",
            )
        replicated = list(devices) != self.devices()[:1]
        from . import native, replicas  # here for start-up time: with TensorFlow

        if is_native:
            return native.parallelize(model, devices, replicated)
        if replicated:
            refusals.refuse_strategies(tf, model)
            _keras.warn_of_distribution(model)
            _keras.warn_of_placed_parts(model, self.placed_parts(model), devices)
            reason = _keras.undivided(model)
            if reason:
                _keras.warn_not_divided(model, reason, self.devices()[0])
                replicated = False
            else:
                refusals.refuse_unreached(tf, model)
        changed = steps.remove(replicas.ReplicatedCall, model)
        if replicated:
            steps.install(replicas.ReplicatedCall, model, devices, self.devices()[0])
        if changed or replicated:
            _keras.forget_compiled_steps(model)
        return model

    def placed_parts(self, model):
        if in_v1_mode(self.import_framework()):
            return tensorflow1.backend.placed_parts(model)
        from . import device_scope  # here for start-up time

        return device_scope.placed_parts(model)

    def verify(self, model, verification):
        tf = self.import_framework()
        if in_v1_mode(tf):
            tensorflow1.backend.verify(model, verification)
            return
        from . import native  # here for start-up time
        from . import verification as verifying

        if not self.is_native(model):
            if verification is not None and _keras.undivided(model):
                verification = None  # it runs on one device
            verifying.VerifiedStep.install_on(model, verification)
        elif hasattr(tf.keras.Model, "train_step"):
            native.verify(model, verification)
        else:  # TensorFlow 2.0 dies where a thread of its own traces what another one has.
            super().verify(model, verification)

    is_native = staticmethod(native_kinds.is_native)

    def build(self, strategy, function, devices):
        """Under ``tf.distribute.MirroredStrategy``: a copy of each weight on each device.

        ``function`` should compile the model, too: its optimizer belongs into the strategy's
        scope. Batches should divide by the number of devices; TensorFlow averages the replicas'
        gradients without regard to their rows, and Keras 3 refuses others.
        """
        tf = self.import_framework()
        with tf.distribute.MirroredStrategy(list(devices)).scope():
            model = function()
        if _keras.keras_of(model) is None:
            raise errors.builds_no_model(function.__qualname__, model)
        return model

    def device(self, device):
        """Layers called inside run on ``device``, forward and backward, whenever the model does.

        A functional model's layers run where they were called; other operations at once, as in
        ``tf.device``. Inside a subclassed model's ``call`` TensorFlow places the forward pass.
        """
        tf = self.import_framework()
        device = "/cpu:0" if device == "cpu" else device
        if in_v1_mode(tf):
            return tensorflow1.backend.device(full_name(device))
        from . import device_scope  # as in parallelize()

        return device_scope.placed_on(device)


backend = TensorFlow2()
