"""MXNet, under keras-mxnet (Keras 2.2.4 as its last release has it) and by itself.

``configure`` fixes the context of models built later, and mends two faults of keras-mxnet that
make a model lose its weights; ``parallelize`` gives a Keras model replicas (class ``_Replicas``),
or a model of MXNet's own (``_mxnet_gluon.py``, ``_mxnet_module.py``).
"""

import contextlib
import os
import sys
import warnings
import weakref
from numbers import Number

from .. import _detect, _keras, _replicas, errors
from ..backend import Backend
from . import _mxnet_gluon, _mxnet_graph, _mxnet_module, _mxnet_statistics

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, Iterator, List, Mapping, Optional, Sequence

    from .._launchers import Ranks
    from .._ranks import Launch
    from .._settings import Settings
    from .._verification import Verification

# Options of configure_gpu(), and the variables that MXNet reads for them when it is imported
# (its documentation, "Environment Variables").
_WORKERS = {
    "cpu_worker_threads": "MXNET_CPU_WORKER_NTHREADS",
    "gpu_worker_threads": "MXNET_GPU_WORKER_NTHREADS",
}
_RESERVE = "MXNET_GPU_MEM_POOL_RESERVE"
_UNUSED = "compat_unused"  # a variable that has a gradient, and that nothing depends on


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
    distributions = (
        ("mxnet", "mxnet-mkl", "mxnet-native")
        + tuple("mxnet-cu" + cuda for cuda in "117 116 115 114 113 112 110 102 101 100".split())
        + tuple("mxnet-cu{}mkl".format(cuda) for cuda in "102 101 100 92 91 90 80 75".split())
        + tuple("mxnet-cu" + cuda for cuda in "92 91 90 80 75".split())
    )
    extra = "mxnet"
    options = tuple(sorted(_WORKERS))
    variables = (
        "CUDA_VISIBLE_DEVICES",
        "MXNET_CPU_WORKER_NTHREADS",
        "MXNET_GPU_WORKER_NTHREADS",
        "MXNET_GPU_MEM_POOL_TYPE",
        "MXNET_GPU_MEM_POOL_RESERVE",
        "MXNET_ENGINE_TYPE",
        "DMLC_ROLE",
    )

    def __init__(self):
        self._names = None  # type: Optional[List[str]]  # the devices configured

    # Configuring ------------------------------------------------------------------------------

    def environ(
        self, settings: "Settings", environ: "Mapping[str, str]"
    ) -> "Dict[str, Optional[str]]":
        wanted = {
            variable: _number(option, settings.options[option])
            for option, variable in sorted(_WORKERS.items())
            if option in settings.options
        }
        if settings.memory is not None and settings.memory.fraction:
            wanted[_RESERVE] = str(int(round(100 * (1 - settings.memory.fraction))))
        changed = {name: value for name, value in wanted.items() if environ.get(name) != value}
        return dict(settings.devices.environ(environ), **changed)

    def initialised(self) -> "Optional[str]":
        return "mxnet is imported, and reads its variables then" if _imported() else None

    def configure(self, settings: "Settings") -> "List[str]":
        missing = self.environ(settings, os.environ)
        late = {name: value for name, value in missing.items() if not name.startswith("CUDA_")}
        if late:
            changes = ", ".join("{}={}".format(*item) for item in sorted(late.items()))
            raise errors.too_late(
                self.framework,
                "it reads {} only when it is imported, and is imported already".format(changes),
                "Call it before the first `import mxnet` or `import keras`.",
            )
        mx = self.import_framework()
        self._names = self._contexts(mx, settings.devices)
        lines = ["models not parallelized run on {}".format(self._names[0])]
        if settings.devices.gpus and not _visible_gpus(mx):
            lines.append(_no_gpu())
        elif settings.devices.gpus and not settings.devices.are_shown_by(os.environ):
            lines.append("other GPUs stay visible: mxnet was imported before")
        if settings.memory is not None:
            lines.append(_memory_line(settings))
        if "keras" in _keras.kerases(self):
            lines += self._mend_keras()
        return lines

    def _contexts(self, mx, devices):
        if devices.undecided is not None:
            devices.settle(_visible_gpus(mx))
        if devices.simulated:
            return ["cpu({})".format(index) for index in range(devices.simulated)]
        visible = _visible_gpus(mx) if devices.gpus else 0
        ids = [index for index in devices.ordinals(os.environ) if index < visible]
        return ["gpu({})".format(index) for index in ids] or ["cpu(0)"]

    def devices(self) -> "List[str]":
        if self._names is None:  # nothing was configured: what MXNet sees
            mx = self.import_framework()
            self._names = ["gpu({})".format(i) for i in range(_visible_gpus(mx))] or ["cpu(0)"]
        return list(self._names)

    def problems(self, environ: "Mapping[str, str]") -> "List[str]":
        found = []
        if environ.get("DMLC_ROLE") in ("server", "scheduler"):
            found.append(
                "DMLC_ROLE={}: `import mxnet` starts a {} and never returns.".format(
                    environ["DMLC_ROLE"], environ["DMLC_ROLE"]
                )
            )
        h5py = _detect.distribution_version("h5py")
        if h5py and _detect.release(h5py) >= (3,):
            found.append(
                "h5py {} is installed: load_model() of keras-mxnet needs h5py<3.".format(h5py)
            )
        return found

    # Mending keras-mxnet ----------------------------------------------------------------------

    def _mend_keras(self):
        """Set the default context, and mend what makes models lose weights; once per process.

        Returns:
            Lines for the report.
        """
        import keras
        from keras.backend import mxnet_backend

        if not isinstance(getattr(mxnet_backend, "_compat_models", None), _Models):
            mxnet_backend._compat_models = _Models(mxnet_backend)
            mxnet_backend.set_model = mxnet_backend._compat_models.add
            find_context = mxnet_backend._get_mxnet_context

            def get_mxnet_context(context):
                if context is None and not mxnet_backend._CURRENT_SCOPE_CTX:
                    return [_context(self.devices()[0])]
                return find_context(context)

            def set_value(x, value):  # Keras' own makes float32, and fails under another floatx
                value = [value] if isinstance(value, Number) else value
                x.bind(mxnet_backend.mx.nd.array(value, dtype=x.dtype))

            mxnet_backend._get_mxnet_context = get_mxnet_context
            mxnet_backend.set_value = keras.backend.set_value = set_value
            _keep_optimizer_state(keras.optimizers.SGD.__mro__[1])
        return [
            "keras-mxnet mended: weights are read and set for every model, not only for the one "
            "compiled last,",
            "and for RNN layers not unrolled; the optimizer's state is saved with its model",
        ]

    # Parallelizing ----------------------------------------------------------------------------

    def is_native(self, model: "Any") -> bool:
        return _is_block(model) or _is_module(model)

    def parallelize(self, model: "Any", devices: "Sequence[str]") -> "Any":
        """Run ``model`` on ``devices``; see ``_Replicas`` for what that means.

        keras-mxnet's own several contexts are not used: they sum gradients of shard means, drop
        weights set after compile, and fail on a batch smaller than their number.
        """
        contexts = [_context(name) for name in devices]
        if _is_block(model):
            _mxnet_gluon.parallelize(model, contexts)
            return model
        if _is_module(model):
            _mxnet_module.parallelize(model, contexts)
            return model
        self._mend_keras()
        if len(contexts) > 1 and _groups(model):
            raise errors.device_with_replicas(model.name)
        if len(contexts) > 1 and _has_size_of_batches(model):
            size = model.inputs[0].shape[0]
            _keras.warn_not_divided(model, "its batch size is fixed to {}".format(size), devices[0])
            contexts = contexts[:1]
        replicas = getattr(model, "_compat_replicas", None)
        if replicas is not None and len(contexts) > 1:
            replicas.move(contexts)
        elif replicas is not None:
            _run_plain(model, contexts[0], replicas.remove())
        elif len(contexts) > 1:
            _Replicas(model, contexts)
        elif model._context != contexts:
            model._sync_weights()
            _run_plain(model, contexts[0], _updater_of(model))
        return model

    # Ranks ------------------------------------------------------------------------------------

    def verify(self, model: "Any", verification: "Optional[Verification]") -> None:
        if _is_module(model):
            return super().verify(model, verification)
        if _is_block(model):
            from . import _mxnet_native_verification

            _mxnet_native_verification.VerifiedForward.install_on(model, verification)
            return None
        from . import _mxnet_verification

        if getattr(model, "_compat_replicas", None) is None:
            verification = None  # it runs on one device
        _mxnet_verification.VerifiedStep.install_on(model, verification)

    def launcher(self, launch: "Launch") -> "List[str]":
        from . import _horovod

        return _horovod.launcher(launch, self.framework)

    def distribute(self, model: "Any", ranks: "Ranks") -> "Any":
        """See ``_mxnet_ranks``; for models of Keras."""
        if self.is_native(model):
            raise errors.unsupported(
                self.name,
                "train a {} of MXNet's own as one of several ranks".format(type(model).__name__),
                "Use a model of Keras, or start the script without a launcher.",
            )
        from . import _mxnet_ranks

        engine = _mxnet_ranks.Horovod.join(ranks)
        self.parallelize(model, self.devices()[:1])
        return _mxnet_ranks.distribute(model, engine)

    # Placing parts of a model -----------------------------------------------------------------

    @contextlib.contextmanager
    def device(self, device: str) -> "Iterator[None]":
        """Build Keras layers, symbols, parameters and arrays for ``device``.

        What Keras layers compute gets the attribute ``ctx_group``, which names the device, and
        which the executors of the model follow; MXNet copies between them, and the backward pass
        runs where the forward pass did. Arrays, and Gluon's parameters that are initialised
        here, lie on the device themselves; a symbol of one's own needs ``group2ctxs=`` in its
        ``Module``, with the names of devices as keys.
        """
        import mxnet as mx

        if "keras" in _keras.kerases(self):
            self._mend_keras()
        name = "cpu(0)" if device == "cpu" else device
        with mx.AttrScope(ctx_group=name), _context(name):
            yield


