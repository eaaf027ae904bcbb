"""A device of Theano's, with weights of its own."""

import contextlib
import weakref

import numpy as np
import theano

from .graph import context_of, is_random


def independent_state(value, number):
    """Return a generator's state whose numbers are independent of those of ``value``."""
    from theano.sandbox import rng_mrg

    if isinstance(value, np.random.RandomState):
        return np.random.RandomState([number] + list(value.get_state()[1][:8]))
    states = np.array(value)
    for _ in range(number):
        states = np.array([rng_mrg.ff_2p134(state) for state in states], dtype=states.dtype)
    return states


class Device:
    """A device: its ``name``, and Theano's ``target`` for it, a context's name or "cpu".

    ``place`` is the target in its own graphs: "cpu", or the default context, None.
    """

    def __init__(self, name, target):
        self.name = name
        self.target = target
        self.place = "cpu" if target == "cpu" else None
        self.variables = {}  # type: Any  # Keras' shared variables, and those used here
        self.functions = weakref.WeakSet()  # type: Any  # those of bodies that run here

    @contextlib.contextmanager
    def current(self):
        """Make Theano's default context this device's for the duration of a block."""
        if self.target == self.place:
            yield
            return
        from theano.gpuarray import type as contexts

        registered = contexts._context_reg  # what reg_context() fills refuses a second one
        default = {None: registered[None]} if None in registered else {}
        registered[None] = contexts.get_context(self.target)
        try:
            yield
        finally:
            del registered[None]
            registered.update(default)

    def adopt(self, variable, number, is_apart=False):
        """Make this device's variable for one of Keras', unless it has one.

        Arguments:
            number: the device's among those of its model. The first uses Keras' variables
                themselves, if they lie there.
            is_apart: whether the first has variables of its own as well.
        """
        known = self.variables.get(variable)
        if known is not None and not (is_apart and known is variable):
            return
        if number == 0 and context_of(variable) == self.target and not is_apart:
            self.variables[variable] = variable
            return
        value, options = variable.get_value(), {}
        if is_random(variable):
            value = independent_state(value, number)
        if hasattr(variable, "broadcastable"):
            options = {"target": self.place, "broadcastable": variable.broadcastable}
        with self.current():
            own = self.variables[variable] = theano.shared(value, variable.name, **options)
        own.is_state = is_random(variable)

    @contextlib.contextmanager
    def randomness_kept(self):
        """Restore the generators of random numbers after a block."""
        states = list(filter(is_random, self.variables.values()))
        before = [state.get_value() for state in states]
        try:
            yield
        finally:
            with self.current():
                for state, value in zip(states, before):
                    state.set_value(value)

    def take_weights(self):
        """Bring this device's weights up to date."""
        for keras, own in self.variables.items():
            if own is not keras and not is_random(keras):
                value = np.asarray(keras.get_value(borrow=True))
                with self.current():
                    own.set_value(value)
