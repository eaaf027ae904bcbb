"""Verification of Keras models on Theano: a step done again on one device."""

from ..._verification import keras2
from .executions import products
from .graph import is_random


def verify(model, verification):
    """Have the first steps of ``model`` verified; None: no longer."""
    keras2.verify(VerifiedStep, model, vars(model).get("_compat_replicas"), verification)


class _Step(keras2.Keras2Step):
    def operations(self):
        """Return numbers of products in each device's functions that this step calls."""
        made = self.function.made
        if not hasattr(made, "owner"):  # Keras' own function: nothing is divided
            return {}
        made(self.data)
        devices = [device.name for device in made.owner.devices]
        return {
            name: (len(products(forward)), len(products(backward)))
            for name, forward, backward in zip(devices, made.plan.forward, made.plan.backward)
        }


class VerifiedStep(keras2.VerifiedKeras2Step):
    """Method by which Keras makes the function of a step."""

    step = _Step
    is_random = staticmethod(is_random)

    def written(self, function, model):
        if hasattr(function, "updates"):  # of replicas, whose generators go on by themselves
            own = [device.variables.values() for device in function.owner.devices]
            written = list(function.updates) + [v for each in own for v in filter(is_random, each)]
        else:
            inputs = function.function.maker.expanded_inputs
            written = [i.variable for i in inputs if i.update is not None]
        written = [v for v in written if hasattr(v, "broadcastable")]  # no RandomState
        return sorted(written, key=lambda variable: int(variable.auto_name.partition("_")[2]))
