"""The kinds of Keras and their differences: keras 2, keras-mxnet, tf.keras and Keras 3."""

import contextlib
import functools
import os
import sys
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

from .. import errors
from .._configuration import detection, packages, settings
from .._runtime import patching
from .._runtime.process import process
from .functions import (
    ALL_FUNCTIONS,
    FUNCTIONS,
    OF_EPOCHS,
    function_of_epochs,
    has_keras_methods,
    is_layer,
    is_users,
    is_users_function,
    maker_of,
    rebuilding_functions,
    trains,
)

TYPE_CHECKING = False
if TYPE_CHECKING:
    from ..backend import Backend

# How the names of the modules of each Keras begin.
_KERASES = {
    "tensorflow.python.keras.": "tensorflow.keras",
    "tensorflow_core.python.keras.": "tensorflow.keras",  # TensorFlow 1.15 and 2.0
    "tf_keras.": "tf_keras",
    "keras.": "keras",
}


def keras_of(model: "Any") -> "Any":
    """Return the Keras (its top module) that a model is of, or None.

    It is one of the imported modules, since the model exists.
    """
    for parent in type(model).__mro__:
        for prefix, keras in _KERASES.items():
            is_model = parent.__name__ in ("Model", "Network", "Container")
            if is_model and parent.__module__.startswith(prefix):
                return _module(keras)
    return None


def _module(name: str) -> "Any":
    top, *attributes = name.split(".")  # lazily loaded ones are not always in sys.modules
    return functools.reduce(getattr, attributes, sys.modules[top])


def backend_name(keras: "Any") -> str:
    """Return the name of the backend that a Keras runs on, as it has it."""
    return keras.backend.backend() if hasattr(keras.backend, "backend") else "tensorflow"


def tree_of(keras: "Any") -> "Any":
    """Return the module of functions on nested structures: Keras 3's, or TensorFlow's."""
    if hasattr(keras, "ops"):
        return getattr(keras, "tree", None) or sys.modules["tree"]  # dm-tree, before Keras 3.1
    return sys.modules["tensorflow"].nest


def output_names(model: "Any") -> "List[str]":
    """Return the names by which a functional or Sequential model has losses."""
    names = getattr(model, "output_names", None)
    return list(names or [model.layers[-1].name])  # Keras 3's Sequential has none


def identity(keras: "Any", name: str) -> "Any":
    """Return a layer that returns its input unchanged, under another name."""
    if backend_name(keras) == "mxnet":
        # There any layer that returns its input itself fails: K.identity() evaluates it.
        return keras.layers.LeakyReLU(1.0, name=name)
    return keras.layers.Activation("linear", name=name)


def wraps_a_model(model: "Any") -> bool:
    """Return whether a model is a Sequential of a Keras before 2.2, which runs an inner model."""
    return "model" in vars(model) and any(c.__name__ == "Sequential" for c in type(model).__mro__)


def inner_model(model: "Any") -> "Any":
    """Return the model that makes a model's functions: itself, or the one inside a ``Sequential``.

    None before that is built.
    """
    return vars(model)["model"] if wraps_a_model(model) else model


class InnerModel(patching.InstanceMethod):
    """The method by which a Sequential before Keras 2.2 makes its inner model, as in ``compile``.

    Arguments:
        prepare: called with each new inner model.
    """

    method = "build"

    def __init__(self, prepare: "Callable[[Any], None]") -> None:
        super().__init__([])
        self.prepare = prepare

    def invoke(self, model: "Any", *args: "Any", **kwargs: "Any") -> None:
        self.plain(model)(*args, **kwargs)
        self.prepare(inner_model(model))

    @classmethod
    def have_prepared(cls, model: "Any", prepare: "Callable[[Any], None]") -> None:
        """Call ``prepare`` with the model that makes the functions of ``model``, and later ones."""
        if wraps_a_model(model):
            cls(prepare).install(model)
        if inner_model(model) is not None:
            prepare(inner_model(model))