backend = MXNet()


def _is_block(model):
    return _is_a(model, "mxnet.gluon.", "Block")


def _is_module(model):
    return _is_a(model, "mxnet.module.", "BaseModule")


def _is_a(model, prefix, name):
    return any(c.__name__ == name and c.__module__.startswith(prefix) for c in type(model).__mro__)


def _imported():
    return "mxnet" in sys.modules


def _context(name):
    """The context that MXNet prints as ``name``, such as ``cpu(1)``."""
    import mxnet as mx

    kind, _, index = name.rstrip(")").partition("(")
    return mx.Context(kind, int(index))


def _number(option, value):
    if isinstance(value, bool) or not hasattr(value, "__index__") or value < 1:
        raise errors.invalid_number_option(option, value)
    return str(value.__index__())


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


def _memory_line(settings):
    memory = settings.memory
    if memory.grow:
        return "memory: MXNet takes it as it is needed, always"
    if memory.size:
        settings.warnings.append(errors.no_memory_size("mxnet", memory))
        return "memory: no limit (MXNet has none by size)"
    return "memory: cached memory is given back while less than {:.0%} of a GPU is free".format(
        1 - memory.fraction
    )


# Faults of keras-mxnet ------------------------------------------------------------------------


class _Models:
    """All compiled models, where keras-mxnet keeps only the one compiled last (``_MODEL``).

    With the last one only, ``get_weights()`` of any other model misses what was trained, and
    ``set_weights()`` on it is overwritten by the values trained before. This object stands in
    its place and passes on to all models the four names that keras-mxnet uses.
    """

    def __init__(self, mxnet_backend):
        self._backend = mxnet_backend
        self._models = weakref.WeakSet()

    def add(self, model):
        """Replaces ``set_model``, which is called when a model was compiled, or will predict."""
        before = self._backend._MODEL
        if before is not self:  # at first, and after clear_session() has set it to None
            self._sync_weights()
            # Names start again after clear_session(): not to be taken for those of old models.
            self._models = weakref.WeakSet([] if before is None else [before])
            self._backend._MODEL = self
        _add_missing_weights(model)
        _place(model, model._module)
        self._models.add(model)

    def _sync_weights(self):
        dirty = [model for model in self._models if model._weights_dirty]
        if any(model._auxs for model in dirty):
            _mxnet_statistics.wait_for_updates()
        for model in dirty:
            model._sync_weights()

    @property
    def _args(self):
        return {name for model in self._models for name in model._args}

    @property
    def _auxs(self):
        return {name for model in self._models for name in model._auxs}

    def _set_weights(self, args, auxs):
        for model in list(self._models):
            mine = [
                {name: given[name] for name in given if name in held}
                for given, held in ((args, model._args), (auxs, model._auxs))
            ]
            if any(mine):
                model._set_weights(*mine)


