"""Verification of Keras models on TensorFlow 1: a step compared with that of one device."""

from _thread import get_ident
from typing import Any

from ... import errors
from ..._runtime import synchronized
from ..._verification import keras2
from .._tensorflow.graph import v1_names
from .._tensorflow.profiler import as_configured
from . import graph, profiler
from .optimizer_order import counting_in_order
from .resource_variables import settable
from .side_effects import PythonFunctions


class _Step(keras2.Keras2Step):
    """A step of a Keras function, computed on several devices and on one."""

    def __init__(self, method, function, data):
        # A trial that fails makes the function anew, with other variables for the optimizer.
        if hasattr(function.made, "try_on"):  # it is of replicas
            function.made.try_on(data)
            function.made.results.give_to(function.unsplit)
        super().__init__(method, function, data)
        computed = []
        for made in function.made, function.unsplit:
            computed += [made.updates_op, *made.outputs, *getattr(made, "fetches", ())]
        self._computed = graph.ancestors(computed, ())[0]

    def is_synchronized(self, layer):
        """Return whether batch normalization, if it is that, has the whole batch's statistics."""
        owner = getattr(self.function.made, "owner", None)  # Keras' own function has none
        return owner is not None and owner.is_synchronized or synchronized.asks(layer)

    def attributes(self):
        """Return the state that Python functions of the step can change."""
        return PythonFunctions(self._computed)

    def operations(self):
        """Return numbers of products by device, forward and backward."""
        recording = profiler.recorded(v1_names(), get_ident(), output_partition_graphs=True)
        with recording as runs:  # other threads may run other functions meanwhile
            self.function.made(self.data)
        products = profiler.products(profiler.partitions(runs[-1]))
        devices = self.method.verification.record.devices
        return dict(zip(as_configured(list(products), devices), products.values()))


class VerifiedStep(keras2.VerifiedKeras2Step):
    """Method by which Keras 2 makes the function of a step."""

    step = _Step

    has_warned = False  # of a graph that is finalized

    def is_ready(self, model):
        """Return whether the step can be verified: the graph must not be finalized."""
        is_finalized = model.outputs[0].graph.finalized
        if is_finalized and not self.has_warned:
            name = self.verification.record.model
            errors.warn(
                f"verify={self.verification.requested}: the graph of model {name!r} is "
                f"finalized, so that no operations can be added that do its {self.kind} step on "
                "one device: it is not verified. Run a step before graph.finalize()."
            )
        self.has_warned = is_finalized
        return not is_finalized

    def written(self, function, model):
        """Return the variables that a function writes, in the order of their making."""
        metrics = list(getattr(model, "metrics", None) or ())  # names or None, before keras 2.3
        metrics += getattr(model, "_output_loss_metrics", None) or []  # of tf.keras
        of_metrics = [v for metric in metrics for v in getattr(metric, "variables", ())]
        ran = [function.updates_op] + list(function.outputs) + getattr(function, "fetches", [])
        written = graph.variables_written(ran, of_metrics)  # TensorFlow does not list those
        return sorted(
            settable(written), key=lambda variable: getattr(variable, "handle", variable).op._id
        )

    # Nothing else orders the two where Keras makes a function for itself.
    ordering = staticmethod(counting_in_order)


def verify(model: "Any", verification: "Any") -> None:
    """Verify the first steps of a model from now on; with None, no longer."""
    keras2.verify(VerifiedStep, model, vars(model).get("_compat_functions"), verification)
