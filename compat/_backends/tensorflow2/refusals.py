"""Models of Keras that cannot run on several devices."""

from ... import _keras, errors
from .runtime import in_graph_of_the_user, runs_eagerly


def refuse_unreached(tf, model):
    """Refuse models that a replicated ``call`` would not reach."""
    keras = _keras.keras_of(model)
    if in_graph_of_the_user(tf):
        raise errors.unsupported(
            "tensorflow2",
            "run a model on several devices within tf.Graph().as_default()",
            "Build the model outside of that graph, or write tf.compat.v1.disable_v2_behavior() "
            "at the top of the script, to have TensorFlow 1.",
        )
    if not runs_eagerly(tf):
        raise errors.unsupported(
            "tensorflow2",
            "run a model on several devices after tf.compat.v1.disable_eager_execution()",
            "Remove that call, or use TensorFlow 1.",
        )
    if not hasattr(model, "train_step") and keras.__name__ == "keras":
        raise errors.unsupported(
            "tensorflow2",
            "run a model of keras {} on several devices".format(keras.__version__),
            "Use tf.keras, or Keras 3, or train on one device, with parallelize(model, gpus=1).",
        )
    refuse_loops(tf, _keras.all_layers(model))
    if (
        getattr(model, "_jit_compile", None)
        and _keras.compiled_with(model).get("jit_compile") != "auto"
    ):
        raise several_devices_in_xla()


def refuse_strategies(tf, model):
    """Refuse a model that a strategy of TensorFlow's replicates already, or will."""
    scope = tf.distribute.has_strategy()
    variables = [] if scope or _is_unbuilt(model) else model.weights
    # A Keras 3 variable has one of TensorFlow's.
    variables = [v if isinstance(v, tf.Variable) else v.value for v in variables]
    parents = [parent for variable in variables for parent in type(variable).__mro__]
    if scope or any(parent.__name__ == "DistributedValues" for parent in parents):
        raise errors.UnsupportedError(
            "parallelize() and tf.distribute both run a model on several devices: {}. Build the "
            "model and call parallelize() outside of the strategy's scope, or write "
            'compat.parallelize(build_model, strategy="mirrored").'.format(
                "it was called within the scope of a {}".format(
                    type(tf.distribute.get_strategy()).__name__
                )
                if scope
                else "the variables of {!r} were made in the scope of a strategy".format(model.name)
            )
        )


def _is_unbuilt(model):
    """Whether asking for a model's variables would be an error."""
    return hasattr(model, "_eager_losses") and not model.built


def refuse_loops(tf, layers):
    """Up to TensorFlow 2.1 a loop fails on another device than the function around it."""
    for layer in layers:
        recurrent = any(c.__name__ == "RNN" for c in type(layer).__mro__)
        if recurrent and not layer.unroll and not hasattr(tf.keras.Model, "train_step"):
            raise errors.unsupported(
                "tensorflow2",
                "run the loop of layer {!r} on several devices in TensorFlow {}, which "
                "takes loops in functions apart".format(layer.name, tf.__version__),
                "Make the layer with unroll=True, or use TensorFlow 2.3 or later.",
            )


def several_devices_in_xla():
    return errors.unsupported(
        "tensorflow2",
        "run a model on several devices under jit_compile=True: XLA puts a whole step on one",
        "Compile the model with jit_compile=False.",
    )