def _add_missing_weights(model):
    """Tell a model the weights that keras-mxnet did not find in its graph.

    It walks the graph by the arguments of Keras functions, and misses what the loop of an RNN
    layer that is not unrolled takes from outside: such a layer began with zeros whatever its
    initialiser, and ``get_weights()`` and ``save()`` missed what it had learnt.
    """
    for weight in model.weights:
        for names, held in ((model._arg_names, model._args), (model._aux_names, model._auxs)):
            if weight.name in (names or ()) and weight.name not in held:
                held[weight.name] = weight.get_bind_values()[weight.name]


def _groups(model):
    """The names of the devices that parts of a Keras model were built for."""
    symbols = (model._train_mxnet_symbol, model._pred_mxnet_symbol)
    attributes = [a for s in symbols if s is not None for a in s.attr_dict().values()]
    return {a["__ctx_group__"] for a in attributes if "__ctx_group__" in a}


def _place(model, module):
    """Let a module's executors, which are yet to be bound, run parts where they were built for."""
    groups = _groups(model)
    if not groups:
        return
    if getattr(model, "_compat_replicas", None) is not None:
        raise errors.device_with_replicas(
            model.name
        )  # a subclass, parallelized before it was built
    if _mxnet_graph.OTHERS not in groups:
        for name in ("_train_mxnet_symbol", "_test_mxnet_symbol", "_pred_mxnet_symbol"):
            symbol = getattr(model, name)
            if symbol is not None:
                setattr(model, name, _mxnet_graph.copied_between_groups(symbol))
    contexts = {name: _context(name) for name in groups - {_mxnet_graph.OTHERS}}
    module._group2ctxs = dict(contexts, **{_mxnet_graph.OTHERS: model._context[0]})

    def bind(**arguments):  # MXNet 1.9 rewrites a graph for inference, and forgets the groups
        type(module).bind(module, **dict(arguments, for_training=True))

    def switch_bucket(key, data_shapes, label_shapes=None):
        bound = module._buckets.get(key)
        if bound is not None and key != module._default_bucket_key:
            if [d.shape for d in bound.data_shapes] != [d.shape for d in data_shapes]:
                del module._buckets[key]  # bound anew: reshaping forgets the groups on MXNet 1.5
        type(module).switch_bucket(module, key, data_shapes, label_shapes)

    module.bind, module.switch_bucket = bind, switch_bucket


