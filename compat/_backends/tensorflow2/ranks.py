"""tf.keras 2 and Keras 3 in ranks: Horovod, or TensorFlow's workers, carry the gradients.

The steps of tf.keras 2 are ``ranked_steps``; here is what is otherwise in Keras 3.
"""

import contextlib
import itertools
import sys

import tensorflow as tf

from ... import _keras, errors
from ..._ranks import clusters, keras3, keras_model
from ..._ranks.engines import tensorflow_collectives, tensorflow_engine
from ..._runtime import patching
from . import ranked_steps
from .keras_models import unsupported


def distribute(model, place):
    """Make a model of Keras one of the ranks', in place. A second time changes nothing."""
    keras = _keras.keras_of(model)
    if hasattr(keras, "StatelessScope"):
        kinds = _KERAS_3
    elif hasattr(model, "_eager_losses") and hasattr(model, "train_step"):
        kinds = ranked_steps.KINDS
    else:
        raise unsupported(
            f"train a model of {keras.__name__} {keras.__version__} as one of several ranks",
            "Use tf.keras from TensorFlow 2.4, or Keras 3.",
        )
    engine = join(place)
    if ranked_steps.RankedStep.of(model) is None:
        keras_model.install(model, engine, kinds)
        _keras.forget_compiled_steps(model)
    return model


def join(place):
    """The engine that the launcher is for.

    Raises:
        NotInstalledError: it is Horovod, which is not installed.
    """
    if place.launcher == clusters.TF_CONFIG:
        return tensorflow_collectives.TensorFlowCollectives.join(place)
    try:
        return tensorflow_engine.TensorFlowHorovod.join(place)
    except errors.NotInstalledError as error:
        raise errors.NotInstalledError(
            f"{error} From TensorFlow 2.4 on, compat run -n {place.size} needs no Horovod."
        ) from None


# Keras 3 --------------------------------------------------------------------------------------


def _build(model, iterator):
    """Make all weights that are still to be made, as the first step would, and run nothing."""
    batch = getattr(iterator, "element_spec", None)
    if batch is None:  # a generator, in train_on_batch()
        batch = next(iterator)
        iterator = itertools.chain([batch], iterator)
    batch = tf.nest.map_structure(
        lambda leaf: None if isinstance(leaf, tf.OptionalSpec) else leaf, batch
    )
    step = tf.function(lambda batch: model.train_step(batch), autograph=False)
    step.get_concrete_function(batch)
    return iterator


@contextlib.contextmanager
def _computing(step, model, rows, share):
    """Within, losses of single outputs, which logs show, are weighed as one process does.

    Keras weighs them by the rows of the batch, if their number is known as it traces the step. On
    TensorFlow it is not, and each batch counts once (3.15, ``CompileLoss.call``).
    """
    compute = getattr(model, "_compile_loss", None)
    call = getattr(compute, "call", None)
    module = sys.modules[_keras.keras_of(model).losses.Loss.__module__]

    def weigh(loss):
        """Multiply a loss by what this rank's rows count in the whole batch."""
        if isinstance(step, TestStep) and not keras_model.RankedFit.of(model).in_step:
            return loss
        return loss * tf.cast(share() * step.engine.place.size, loss.dtype)

    def call_and_weigh(*args, **kwargs):
        with patching.replaced(module, unscale_loss_for_distribution=weigh):
            return call(*args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(ranked_steps.RankedStep.computing(step, model, rows, share))
        if call is not None and not isinstance(rows, int):
            stack.enter_context(patching.replaced(compute, call=call_and_weigh))
        yield


class RankedKeras3Step(ranked_steps.RankedStep):
    """The ``train_step`` of a Keras 3 model. Its optimizers' ``apply`` gets all ranks' mean."""

    def begin(self, model, function, iterator):
        """Keras' function is none of TensorFlow's: it calls some."""
        if not all(layer.built for layer in _keras.all_layers(model)):
            iterator = _build(model, iterator)
        keras_model.same_start(model, self.engine)
        return iterator

    def begin_eagerly(self, model, data):
        """``begin`` has done that."""

    computing = _computing

    def state(self, model):
        return [variable._value for variable in keras3.averaged(model)]

    def of_all_ranks(self, optimizer, share):
        apply = optimizer.apply
        methods, scaled = keras3.scaling(optimizer, lambda dtype: tf.cast(share, dtype))

        def apply_of_all_ranks(grads, *args, **kwargs):
            means = self.means(list(grads), tf.ones_like(share) if scaled else share)
            return apply(means, *args, **kwargs)

        return dict(methods, apply=apply_of_all_ranks)


class TestStep(ranked_steps.RankedTestStep):
    """The ``test_step`` of a Keras 3 model."""

    computing = _computing


#: The methods of a model that become a rank's.
_KERAS_3 = (RankedKeras3Step, TestStep) + ranked_steps.KINDS[2:]  # the other ones, as they are
