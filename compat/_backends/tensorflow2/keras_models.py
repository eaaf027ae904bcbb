"""Models of Keras which cannot run on several devices."""

import functools

from ... import _keras, errors
from .runtime import in_graph_of_the_user, runs_eagerly

#: What TensorFlow 2 cannot do, and a remedy, as an error.
unsupported = functools.partial(errors.unsupported, "tensorflow2")


def refuse_unreached(tf, model):
    """Refuse models that a replicated ``call`` would not reach."""
    keras = _keras.keras_of(model)
    if in_graph_of_the_user(tf):
        raise unsupported(
            "run a model on several devices within tf.Graph().as_default()",
            "Build the model outside of that graph, or write tf.compat.v1.disable_v2_behavior() "
            "at the top of the script, to have TensorFlow 1.",
        )
    if not runs_eagerly(tf):
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
    asked_for = _keras.compiled_with(model).get("jit_compile")
    if getattr(model, "_jit_compile", None) and asked_for != "auto":
        raise several_devices_in_xla()


def refuse_strategies(tf, model):
    """Refuse a model that a strategy of TensorFlow's replicates already, or will."""
    if tf.distribute.has_strategy():
        kind = type(tf.distribute.get_strategy()).__name__
        found = f"it was called within the scope of a {kind}"
    elif _is_distributed(tf, model):
        found = f"the variables of {model.name!r} were made in the scope of a strategy"
    else:
        return
    raise errors.UnsupportedError(
        f"parallelize() and tf.distribute both run a model on several devices: {found}. Build the "
        "model and call parallelize() outside of the strategy's scope, or write "
        'compat.parallelize(build_model, strategy="mirrored").'
    )


def _is_distributed(tf, model):
    if hasattr(model, "_eager_losses") and not model.built:
        return False  # asking for its variables would be an error
    # A Keras 3 variable has one of TensorFlow's.
    variables = [v if isinstance(v, tf.Variable) else v.value for v in model.weights]
    return any(c.__name__ == "DistributedValues" for v in variables for c in type(v).__mro__)


def refuse_loops(tf, layers):
    """Up to TensorFlow 2.1 a loop fails on another device than the function around it."""
    for layer in layers:
        recurrent = any(c.__name__ == "RNN" for c in type(layer).__mro__)
        if recurrent and not layer.unroll and not hasattr(tf.keras.Model, "train_step"):
            raise unsupported(
                f"run the loop of layer {layer.name!r} on several devices in TensorFlow "
                f"{tf.__version__}, which takes loops in functions apart",
                "Make the layer with unroll=True, or use TensorFlow 2.3 or later.",
            )


def several_devices_in_xla():
    return unsupported(
        "run a model on several devices under jit_compile=True: XLA puts a whole step on one",
        "Compile the model with jit_compile=False.",
    )
