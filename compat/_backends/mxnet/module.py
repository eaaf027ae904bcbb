"""``mx.mod.Module`` on several contexts.

MXNet's executors split a batch, sum the gradients and merge the outputs. Fixed here are batches of
fewer rows than contexts, running statistics that drift apart, and gradients that are not summed
under ``kvstore=None``. A module with cross-batch operations, such as a loss that is divided by the
number of rows, runs on the first context, with a warning.
"""

import types

import mxnet as mx
import numpy as np

from ... import _rows, errors
from ..._rows import Fallback, Reason, splitting
from ..._runtime import synchronized, work
from ..._runtime.patching import InstanceMethod, replaced
from . import joined_executors
from .gradient_store import store_for
from .graph import Graph
from .joined_executors import JoinedExecutor, Replica
from .locks import making
from .propagation import grown
from .trial import propagate_and_try
from .weight_copies import unite


def parallelize(module, contexts):
    """Run ``module`` on ``contexts``; a single one restores the plain behaviour.

    This must come before ``bind()``.

    Differs from one context: BatchNorm normalises each shard by its own statistics, unless it is
    asked for those of the whole batch; the running ones take one step to the mean of the shards'
    new values, weighted by size.

    Raises:
        UnsupportedError: the module is bound, or is not a plain ``Module``.
    """
    if type(module) is not mx.mod.Module:
        raise errors.UnsupportedError(
            "parallelize() runs an mx.mod.Module on several devices, not a {0}. Give context=[...] "
            "to the {0} itself.".format(type(module).__name__)
        )
    divided = _BindDivided.of(module)
    if (module._context if divided is None else divided.devices) == contexts:
        return
    if module.binded:
        raise errors.UnsupportedError(
            "This Module is bound to its devices already. Call parallelize() before bind() or "
            "fit()."
        )
    module._context = contexts
    module._work_load_list = [1] * len(contexts)
    for kind in (_BindDivided, _InitOptimizerWithKVStore):
        method = kind.of(module)
        if method is not None:
            method.remove(module)
        if len(contexts) > 1:
            kind(contexts).install(module)


class _BindDivided(InstanceMethod):
    """Binds a module so that batches are split evenly, even those of fewer rows than contexts."""

    method = "bind"

    def invoke(self, module, data_shapes, label_shapes=None, for_training=True, *args, **kwargs):
        bind = self.plain(module)
        if module.binded and not kwargs.get("force_rebind"):
            return bind(data_shapes, label_shapes, for_training, *args, **kwargs)
        inputs = [
            desc if isinstance(desc, mx.io.DataDesc) else mx.io.DataDesc(*desc)
            for desc in list(data_shapes) + list(label_shapes or ())
        ]
        fallback = _fallback(module, inputs, self.devices[0])
        if fallback is not None:
            _rows.warn_unsplit(module, "Module", fallback, self.devices[0], "The Module")
        module._context = self.devices if fallback is None else self.devices[:1]
        with making, replaced(mx.module.module, DataParallelExecutorGroup=_Group):
            bind(data_shapes, label_shapes, True, *args, **kwargs)
        group = module._exec_group
        group.module = module
        # Bound for inference, oneDNN's convolutions would keep the weights of their first batch.
        module.for_training = group.for_training = for_training
        group.names = [str(context) for context in self.devices]


class _InitOptimizerWithKVStore(InstanceMethod):
    """Initializes the optimizer with a kvstore, without which gradients are not summed."""

    method = "init_optimizer"

    def invoke(self, module, kvstore="local", *args, **kwargs):
        self.plain(module)(store_for(module, kvstore or "local"), *args, **kwargs)


