"""``mx.mod.Module`` on several contexts, for the MXNet backend.

MXNet's own executors are used, which split a batch, sum the gradients and merge the outputs.
What they get wrong is fixed here: a batch of fewer rows than contexts, running statistics that
drift apart, and gradients not summed under ``kvstore=None``. What computes across the rows of a
batch, such as a loss that is divided by their number, runs on the first context, with a warning.
"""

import itertools
from functools import partial

import mxnet as mx
import numpy as np

from ... import _rows, errors
from ..._rows import split_rows
from ..._runtime import work
from ..._runtime.patching import replaced
from . import symbol_executors, symbol_graph


def parallelize(module, contexts):
    """Run ``module`` on ``contexts``; one context gives the plain behaviour back.

    Before ``bind()``, or after it: then it is bound anew, with its parameters. Once it has an
    optimizer, whose state is numbered by context, it stays where it is.

    Differs from one context: BatchNorm normalises each shard by its own statistics; the running
    ones take one step to the mean of the shards' new values, weighted by size.

    Raises:
        UnsupportedError: the module has an optimizer, or is not a plain ``Module``.
    """
    if type(module) is not mx.mod.Module:
        raise errors.UnsupportedError(
            "parallelize() runs an mx.mod.Module on several devices, not a {0}. Give context=[...] "
            "to the {0} itself.".format(type(module).__name__)
        )
    if vars(module).get("_compat_contexts", module._context) == contexts:
        return
    if module.optimizer_initialized:
        raise errors.UnsupportedError(
            "This Module has an optimizer already, and MXNet numbers its state by device. "
            "Call parallelize() before fit() or init_optimizer()."
        )
    module._context = contexts
    module._work_load_list = [1] * len(contexts)
    own = {"bind": partial(_bind, module), "init_optimizer": partial(_init_optimizer, module)}
    own["_compat_contexts"] = contexts
    for name in own:
        vars(module).pop(name, None)
    if len(contexts) > 1:
        vars(module).update(own)
    if module.binded:
        if module.params_initialized:
            module.get_params()  # brings them from the executors, which are dropped
        else:
            module._arg_params = module._aux_params = None
        module.bind(
            module.data_shapes, module.label_shapes or None, module.for_training,
            module.inputs_need_grad, force_rebind=True, grad_req=module._grad_req,
        )  # fmt: skip


def _bind(module, data_shapes, label_shapes=None, for_training=True, *args, **kwargs):
    """Splits batches as ``compat`` does, also those of fewer rows than contexts."""
    bind, contexts = partial(type(module).bind, module), module._compat_contexts
    if module.binded and not kwargs.get("force_rebind"):
        return bind(data_shapes, label_shapes, for_training, *args, **kwargs)
    inputs = [
        each if isinstance(each, mx.io.DataDesc) else mx.io.DataDesc(*each)
        for each in list(data_shapes) + list(label_shapes or ())
    ]
    across = _across(module, inputs, contexts[0])
    if across is not None:
        _rows.runs_whole("Module", across, contexts[0], "The Module")
    module._context = contexts if across is None else contexts[:1]
    with replaced(mx.module.module, DataParallelExecutorGroup=_Group):
        bind(data_shapes, label_shapes, True, *args, **kwargs)
    group = module._exec_group
    # Bound for inference, oneDNN's convolutions would keep the weights of their first batch.
    module.for_training = group.for_training = for_training
    group.names = [str(context) for context in contexts]


def _init_optimizer(module, kvstore="local", *args, **kwargs):
    """Without a kvstore gradients would not be summed, and the contexts' weights drift apart."""
    type(module).init_optimizer(module, kvstore or "local", *args, **kwargs)


class _Group(mx.module.executor_group.DataParallelExecutorGroup):
    """MXNet's group of executors, of which those that have rows of their own run.

    Where the batch runs whole, there is the first context's alone.
    """

    def bind_exec(self, *args, **kwargs):
        if self._default_execs is not None:
            self.execs, self.contexts = self._default_execs[:], self._every_context
        self._every_context = self.contexts
        super().bind_exec(*args, **kwargs)
        self._default_execs = self._default_execs or self.execs
        self.sizes = split_rows.sizes(self.batch_size, len(self.contexts))

        def filled(items):
            return list(itertools.compress(items, self.sizes))

        for name in ("execs", "slices", "contexts"):
            setattr(self, name, filled(getattr(self, name)))
        self.input_grad_arrays = list(map(filled, self.input_grad_arrays or ()))

    def set_params(self, *args, **kwargs):
        with replaced(self, execs=self._default_execs):  # they share their weights with all
            super().set_params(*args, **kwargs)

    def decide_slices(self, data_shapes):
        axes = [_axis(desc.layout) for desc in data_shapes]
        for desc, axis in zip(data_shapes, axes):
            if axis >= 0:
                self.batch_size = desc.shape[axis]
        rows, count = self.batch_size, len(self.contexts)
        self.slices = [slice(*split_rows.run_bounds(rows, count, i)) for i in range(count)]
        return axes

    def forward(self, data_batch, is_train=None):
        super().forward(data_batch, is_train)
        training = self.for_training if is_train is None else is_train
        idle = len(self.names) - len(self.sizes)
        work.count(self.names, self.sizes + [0] * idle, training)

    def backward(self, out_grads=None):
        super().backward(out_grads)
        for name, arrays in zip(self.param_names, self.grad_arrays):
            for array, size in zip(arrays, self.sizes):
                if array is not None and not size and self.grad_req[name] == "write":
                    array[:] = 0
        if len(self.sizes) > 1:  # else it would only wait
            symbol_executors.unite(self.aux_arrays, self.sizes)


# What can be divided ------------------------------------------------------------------------------


def _across(module, inputs, context):
    """What cannot be divided, or None.

    A module has its contexts before it has a batch, so it is tried with random numbers.
    """
    axes = {d.name: _axis(d.layout) for d in inputs}
    given = dict.fromkeys(module.label_names, _rows.Sharded(0))  # not described in inference
    given.update((name, _rows.Sharded(axis)) for name, axis in axes.items() if axis >= 0)
    random, count = np.random.RandomState(0), len(_rows.trial.WHOLE)
    shapes = {d.name: symbol_graph.grown(d.shape, given.get(d.name), count) for d in inputs}
    fed = {name: random.uniform(0.5, 2.5, shape) for name, shape in shapes.items()}
    graph = symbol_graph.Graph([], module.symbol)
    unknown = graph.follow_and_try(given, fed, context, {d.name: d.dtype for d in inputs}, {})
    if unknown is not None:
        return unknown
    for head, output in zip(graph.heads, module.symbol):
        axis = _axis(output.attr("__layout__"))
        wanted = _rows.Sharded(axis) if axis >= 0 else _rows.REPLICATED
        if graph.placements[head] != wanted:
            return graph.across([head], with_rows=False) or _rows.Across(output.name)
    return None


_axis = mx.io.DataDesc.get_batch_axis  # of a layout; -1: none
