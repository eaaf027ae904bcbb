"""Horovod's optimizers in a script, which would exchange gradients a second time."""

from .. import _keras, errors


def refuse(model):
    """Check that a Keras model's optimizer is not one that Horovod has wrapped.

    Raises:
        UnsupportedError: it is, or wraps one.
    """
    for optimizer in _keras.wrapped_optimizers(getattr(model, "optimizer", None)):
        kind = type(optimizer)
        if kind.__module__.partition(".")[0] == "horovod":
            raise errors.UnsupportedError(
                f"The optimizer of {model.name!r} is Horovod's ({kind.__module__}, hvd."
                "DistributedOptimizer): it would exchange gradients once more, and weigh all "
                "ranks alike, whatever number of rows they have. Ranks exchange them already: "
                "give compile() the optimizer without hvd.DistributedOptimizer()."
            )
