"""Verification of Keras 2 models in TensorFlow's graphs."""

from .. import _keras2_verification
from . import _tensorflow1_placement, tensorflow1
from ._tensorflow1_graph import v1_names, variables_written


class VerifiedStep(_keras2_verification.VerifiedStep):
    """The method by which Keras 2 makes the function of a step."""

    def written(self, function, model):
        metrics = list(getattr(model, "metrics", None) or ())  # names or None, before keras 2.3
        metrics += getattr(model, "_output_loss_metrics", None) or []  # of tf.keras
        held = [v for metric in metrics for v in getattr(metric, "variables", ())]
        return variables_written(function, held)  # TensorFlow does not list those

    def ordering(self, optimizer):
        # Nothing else orders the two where Keras makes a function for itself.
        return tensorflow1.counting_after_reading(getattr(optimizer, "iterations", None))

    def operations(self, step):
        import tensorflow

        tf, made = v1_names(tensorflow), step.function.made
        record = _tensorflow1_placement.record(tf, made, lambda: made(step.inputs))
        return _tensorflow1_placement.products(_tensorflow1_placement.partitions(record))