def states(model: "Any", attribute: str) -> "List[Any]":
    """Return the variables in which Keras 2's stateful RNNs keep a state for each sample.

    Arguments:
        model: the model.
        attribute: one that the backend's variables have; states not made yet are None.
    """
    variables = {
        id(state): state  # of layers that are there twice, too
        for layer in all_layers_of_keras2(model)
        if getattr(layer, "stateful", False) and not hasattr(layer, "layers")
        for state in getattr(layer, "states", None) or ()
        if hasattr(state, attribute)
    }
    return list(variables.values())


def all_layers(model: "Any") -> "List[Any]":
    """Return a model of tf.keras or Keras 3, and the layers within it, at any depth."""
    if hasattr(model, "_flatten_layers"):
        return list(model._flatten_layers())
    from tensorflow.python.training.tracking import layer_utils  # TensorFlow 2.0

    parts = layer_utils.filter_empty_layer_containers(getattr(model, "_layers", None) or ())
    return [model] + [layer for part in parts for layer in all_layers(part)]


def all_layers_of_keras2(model: "Any") -> "List[Any]":
    """Return the layers of a model of Keras 2, and those within them, at any depth."""
    layers = list(model.layers)
    for layer in layers:  # which grows meanwhile
        layers += getattr(layer, "layers", None) or ()
        parts = ("layer", "forward_layer", "backward_layer")  # of wrappers
        layers += [getattr(layer, part) for part in parts if getattr(layer, part, None) is not None]
    return layers


def layers_within(model: "Any") -> "List[Any]":
    """Return the layers of a model of any Keras, at any depth."""
    is_flat = hasattr(model, "_flatten_layers")
    return all_layers(model) if is_flat else all_layers_of_keras2(model)


def unsplit_reason(model: "Any") -> "Optional[str]":
    """Return why batches of a model of tf.keras or Keras 3 cannot be split, a phrase, or None."""
    recurrent = keras_of(model).layers.RNN
    for layer in all_layers(model):
        if isinstance(layer, recurrent) and getattr(layer, "stateful", False):
            return f"its layer {layer.name!r} is stateful"
    for tensor in getattr(model, "inputs", None) or ():
        if tensor.shape.ndims if hasattr(tensor.shape, "ndims") else len(tensor.shape):
            if tensor.shape[0] is not None:
                return f"its batch size is fixed to {tensor.shape[0]}"
    return None


def warn_left_unsplit(model: "Any", reason: str, device: str) -> None:
    """Warn that a model stays on one device, and note it for reports."""
    process.unsplit.record(model, model.name, f"unsplit, because {reason}")
    errors.warn(
        f"parallelize() leaves model {model.name!r} on {device}: {reason}, so its batches cannot "
        "be split. The results are those of one device, and so is the speed."
    )


def warn_of_placed_parts(model: "Any", parts: "Sequence[str]", devices: "Sequence[str]") -> None:
    """Warn that replicas on ``devices`` also run the ``parts`` that ``device()`` placed."""
    if parts:
        errors.warn(
            f"Parts of {model.name} were placed on {', '.join(parts)} by device(), but "
            f"parallelize() runs all of it on each of {settings.listed(devices)}. Leave out one "
            "of the two; parallelize(model, gpus=1) puts the parts back."
        )


def warn_of_distribution(model: "Any") -> None:
    """Warn of a ``keras.distribution``, which has no effect but on JAX."""
    keras = keras_of(model)
    distribution = getattr(getattr(keras, "distribution", None), "distribution", None)
    if distribution is not None and distribution() is not None:
        errors.warn(
            f"A keras.distribution is set: on {keras.backend.backend()} Keras accepts it and does "
            "nothing with it. Remove keras.distribution.set_distribution(); parallelize() splits "
            "the batches by itself."
        )


