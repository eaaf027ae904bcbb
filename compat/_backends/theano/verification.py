"""Verification of Keras models on Theano, and where the products of a step ran."""

from ..._verification import keras2
from .compilation import is_random

# Which of a compiled function's operations are the products of layers; a loop has its own. On GPUs
# their names begin with Gpu.
PRODUCTS = (
    "Dot", "Dot22", "Dot22Scalar", "Gemm", "Gemv", "CGemv", "Ger", "CGer", "Scan",
    "CorrMM", "CorrMM_gradWeights", "CorrMM_gradInputs", "AbstractConv2d",
    "AbstractConv2d_gradWeights", "AbstractConv2d_gradInputs",
    "DnnConv", "DnnConvGradW", "DnnConvGradI",
)  # fmt: skip


class _TheanoStep(keras2.Keras2Step):
    def operations(self):
        """From the functions that Theano compiled for each device, and that this step calls."""
        made = self.function.made
        if not hasattr(made, "owner"):  # Keras' own function: nothing is divided
            return {}
        made(self.data)
        devices = [device.name for device in made.owner.devices]
        return {
            name: (len(products(forward)), len(products(backward)))
            for name, forward, backward in zip(devices, made.forward, made.backward)
        }


class VerifiedTheanoStep(keras2.VerifiedKeras2Step):
    """The method by which Keras makes the function of a step."""

    step = _TheanoStep
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


def products(function):
    """The nodes of a compiled function's graph that are products of layers."""
    nodes = function.maker.fgraph.apply_nodes
    return [node for node in nodes if type(node.op).__name__.replace("Gpu", "") in PRODUCTS]
