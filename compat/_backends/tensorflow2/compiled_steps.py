"""The functions that tf.keras and Keras 3 compile of a model's steps."""

from ... import _keras


def forget_compiled_steps(model):
    """Have Keras trace its steps again: the ones it has hold the call that was.

    The optimizer and its state stay.
    """
    if _keras.compiled_with(model).get("jit_compile") == "auto":
        model._jit_compile = None  # Keras 3 asks again whether the model supports XLA
    for name in ("train_function", "train_tf_function", "test_function", "predict_function"):
        if hasattr(model, name):
            setattr(model, name, None)
    vars(model).pop("_distributed_function_cache", None)  # TensorFlow 2.0's
