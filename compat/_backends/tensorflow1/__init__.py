"""TensorFlow 1, under standalone Keras 2 or its own ``tf.keras``.

Configuring: TensorFlow 1 takes its devices and its memory from each session's ``ConfigProto``,
and a script makes sessions in many places. So every session begins with one configuration.

Parallelizing: Keras 2 builds a static graph, so replicas are made in the graph, which is alike in
every Keras. Keras builds the model, its loss and its metrics for one device. When it then makes a
function of tensors (by ``_make_train_function`` and its two siblings), the *batch part* of the
graph (the operations between the model's inputs and outputs) is replaced:

- it is copied once per device, and each copy reads its shard of the batch;
- a tensor that leaves the batch part, towards outputs, loss, metrics or updates, is replaced by the
  concatenated rows of the copies, so that all of these see the whole batch, and state is written
  once a step;
- values of the whole batch that it needs, such as means, are reduced over the copies; other
  cross-batch operations are not a part of it, as far as the graph shows, except BatchNorm;
- gradients are computed on the devices of the operations that they differentiate.

The original batch part stays in the graph, never runs, and is the one that the model's layers,
``summary``, ``get_config`` and ``save`` refer to.
"""

import os
import sys

from ... import _keras, errors
from ..._configuration import device_choice, gpu_selection
from ..._runtime import synchronized
from ...backend import Backend
from .._tensorflow.graph import v1_names
from . import configuration, resource_variables
from .device_scope import placed_on, placed_parts


