"""Verification of Keras models on Theano: a step compared with that of one device."""

from typing import Any

from ..._runtime import synchronized
from ..._verification import keras2
from .executions import products
from .graph import is_random


def verify(model: "Any", verification: "Any") -> None:
    """Verify the first steps of a model from now on; with None, no longer."""
    keras2.verify(VerifiedStep, model, vars(model).get("_compat_replicas"), verification)


class _Step(keras2.Keras2Step):
    """A step of a Keras function, computed on several devices and on one."""

    def is_synchronized(self, layer):
        """Return whether batch normalization, if it is that, has the whole batch's statistics."""
        owner = getattr(self.function.made, "owner", None)  # Keras' own function has none
        is_asked = owner is not None and synchronized.is_asked(owner.owner)
        return is_asked or synchronized.asks(layer)

    def operations(self):
        """Return numbers of products in each device's functions that this step calls."""
        made = self.function.made
        if not hasattr(made, "owner"):  # Keras' own function: nothing is split
            return {}
        made(self.data)

        def count(stages):
            return sum(len(products(stage.function)) for stage in stages)

        devices = [device.name for device in made.owner.devices]
        return {
            name: (count(program.forward), count(program.backward))
            for name, program in zip(devices, made.plan.programs)
        }


class VerifiedStep(keras2.VerifiedKeras2Step):
    """Method by which Keras makes the function of a step."""

    step = _Step
    is_random = staticmethod(is_random)

    def written(self, function, model):
        """Return the variables that a function writes, in the order of their making."""
        if hasattr(function, "updates"):  # of replicas, whose generators go on by themselves
            copies = [v for device in function.owner.devices for v in device.variables.values()]
            written = list(function.updates) + list(filter(is_random, copies))
        else:
            inputs = function.function.maker.expanded_inputs
            written = [i.variable for i in inputs if i.update is not None]
        written = [v for v in written if hasattr(v, "broadcastable")]  # no RandomState
        return sorted(written, key=lambda variable: int(variable.auto_name.partition("_")[2]))
