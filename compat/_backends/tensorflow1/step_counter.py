"""The updates that Keras 2 asks an optimizer for, and the order in which its steps are counted."""

import contextlib

from ... import _keras, _patching
from .graph import ancestors


class OrderedCounting(_patching.InstanceMethod):
    """How a model on one device makes its training function, so that its first step is step 1."""

    method = "_make_train_function"

    def __call__(self, model):
        with counting_in_order(model.optimizer):
            self.plain(model)()


class _InnerModel(_keras.InnerModel):
    """The inner models of an old Sequential whose first step is step 1."""


def is_ordered(model):
    """Whether ``order`` was called for this model."""
    method = _InnerModel if _keras.wraps_a_model(model) else OrderedCounting
    return method.of(model) is not None


def order(model):
    """Have the first training step of a model on one device be step 1."""

    def order_inside(maker):
        with _keras.rebuilding_functions(maker):
            OrderedCounting([]).install(maker)

    _InnerModel.have_prepared(model, order_inside)


def leave_as_it_was(model):
    """Take back what ``order`` did."""
    maker = _keras.inner_model(model)
    if maker is not None:
        OrderedCounting.of(maker).remove(maker)
    if maker is not model:
        _InnerModel.of(model).remove(model)


def counts_without_order(model):
    """Whether an Adam of this model's Keras may read its step counter before or after it grows."""
    adam = _keras.keras_of(model).optimizers.Adam
    return "get_updates" in vars(adam)  # not that of all later optimizers


@contextlib.contextmanager
def counting_in_order(optimizer):
    """Within, the training functions that Keras makes count as ``counting_after_reading`` says."""
    get_updates = optimizer.get_updates

    def get_updates_in_order(loss, params):
        with counting_after_reading(getattr(optimizer, "iterations", None)):
            return get_updates(loss=loss, params=params)

    # Not around all of it: a session that has run knows no new order (keras 2.3).
    with _patching.replaced(optimizer, get_updates=get_updates_in_order):
        yield


@contextlib.contextmanager
def counting_after_reading(counter):
    """Within, the increment of an optimizer's step counter waits for what reads the counter.

    In keras 2.2 and 2.3 nothing orders the two. Adam adds 1 to what it reads, so it means the
    number before: with reference variables it mostly gets that, with resource variables the other
    one. tf.keras has an order of its own, which stays.
    """

    def uses(kind):
        consumers = counter.handle.consumers() if hasattr(counter, "handle") else ()
        return [op for op in consumers if op.type == kind]

    # Those that others made, such as the one that saves the counter, must not count.
    reads, writes = uses("ReadVariableOp"), uses("AssignAddVariableOp")
    yield
    for read in uses("ReadVariableOp"):
        for write in uses("AssignAddVariableOp"):
            if read not in reads and write not in writes + ancestors([read], ())[0]:
                write._add_control_input(read)
