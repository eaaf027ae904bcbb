"""Resource variables, which TensorFlow 1 makes reference variables where it is left alone."""

import functools

from ... import errors
from ..._runtime import patching
from .._tensorflow.graph import v1_names

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any


def warn_of_reference_variables(model: "Any") -> None:
    """Warn where a model's weights are reference variables."""
    weights = model.weights if model.built else ()  # a Sequential of unknown input
    if any(weight.dtype._is_ref_dtype for weight in weights):
        errors.warn(
            f"The weights of {model.name} are reference variables, which TensorFlow may overwrite "
            "while a replica still reads them: training goes wrong now and then. Call "
            "configure_gpu() before the model is built; it switches resource variables on."
        )


def switch_resource_variables_on(tf: "Any") -> str:
    """Switch resource variables on: keras 2.2's reference variables race, and train wrongly.

    An update may overwrite a weight that the gradient, or another replica, has yet to read.

    Returns:
        A line for the report.
    """
    _let_resource_variables_add_in_place()
    if hasattr(tf, "enable_resource_variables"):  # from 1.11
        tf.enable_resource_variables()
        _leave_changing_shapes_to_references()
        call = "tf.enable_resource_variables()"
    else:
        _make_resource_variables(tf.Variable)
        call = "tf.Variable() makes resource variables"
    return call + ", since reference variables race and train wrongly"


def _leave_changing_shapes_to_references():
    """Keep reference variables where shapes may change, unless the script chooses otherwise.

    A resource variable keeps the shape of its initial value also under ``validate_shape=False``,
    by which a metric keeps a row for each row that it has seen.
    """
    from tensorflow.python.ops import variable_scope, variables

    store = variable_scope._VariableStore  # of tf.get_variable()
    for owner, name in (
        (variables, "default_variable_creator"),  # of tf.Variable()
        (store, "_get_single_variable"),
    ):
        if patching.find(owner, name) is None:
            make = getattr(owner, name)
            patching.Patch(owner, name, _with_changing_shapes(make, variable_scope))


def _with_changing_shapes(make, variable_scope):
    @functools.wraps(make)
    def make_variable(*args, **options):
        wanted = options.get("use_resource"), variable_scope.get_variable_scope().use_resource
        if not options.get("validate_shape", True) and wanted == (None, None):
            options["use_resource"] = False
        return make(*args, **options)

    return make_variable


def settable(variables: "Any") -> "Any":
    """Return variables, such that Keras' ``batch_set_value`` can set those whose shape may change.

    Keras makes an operation for that once, for values of the shape of the first one.
    """
    tf = v1_names()
    for variable in variables:
        if variable.shape.ndims is None and not hasattr(variable, "_assign_placeholder"):
            variable._assign_placeholder = value = tf.placeholder(variable.dtype.base_dtype)
            variable._assign_op = tf.assign(variable, value, validate_shape=False)
    return variables


def _let_resource_variables_add_in_place():
    """Have ``loss += tensor`` give a tensor, as before 1.12: resource variables refuse it.

    Losses of Keras' own examples begin as ``K.variable(0.)``: deep_dream, neural_style_transfer.
    """
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    for operator in ("add", "sub", "mul", "div", "truediv", "realdiv", "pow"):
        name = f"__i{operator}__"
        for parent in ResourceVariable.__mro__:
            if name in vars(parent) and patching.find(parent, name) is None:
                # Python then takes __add__, and binds what that returns.
                patching.Patch(parent, name, lambda self, other: NotImplemented)


def _make_resource_variables(variable):
    """Have ``tf.Variable()`` return an instance of its subclass for resource variables."""
    from tensorflow.python.ops.resource_variable_ops import ResourceVariable

    def __new__(cls, *args, **options):
        # A resource variable can neither be read from a file nor have an unknown shape.
        others = {"variable_def", "expected_shape"} & set(options)
        keeps_shape = args[3] if len(args) > 3 else options.get("validate_shape", True)
        if cls is variable and len(args) < 7 and not others and keeps_shape:
            cls = ResourceVariable
        return object.__new__(cls)

    if patching.find(variable, "__new__") is None:
        patching.Patch(variable, "__new__", staticmethod(__new__))