def _keep_optimizer_state(optimizer_class):
    """Give keras-mxnet's optimizers the ``weights`` that ``save()`` and ``load_model()`` use.

    Its own are always empty, so momentum and step count were lost on the way (keras#9197). The
    first array holds the step count and Nadam's schedule; then come the arrays of each weight.
    """
    import mxnet as mx

    def arrays(self):
        states = getattr(self, "_compat_states", {})
        flat = [a for index in sorted(states) for a in _flat(states[index])]
        restored = [mx.nd.array(value) for value in getattr(self, "_compat_restored", ())]
        if not self.num_update:
            return []
        return [mx.nd.array([self.num_update, getattr(self, "m_schedule", 1.0)])] + flat + restored

    def set_weights(self, weights):
        steps, schedule = weights[0] if len(weights) else (0, 1.0)
        self.num_update = self.begin_num_update = int(steps)
        if hasattr(self, "m_schedule"):
            self.m_schedule = float(schedule)
        for counts in self._all_index_update_counts.values():
            counts.clear()
        restored = list(weights[1:])
        for _, state in sorted(getattr(self, "_compat_states", {}).items()):
            for array in _flat(state):
                array[:] = restored.pop(0) if restored else 0
        self._compat_restored = restored  # for states not made yet, in their order

    def create_state_multi_precision(self, index, weight):
        state = super(optimizer_class, self).create_state_multi_precision(index, weight)
        for array in _flat(state):
            if getattr(self, "_compat_restored", ()):
                array[:] = self._compat_restored.pop(0)
        self.__dict__.setdefault("_compat_states", {})[index] = state
        return state

    optimizer_class.weights = property(arrays, lambda self, value: None)
    optimizer_class.set_weights = set_weights
    optimizer_class.create_state_multi_precision = create_state_multi_precision


def _flat(state):
    """The arrays of an optimizer's state: an array, a tuple of states, or None."""
    if state is None:
        return []
    if isinstance(state, (tuple, list)):
        return [array for part in state for array in _flat(part)]
    return [state]


# Moving between plain and parallel ------------------------------------------------------------


def _updater_of(model):
    """The updater, which holds the optimizer's state, of a plain model; None before training."""
    module = model._module if model.compiled else None
    if module is None or not module.optimizer_initialized:
        return None
    return module._curr_module._updater


def _take_to(updater, context):
    """Move the optimizer's state and step counts to ``context``."""
    optimizer = updater.optimizer
    updater.states = {
        index: updater.sync_state_context(state, context) for index, state in updater.states.items()
    }
    # If a weight was placed elsewhere, the updater takes its state there.
    updater.states_synced = dict.fromkeys(updater.states, False)
    optimizer._compat_states = updater.states
    # Steps are counted per device id: Adam would begin anew on another one.
    optimizer._all_index_update_counts[context.device_id] = dict(optimizer._index_update_count)
    optimizer._set_current_context(context.device_id)


def _run_plain(model, context, updater):
    """Let a model run as Keras alone would, on one context, with the optimizer's state."""
    import mxnet as mx

    model._context = [context]
    if not model.compiled:
        return  # Keras makes a module for each prediction
    module = mx.mod.BucketingModule(
        sym_gen=model._module._sym_gen,
        default_bucket_key="pred",
        context=[context],
        fixed_param_names=model._fixed_weights,
    )
    model._module = module
    _place(model, module)
    if updater is None:
        return
    _take_to(updater, context)

    def init_optimizer(**arguments):  # a module takes no state before it is bound to shapes
        mx.mod.BucketingModule.init_optimizer(module, **arguments)
        module._curr_module._updater = updater

    module.init_optimizer = init_optimizer


