"""Faults of keras-mxnet that make a model lose its weights or its optimizer's state, fixed.

And parts of a model on devices of their own: MXNet's groups of contexts. What is built under
``compat.device()`` has the attribute ``ctx_group``, the name of its device.
"""

import weakref
from numbers import Number

import keras
import mxnet as mx
from keras.backend import mxnet_backend

from ... import errors
from ..._ranks.arrays import parts_of
from ..._runtime.patching import InstanceMethod, Patch, find
from . import propagation
from .propagation import context_named


def fix(default_device):
    """Set keras-mxnet's default context, and fix what makes models lose weights.

    Arguments:
        default_device: a function that returns the name of the device of models that are not
            parallelized. Of several calls in a process the first one's counts.

    Returns:
        Lines for the report.
    """
    if find(mxnet_backend, "set_model") is None:
        find_context, models = mxnet_backend._get_mxnet_context, _Models()

        def get_mxnet_context(context):
            if context is None and not mxnet_backend._CURRENT_SCOPE_CTX:
                return [context_named(default_device())]
            return find_context(context)

        def set_value(x, value):  # Keras' own makes float32, and fails under another floatx
            value = [value] if isinstance(value, Number) else value
            array = mx.nd.array(value, dtype=x.dtype)
            x.bind(array)
            models.set_weight(x.name, array)

        rnn = mxnet_backend.rnn
        named = mxnet_backend.keras_mxnet_symbol(
            lambda state: mxnet_backend.KerasSymbol(mx.sym.identity(state.symbol))
        )

        def rnn_with_named_states(*args, **kwargs):
            # Keras knows outputs by the names of their nodes. Those of a loop have one name, so
            # it took the last one for all states, and did not find any in inference.
            last, outputs, states = rnn(*args, **kwargs)
            return last, outputs, [named(state) for state in states]

        Patch(mxnet_backend, "set_model", models.add)
        Patch(mxnet_backend, "_get_mxnet_context", get_mxnet_context)
        for module in (mxnet_backend, keras.backend):
            Patch(module, "set_value", set_value)
            Patch(module, "rnn", rnn_with_named_states)
        keep_state(keras.optimizers.SGD.__mro__[1])
    return [
        "keras-mxnet fixed: weights are read and set for every model, not only for the one "
        "compiled last,",
        "and for RNN layers not unrolled, which keep all of their states if they are stateful;",
        "the optimizer's state is saved with its model",
    ]


class _Models:
    """All compiled models, where keras-mxnet keeps only the one compiled last (``_MODEL``).

    With the last one only, ``get_weights()`` of any other model misses what was trained, and
    ``set_weights()`` on it is overwritten by the values trained before. This object stands in
    its place, has no weights of its own, and passes on to all models what is read and set.
    """

    _args = _auxs = ()

    def __init__(self):
        self._models = weakref.WeakSet()

    def add(self, model):
        """Replaces ``set_model``, which is called when a model was compiled, or will predict."""
        before = mxnet_backend._MODEL
        if before is not self:  # at first, and after clear_session() has set it to None
            self._sync_weights()
            # Names start again after clear_session(): not to be taken for those of old models.
            self._models = weakref.WeakSet([] if before is None else [before])
            mxnet_backend._MODEL = self
        _add_missing_weights(model)
        place_groups(model)
        self._models.add(model)

    def _sync_weights(self):
        if any(model._auxs for model in list(self._models) if model._weights_dirty):
            propagation.wait_for_updates()
        for model in list(self._models):
            model._sync_weights()

    def set_weight(self, name, array):
        if mxnet_backend._MODEL is self:
            for model in list(self._models):
                replicas = getattr(model, "_compat_replicas", None)
                set_weights = model._set_weights if replicas is None else replicas.set_weights
                if name in model._args:
                    set_weights({name: array}, {})
                if name in model._auxs:
                    set_weights({}, {name: array})


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


