"""Order in which an optimizer of Keras reads and increments its step counter."""

import contextlib
from typing import Any

from ... import _keras
from ..._runtime import patching
from . import graph


def counts_without_order(model: "Any") -> bool:
    """Return whether Adam in a model's Keras may read its step counter after the increment."""
    get_updates = vars(_keras.keras_of(model).optimizers.Adam).get("get_updates")
    code = getattr(get_updates, "__code__", None)  # none: that of all later optimizers
    return code is not None and "control_dependencies" not in code.co_names  # as in 1.13's tf.keras


@contextlib.contextmanager
def counting_in_order(
    optimizer,
    loss_of=lambda loss, params: loss,
    within=contextlib.ExitStack,
    check=lambda updates: None,
):
    """Have the training functions that Keras makes within a block count ``updates_in_order``.

    Yields a list of the losses whose updates were computed.

    Arguments:
        optimizer: the model's.
        loss_of: from Keras' loss and parameters to the loss that the optimizer trains on.
        within: a function that returns the context in which updates are computed.
        check: a function that is called with the updates.
    """
    get_updates, losses = optimizer.get_updates, []

    def get_updates_in_order(loss, params):
        losses.append(loss)
        with within():
            updates = updates_in_order(optimizer, get_updates, loss_of(loss, params), params)
        check(updates)
        return updates

    # Not around all of it: a session that has run knows no new order (keras 2.3).
    with patching.replaced(optimizer, get_updates=get_updates_in_order):
        yield losses


def updates_in_order(optimizer, get_updates, loss, params):
    """Return the updates of an optimizer, in which counters grow once they were read.

    In keras 2.2 and 2.3 nothing orders the two. Adam adds 1 to the number of steps that it reads,
    so it means the number before: with reference variables it mostly gets that, with resource
    variables the other one. Nadam reads its schedule of momentum twice, before and after it is set.
    tf.keras orders them itself.
    """
    optimizers = _keras.wrapped_optimizers(optimizer)
    attributes = [value for wrapped in optimizers for value in vars(wrapped).values()]
    counters = [value for value in attributes if hasattr(value, "handle")]
    # Operations that were there before, such as those that save the counter, do not count.
    others = {op for counter in counters for op in counter.handle.consumers()}
    # From a variable and its new value Keras makes an assignment, but later than can be seen here.
    updates = [
        update[0].assign(update[1]) if isinstance(update, tuple) else update
        for update in get_updates(loss=loss, params=params)
    ]
    for counter in counters:
        made = [op for op in counter.handle.consumers() if op not in others]
        for read in [op for op in made if op.type == "ReadVariableOp"]:
            for write in [op for op in made if op.type.startswith("Assign")]:
                if write not in graph.ancestors([read], ())[0]:
                    write._add_control_input(read)
    return updates
