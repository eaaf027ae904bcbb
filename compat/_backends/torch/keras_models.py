"""Keras models on several devices: their ``call``, their losses and their state."""

import contextlib
import functools
import sys

from ... import _keras, _rows, errors
from ..._keras import steps
from ..._runtime import patching
from .calls import tag, tag_of
from .reductions import NotMergeable, State, Total
from .replicas import ReplicatedMethod


class ReplicatedKerasCall(ReplicatedMethod):
    """The ``call`` of a Keras model on several devices.

    Arguments:
        belongs_to_step: whether the model became replicated with the one whose steps call it.
    """

    def __init__(self, devices, belongs_to_step=False):
        super().__init__(devices)
        self.belongs_to_step = belongs_to_step

    def layouts(self, model, arguments):
        steps.note_call()
        return super().layouts(model, arguments)

    def first_call(self, model, arguments, layouts):
        if any(getattr(v, "overwrite_with_gradient", False) for v in model.trainable_variables):
            # Set to a gradient, which replicas would add up: the largest values of float8.
            raise NotMergeable(_rows.Across(None))
        return super().first_call(model, arguments, layouts)

    def name_of(self, model):
        return model.name

    def converter(self, model):
        """Keras hands arrays to a model, too."""
        numpy = sys.modules["numpy"]
        convert = _keras.keras_of(model).ops.convert_to_tensor
        return lambda value: convert(value) if isinstance(value, numpy.ndarray) else value

    def is_only_traced(self, model, batch):
        """Keras runs a model on the device "meta" to learn shapes, and in scopes of its own."""
        return getattr(batch, "is_meta", False) or _keras.in_stateless_scope(_keras.keras_of(model))

    def home(self, model, arguments):
        return _keras.keras_of(model).ops.convert_to_tensor(0).device  # where Keras computes

    def state(self, model):
        return KerasReplicas(_keras.keras_of(model), model)


class KerasReplicas:
    """Losses and state of a Keras model's replicas: a stateless scope keeps them from being set.

    Each replica has the variables on its device. All but the first get copies even on the CPU, so
    that simulated devices do what GPUs would. Random seeds go from replica to replica, so that
    dropout masks are independent.
    """

    def __init__(self, keras, model):
        self.keras, self.model = keras, model
        self.variables = {}  # those that were set, by key
        self.before = {}  # their values, by key
        self.seeds = {}  # the values of random seeds, by id

    def normalising(self):
        kind = self.keras.layers.BatchNormalization
        return [layer for layer in _keras.all_layers(self.model) if isinstance(layer, kind)]

    def run(self, call, device, copy, args, kwargs, watch):
        with self.keras.device(str(device)):
            variables = [v for v in self.model.variables if v._value is not None]
            pairs = [
                (v, self.seeds.get(id(v), v._value).to(device, copy=copy or not v.trainable))
                for v in variables
            ]
            scope = self.keras.StatelessScope(pairs, collect_losses=True)
            given = dict(scope.state_mapping)
            for variable in variables if watch is not None else ():
                if not variable.trainable and not _is_seed(variable):
                    tag(scope.state_mapping[id(variable)], State(variable._value))
            with scope, watch or contextlib.ExitStack(), self.unwatched(watch):
                result = call(*args, **kwargs)
        state = {}
        averages = {id(v) for layer in self.normalising() for v in layer.non_trainable_variables}
        for index, variable in enumerate(variables):
            value = scope.state_mapping[id(variable)]
            if _is_seed(variable):
                self.seeds[id(variable)] = value
            elif value is not given[id(variable)]:
                if variable.trainable:
                    # SpectralNormalization does: the gradient is that of the value it has set.
                    raise NotMergeable(_rows.Across(None, why="weight"))
                key = ("state", index, variable.path)
                self.variables[key], self.before[key] = variable, variable._value
                state[key] = value
                if watch is not None and id(variable) in averages:
                    tag(value, Total("mean", value, watch.rows, regular=True))
        return result, list(scope.losses), state, {}

    def unwatched(self, watch):
        """A context in which batch normalization is one function: each device's own rows."""

        def call(hidden, inputs, *args, **kwargs):
            if watch.probing:
                kwargs["training"] = False
            with patching.replaced(watch, paused=True):
                outputs = hidden(inputs, *args, **kwargs)
            tag(outputs, tag_of(inputs))
            return outputs

        patched = contextlib.ExitStack()
        for layer in self.normalising() if watch is not None else []:
            own = functools.partial(call, layer.call)
            patched.enter_context(patching.replaced(layer, call=own))
        return patched

    def finish(self, merged):
        """Set the state, once, and add the losses."""
        for variable in self.model.variables:
            if id(variable) in self.seeds:
                variable.assign(self.seeds[id(variable)])
        for key, value in merged.items():
            if key[0] == "state":
                self.variables[key].assign(value)
            elif key[0] == "loss":
                # The base class's method: functional models refuse their own.
                self.keras.Layer.add_loss(self.model, value)


def _is_seed(variable):
    """Whether random numbers are drawn with it (keras.random.SeedGenerator)."""
    return variable.name == "seed_generator_state"


def refuse_torch_compile(model):
    if _keras.compiled_with(model).get("jit_compile") is True:
        raise errors.unsupported(
            "torch",
            "run a model on several devices under jit_compile=True: torch.compile() makes one "
            "program for one device",
            "Compile the model with jit_compile=False.",
        )