def keep_state(optimizer_class):
    """Give keras-mxnet's optimizers the ``weights`` that ``save()`` and ``load_model()`` use.

    Its own are always empty, so momentum and step count were lost on the way (keras#9197). The
    first array holds the step count and Nadam's schedule; then come the arrays of each weight.
    """

    def arrays(self):
        states = getattr(self, "_compat_states", {})
        flat = [a for index in sorted(states) for a in parts_of(states[index])]
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
            for array in parts_of(state):
                array[:] = restored.pop(0) if restored else 0
        self._compat_restored = restored  # for states not made yet, in their order

    def create_state_multi_precision(self, index, weight):
        state = super(optimizer_class, self).create_state_multi_precision(index, weight)
        for array in parts_of(state):
            if getattr(self, "_compat_restored", ()):
                array[:] = self._compat_restored.pop(0)
        self.__dict__.setdefault("_compat_states", {})[index] = state
        return state

    Patch(optimizer_class, "weights", property(arrays, lambda self, value: None))
    Patch(optimizer_class, "set_weights", set_weights)
    Patch(optimizer_class, "create_state_multi_precision", create_state_multi_precision)


def take_to(updater, context):
    """Move an updater's states, of one of its optimizer's models, and step counts to a context."""
    optimizer = updater.optimizer
    updater.set_states(updater.get_states())  # copies, which move when they are next used
    optimizer._compat_states = updater.states
    # Steps are counted per device id: Adam would begin anew on another one.
    optimizer._all_index_update_counts[context.device_id] = dict(optimizer._index_update_count)
    optimizer._set_current_context(context.device_id)


def run_plain(model, context, updater):
    """Let a model run as Keras alone would, on one context, with the optimizer's state."""
    model._context = [context]
    if not model.compiled:
        return  # Keras makes a module for each prediction
    model._module = module = mx.mod.BucketingModule(
        model._module._sym_gen, "pred", context=[context], fixed_param_names=model._fixed_weights
    )
    place_groups(model)

    if updater is not None:
        take_to(updater, context)
        _InitOptimizerWithState(updater).install(module)


class _InitOptimizerWithState(InstanceMethod):
    """Brings the state along: a module takes none before it is bound to shapes."""

    method = "init_optimizer"

    def __init__(self, updater):
        super().__init__([])
        self.updater = updater

    def invoke(self, module, **arguments):
        self.plain(module)(**arguments)
        module._curr_module._updater = self.updater


# Parts on devices of their own ----------------------------------------------------------------

OTHERS = "default"  # the group of what was built outside of device()


def groups_of(model):
    """The names of the devices that parts of a Keras model were built for."""
    symbols = (model._train_mxnet_symbol, model._pred_mxnet_symbol)
    attributes = [a for s in symbols if s is not None for a in s.attr_dict().values()]
    return {a["__ctx_group__"] for a in attributes if "__ctx_group__" in a}


def place_groups(model):
    """Let a model's executors, which are yet to be bound, run parts where they were built for."""
    groups, module = groups_of(model), model._module
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
    """Binds for training always: MXNet 1.9 rewrites a graph for inference, without groups."""

    method = "bind"

    def invoke(self, module, **arguments):
        self.plain(module)(**dict(arguments, for_training=True))


class _SwitchBucket(InstanceMethod):
    """Binds a bucket anew for other shapes: reshaping drops the groups on MXNet 1.5."""

    method = "switch_bucket"

    def invoke(self, module, key, data_shapes, label_shapes=None):
        bound = module._buckets.get(key)
        if bound is not None and key != module._default_bucket_key:
            if [d.shape for d in bound.data_shapes] != [d.shape for d in data_shapes]:
                del module._buckets[key]
        self.plain(module)(key, data_shapes, label_shapes)


def copied_between_groups(symbol):
    """The same graph, with a group for each node, and a copy for each group that uses a value.

    So the gradients of one value are summed on each device first. MXNet's own way, adding each
    to the sum in its place, silently leaves some out where they lie on several devices; and the
    sum for a weight is refused unless it is computed where the weight lies.
    """
    graph = propagation.Graph([], symbol)
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
    return errors.UnsupportedError(
        f"Parts of the model {model} were placed by compat.device(), which parallelize() on "
        "several devices would undo. Use one of the two."
    )
