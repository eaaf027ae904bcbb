"""Parts of a Keras model on devices of their own: MXNet's groups of contexts.

What is built under ``compat.device()`` has the attribute ``ctx_group``, the name of its device.
"""

from ... import errors
from . import symbol_graph
from .context_names import context_named


def groups_of(model):
    """The names of the devices that parts of a Keras model were built for."""
    symbols = (model._train_mxnet_symbol, model._pred_mxnet_symbol)
    attributes = [a for s in symbols if s is not None for a in s.attr_dict().values()]
    return {a["__ctx_group__"] for a in attributes if "__ctx_group__" in a}


def place_groups(model, module):
    """Let a module's executors, which are yet to be bound, run parts where they were built for."""
    groups = groups_of(model)
    if not groups:
        return
    if getattr(model, "_compat_replicas", None) is not None:
        raise device_with_replicas(model.name)  # a subclass, parallelized before it was built
    if symbol_graph.OTHERS not in groups:
        for name in ("_train_mxnet_symbol", "_test_mxnet_symbol", "_pred_mxnet_symbol"):
            symbol = getattr(model, name)
            if symbol is not None:
                setattr(model, name, symbol_graph.copied_between_groups(symbol))
    contexts = {name: context_named(name) for name in groups - {symbol_graph.OTHERS}}
    module._group2ctxs = dict(contexts, **{symbol_graph.OTHERS: model._context[0]})

    def bind(**arguments):
        """Binds for training always: MXNet 1.9 rewrites a graph for inference, without groups."""
        type(module).bind(module, **dict(arguments, for_training=True))

    def switch_bucket(key, data_shapes, label_shapes=None):
        """Binds a bucket anew for other shapes: reshaping drops the groups on MXNet 1.5."""
        bound = module._buckets.get(key)
        if bound is not None and key != module._default_bucket_key:
            if [d.shape for d in bound.data_shapes] != [d.shape for d in data_shapes]:
                del module._buckets[key]
        type(module).switch_bucket(module, key, data_shapes, label_shapes)

    vars(module).update(bind=bind, switch_bucket=switch_bucket)


def device_with_replicas(model):
    return errors.UnsupportedError(
        "Parts of the model {} were placed by compat.device(), which parallelize() on several "
        "devices would undo. Use one of the two.".format(model)
    )