def variable_kinds(keras: "Any") -> "Tuple[type, ...]":
    """Return the class of which all variables of a Keras 3 are; none for another Keras.

    Before 3.7 ``keras.Variable`` is not the class of the variables that layers make, but shares a
    parent with them.
    """
    for kind in reversed(getattr(getattr(keras, "Variable", None), "__mro__", ())):
        if kind.__module__.startswith("keras.") and "assign" in vars(kind):
            return (kind,)
    return ()


def compiled_with(model: "Any") -> "Dict[str, Any]":
    """Return the arguments of Keras 3's ``compile``."""
    return getattr(getattr(model, "_compile_config", None), "config", None) or {}


def forget_compiled_steps(model: "Any") -> None:
    """Have tf.keras or Keras 3 trace its steps again, since they contain the previous call.

    The optimizer and its state stay.
    """
    if compiled_with(model).get("jit_compile") == "auto":
        model._jit_compile = None  # Keras 3 queries again whether the model supports XLA
    for name in FUNCTIONS + ("train_tf_function",):
        if hasattr(model, name):
            setattr(model, name, None)
    if "_distributed_function_cache" in vars(model):  # TensorFlow 2.0's
        patching.detach(model, "_distributed_function_cache")


def trace_again(model: "Any") -> None:
    """Have any Keras trace a model's steps again, if it has; the optimizer's state stays."""
    if hasattr(model, "make_train_function"):
        forget_compiled_steps(model)
    else:
        with rebuilding_functions(inner_model(model)):
            pass


def wrapped_optimizers(optimizer: "Any") -> "List[Any]":
    """Return an optimizer, and those that it wraps, each once: one may refer to its wrapper."""
    optimizers = [] if optimizer is None else [optimizer]
    for wrapping in optimizers:
        for value in vars(wrapping).values():
            is_one = hasattr(value, "get_updates") or hasattr(value, "apply_gradients")
            if is_one and all(value is not other for other in optimizers):
                optimizers.append(value)
    return optimizers


def in_stateless_scope(keras: "Any") -> bool:
    """Return whether a Keras 3 model is being called as a pure function of its state."""
    if not hasattr(keras, "StatelessScope"):
        return False
    with keras.StatelessScope(initialize_variables=False) as scope:
        return scope.original_scope is not None


def reader_and_writer(model: "Any") -> "Tuple[Callable[..., List[Any]], Callable[..., None]]":
    """Return functions that read variables as arrays, and write pairs of variable and array.

    Eager tensors are read, too.
    """
    keras = keras_of(model)
    tensorflow = sys.modules.get("tensorflow") if backend_name(keras) == "tensorflow" else None
    is_eager = tensorflow is not None and getattr(tensorflow, "executing_eagerly", bool)()

    def read(variables: "Iterable[Any]") -> "List[Any]":
        return [keras.ops.convert_to_numpy(getattr(v, "value", v)) for v in variables]

    def write(pairs: "Iterable[Tuple[Any, Any]]") -> None:
        for variable, value in pairs:
            variable.assign(value)

    read = getattr(keras.backend, "batch_get_value", read)
    read = functools.partial(_read_eagerly, tensorflow) if is_eager else read
    return read, getattr(keras.backend, "batch_set_value", write)


@contextlib.contextmanager
def kept(model: "Any", variables: "Sequence[Any]") -> "Iterator[List[Any]]":
    """Restore variables of a model at the end of a block.

    Yields:
        Their values.
    """
    read, write = reader_and_writer(model)
    values = [value.copy() for value in read(variables)]  # what is read may be the memory itself
    try:
        yield values
    finally:
        write(list(zip(variables, values)))


def _read_eagerly(tensorflow: "Any", variables: "Iterable[Any]") -> "List[Any]":
    """Return the values of variables as arrays, up to four times as fast as their own methods."""
    arrays = []
    for variable in variables:
        value = getattr(variable, "value", variable)  # of a Keras 3 variable one of TensorFlow's
        variable = variable if callable(value) else value
        if hasattr(variable, "handle"):
            tensor = tensorflow.raw_ops.ReadVariableOp(
                resource=variable.handle, dtype=variable.dtype
            )
        else:
            tensor = tensorflow.convert_to_tensor(variable)
        arrays.append(tensor.numpy())
    return arrays