# Replicas -------------------------------------------------------------------------------------


class _Replicas:
    """The replicas of one model, each on its own context.

    Keras' graph of a phase (train, test, predict) is cut in two. The *body*, all that the
    model's outputs depend on, runs on each context with its shard of the batch. The *head*, the
    rest, runs once, on the first context, with the whole batch gathered from there: losses,
    metrics, penalties, masks' means. Its gradient at the cut is what the bodies go back from.
    So any loss, also one that compares rows with one another, and every metric is that of one
    device, however uneven the shards; summed over the replicas, the gradients are, too. One
    optimizer updates the first context's weights, which are then copied to the others.

    Differs from one device:

    - BatchNormalization normalises each shard by its own statistics. The moving averages take
      one step to the mean of the replicas' new values, weighted by shard size, as
      tf.distribute.MirroredStrategy does.
    - Dropout draws an independent mask in each replica.

    What computes across the rows of a batch, and all that follows from it, is the head's, with a
    warning, since it runs on one device. Sums and other states that layers update are the head's,
    too. An operation of MXNet's with states other than moving averages is refused.

    Stateful RNNs do not differ: each replica has the states of its rows. What no output depends
    on (a layer's own loss or averages) is computed by the head. ``save_mxnet_model()`` needs a
    module that Keras has bound: give the plain behaviour back and predict once before.

    keras-mxnet calls a model's own methods at a few points. These are replaced on the instance,
    so it stays the same object, and compile(), whenever it comes, is followed at the next batch.
    """

    METHODS = (
        "compile",
        "_make_train_function",
        "_make_test_function",
        "_make_predict_function",
        "_sync_weights",
        "_set_weights",
    )

    def __init__(self, model, contexts):
        from keras.backend import mxnet_backend as K

        self.model = model
        self._warned = False
        self._source = None  # the symbol, or the outputs, that arrays and phases were made for
        if model.compiled:
            K.set_model(model)  # it may have been compiled before keras-mxnet was mended
            self._source = model._pred_mxnet_symbol
        model._sync_weights()
        self._updater = _updater_of(model)
        self._forget()
        self.move(contexts)
        for name in self.METHODS:
            setattr(model, name, getattr(self, name))
        model._compat_replicas = self

    def move(self, contexts):
        """Go on with other contexts."""
        self._sync_weights()
        self.contexts = contexts
        if self._updater is not None:
            _take_to(self._updater, contexts[0])
        self._forget()

    def remove(self):
        """Leave the model without replicas, and return the updater, or None."""
        self._sync_weights()
        self._follow()
        for name in self.METHODS + ("_compat_replicas",):
            delattr(self.model, name)
        return self._updater

    @contextlib.contextmanager
    def undivided(self):
        """Within, the first replica runs the whole batch."""
        self._follow()
        self._hold_arrays()
        kept = self.contexts, self.args, self.auxs, self.phases
        self.contexts, self.phases = self.contexts[:1], self._undivided_phases
        self.args, self.auxs = self.args[:1], self.auxs[:1]
        try:
            yield
            self._sync_weights()
        finally:
            self.contexts, self.args, self.auxs, self.phases = kept
            self._stale = True

    def _forget(self):
        """Drop arrays and executors; they are made again when a batch comes."""
        self.args = self.auxs = None  # of weights and auxiliary states by name, for each replica
        self.phases = {}
        self._undivided_phases = {}
        self._stale = False  # whether Keras' variables have newer values than the arrays

    def _pairs(self, replica):
        """A replica's arrays, each with that of Keras' variable."""
        model = self.model
        for mine, keras in ((self.args, model._args), (self.auxs, model._auxs)):
            for name, array in mine[replica].items():
                yield array, keras[name]

    # Called by Keras ----------------------------------------------------------------------------

    def compile(self, *args, **kwargs):
        self._sync_weights()  # compiling begins with the values that Keras has
        return type(self.model).compile(self.model, *args, **kwargs)

    def _make_train_function(self):
        self.model.train_function = self._train

    def _make_test_function(self):
        self.model.test_function = self._test

    def _make_predict_function(self):
        self.model.predict_function = self._predict

    def _sync_weights(self):
        """Bring what was trained to the arrays of Keras' variables, where Keras reads it."""
        if self.args is None or not self.model._weights_dirty:
            return
        for mine, keras in self._pairs(0):
            mine.copyto(keras)
        self.model._weights_dirty = False

    def _set_weights(self, arg_params=None, auxs_params=None):
        """Take values for Keras' variables; the replicas take them before the next batch."""
        self._sync_weights()
        for given, keras in ((arg_params, self.model._args), (auxs_params, self.model._auxs)):
            for name, value in (given or {}).items():
                keras[name][:] = value
        self._stale = True

    def _train(self, inputs):
        self.model._check_trainable_weights_consistency()
        phase = self._prepared("train", inputs)
        results = phase.forward(inputs, is_train=True)
        phase.backward()
        self._update_weights(phase)
        self._average_auxiliary_states(phase)
        self._assign(phase.updates)
        self.model._weights_dirty = True
        return [array.asnumpy().mean() for array in results]

    def _test(self, inputs):
        phase = self._prepared("test", inputs)
        results = phase.forward(inputs, is_train=False)
        self._assign(phase.updates)
        return [array.asnumpy().mean() for array in results]

    def _predict(self, inputs):
        phase = self._prepared("predict", inputs)
        results = phase.forward(inputs, is_train=False)
        self._assign(phase.updates)
        return [array.asnumpy() for array in results]

    # Arrays -------------------------------------------------------------------------------------

    def _follow(self):
        """Begin anew where the model was compiled since the last batch, or its layers changed."""
        from keras.backend import mxnet_backend as K

        model = self.model
        if model.compiled:
            if self._source is not model._pred_mxnet_symbol:
                self._source, self._updater = model._pred_mxnet_symbol, None
                self._forget()
        elif self._source != model.outputs:
            model._create_predict_module()
            self._source = list(model.outputs)
            self._forget()
            K.set_model(model)

    def _hold_arrays(self):
        """Make each replica's arrays of the weights and auxiliary states."""
        model = self.model
        if self.args is None:
            states = _state_names(model)
            weights = {key: array for key, array in model._args.items() if key not in states}
            self.args, self.auxs = (
                [{key: array.copyto(c) for key, array in held.items()} for c in self.contexts]
                for held in (weights, model._auxs)
            )
            self._stale = False

    def _prepared(self, name, inputs):
        """The phase of that name, with executors for these inputs and current weights."""
        self._follow()
        self._hold_arrays()
        if self._stale:
            for replica in range(len(self.contexts)):
                for mine, keras in self._pairs(replica):
                    keras.copyto(mine)
        self._stale = False
        if name not in self.phases:
            self.phases[name] = _Phase(self, name, inputs)
        self.phases[name].bind(inputs)
        return self.phases[name]

    def _update_weights(self, phase):
        import mxnet as mx

        if self._updater is None:
            self._updater = mx.optimizer.get_updater(self.model.optimizer)
        weights, first = self.args[0], self.contexts[0]
        numbers, gradients = [], []
        for number, name in enumerate(phase.parameters):  # numbered as a plain module does
            parts = [executor.grad_dict.get(name) for executor in phase.executors()]
            parts = [part.as_in_context(first) for part in parts if part is not None]
            if parts:
                numbers.append(number)
                gradients.append(mx.nd.add_n(*parts))
        names = [phase.parameters[number] for number in numbers]
        if names:
            self._updater(numbers, gradients, [weights[name] for name in names])
        for others in self.args[1:]:
            for name in names:
                weights[name].copyto(others[name])

    def _average_auxiliary_states(self, phase):
        """Moving averages: one update, to the mean of the replicas' weighted by shard size."""
        _mxnet_statistics.unite(
            [[auxs[name] for auxs in self.auxs] for name in phase.body.list_auxiliary_states()],
            _replicas.sizes(phase.rows, len(self.contexts)),
        )
        if phase.head is not None and phase.head.aux_dict:  # of the whole batch
            _mxnet_statistics.wait_for_updates()
            for name, array in phase.head.aux_dict.items():
                for auxs in self.auxs[1:]:
                    array.copyto(auxs[name])

    def warn_of_whole_batches(self, operation):
        """Say, once, that the devices do not share all of the work."""
        if operation is not None and not self._warned:
            self._warned = True
            text = errors.across_rows(operation, self.model.name, self.contexts[0])
            warnings.warn(text, errors.CompatWarning, stacklevel=2)

    def _assign(self, updates):
        """Store new values of variables that layers update: RNN states, a layer's own averages."""
        for name, value in updates:
            if name in self.args[0]:
                for args in self.args:
                    value.copyto(args[name])
                self.model._weights_dirty = True
            else:
                value.copyto(self.model._args[name])