class TensorFlow1(Backend):
    """The backend of TensorFlow 1."""

    name = "tensorflow1"
    framework = "tensorflow"
    distributions = ("tensorflow", "tensorflow-cpu", "tensorflow-gpu")
    extra = "tensorflow1"
    options = configuration.OPTIONS
    synchronizes = ("devices", "ranks")
    variables = ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER", "TF_FORCE_GPU_ALLOW_GROWTH")

    def accepts(self, version):
        """Return whether a version is of TensorFlow 1."""
        return version.startswith("1.")

    def initialised(self):
        """Return why GPUs may be initialized already, or None."""
        if "tensorflow" in sys.modules:
            return "tensorflow is imported, and may have asked CUDA for its GPUs"
        return None

    # Configuring ------------------------------------------------------------------------------

    def configure(self, settings):
        """Give all sessions one configuration; return lines for the report, and warnings."""
        late = self.initialised()
        tf = v1_names(self.import_framework())
        config = configuration.session_config(tf, settings, late)
        configuration.ensure_no_other_session(tf, config)
        configuration.set_session_defaults(lambda: config)
        configuration.release_callables_of_open_sessions_alone()
        self.kept["settings"] = settings
        if settings.devices.undecided is not None:
            gpus = [name for name in self.devices() if "GPU" in name]
            settings.devices.settle(len(gpus), restricted=True)
            if gpus and settings.memory and settings.memory.size:
                raise configuration.memory_total_unknown(settings.memory)
            if not gpus:
                config.CopyFrom(configuration.session_config(tf, settings, late))
        shown = " ".join(str(config).split())
        lines = [f"every session, of Keras and others: ConfigProto {shown}"]
        if settings.memory and not settings.devices.gpus:
            lines.append("memory: no GPU is used, so nothing was set")
        lines.append(resource_variables.switch_resource_variables_on(tf))
        return lines, []

    def devices(self):
        """Return the names of the GPUs that sessions use, or of CPUs."""
        tf = v1_names(self.import_framework())
        settings = self.kept.get("settings")
        simulated = settings.devices.simulated if settings else 0
        if settings is not None:
            on_cpu = not settings.devices.gpus and "device_count" not in settings.options
            # Without a session: a process that has made one hangs after a fork.
            if on_cpu and (simulated or not configuration.may_list_gpus(tf)):
                return [f"/device:CPU:{i}" for i in range(max(1, simulated))]
            # A session on an empty graph initializes GPUs exactly as the user's will.
            with tf.Session(graph=tf.Graph()) as session:
                return configuration.devices_to_train_on(session, simulated)
        for session in map(configuration.session_of, configuration.imported_keras_packages()):
            if session is not None:
                return configuration.devices_to_train_on(session, simulated)
        # A session would initialize every GPU, with other memory settings than the user's
        # (keras#8353). So the driver is queried.
        chosen = device_choice.choose(gpu_selection.parse_gpus(None), None, os.environ)
        gpus = len(chosen) if tf.test.is_built_with_cuda() else 0
        return [f"/device:GPU:{i}" for i in range(gpus)] or ["/device:CPU:0"]

    # Parallelizing ----------------------------------------------------------------------------

    def synchronizes_on_ranks(self, layer):
        """Return whether a layer can use the statistics of the whole batch on several ranks."""
        from . import ranked_batch_norm  # here for start-up time

        return ranked_batch_norm.is_synchronizable(layer)

    def parallelize(self, model, devices):
        """Run a model on devices, and return the same object; see the docstring of the module.

        Raises:
            UnsupportedError: in a loop, an operation's gradient is by ``tf.custom_gradient``; when
                Keras makes the model's functions.

        BatchNorm normalizes each replica's rows by their own statistics, and its moving
        averages take the mean of the replicas' updates, once a step; where it is synchronized, it
        uses the statistics of the whole batch. Dropout masks of replicas are independent. A
        stateful RNN keeps one state per row of the batch, as on one device: each replica reads and
        writes the states of its rows.

        Sums, means and extremes over the batch are reduced over the replicas. Other cross-batch
        operations, and all that depend on them, run unsplit, with a warning where that costs
        something; ``propagation`` infers which these are.

        User-defined functions (``K.function``, the loss of a custom training loop) run the original
        graph.
        """
        from . import optimizer_order, replicated_function  # here for start-up time

        inputs = getattr(model, "inputs", None) or ()
        kinds = {"nested_row_splits": "ragged", "assign": "a variable"}
        refused = [kinds[name] for name in kinds if any(hasattr(x, name) for x in inputs)]
        if len(devices) > 1 and refused:
            _keras.warn_left_unsplit(model, f"an input of it is {refused[0]}", devices[0])
            devices = devices[:1]
        current = vars(model).get("_compat_functions")
        if current is not None:
            is_same = current.is_synchronized == synchronized.is_asked(model)
            if is_same and list(current.devices) == list(devices):
                return model
            with _keras.rebuilding_functions(_keras.inner_model(model)):
                current.uninstall()
        if len(devices) > 1:
            resource_variables.warn_of_reference_variables(model)
            _keras.warn_of_placed_parts(model, self.placed_parts(model), devices)
        if len(devices) > 1 or optimizer_order.counts_without_order(model):
            with _keras.rebuilding_functions(_keras.inner_model(model)):
                replicated_function.ReplicatedGraphFunctions(model, devices)
        return model

    placed_parts = staticmethod(placed_parts)

    def verify(self, model, verification):
        """Verify the first steps of a model from now on; with None, no longer."""
        from . import verification as verifying  # here for start-up time

        verifying.verify(model, verification)

    def executed(self, model):
        """Record where a session executes the operations of the first step; see ``executions``."""
        from . import executions, replicated_function  # here for start-up time

        devices = replicated_function.devices_of(model) or self.devices()
        return executions.executed(model, devices)

    def profiled(self):
        """Record operations from the statistics of each run of a session; see ``profiler``."""
        from . import profiler  # here for start-up time

        return profiler.profiled(self.devices())

    # Ranks ------------------------------------------------------------------------------------

    def launcher(self, job):
        """Return the command that starts ranks by Horovod."""
        from ..._ranks.engines import horovod  # here for start-up time

        return horovod.launcher(job, self.framework)

    def join(self, place):
        """Mark gradients from now on that a script computes before ``parallelize()``."""
        from . import ranks  # here for start-up time

        ranks.watch_gradients()

    def distribute(self, model, place):
        """Make a model one of the ranks'; see ``ranks``."""
        from . import ranks  # here for start-up time

        return ranks.distribute(model, place)

    # Devices of parts of a model --------------------------------------------------------------

    def device(self, device):
        """Place operations that are built in a block, and their gradients, on a device.

        A layer that is called on several devices keeps its weights where it was called first.
        Within, a loop (an RNN) takes the values that weights have before it.
        """
        tf = v1_names(self.import_framework())
        return placed_on(tf, "/device:CPU:0" if device == "cpu" else device)


backend = TensorFlow1()
