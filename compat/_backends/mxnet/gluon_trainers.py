"""Gluon's parameters and trainers, moved between contexts, for the MXNet backend."""

import mxnet as mx

from .optimizer_state import set_states


def _parameters(block):
    return list(type(block).collect_params(block).values())


def _move(block, contexts):
    """Bring parameters, and the trainers that have them, to these contexts where they are not."""
    parameters = _parameters(block)
    for parameter in parameters:
        is_made = parameter._data is not None or parameter._deferred_init
        if is_made and parameter.list_ctx() != contexts:
            parameter.reset_ctx(contexts)
    trainers = {id(parameter._trainer): parameter._trainer for parameter in parameters}
    for trainer in trainers.values():
        if trainer is not None:
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
    states = _updaters(trainer)[0].states
    trainer._reset_kvstore()
    trainer._contexts = contexts
    optimizer = trainer._optimizer
    trainer._updaters = [mx.optimizer.get_updater(optimizer) for _ in contexts]
    # Steps are counted per device id: Adam would begin anew on another one.
    counts = optimizer._all_index_update_counts
    ids = {context.device_id for context in contexts} | set(counts)
    counts.update((i, dict(optimizer._index_update_count)) for i in ids)
    if states:
        trainer._init_kvstore()
        for updater, context in zip(_updaters(trainer), contexts):
            set_states(updater, states, context)


def _updaters(trainer):
    on_kvstore = trainer._kvstore and trainer._update_on_kvstore
    return [trainer._kvstore._updater] if on_kvstore else trainer._updaters
