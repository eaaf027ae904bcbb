"""TensorFlow 2: tf.keras up to 2.15 (and tf_keras), and Keras 3 on TensorFlow.

Devices are chosen through ``tf.config`` before TensorFlow's runtime starts. A model runs on
several devices by another ``call``: an attribute of the instance, which hides its class's method.
It splits the batch, runs the class's ``call`` on each device and merges the outputs, so that loss,
metrics and update see the whole batch. See ``replicas``.
"""

import functools

from ... import _keras, errors
from ..._keras import steps
from ..._ranks.tf_config import TF_CONFIG
from ..._runtime import synchronized
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

    @property
    def synchronizes(self):
        """The places where batch normalization can use the statistics of the whole batch."""
        is_v1 = in_v1_mode(self.import_framework())
        return tensorflow1.backend.synchronizes if is_v1 else ("devices", "ranks")

    def synchronizes_on_ranks(self, layer):
        """Return whether a layer can use the statistics of the whole batch on several ranks."""
        if in_v1_mode(self.import_framework()):
            return tensorflow1.backend.synchronizes_on_ranks(layer)
        from . import batch_norm  # here for start-up time

        return batch_norm.is_synchronizable(layer)

    def accepts(self, version):
        """Return whether it is a version of TensorFlow 2."""
        return version.startswith("2.")

    # Before the import ------------------------------------------------------------------------

    def environ(self, settings, environ):
        """Return the variables to set, among them that of growing memory."""
        variables = dict(super().environ(settings, environ))
        memory = settings.memory
        # In TensorFlow this variable overrides tf.config ("Limiting GPU memory growth").
        growth = environ.get("TF_FORCE_GPU_ALLOW_GROWTH")
        gpus = settings.devices.gpus or (growth and settings.devices.undecided is not None)
        if gpus and memory and memory.grow and growth != "true":
            variables["TF_FORCE_GPU_ALLOW_GROWTH"] = "true"
        return variables

    def initialised(self):
        """Return why it is too late: TensorFlow reads CUDA's variables as it lists its devices."""
        return "TensorFlow has listed its devices" if configuration.has_listed_devices() else None

    # After the import -------------------------------------------------------------------------

    def configure(self, settings):
        """Apply the settings through ``tf.config``."""
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
        """Return the devices of the configuration, without starting the runtime, which fixes it."""
        config = self.import_framework().config.experimental
        for kind in ("GPU", "CPU"):
            parts = map(config.get_virtual_device_configuration, config.get_visible_devices(kind))
            count = sum(len(of_device or [None]) for of_device in parts)
            gpus = self.kept.get("gpus")  # in the order configured
            if kind == "GPU" and gpus and len(gpus) == count:
                return list(gpus)
            if count:
                return [f"/{kind.lower()}:{index}" for index in range(count)]
        return ["/cpu:0"]

    def memory_peaks(self):
        """Return the peaks of ``tf.config.experimental.get_memory_info()``, from TensorFlow 2.5."""
        tf = self.import_framework()
        info = getattr(tf.config.experimental, "get_memory_info", None)
        names = [name for name in self.devices() if "gpu" in name.lower()]
        return {name: info(name.lstrip("/"))["peak"] for name in names} if info else {}

    def profiled(self):
        """Return a context in which TensorFlow's profiler records; see ``profiler``."""
        devices = self.devices()
        from . import profiler  # here for start-up time

        return profiler.profiled(devices)

    def executed(self, model):
        """Return a context that counts the operations of each device; see ``executions``."""
        if in_v1_mode(self.import_framework()):
            return tensorflow1.backend.executed(model)
        from . import executions, replicas  # here for start-up time

        call = replicas.of(model)
        return executions.executed(call.devices if call else self.devices())

    def watch(self, model, check):
        """Check calls of the model and gradients by its weights; see ``watched_loops``."""
        if not in_v1_mode(self.import_framework()):
            from . import watched_loops  # here for start-up time

            watched_loops.watch(model, check)

    watch_loops = watch

    # Ranks ------------------------------------------------------------------------------------

    def launcher(self, job):
        """Return horovodrun if Horovod is installed, else a command with workers of TF_CONFIG."""
        # Both here for start-up time.
        from ..._ranks.engines import horovod  # for start-up time
        from ..._ranks.launch import starter

        if horovod.is_missing(job.python):
            return starter.launcher(job, "--cluster")
        return horovod.launcher(job, self.framework)

    def join(self, place):
        """Join TensorFlow's workers as TensorFlow starts, in versions whose Keras supports that."""
        tf = self.import_framework()
        has_workers = hasattr(tf.distribute, "MultiWorkerMirroredStrategy") and runs_eagerly(tf)
        if place.launcher == TF_CONFIG and has_workers:
            from ..._ranks.engines import tensorflow_collectives  # for start-up time

            tensorflow_collectives.join_at_start(place)

    def ranks_train_under(self, strategy, place):
        """Return whether all devices of all workers train as one strategy, as ``TF_CONFIG``'s."""
        return strategy == "mirrored" and place.launcher == TF_CONFIG

    def distribute(self, model, place):
        """Let the model train as one of several ranks; see ``ranks``, and ``tensorflow1.ranks``."""
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

    def batch_norm_layers(self, model):
        """Return the layers that a model without Keras reaches and are batch normalization."""
        return synchronized.layers(
            (getattr(part, "name", ""), part) for part in native_kinds.layers_reached(model)
        )

    def parallelize(self, model, devices):
        """Replace the instance's ``call``, or restore that of its class.

        A stateful model, or one with a fixed batch size, runs unsplit on the first device, with a
        warning: its state has a row for each row of the batch. If the only device is another one
        than the first, the model runs there as a single replica.
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
            reason = _keras.unsplit_reason(model)
            if reason:
                _keras.warn_left_unsplit(model, reason, self.devices()[0])
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
        """Return the devices on which ``device()`` has placed parts of the model."""
        if in_v1_mode(self.import_framework()):
            return tensorflow1.backend.placed_parts(model)
        from . import device_scope  # here for start-up time

        return device_scope.placed_parts(model)

    def verify(self, model, verification):
        """Compare first steps, or calls, with one device; see ``verification``."""
        tf = self.import_framework()
        if in_v1_mode(tf):
            tensorflow1.backend.verify(model, verification)
            return
        from . import native  # here for start-up time
        from . import verification as verifying

        if not self.is_native(model):
            if verification is not None and _keras.unsplit_reason(model):
                verification = None  # it runs on one device
            verifying.VerifiedStep.install_on(model, verification)
        elif hasattr(tf.keras.Model, "train_step"):
            native.verify(model, verification)
        else:  # TensorFlow 2.0 crashes if a thread traces a function that another one has traced.
            super().verify(model, verification)

    is_native = staticmethod(native_kinds.is_native)

    def build(self, strategy, function, devices):
        """Build a model under ``tf.distribute.MirroredStrategy``, with its weights on each device.

        ``function`` should compile the model, too: its optimizer belongs in the strategy's scope.
        The number of rows of a batch should be a multiple of the number of devices: TensorFlow
        averages the replicas' gradients without regard to their rows, and Keras 3 refuses others.
        """
        tf = self.import_framework()
        with tf.distribute.MirroredStrategy(list(devices)).scope():
            model = function()
        if _keras.keras_of(model) is None:
            raise errors.builds_no_model(function.__qualname__, model)
        refusals.refuse_mirrored(model)
        return model

    def device(self, device):
        """Place the layers called within on a device, forward and backward.

        It applies to layers of functional models, whenever the model runs; other operations run
        there at once, as in ``tf.device``. In a subclassed model's ``call`` only the forward pass
        is placed, by TensorFlow.
        """
        tf = self.import_framework()
        device = "/cpu:0" if device == "cpu" else device
        if in_v1_mode(tf):
            return tensorflow1.backend.device(full_name(device))
        from . import device_scope  # as in parallelize()

        return device_scope.placed_on(device)


backend = TensorFlow2()