def check_floatx(floatx: str, backend: "Backend") -> None:
    """Refuse a float type that a Keras on this backend does not know."""
    for name in keras_packages(backend) if floatx == "bfloat16" else ():
        version = packages.version("tf_keras" if name == "tf_keras" else "keras") or "2"
        if int(version.partition(".")[0]) < 3:
            raise errors.InvalidArgumentError(
                f"floatx='bfloat16' was asked for, which Keras 3 knows, and {name} here is Keras "
                '2. Use "float16" or "float32", or install Keras 3.'
            )


def set_floatx(floatx: str, backend: "Backend") -> "List[str]":
    """Set the float type of every Keras on this backend, importing those that are installed.

    Keras reads its float type from its own file when it is imported, whatever the backend is
    configured to, so the two would disagree (keras#3772).

    Returns:
        Lines for the report.
    """
    lines = []
    for name in keras_packages(backend):
        _import(name).backend.set_floatx(floatx)
        lines.append(f"{name}.backend.set_floatx({floatx!r})")
    return lines


def versions(backend: "Backend") -> "Dict[str, str]":
    """Return the installed versions of the backend's framework and of Keras packages, by name."""
    versions = {backend.framework: detection.installed_version(backend)}
    for name in ("keras", "keras-mxnet", "tf_keras"):
        versions[name] = packages.version(name)
    return {name: version for name, version in versions.items() if version}


def keras_packages(backend: "Backend") -> "List[str]":
    """Return the installed Keras packages for a backend, a program's default first."""
    running = detection.keras_backend(os.environ)
    names = ["keras"] if running in (backend.name, backend.framework) else []
    if backend.framework == "tensorflow":
        names.append("tensorflow.keras")
        if packages.version("tf_keras"):
            # `import keras` and tf.keras stay Keras 3 unless this makes tf.keras tf_keras.
            prefers_legacy = os.environ.get("TF_USE_LEGACY_KERAS") in ("1", "true", "True")
            names.insert(0 if prefers_legacy else len(names), "tf_keras")
        if _v1_keras() is not None:
            names.insert(0, "tensorflow.compat.v1.keras")
    return names


def _v1_keras() -> "Any":
    """Return ``tf.compat.v1.keras`` where TensorFlow 2 runs in sessions, else None.

    There tf.keras has no functions for sessions, and optimizers (2.11 to 2.15) that fail.
    Keras 3, which has another name for itself there, knows no sessions.
    """
    tf = sys.modules.get("tensorflow")
    if tf is None or "Session" in dir(tf):  # TensorFlow 1; 1.15 warns where the name is read
        return None
    if not hasattr(tf, "executing_eagerly") or tf.executing_eagerly():
        return None
    keras = tf.compat.v1.keras
    return keras if hasattr(keras.backend, "set_session") else None


def _import(name: str) -> "Any":
    import importlib

    try:
        return importlib.import_module(name)
    except Exception as error:  # whatever an installation can do wrong
        if name.startswith("tensorflow."):
            return _module(name)
        raise errors.broken_install(name, error) from error


def import_keras(backend: "Backend") -> "Any":
    """Import the Keras that runs on a backend, the standalone one if possible.

    Raises:
        NotInstalledError: there is none.
        BrokenInstallError: it is installed, but importing it fails.
    """
    names = keras_packages(backend)
    if names:
        return _import(names[0])
    remedy = ""
    if backend.extra:  # else it is a third party's
        remedy = f' Install one: pip install "keras-gpu-compat[{detection.extra_of([backend])}]".'
    raise errors.NotInstalledError(
        f"No Keras that runs on {backend.name} is installed, or KERAS_BACKEND and keras.json "
        f"choose another backend for it.{remedy}"
    )
