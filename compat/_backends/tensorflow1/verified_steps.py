"""Verification of Keras 2 models in TensorFlow's graphs."""

from _thread import get_ident
from typing import Any, Optional

from ... import _keras
from ..._verification import Verification, keras2
from . import op_placement, timeline
from .graph import v1_names, variables_written
from .step_counter import counting_in_order


class _TensorFlow1Step(keras2.Keras2Step):
    def __init__(self, method, function, data):
        # A trial that fails makes the function anew, with other variables for the optimizer.
        if hasattr(function.made, "try_on"):  # it is of replicas
            function.made.try_on(data)
        super().__init__(method, function, data)

    def operations(self):
        recording = timeline.recorded(v1_names(), get_ident(), output_partition_graphs=True)
        with recording as runs:  # other threads may run other functions meanwhile
            self.function.made(self.data)
        products = op_placement.products(op_placement.partitions(runs[-1]))
        devices = self.method.verification.record.devices
        return dict(zip(op_placement.as_configured(list(products), devices), products.values()))


class VerifiedTensorFlow1Step(keras2.VerifiedKeras2Step):
    """The method by which Keras 2 makes the function of a step."""

    step = _TensorFlow1Step

    def written(self, function, model):
        metrics = list(getattr(model, "metrics", None) or ())  # names or None, before keras 2.3
        metrics += getattr(model, "_output_loss_metrics", None) or []  # of tf.keras
        held = [v for metric in metrics for v in getattr(metric, "variables", ())]
        ran = [function.updates_op] + list(function.outputs)
        written = variables_written(ran, held)  # TensorFlow does not list those
        return sorted(written, key=lambda variable: getattr(variable, "handle", variable).op._id)

    def ordering(self, optimizer):
        # Nothing else orders the two where Keras makes a function for itself.
        return counting_in_order(optimizer)


class _VerifiedInnerModel(_keras.InnerModel):
    """The inner models of an old Sequential whose steps are verified."""


def verify(model: "Any", verification: "Optional[Verification]") -> None:
    """Have the first steps of ``model`` verified; None: no longer."""
    if _VerifiedInnerModel.of(model) is not None:
        _VerifiedInnerModel.of(model).remove(model)

    def verify_inside(maker):
        VerifiedTensorFlow1Step.install_on(maker, verification)

    if verification is not None:
        _VerifiedInnerModel.have_prepared(model, verify_inside)
    elif _keras.inner_model(model) is not None:
        verify_inside(_keras.inner_model(model))
