"""A device of Theano, with its own copies of the weights."""

import contextlib
import weakref
from typing import Any, Dict, Iterator

import numpy as np
import theano

from .graph import context_of, is_random


def independent_state(value: "Any", number: int) -> "Any":
    """Return a random generator's state that is independent of another one.

    Arguments:
        value: the other state.
        number: that of the new state: other numbers give other states.
    """
    from theano.sandbox import rng_mrg

    if isinstance(value, np.random.RandomState):
        return np.random.RandomState([number] + list(value.get_state()[1][:8]))
    states = np.array(value)
    for _ in range(number):
        states = np.array([rng_mrg.ff_2p134(state) for state in states], dtype=states.dtype)
    return states


class Device:
    """A device, with its own variables.

    Arguments:
        name: the name that was configured, such as "cuda0".
        target: Theano's name of its context, or "cpu".

    Attributes:
        place: the target in the device's graphs: "cpu", or the default context, None.
        variables: the device's shared variables, by those of Keras.
        functions: the functions of bodies that run here.
    """

    def __init__(self, name, target):
        self.name = name
        self.target = target
        self.place = "cpu" if target == "cpu" else None
        self.variables: "Dict[Any, Any]" = {}
        self.functions: "Any" = weakref.WeakSet()

    @contextlib.contextmanager
    def current(self) -> "Iterator[None]":
        """Make this device's context Theano's default one within a block."""
        if self.target == self.place:
            yield
            return
        from theano.gpuarray import type as contexts

        registered = contexts._context_reg  # reg_context() refuses to replace a context
        default = {None: registered[None]} if None in registered else {}
        registered[None] = contexts.get_context(self.target)
        try:
            yield
        finally:
            del registered[None]
            registered.update(default)

    def adopt(self, variable: "Any", number: int, is_apart: bool = False) -> None:
        """Make this device's copy of a variable, unless there is one.

        Arguments:
            variable: Keras' variable.
            number: the device's index among those of its model. The first device uses Keras'
                variables themselves, if they lie there.
            is_apart: whether the first device has copies as well.
        """
        present = self.variables.get(variable)
        if present is not None and not (is_apart and present is variable):
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
            copy = self.variables[variable] = theano.shared(value, variable.name, **options)
        copy.is_state = is_random(variable)

    @contextlib.contextmanager
    def randomness_kept(self) -> "Iterator[None]":
        """Restore the generators of random numbers after a block."""
        states = list(filter(is_random, self.variables.values()))
        before = [state.get_value() for state in states]
        try:
            yield
        finally:
            with self.current():
                for state, value in zip(states, before):
                    state.set_value(value)

    def take_weights(self) -> None:
        """Bring this device's weights up to date."""
        for variable, copy in self.variables.items():
            if copy is not variable and not is_random(variable):
                value = np.asarray(variable.get_value(borrow=True))
                with self.current():
                    copy.set_value(value)
