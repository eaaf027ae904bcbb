"""TensorFlow 1, under standalone Keras 2 or its own ``tf.keras``.

Configuring: TensorFlow 1 takes its devices and its memory from each session's ``ConfigProto``,
and a script makes sessions in many places. So every session begins with one configuration.

Parallelizing: Keras 2 builds a static graph, so replicas are made in the graph, where every
Keras looks alike. Keras builds the model, its loss and its metrics as ever, for one device. When
it then turns tensors into a function to run (``_make_train_function`` and its two siblings), the
*batch part* of the graph (the operations between the model's inputs and outputs) is replaced:

- it is copied once per device, and each copy reads its shard of the batch;
- a tensor that leaves the batch part, towards outputs, loss, metrics or updates, becomes the
  copies' rows in order, so that all of these see the whole batch and state is written once a step;
- what computes across rows is no part of it, as far as the graph shows, BatchNorm excepted;
- gradients are computed where the operations they belong to ran.

The undivided batch part stays in the graph, is never run, and is what the model's layers,
``summary``, ``get_config`` and ``save`` go on to see.
"""

import ctypes
import os
import sys

from ... import _keras, errors
from ..._configuration import device_choice, gpu_selection
from ...backend import Backend
from . import sessions, variables
from .graph import v1_names
from .graph_changes import placed_on, placed_parts


