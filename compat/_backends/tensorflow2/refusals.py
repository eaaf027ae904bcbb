"""Errors for models, modes and versions of TensorFlow that cannot run on several devices.

This imports no TensorFlow.
"""

import sys

from ... import _keras, errors
from ..._ranks.tf_config import TF_CONFIG
from .configuration import runs_eagerly, unsupported

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Iterable


def refuse_unreached(tf: "Any", model: "Any") -> None:
    """Refuse models whose steps would not reach a replicated ``call``."""
    from tensorflow.python.eager import context

    keras, is_eager = _keras.keras_of(model), runs_eagerly(tf)
    # It would run eagerly, were it not for a graph around.
    if not is_eager and context.default_execution_mode == context.EAGER_MODE:
        raise unsupported(
            "run a model on several devices within tf.Graph().as_default()",
            "Build the model outside of that graph, or write tf.compat.v1.disable_v2_behavior() "
            "at the top of the script, to have TensorFlow 1.",
        )
    if not is_eager:
        raise unsupported(
            "run a model on several devices after tf.compat.v1.disable_eager_execution()",
            "Remove that call, or use TensorFlow 1.",
        )
    if not hasattr(model, "train_step") and keras.__name__ == "keras":
        raise unsupported(
            f"run a model of keras {keras.__version__} on several devices",
            "Use tf.keras, or Keras 3, or train on one device, with parallelize(model, gpus=1).",
        )
    refuse_loops(tf, _keras.all_layers(model))
    requested = _keras.compiled_with(model).get("jit_compile")
    if getattr(model, "_jit_compile", None) and requested != "auto":
        raise several_devices_in_xla()


def refuse_strategies(tf: "Any", model: "Any") -> None:
    """Refuse a model that a strategy of TensorFlow's replicates already, or will."""
    if tf.distribute.has_strategy():
        kind = type(tf.distribute.get_strategy()).__name__
        reason = f"it was called within the scope of a {kind}"
    else:
        # The weights of a model of tf.keras that is not built yet would be an error.
        weights = model.weights if not hasattr(model, "_eager_losses") or model.built else ()
        # A Keras 3 variable has one of TensorFlow's; a layer's vocabulary is no variable.
        variables = [v if isinstance(v, tf.Variable) else getattr(v, "value", v) for v in weights]
        kinds = {kind.__name__ for variable in variables for kind in type(variable).__mro__}
        if "DistributedValues" not in kinds:
            return
        reason = f"the variables of {model.name!r} were made in the scope of a strategy"
    raise errors.UnsupportedError(
        f"parallelize() and tf.distribute both run a model on several devices: {reason}. Build the "
        "model and call parallelize() outside of the strategy's scope, or write "
        'compat.parallelize(build_model, strategy="mirrored").'
    )


def refuse_mirrored(model: "Any") -> None:
    """Refuse a strategy for a Keras 3 that does not scale losses by its number of replicas.

    Before 3.8 it trains to other numbers under one, evaluates to another loss, and predicts sums
    of the replicas' outputs, without compat, too.
    """
    keras = _keras.keras_of(model)
    module = sys.modules[keras.losses.Loss.__module__]
    if hasattr(keras, "ops") and not hasattr(module, "scale_loss_for_distribution"):
        raise unsupported(
            f'train by strategy="mirrored" with keras {keras.__version__}, which does not average '
            "losses and outputs over the replicas of a strategy",
            "Use Keras 3.8 or later, or parallelize(model) without a strategy.",
        )


def refuse_loops(tf: "Any", layers: "Iterable[Any]") -> None:
    """Refuse loops up to TensorFlow 2.1: on another device than the function around they fail."""
    for layer in layers:
        is_recurrent = any(c.__name__ == "RNN" for c in type(layer).__mro__)
        if is_recurrent and not layer.unroll and not hasattr(tf.keras.Model, "train_step"):
            raise unsupported(
                f"run the loop of layer {layer.name!r} on several devices in TensorFlow "
                f"{tf.__version__}, which takes loops in functions apart",
                "Make the layer with unroll=True, or use TensorFlow 2.2 or later.",
            )


def several_devices_in_xla() -> "errors.UnsupportedError":
    """Return the error for a model that XLA compiles."""
    return unsupported(
        "run a model on several devices under jit_compile=True: XLA puts a whole step on one",
        "Compile the model with jit_compile=False.",
    )


def not_differentiable() -> "errors.UnsupportedError":
    """Return the error for a gradient that would need more than values of all replicas."""
    return errors.UnsupportedError(
        "A gradient of a gradient, or of one output of a model by another one, is taken of a model "
        "that uses values of the whole batch on several devices, as synchronized batch "
        "normalization does. compat computes none. If it is only that a tf.GradientTape still "
        "records, call tape.gradient() outside of its block. Otherwise run the model on one "
        "device: compat.parallelize(model, gpus=1)."
    )


def refuse_workers(tf: "Any", place: "Any") -> None:
    """Refuse workers of ``TF_CONFIG`` if TensorFlow has none, or does not run eagerly."""
    if place.launcher == TF_CONFIG and not hasattr(tf.distribute, "MultiWorkerMirroredStrategy"):
        raise unsupported(
            f"train as {place} with TensorFlow {tf.__version__}",
            "Use TensorFlow 2.4 or later, or install Horovod and start the script with horovodrun.",
        )
    if place.launcher == TF_CONFIG and not runs_eagerly(tf):
        raise unsupported(
            f"train as {place} after tf.compat.v1.disable_v2_behavior() or "
            "disable_eager_execution()",
            "Remove that call, or start the script with horovodrun.",
        )
