"""States and step counts of optimizers, moved with their parameters to another context."""

import mxnet as mx


def move_updater(updater, context):
    """Move an updater's states and step counts to a context."""
    optimizer = updater.optimizer
    updater.set_states(updater.get_states())  # copies, which move when they are next used
    optimizer._compat_states = updater.states
    if hasattr(optimizer, "_set_current_context"):
        # Steps are counted by device id: Adam would start again on another one.
        optimizer._all_index_update_counts[context.device_id] = dict(optimizer._index_update_count)
        optimizer._set_current_context(context.device_id)


def update(updater, gradients, weights):
    """Update weights by their gradients.

    Arguments:
        updater: the updater.
        gradients: by the number that a plain module gives a weight.
        weights: those of the gradients, in the same order.
    """
    if hasattr(updater, "aggregate_updates"):
        updater(list(gradients), list(gradients.values()), weights)
    else:  # MXNet before 1.5 updates one weight in a call
        for (number, gradient), weight in zip(gradients.items(), weights):
            updater(number, gradient, weight)


def step_counts(optimizer):
    """Return the dictionaries in which an optimizer counts the steps of each weight.

    There is one for each device; MXNet before 1.5 has one for all of them.
    """
    counts = getattr(optimizer, "_all_index_update_counts", None)
    return [optimizer._index_update_count] if counts is None else list(counts.values())


def move_trainer(trainer):
    """Move a Gluon trainer to its parameters' contexts, with the optimizer's state and counts."""
    try:
        contexts = trainer._check_contexts()
    except (AssertionError, RuntimeError):
        return  # it also has parameters of another block, which are elsewhere, or not made yet
    if trainer._contexts == contexts:
        return
    updater = _updaters(trainer)[0]
    # Copies, since states that are copied at their next use contain another context's update.
    states = updater.get_states() if updater.states else None
    trainer._reset_kvstore()
    trainer._contexts = contexts
    optimizer = trainer._optimizer
    trainer._updaters = [mx.optimizer.get_updater(optimizer) for _ in contexts]
    if hasattr(optimizer, "_all_index_update_counts"):
        # Steps are counted by device id: Adam would start again on another one.
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