class TensorFlow1(Backend):
    name = "tensorflow1"
    framework = "tensorflow"
    distributions = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu")
    extra = "tensorflow1"
    options = (
        "allow_soft_placement",
        "inter_op_parallelism_threads",
        "intra_op_parallelism_threads",
        "log_device_placement",
        "device_count",
    )
    variables = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TF_FORCE_GPU_ALLOW_GROWTH")

    def accepts(self, version):
        return version.startswith("1.")

    def initialised(self):
        if "tensorflow" in sys.modules:
            return "tensorflow is imported, and may have asked CUDA for its GPUs"
        return None

    # Configuring ------------------------------------------------------------------------------

    def configure(self, settings):
        late = self.initialised()
        tf = v1_names(self.import_framework())
        config = self.session_config(tf, settings, late)
        sessions.ensure_no_other_session(tf, config)
        sessions.set_session_defaults(lambda: config)
        self.kept["settings"] = settings
        if settings.devices.undecided is not None:
            gpus = [name for name in self.devices() if "GPU" in name]
            settings.devices.settle(len(gpus), restricted=True)
            if gpus and settings.memory and settings.memory.size:
                raise self._memory_total_unknown(settings.memory)
            if not gpus:
                config.CopyFrom(self.session_config(tf, settings, late))
        shown = " ".join(str(config).split())
        lines = [f"every session, of Keras and others: ConfigProto {shown}"]
        if settings.memory and not settings.devices.gpus:
            lines.append("memory: no GPU is used, so nothing was set")
        lines.append(variables.switch_resource_variables_on(tf))
        return lines, []

    def session_config(self, tf, settings, late):
        """The settings as TensorFlow's ``ConfigProto``."""
        devices, memory, options = settings.devices, settings.memory, dict(settings.options)
        config = tf.ConfigProto()
        # Keras' own sessions have it: on a GPU, some of its operations have CPU kernels only.
        config.allow_soft_placement = True
        if devices.simulated:
            config.device_count["CPU"] = devices.simulated
        unlisted = devices.undecided is not None and devices.listed is None
        ids = devices.wanted() if unlisted else None
        if ids and ids == list(range(len(ids))):
            config.device_count["GPU"] = len(ids)  # at most
        elif ids:
            config.gpu_options.visible_device_list = ",".join(map(str, ids))
        elif not devices.gpus and not unlisted:
            config.device_count["GPU"] = 0
        elif late and not devices.are_shown_by(os.environ):
            # The ids count inside CUDA_VISIBLE_DEVICES as TensorFlow found it.
            config.gpu_options.visible_device_list = ",".join(map(str, devices.positions))
        if memory and (devices.gpus or (unlisted and not memory.size)):
            if memory.grow:
                config.gpu_options.allow_growth = True
            else:
                fraction = memory.fraction or self._fraction(memory, devices)
                config.gpu_options.per_process_gpu_memory_fraction = fraction
        config.device_count.update(options.pop("device_count", None) or {})
        for option in set(options).intersection(self.options):
            setattr(config, option, options[option])
        return config

    def _fraction(self, memory, devices):
        """The fraction of each GPU that is ``memory.size``; TensorFlow 1 takes nothing else."""
        totals = devices.memory_totals()
        if not any(totals):
            raise self._memory_total_unknown(memory)
        # One fraction holds for all GPUs: that of the largest, so that none takes more.
        return min(1.0, memory.size / float(max(totals)))

    def _memory_total_unknown(self, memory):
        return self._cannot(
            f"limit memory to {memory}: it takes a fraction of each GPU only, and nvidia-smi does "
            "not tell how much memory the GPUs have",
            'Use a fraction such as memory=0.5, or memory="grow".',
        )

    def devices(self):
        tf = v1_names(self.import_framework())
        settings = self.kept.get("settings")
        simulated = settings.devices.simulated if settings else 0
        if settings is not None:
            on_cpu = not settings.devices.gpus and "device_count" not in settings.options
            # Without a session: a process that has made one hangs once it is forked.
            if on_cpu and (simulated or not _may_list_gpus(tf)):
                return [f"/device:CPU:{i}" for i in range(max(1, simulated))]
            # An own session on an empty graph: it initialises GPUs just as the user's will.
            with tf.Session(graph=tf.Graph()) as session:
                return _to_train_on(session, simulated)
        for session in map(sessions.session_of, sessions.imported_keras_packages()):
            if session is not None:
                return _to_train_on(session, simulated)
        # Making a session would initialise every GPU, with memory settings that are not the
        # user's (keras#8353): ask the driver instead.
        chosen = device_choice.choose(gpu_selection.parse_gpus(None), None, os.environ)
        gpus = len(chosen) if tf.test.is_built_with_cuda() else 0
        return [f"/device:GPU:{i}" for i in range(gpus)] or ["/device:CPU:0"]

    # Parallelizing ----------------------------------------------------------------------------

    def parallelize(self, model, devices):
        """Run ``model`` on ``devices``, the same object; see the head of this file.

        Raises:
            UnsupportedError: in a loop, an operation's gradient is by ``tf.custom_gradient``; when
                Keras makes the model's functions.

        BatchNorm normalises each replica's rows by their own statistics, and its moving
        averages take the mean of the replicas' updates, once a step. Dropout masks of replicas
        are independent. A stateful RNN keeps one state per row of the batch, as on one device:
        each replica reads and writes the states of its rows.

        What computes across rows, and all that needs it, runs undivided, with a warning where
        that costs something; see ``graph_rows`` for how it is found.

        Functions of the user's own (``K.function``, a loss of their own training loop) run the
        undivided graph.
        """
        from . import functions, step_order  # here for start-up time

        inputs = getattr(model, "inputs", None) or ()
        kinds = {"nested_row_splits": "ragged", "assign": "a variable"}
        found = [kinds[name] for name in kinds if any(hasattr(each, name) for each in inputs)]
        if len(devices) > 1 and found:
            _keras.warn_not_divided(model, f"an input of it is {found[0]}", devices[0])
            devices = devices[:1]
        current = vars(model).get("_compat_functions")
        if current is not None:
            if list(current.devices) == list(devices):
                return model
            with _keras.rebuilding_functions(_keras.inner_model(model)):
                current.uninstall()
        if len(devices) > 1:
            variables.warn_of_reference_variables(model)
            _keras.warn_of_placed_parts(model, self.placed_parts(model), devices)
        if len(devices) > 1 or step_order.counts_without_order(model):
            with _keras.rebuilding_functions(_keras.inner_model(model)):
                functions.ReplicatedGraphFunctions(model, devices)
        return model

    placed_parts = staticmethod(placed_parts)

    def verify(self, model, verification):
        from . import functions  # here for start-up time

        functions.verify(model, verification)

    def executed(self, model):
        """Where the session places the operations that the first step runs: see ``executions``."""
        from . import executions, functions  # here for start-up time

        return executions.by_device(model, functions.devices_of(model) or self.devices())

    def profiled(self):
        """From the statistics that sessions record of each run: see ``timeline``."""
        from . import timeline  # here for start-up time

        return timeline.profiled(v1_names(self.import_framework()), self.devices())

    # Ranks ------------------------------------------------------------------------------------

    def launcher(self, job):
        from ..._ranks.engines import horovod  # here for start-up time

        return horovod.launcher(job, self.framework)

    def join(self, place):
        """Have gradients be marked that a script computes before ``parallelize()``."""
        from . import ranks  # here for start-up time

        ranks.watch_gradients()

    def distribute(self, model, place):
        """See ``ranks``."""
        from . import ranks  # here for start-up time

        return ranks.distribute(model, place)

    # Devices of parts of a model --------------------------------------------------------------

    def device(self, device):
        """Place on ``device`` what is built inside, and its gradients; variables where first used.

        A layer that is called on several devices keeps its weights where it was called first.
        Within, a loop (an RNN) takes the values that weights have before it.
        """
        tf = v1_names(self.import_framework())
        return placed_on(tf, "/device:CPU:0" if device == "cpu" else device)


def _to_train_on(session, simulated):
    # XLA_GPU and XLA_CPU are further names for the same devices (keras#11644).
    def named(kind):
        found = [device.name for device in session.list_devices() if device.device_type == kind]
        return [name[name.index("/device:") :] for name in found]

    return named("GPU") or named("CPU")[: max(1, simulated)]


def _may_list_gpus(tf):
    """Whether there may be GPUs: on Linux CUDA has none without the driver's library."""
    if not tf.test.is_built_with_cuda():
        return getattr(tf.test, "is_built_with_rocm", lambda: True)()
    if not sys.platform.startswith("linux"):
        return True
    try:
        ctypes.CDLL("libcuda.so.1")
        return True
    except OSError:
        return False


backend = TensorFlow1()
