"""``mx.mod.Module`` on several contexts, for the MXNet backend.

MXNet's own executors are used, which split a batch, sum the gradients and merge the outputs.
What they get wrong is fixed here: a batch of fewer rows than contexts, running statistics that
drift apart, and gradients not summed under ``kvstore=None``. A loss that is divided by the rows
of a batch is refused, since each shard would divide by its own.
"""

from ... import _replicas, _work, errors
from ..._patching import InstanceMethod, replaced
from . import running_statistics, symbol_graph


def parallelize(module, contexts):
    """Run ``module`` on ``contexts``; one context gives the plain behaviour back.

    Before ``bind()``, or after it: then it is bound anew, with its parameters. Once it has an
    optimizer, whose state is numbered by context, it stays where it is.

    Differs from one context: BatchNorm normalises each shard by its own statistics; the running
    ones take one step to the mean of the shards' new values, weighted by size.

    Raises:
        UnsupportedError: the module has an optimizer, or is not a plain ``Module``; or its loss
            depends on the size of the batch (that may come in ``bind()``, too).
    """
    import mxnet as mx

    if type(module) is not mx.mod.Module:
        raise _not_a_plain_module(type(module).__name__)
    if module._context == contexts:
        return
    if module.optimizer_initialized:
        raise errors.UnsupportedError(
            "This Module has an optimizer already, and MXNet numbers its state by device. "
            "Call parallelize() before fit() or init_optimizer()."
        )
    binding = None
    if module.binded:
        binding = {
            "data_shapes": module.data_shapes,
            "label_shapes": module.label_shapes or None,
            "for_training": module.for_training,
            "inputs_need_grad": module.inputs_need_grad,
            "grad_req": module._grad_req,
        }
        if len(contexts) > 1:
            _check(module.symbol, binding["data_shapes"] + (binding["label_shapes"] or []))
        if module.params_initialized:
            module.get_params()  # brings them from the executors, which are dropped
        module._reset_bind()
    module._context = contexts
    module._work_load_list = [1] * len(contexts)
    for kind in (_Bind, _InitOptimizer):
        method = kind.of(module)
        if method is not None:
            method.remove(module)
        if len(contexts) > 1:
            kind(contexts).install(module)
    if binding:
        module.bind(**binding)


class _Bind(InstanceMethod):
    """Splits batches as ``compat`` does, also those of fewer rows than contexts."""

    method = "bind"

    def __call__(self, module, data_shapes, label_shapes=None, for_training=True, *args, **kwargs):
        bind, count = self.plain(module), len(module._context)
        if module.binded and not kwargs.get("force_rebind"):
            return bind(data_shapes, label_shapes, for_training, *args, **kwargs)
        data, labels = _described(data_shapes), _described(label_shapes or ())
        _check(module.symbol, data + labels)
        rows = data[0].shape[max(_axis(data[0].layout), 0)]
        enough = max(rows, count)
        # MXNet splits by these, and refuses an empty share; fewer rows come by reshape().
        module._work_load_list = _replicas.sizes(enough, count)
        wide = [_with_rows(desc, enough) for desc in data]
        wide_labels = [_with_rows(desc, enough) for desc in labels] or None
        bind(wide, wide_labels, True, *args, **kwargs)
        group = module._exec_group
        # Bound for inference, oneDNN's convolutions would keep the weights of their first batch.
        module.for_training = group.for_training = for_training
        group.__class__ = type("Group", (_Group, type(group)), {})
        if rows < count:
            module.reshape(data, labels or None)


class _InitOptimizer(InstanceMethod):
    """Without a kvstore gradients would not be summed, and the contexts' weights drift apart."""

    method = "init_optimizer"

    def __call__(self, module, kvstore="local", *args, **kwargs):
        self.plain(module)(kvstore or "local", *args, **kwargs)


