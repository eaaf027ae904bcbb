"""Parts of a model on different devices, by MXNet's groups of contexts.

Symbols that are built under ``compat.device()`` have the attribute ``ctx_group``, the name of their
device.
"""

import contextlib

import mxnet as mx

from ... import errors
from ..._runtime.patching import InstanceMethod
from .configuration import context_named
from .graph import Graph

OTHERS = "default"  # the group of symbols that were built outside of device()


@contextlib.contextmanager
def placed_on(device):
    """Build symbols, parameters and arrays for a device; see ``MXNet.device()``."""
    name = "cpu(0)" if device == "cpu" else device
    with mx.AttrScope(ctx_group=name), context_named(name):
        yield


def placed_parts(model):
    """Return the names of the devices that parts of a Keras model were built for."""
    symbols = (model._train_mxnet_symbol, model._pred_mxnet_symbol)
    attributes = [a for s in symbols if s is not None for a in s.attr_dict().values()]
    return {a["__ctx_group__"] for a in attributes if "__ctx_group__" in a}


def place_groups(model):
    """Have a model's executors, which are yet to be bound, run parts on their devices."""
    groups, module = placed_parts(model), model._module
    if not groups:
        return
    if getattr(model, "_compat_replicas", None) is not None:
        raise device_with_replicas(model.name)  # a subclass, parallelized before it was built
    if OTHERS not in groups:
        for name in ("_train_mxnet_symbol", "_test_mxnet_symbol", "_pred_mxnet_symbol"):
            symbol = getattr(model, name)
            if symbol is not None:
                setattr(model, name, copied_between_groups(symbol))
    contexts = {name: context_named(name) for name in groups - {OTHERS}}
    module._group2ctxs = dict(contexts, **{OTHERS: model._context[0]})

    for kind in (_BindForTraining, _SwitchBucket):
        if kind.of(module) is None:
            kind([]).install(module)


class _BindForTraining(InstanceMethod):
    """Always binds for training: MXNet 1.9 rewrites graphs for inference, and drops groups."""

    method = "bind"

    def invoke(self, module, **arguments):
        """Bind the module."""
        self.plain(module)(**dict(arguments, for_training=True))


class _SwitchBucket(InstanceMethod):
    """Binds a bucket again for other shapes: reshaping drops the groups on MXNet 1.5."""

    method = "switch_bucket"

    def invoke(self, module, key, data_shapes, label_shapes=None):
        """Switch to a bucket, which is bound again if its shapes differ."""
        bound = module._buckets.get(key)
        if bound is not None and key != module._default_bucket_key:
            if [d.shape for d in bound.data_shapes] != [d.shape for d in data_shapes]:
                del module._buckets[key]
        self.plain(module)(key, data_shapes, label_shapes)


def copied_between_groups(symbol):
    """Return the graph with a group for each node, and a copy for each group that uses a value.

    So the gradients of one value are summed on each device first. MXNet adds each of them to the
    sum in place, and silently drops some that are on other devices; and it refuses to sum those of
    a weight unless the sum is computed on the weight's device.
    """
    graph = Graph([], symbol)
    groups = [node["attrs"].get("__ctx_group__", OTHERS) for node in graph.nodes]
    users = {}
    for group, entries in zip(groups, graph.inputs):
        for entry in entries:
            users.setdefault(entry, {groups[entry[0]]}).add(group)
    nodes, numbers, copies = [], [], {}

    def add(node, group, inputs):
        attributes = dict(node.get("attrs", {}), __ctx_group__=group)
        nodes.append(dict(node, attrs=attributes, inputs=[entry + (0,) for entry in inputs]))
        return len(nodes) - 1

    def copied(entry, group):
        source, output = entry
        if len(users[entry]) == 1:
            return numbers[source], output
        if (entry, group) not in copies:
            name = f"{graph.nodes[source]['name']}_{output}_on_{group}"
            copy = {"op": "_copy", "name": name}
            copies[entry, group] = add(copy, group, [(numbers[source], output)])
        return copies[entry, group], 0

    for node, group, entries in zip(graph.nodes, groups, graph.inputs):
        is_shared = node["op"] == "null" and len(users.get((len(numbers), 0), ())) > 1
        if is_shared and node["name"] in graph.auxiliary:
            raise errors.UnsupportedError(
                f"{node['name']} is used on several devices, and MXNet would keep only what one of "
                "them computes of it. Call the layer inside one compat.device() only."
            )
        number = add(node, group, [copied(entry, group) for entry in entries])
        if is_shared:
            number = add({"op": "_copy", "name": node["name"] + "_shared"}, group, [(number, 0)])
        numbers.append(number)
    return graph.symbol([(numbers[source], output) for source, output in graph.heads], nodes)


def device_with_replicas(model):
    """Return the error of a model that is both parallelized and placed by ``device()``."""
    return errors.UnsupportedError(
        f"Parts of the model {model} were placed by compat.device(), which parallelize() on "
        "several devices would undo. Use one of the two."
    )
