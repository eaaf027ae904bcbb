"""JAX as one of several ranks: jax.distributed, and one array over all processes for each sum.

A step is two programs of this process, with the sum of the gradients between: a program that spans
processes would need the same shapes on all ranks, and batches may differ.
"""

from ... import errors
from ..._ranks import evaluated_batch_norm, keras_model
from ..._ranks.engines.jax_distributed import JaxDistributed
from ..._runtime import synchronized
from . import batch_norm
from .arguments import rows_of
from .loss_totals import Reduced
from .ranked_step import RankedJAXStep, under_way


def distribute(model, place):
    """Have the ranks train a model together. Repeated calls have no effect."""
    engine = JaxDistributed.join(place)
    if RankedJAXTrainFunction.of(model) is None:
        model.train_function = model.test_function = None
    kinds = RankedJAXTrainFunction, RankedJAXTestFunction, RankedStatelessCall
    keras_model.install(model, engine, kinds)
    # The front end has named these.
    layers = batch_norm.requested(model)
    others = [layer for layer in layers if not batch_norm.is_synchronizable(layer)]
    RankedJAXTrainFunction.of(model).warned = others
    if model.built:
        keras_model.same_start(model, engine)
    return model


class RankedJAXTrainFunction(keras_model.RankedMethod):
    """Method by which Keras makes a function of ``train_step``: a ``RankedJAXStep``."""

    method = "make_train_function"
    steps = ("train",)
    is_synchronized = False  # the function's batch normalization
    warned = ()  # layers whose own statistics were warned of

    def invoke(self, model, force=False):
        is_synchronized = synchronized.is_asked(model)
        if model.train_function is None or force or is_synchronized != self.is_synchronized:
            self.is_synchronized = is_synchronized
            layers = batch_norm.synchronizable(model, self.warned)
            model.train_function = _function_of(model, RankedJAXStep(model, self.engine, layers))


class RankedJAXTestFunction(keras_model.RankedMethod):
    """Method by which Keras makes a function of ``test_step``, with its rows counted."""

    method = "make_test_function"
    steps = ("evaluate",)

    def invoke(self, model, force=False):
        if model.test_function is not None and not force:
            return

        watch = evaluated_batch_norm.Watch(model)

        def step(state, data, share):
            with under_way, watch.watching(batch_norm.requested(model)):
                return model.test_step(state, data)

        reduced = Reduced(model, self.engine, step)

        def counted(state, data):
            rows = rows_of(model, data)
            keras_model.count(model, rows, False)

            def share():
                keras_model.RankedFit.of(model).in_step = True
                return self.engine.share(rows)

            return reduced(state, data, share)

        model.test_function = _function_of(model, counted)


def _function_of(model, step):
    """Return Keras' function of a step for its loops."""
    if hasattr(model, "_make_function"):
        return model._make_function(step)

    def function(state, data):  # Keras before 3.7: of the state, and a list of batches
        for batch in data:
            logs, state = step(state, batch)
        return logs, state

    return function


class RankedStatelessCall(keras_model.RankedMethod):
    """``stateless_call``, an error where a custom loop trains with it.

    Such a loop calls nothing by which the ranks could exchange gradients.
    """

    method = "stateless_call"
    steps = ("train",)
    is_of_keras_steps = True

    def invoke(self, model, *args, **kwargs):
        if kwargs.get("training") and not under_way.here():
            raise errors.unsupported(
                "jax",
                "train model {!r} in a loop of the script's own in {}: gradients of such a "
                "loop are never the model's".format(model.name, self.engine.place),
                "Use fit() or train_on_batch(), or start the script without a launcher.",
            )
        return self.plain(model)(*args, **kwargs)