class _Group:
    """Mixed into MXNet's group of executors: some may have no rows of their own."""

    @property
    def sizes(self):
        return _replicas.sizes(self.batch_size, len(self.contexts))

    def decide_slices(self, data_shapes):
        axes = [_axis(desc.layout) for desc in data_shapes]
        for desc, axis in zip(data_shapes, axes):
            if axis >= 0:
                self.batch_size = desc.shape[axis]
        count = len(self.contexts)
        self.slices = [
            slice(*_replicas.run_bounds(self.batch_size, count, i)) for i in range(count)
        ]
        return axes

    def _where_rows_are(self, method, *args):
        """Call a method as if there were only the executors that have rows of their own."""
        filled = [i for i, size in enumerate(self.sizes) if size]
        whole = {name: getattr(self, name) for name in ("execs", "slices", "contexts")}
        parts = {name: [items[i] for i in filled] for name, items in whole.items()}
        with replaced(self, **parts):
            return method(*args)

    def forward(self, data_batch, is_train=None):
        self._where_rows_are(super(_Group, self).forward, data_batch, is_train)
        training = self.for_training if is_train is None else is_train
        _work.count([str(context) for context in self.contexts], self.sizes, training)

    def backward(self, out_grads=None):
        self._where_rows_are(super(_Group, self).backward, out_grads)
        sizes = self.sizes
        for name, arrays in zip(self.param_names, self.grad_arrays):
            for array, size in zip(arrays, sizes):
                if array is not None and not size and self.grad_req[name] == "write":
                    array[:] = 0
        running_statistics.unite(self.aux_arrays, sizes)

    def get_outputs(self, merge_multi_context=True, begin=0, end=None):
        get = super(_Group, self).get_outputs
        return self._where_rows_are(get, merge_multi_context, begin, end)

    def get_input_grads(self, merge_multi_context=True):
        filled = [
            [array for array, size in zip(arrays, self.sizes) if size]
            for arrays in self.input_grad_arrays
        ]
        with replaced(self, input_grad_arrays=filled):
            return super(_Group, self).get_input_grads(merge_multi_context)

    def update_metric(self, *args, **kwargs):
        update = super(_Group, self).update_metric
        self._where_rows_are(lambda: update(*args, **kwargs))


def _check(symbol, inputs):
    """Refuse what is computed across the rows of a batch, as of a loss divided by their number."""
    for node, attributes in sorted(symbol.attr_dict().items()):
        if attributes.get("normalization", "null") != "null":
            raise _loss_depends_on_the_batch(
                "{} has normalization={!r}".format(node, attributes["normalization"])
            )
    names = symbol.list_arguments()
    shapes = {
        rows: {d.name: _with_rows(d, rows).shape for d in inputs if d.name in names}
        for rows in symbol_graph.ROWS
    }
    rows = symbol_graph.ROWS[0]
    _, found, _ = symbol.infer_shape_partial(**shapes[rows])
    for output, shape in zip(symbol, found or ()):
        axis = _axis(output.attr("__layout__"))
        if shape and axis >= 0 and rows not in shape[axis : axis + 1]:
            raise _loss_depends_on_the_batch(
                "{} has no row for each of the batch".format(output.name)
            )
    graph = symbol_graph.Graph([], symbol)
    graph.follow(graph.heads, [d.name for d in inputs if _axis(d.layout) >= 0], shapes)
    if graph.across_rows is not None:
        problem = "its operation {} computes across rows".format(graph.across_rows)
        raise errors.rows_cannot_be_cut("The Module", problem)
    running_statistics.check(graph.states(symbol.list_auxiliary_states()), "the Module")


def _described(shapes):
    import mxnet as mx

    return [s if isinstance(s, mx.io.DataDesc) else mx.io.DataDesc(*s) for s in shapes]


def _axis(layout):
    import mxnet as mx

    return mx.io.DataDesc.get_batch_axis(layout)


def _with_rows(desc, rows):
    axis, shape = _axis(desc.layout), list(desc.shape)
    if axis >= 0:
        shape[axis] = rows
    return type(desc)(desc.name, tuple(shape), desc.dtype, desc.layout)


def _not_a_plain_module(kind):
    return errors.UnsupportedError(
        "parallelize() runs an mx.mod.Module on several devices, not a {}. Give context=[...] "
        "to the {} itself.".format(kind, kind)
    )


def _loss_depends_on_the_batch(what):
    return errors.UnsupportedError(
        "A Module on several devices must not divide its loss by the batch, since each device "
        "sees a shard of it: {}. Leave the division to the optimizer's rescale_grad, which is "
        "1/batch size.".format(what)
    )
