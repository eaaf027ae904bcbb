"""What Gluon blocks have: parameters, their trainers, and states, which blocks set themselves."""

import contextlib

import mxnet as mx

from ... import _rows, errors
from .symbol_executors import MEANS


def parameters_of(block):
    return list(type(block).collect_params(block).values())


# On several contexts ----------------------------------------------------------------------------


def move(block, contexts):
    """Bring parameters, and the trainers that have them, to these contexts where they are not."""
    parameters = parameters_of(block)
    for parameter in parameters:
        is_made = parameter._data is not None or parameter._deferred_init
        if is_made and parameter.list_ctx() != contexts:
            parameter.reset_ctx(contexts)
    for trainer in {parameter._trainer for parameter in parameters} - {None}:
        _move_trainer(trainer)


def _move_trainer(trainer):
    """Let a trainer follow its parameters, with the optimizer's state and step counts."""
    try:
        contexts = trainer._check_contexts()
    except (AssertionError, RuntimeError):
        return  # it has another block's parameters, too, which are elsewhere as yet, or not there
    settings, wanted = trainer._kvstore_params, {}
    if len(contexts) > 1 and settings["kvstore"] is None:  # it would sum no gradients over them
        wanted["kvstore"] = "device"
    # As on one context: allreduce_grads() and update() can be called one by one.
    can_be_split = settings["update_on_kvstore"] is None and not trainer._contains_sparse_weight
    if len(contexts) > 1 and can_be_split:
        wanted["update_on_kvstore"] = False
    if not wanted and trainer._contexts == contexts:
        return
    settings.update(wanted)
    updater = _updaters(trainer)[0]
    # Copies: what is copied when it is used has another context's update in it.
    states = updater.get_states() if updater.states else None
    trainer._reset_kvstore()
    trainer._contexts = contexts
    optimizer = trainer._optimizer
    trainer._updaters = [mx.optimizer.get_updater(optimizer) for _ in contexts]
    # Steps are counted per device id: Adam would begin anew on another one.
    counts = optimizer._all_index_update_counts
    ids = {context.device_id for context in contexts} | set(counts)
    counts.update((i, dict(optimizer._index_update_count)) for i in ids)
    if states is not None:
        trainer._init_kvstore()
        for updater in _updaters(trainer):
            updater.set_states(states)


def _updaters(trainer):
    on_kvstore = trainer._kvstore and trainer._update_on_kvstore
    return [trainer._kvstore._updater] if on_kvstore else trainer._updaters


def leave_without_gradients(block):
    """Gradients of 0 on all contexts but the first, new as if a backward pass had written them."""
    for parameter in parameters_of(block):
        if parameter._data is not None and parameter.grad_req != "null":
            for array, gradient in zip(parameter.list_data()[1:], parameter.list_grad()[1:]):
                if parameter.grad_req == "write":
                    gradient[:] = 0
                array._fresh_grad = True


# States -----------------------------------------------------------------------------------------


def states_of(block, operations):
    """The parameters that a block sets by itself, as far as they are made.

    Arguments:
        operations: of those known to be written by operations of MXNet, the operation by name.

    Returns:
        Running statistics, which are means over rows; and those of which only the user's own
        block knows what they are.
    """
    layers = mx.gluon.nn.basic_layers
    batch_norm = getattr(layers, "_BatchNorm", layers.BatchNorm)  # the former from MXNet 1.7 on
    parts = {}  # type: dict  # by parameter: the block within that has it
    for part in blocks(block):
        for parameter in list(part.params.values()) + list(part._reg_params.values()):
            is_state = parameter.grad_req == "null" and parameter._data is not None
            if is_state and not isinstance(parameter, mx.gluon.Constant):
                parts.setdefault(parameter, part)
    means, others = [], []
    for parameter, part in parts.items():
        if operations.get(parameter.name) in MEANS or isinstance(part, batch_norm):
            means.append(parameter)
        elif parameter.name in operations or not type(part).__module__.startswith("mxnet.gluon"):
            others.append(parameter)
    return means, others


class OwnStates:
    """States that a user's block sets in its ``forward``.

    Each replica begins with the same values, also where ``set_data()`` of the one before has set
    those of all contexts. If all end with the same (a step counter) that is the new value. If
    not, it depends on the rows, and only the user knows whether as a sum or as a mean.
    """

    def __init__(self, parameters):
        self.parameters = parameters
        self.before = [parameter.list_data()[0].copy() for parameter in self.parameters]
        self.after = []  # of each replica

    def _set(self, values):
        with mx.autograd.pause():
            for parameter, value in zip(self.parameters, values):
                for array in parameter.list_data():
                    value.copyto(array)

    def reset(self):
        self._set(self.before)

    @contextlib.contextmanager
    def replica(self, context):
        self.reset()
        yield
        self.after.append([parameter.data(context).copy() for parameter in self.parameters])

    def unite(self):
        """Set what all replicas have set; or return what sets different values, by the rows."""
        for parameter, *values in zip(self.parameters, *self.after):
            if not _equal(values):
                return _rows.Across(f"that sets the parameter {parameter.name!r}")
        self._set(self.after[0])
        return None


def blocks(block):
    """A block and all that are within."""
    yield block
    for child in block._children.values():
        yield from blocks(child)


def own_attributes(block):
    """What a block has set on itself, such as a counter, to be put back."""
    from ..._verification import Attributes  # not at start-up

    own = [part for part in blocks(block) if not type(part).__module__.startswith("mxnet.")]
    # Gluon's own begin with "_": what is compiled stays.
    return Attributes(own, lambda name, value: not name.startswith("_"))


def check_equal(block, parameters):
    """See that no replica has set a state of its own since, in its backward pass."""
    for parameter in parameters:
        if not _equal(parameter.list_data()):
            raise errors.UnsupportedError(
                f"The replicas of the block {block.name!r} set its parameter {parameter.name!r} to "
                "different values, each from its own rows, and whether these are to be added up or "
                "averaged only the block knows. Set it outside of the block, from results for the "
                "whole batch; or run the block on one device: parallelize(block, gpus=1)."
            )


def _equal(arrays):
    first, *others = [array.asnumpy() for array in arrays]
    return all((other == first).all() for other in others)