class _Group(mx.module.executor_group.DataParallelExecutorGroup):
    """MXNet's group of executors, of which some may have no rows.

    Where the module runs unsplit, there is the first context's executor alone; once a Monitor is
    installed, the others have no rows.
    """

    is_monitored = False
    _joined = None  # replicas of a ``JoinedExecutor``, for the present executors
    _is_joined = False  # whether these have run the last batch

    def bind_exec(self, *args, **kwargs):
        """Bind executors of the shards."""
        self._joined = None
        super().bind_exec(*args, **kwargs)

    def _replicas(self, filled):
        """Return executors that normalize by the statistics of all of these, or None."""
        if self._joined is None:
            is_asked, graph = synchronized.is_asked(self.module), Graph([], self.symbol)
            nodes = joined_executors.synchronized(graph, is_asked)
            # Alone, an operation of MXNet's that does so would wait for others.
            has_own = joined_executors.synchronized(graph, False)
            is_needed = nodes and (len(filled) > 1 or has_own)
            self._joined = self._join(filled, is_asked) if is_needed else []
        return self._joined or None

    def _join(self, filled, is_asked):
        replicas = []
        for number in filled:
            executor = self.execs[number]
            inputs = self.data_shapes + (self.label_shapes or [])
            shapes = {desc.name: executor.arg_dict[desc.name].shape for desc in inputs}
            gradients = {n: array for n, array in executor.grad_dict.items() if array is not None}
            arrays = executor.arg_dict, gradients, executor.aux_dict
            groups = self.group2ctxs[number] or {}
            replicas.append(Replica(self.contexts[number], shapes, *arrays, groups))
        return JoinedExecutor(self.symbol, is_asked, replicas, self.grad_req).replicas

    @property
    def sizes(self):
        """The shard sizes of a batch."""
        sizes = splitting.sizes(self.batch_size, len(self.contexts))
        return work.unsplit_sizes(sizes, self.batch_size) if self.is_monitored else sizes

    def decide_slices(self, data_shapes):
        """Set the slices of a batch, and return the batch dimensions of inputs."""
        axes = [_axis(desc.layout) for desc in data_shapes]
        for desc, axis in zip(data_shapes, axes):
            if axis >= 0:
                self.batch_size = desc.shape[axis]
        stops = np.cumsum(self.sizes).tolist()
        self.slices = [
            # Where there is no row, the first one is loaded, but not used.
            slice(stop - size, stop) if size else slice(0, 1)
            for stop, size in zip(stops, self.sizes)
        ]
        return axes

    def install_monitor(self, mon):
        """Have a Monitor observe a single executor, which computes the whole batch."""
        if len(self.contexts) > 1 and not self.is_monitored:
            fallback = Fallback(Reason.MONITOR)
            _rows.warn_unsplit(self.module, "Module", fallback, self.contexts[0], "The Module")
            self.is_monitored = True
            self._default_execs = self._default_execs or list(self.execs)
            self.bind_exec(self.data_shapes, self.label_shapes, reshape=True)
        self._where_rows_are(super().install_monitor, mon)

    def _where_rows_are(self, method, *args, **kwargs):
        """Call a method as if the executors that have rows were the only ones."""
        filled = [i for i, size in enumerate(self.sizes) if size]
        whole = {name: getattr(self, name) for name in ("execs", "slices", "contexts")}
        parts = {name: [items[i] for i in filled] for name, items in whole.items()}
        if self._is_joined:
            parts["execs"] = self._replicas(filled) or parts["execs"]
        with replaced(self, **parts):
            return method(*args, **kwargs)

    def forward(self, data_batch, is_train=None):
        """Run the executors on their shards, and count the batch."""
        training = self.for_training if is_train is None else is_train
        self._is_joined = training
        self._where_rows_are(super().forward, data_batch, is_train)
        idle = len(self.names) - len(self.contexts)
        work.count(self.names, self.sizes + [0] * idle, training)

    def backward(self, out_grads=None):
        """Compute gradients, and unite running statistics."""
        module = self.module
        if len(self.contexts) > 1 and module.optimizer_initialized and module._kvstore is None:
            raise errors.UnsupportedError(
                f"The optimizer of {type(module).__name__} {module.symbol.name!r} was initialized "
                "without a kvstore in a way that parallelize() does not know, so the gradients of "
                "its devices would not be summed. Call its method init_optimizer()."
            )
        self._where_rows_are(super().backward, out_grads)
        sizes = self.sizes
        for name, arrays in zip(self.param_names, self.grad_arrays):
            for array, size in zip(arrays, sizes):
                if array is not None and not size and self.grad_req[name] == "write":
                    # A sparse one then has no rows: any that it had would be updated.
                    array[:] = 0 if array.stype == "default" else mx.nd.zeros_like(array)
        if len(sizes) > 1:  # else it would only wait
            unite(self.aux_arrays, sizes)

    def get_outputs(self, *args, **kwargs):
        """Return the outputs of all rows."""
        return self._where_rows_are(super().get_outputs, *args, **kwargs)

    def get_input_grads(self, merge_multi_context=True):
        """Return the gradients of inputs, of all rows."""
        filled = [
            [array for array, size in zip(arrays, self.sizes) if size]
            for arrays in self.input_grad_arrays
        ]
        with replaced(self, input_grad_arrays=filled):
            return super().get_input_grads(merge_multi_context)

    def update_metric(self, eval_metric, labels, *pre_sliced):
        """Update a metric by the outputs of the whole batch: metrics of shards do not add up."""
        # MXNet before 1.3 does not pass it.
        if any(pre_sliced):  # by the script, for each executor
            return self._where_rows_are(super().update_metric, eval_metric, labels, *pre_sliced)
        whole = types.SimpleNamespace(outputs=self.get_outputs())
        with replaced(self, execs=[whole], slices=[slice(0, self.batch_size)]):
            return super().update_metric(eval_metric, labels, *pre_sliced)


def _fallback(module, inputs, context):
    """Return what cannot be divided, or None.

    A module has its contexts before it has a batch, so it is tried with random numbers.
    """
    axes = {d.name: _axis(d.layout) for d in inputs}
    placements = dict.fromkeys(module.label_names, _rows.Sharded(0))  # not described in inference
    placements.update((name, _rows.Sharded(axis)) for name, axis in axes.items() if axis >= 0)
    random, count = np.random.RandomState(0), len(_rows.trial.WHOLE)
    shapes = {d.name: grown(d.shape, placements.get(d.name), count) for d in inputs}
    fed = {name: random.uniform(0.5, 2.5, shape) for name, shape in shapes.items()}
    graph, types = Graph([], module.symbol), {d.name: d.dtype for d in inputs}
    refused = joined_executors.refused(graph, synchronized.is_asked(module), types)
    if refused:
        return Fallback(Reason.CROSS_BATCH, graph.nodes[refused[0]]["name"])
    propagation, fallback = propagate_and_try(graph, placements, fed, context, types, {})
    if fallback is not None:
        return fallback
    for head, output in zip(graph.heads, module.symbol):
        axis = _axis(output.attr("__layout__"))
        wanted = _rows.Sharded(axis) if axis >= 0 else _rows.REPLICATED
        if propagation.placement_of(head) != wanted:
            return propagation.fallback([head], with_rows=False) or Fallback(
                Reason.CROSS_BATCH, output.name
            )
    return None


_axis = mx.io.DataDesc.get_batch_axis  # of a layout; -1: none
