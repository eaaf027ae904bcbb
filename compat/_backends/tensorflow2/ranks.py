"""tf.keras 2 and Keras 3 in ranks: Horovod, or TensorFlow's workers, carry the gradients."""

from ... import _keras, errors
from ..._ranks import clusters, keras_model
from ..._ranks.engines import tensorflow_collectives, tensorflow_horovod
from . import keras3_steps, ranked_steps
from .compiled_steps import forget_compiled_steps
from .refusals import unsupported


def distribute(model, place):
    """Make a model of Keras one of the ranks', in place. A second time changes nothing."""
    keras = _keras.keras_of(model)
    if hasattr(keras, "StatelessScope"):
        kinds = keras3_steps.KINDS
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
        forget_compiled_steps(model)
    return model


def join(place):
    """The engine that the launcher is for.

    Raises:
        NotInstalledError: it is Horovod, which is not installed.
    """
    if place.launcher == clusters.TF_CONFIG:
        return tensorflow_collectives.TensorFlowCollectives.join(place)
    try:
        return tensorflow_horovod.TensorFlowHorovod.join(place)
    except errors.NotInstalledError as error:
        raise errors.NotInstalledError(
            f"{error} From TensorFlow 2.4 on, compat run -n {place.size} needs no Horovod."
        ) from None