def _has_size_of_batches(model):
    """Whether a model's graph gives one row as many rows as its inputs' ``batch_shape`` has.

    keras-mxnet writes that size into some operations, such as those of ``Conv1D``, and not into
    others: a stateful RNN can be cut. Where sizes other than the batch's are unknown, it is not
    tried.
    """
    import mxnet as mx

    if not model.inputs:  # it is built by its first batch
        return False
    if any(tensor.shape[0] in (None, 1) or None in tensor.shape for tensor in model.inputs):
        return False
    states = [variable for variable, _ in model.state_updates]
    values = model.outputs + [value for _, value in model.state_updates]
    shapes = {held.name: (1,) + tuple(held.shape[1:]) for held in model.inputs + states}
    symbol = mx.sym.Group([value.symbol for value in values])
    names = symbol.list_arguments()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given = {name: shape for name, shape in shapes.items() if name in names}
            _, made, _ = symbol.infer_shape(**given)
    except mx.base.MXNetError:
        return True
    return made is None or any(shape[0] != 1 for shape in made)


def _state_names(model):
    """The variables that hold stateful layers' states, one row for each row of the batch."""
    return {variable.name for variable, _ in model.state_updates}


class _Phase:
    """One of Keras' graphs (train, test or predict) cut into body and head, and its executors.

    Attributes:
        bodies: an executor for each replica, on its context.
        head: the executor that runs once, or None where bodies give all there is to give.
        updates: (variable, new value), after ``forward``.
        parameters: all weights of the graph, in MXNet's order.
    """

    def __init__(self, replicas, name, inputs):
        from keras.backend import mxnet_backend as K

        self.replicas = replicas
        model = replicas.model
        symbol, results, updates = {
            "train": (model._train_mxnet_symbol, model._ntrain, model.updates),
            "test": (model._test_mxnet_symbol, model._ntest, model.state_updates),
            "predict": (model._pred_mxnet_symbol, model._npred, model.state_updates),
        }[name]
        labels = [] if name == "predict" else model.targets + model.sample_weights
        self.fed = [tensor.name for tensor in model.inputs + [t for t in labels if t is not None]]
        self.is_train = name == "train"
        learning_phase = K.learning_phase()
        K.set_learning_phase(int(self.is_train))
        try:
            outputs = [output.symbol for output in model.outputs]
        finally:
            K.set_learning_phase(learning_phase)
        self.states = sorted(_state_names(model) & set(symbol.list_arguments()))
        self.sharded = [tensor.name for tensor in model.inputs] + self.states
        self.parameters = [n for n in symbol.list_arguments() if n not in self.fed]
        fixed = self.parameters if not self.is_train else model._fixed_weights
        self.trained = [n for n in self.parameters if n not in fixed]
        # Where the values stand among the heads: outputs, results, then the updates' values.
        graph = _mxnet_graph.Graph(outputs, symbol)
        self.sparse = graph.sparse_gradients()
        values = graph.heads[len(outputs) :]
        self.variables = [variable.name for variable, _ in updates]
        if name == "predict":  # Keras leaves out values that are outputs, too
            others = [value for _, value in updates if value not in model.outputs]
            order = [
                model.outputs.index(value)
                if value in model.outputs
                else results + others.index(value)
                for _, value in updates
            ]
        else:
            order = range(results, results + len(updates))
        self.results = results
        wanted = values[:results] + [values[position] for position in order]
        # A stateful model knows only its own batch size.
        counts = [len(inputs[0])] if self.states else _mxnet_graph.ROWS
        shapes = {
            count: {n: (count,) + tuple(x.shape[1:]) for n, x in zip(self.fed, inputs)}
            for count in counts
        }
        self._check_rows(inputs)
        with _mxnet_graph.shape_errors(model.name, counts[0]):
            self.body, self.head_symbol, self.cuts, self.places = graph.cut(
                graph.heads[: len(outputs)], wanted, self.sharded, shapes
            )
        replicas.warn_of_whole_batches(graph.across_rows)
        states = self.body.list_auxiliary_states()
        for state, operation in sorted(graph.states(states).items()):
            if operation not in _mxnet_statistics.MEANS:
                raise errors.state_of_replicas(operation, model.name, state)
        self.shapes = None

    def _check_rows(self, inputs):
        """Refuse inputs whose rows are not those of one batch."""
        rows = [len(x) for x in inputs[: len(self.replicas.model.inputs)]]
        if len(set(rows)) > 1:
            named = ", ".join("{} of {}".format(*pair) for pair in zip(rows, self.fed))
            problem = "its inputs have rows: " + named
            raise errors.rows_cannot_be_cut(self.replicas.model.name, problem)

    # Executors ----------------------------------------------------------------------------------

    def executors(self):
        return self.bodies + ([self.head] if self.head is not None else [])

    def bind(self, inputs):
        """Make executors for inputs of these shapes, unless there are."""
        shapes = {name: tuple(x.shape) for name, x in zip(self.fed, inputs)}
        if shapes == self.shapes:
            return
        self._check_rows(inputs)
        self.bodies, self.head = [], None  # give their memory back first
        self.rows = rows = len(inputs[0])
        replicas = self.replicas
        count = len(replicas.contexts)
        self.kept = [_replicas.bounds(rows, count, i) for i in range(count)]
        self.computed = [_replicas.run_bounds(rows, count, i) for i in range(count)]
        held = replicas.model._args
        whole = dict(shapes, **{name: held[name].shape for name in self.states})
        self.bodies = [
            self._executor(
                self.body,
                i,
                {n: (stop - start,) + tuple(whole[n][1:]) for n in self.sharded},
                self.trained,
            )
            for i, (start, stop) in enumerate(self.computed)
        ]
        if self.head_symbol is not None:
            for name, output in zip(self.cuts, self.bodies[0].outputs):
                whole[name] = (rows,) + tuple(output.shape[1:])
            cuts = self.cuts if self.is_train else []
            self.head = self._executor(self.head_symbol, 0, whole, self.trained + cuts)
        self.shapes = shapes

    def _executor(self, symbol, replica, shapes, differentiated):
        """Bind ``symbol`` on a replica's context, to its weights and to new arrays."""
        import mxnet as mx

        is_head = symbol is self.head_symbol
        if not differentiated:
            # Bound without any gradient, MXNet 1.9 runs oneDNN's fused convolutions on cpu(0),
            # which go on with the weights of their first batch (SgMKLDNNConvOperator).
            unused = mx.sym.make_loss(mx.sym.var(_UNUSED, shape=(1,), dtype="float32"))
            symbol = mx.sym.Group([symbol, unused])
            differentiated = [_UNUSED]
        context, weights = self.replicas.contexts[replica], self.replicas.args[replica]
        names = symbol.list_arguments()
        types = {n: w.dtype for n, w in weights.items() if n in names}
        if is_head:
            types.update((n, o.dtype) for n, o in zip(self.cuts, self.bodies[0].outputs))
        shapes = {n: shape for n, shape in shapes.items() if n in names}
        types = {n: t for n, t in types.items() if n in names}
        rows = next(iter(shapes.values()))[0] if shapes else 0
        with _mxnet_graph.shape_errors(self.replicas.model.name, rows):
            inferred, typed = _mxnet_graph.inferred(symbol, shapes, types)
        args = {
            n: weights[n] if n in weights else mx.nd.zeros(shape, context, dtype)
            for n, shape, dtype in zip(names, inferred, typed)
        }
        gradients = {
            n: mx.nd.zeros(
                args[n].shape, context, args[n].dtype, "row_sparse" if n in self.sparse else None
            )
            for n in differentiated
            if n in args
        }
        return symbol.bind(
            context,
            args,
            args_grad=gradients,
            grad_req={n: "write" if n in gradients else "null" for n in names},
            aux_states={n: self.replicas.auxs[replica][n] for n in symbol.list_auxiliary_states()},
        )

    # One batch ----------------------------------------------------------------------------------

    def forward(self, inputs, is_train):
        """Run the bodies on their shards and the head on the whole; return Keras' results."""
        held = self.replicas.model._args
        fed = dict(zip(self.fed, inputs))
        fed.update((name, held[name]) for name in self.states)
        for body, (start, stop) in zip(self.bodies, self.computed):
            for name in self.sharded:
                if name in body.arg_dict:
                    body.arg_dict[name][:] = fed[name][start:stop]
            body.forward(is_train=is_train)
        gathered = [self._gather(position) for position in range(len(self.cuts))]
        computed = []
        if self.head is not None:
            for name, value in list(fed.items()) + list(zip(self.cuts, gathered)):
                if name in self.head.arg_dict:
                    self.head.arg_dict[name][:] = value
            computed = self.head.forward(is_train=is_train)
        values = [
            (gathered if where == "cut" else computed)[position] for where, position in self.places
        ]
        self.updates = list(zip(self.variables, values[self.results :]))
        return values[: self.results]

    def _gather(self, position):
        """The rows of one output of all bodies, on the first context."""
        import mxnet as mx

        first = self.replicas.contexts[0]
        shards = [
            body.outputs[position][: stop - start].as_in_context(first)
            for body, (start, stop) in zip(self.bodies, self.kept)
            if stop > start
        ]
        return mx.nd.concat(*shards, dim=0) if len(shards) > 1 else shards[0]

    def backward(self):
        """Gradients: the head's at the cut, and from there on each context its shard's."""
        import mxnet as mx

        self.head.backward()
        if not self.cuts:  # the head computes all
            return
        for body, (start, stop) in zip(self.bodies, self.kept):
            context = body.outputs[0].context
            body.backward(
                [
                    self.head.grad_dict[name][start:stop].as_in_context(context)
                    if stop > start  # a row computed for an empty shard counts for nothing
                    else mx.nd.zeros_like(output)
                    for name, output in zip(self.cuts, body.outputs)
                ]
            )
