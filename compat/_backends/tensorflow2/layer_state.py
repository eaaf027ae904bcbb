"""Losses and state of a model's replicas on TensorFlow 2, one class for each kind of model.

Each replica starts from the same state, and the state is set once, to what one device would have
made of all rows. Generators of random numbers go from replica to replica instead, so that
dropout masks are independent. Moving averages of batch normalization are the mean of the
replicas'. How other variables are put together is read off a ``Trace`` of the call.
"""

import contextlib
import functools
import sys

import tensorflow as tf

from ... import _keras
from ..._rows import Mixed
from ..._runtime import patching
from .functions import may_be_set


def is_set(variable):
    """Whether the function being traced may set the variable."""
    if tf.executing_eagerly():
        return True
    return may_be_set(tf.compat.v1.get_default_graph().capture(variable.handle))


def read(variable):
    """The value in the variable's own dtype, whatever mixed precision casts it to."""
    return tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)


def is_generator(variable):
    """Whether a variable is the state of a generator of random numbers, by the look of it.

    Up to TensorFlow 2.3 they have no name of their own.
    """
    if "StateVar" in variable.name:
        return True
    named = variable.name.split("/")[-1].split(":")[0]
    plain = variable.dtype.name == "int64" and variable.shape.as_list() == [3]
    return plain and not variable.trainable and named == "Variable"


def normalizations(layers):
    """The layers among these that normalize by statistics of the batch, as each device can.

    Renormalization corrects them by averages over all batches, so that the parts matter.
    """
    return [each for each in layers if _normalizes(each) and not getattr(each, "renorm", False)]


def _normalizes(layer):
    """Whether this is a layer of batch normalization, which may not be built yet."""
    names = [kind.__name__ for kind in type(layer).__mro__]
    has_name = any(name.startswith("BatchNormalization") for name in names)
    return has_name or hasattr(layer, "moving_mean")


def averages(layers):
    """The ids of their moving averages."""
    names = ("moving_mean", "moving_variance")
    found = [getattr(layer, name, None) for layer in normalizations(layers) for name in names]
    return {id(variable) for variable in found if variable is not None}


@contextlib.contextmanager
def normalizing_apart(layers):
    """Yield a list; note there from which operation to which each of these layers' calls went."""
    noted = []  # type: list

    def noting(call):
        def noting_call(*args, **kwargs):
            graph = tf.compat.v1.get_default_graph()
            first = len(graph.get_operations())
            result = call(*args, **kwargs)
            noted.append((first, len(graph.get_operations())))
            return result

        return noting_call

    with contextlib.ExitStack() as stack:
        for layer in layers:
            if hasattr(layer, "_trainable_var"):  # a tensor of the first graph, in TensorFlow 2.0
                stack.callback(setattr, layer, "_trainable_var", layer._trainable_var)
        for layer in normalizations(layers):
            if patching.find(layer, "call") is None:  # TensorFlow 2.0 lists shared layers twice
                stack.enter_context(patching.replaced(layer, call=noting(layer.call)))
        yield noted


class VariableState:
    """State in variables of TensorFlow, which are set back after each replica."""

    # Pairs of what a traced call sets without an operation on a variable, and the new value.
    traced_updates = ()
    variables, before = (), ()  # until they are watched
    squares_lookups = False  # the optimizers sum up what there is of a row

    def __init__(self, model, replicas):
        self.model = model
        self.replicas_in_all = replicas
        self.layers = []  # type: list

    def watch(self, variables, trace):
        """Note the values as they are before the first replica.

        Arguments:
            variables: those that the call may set.
            trace: returns the trace of the call.
        """
        self.trace = trace
        self.averages = averages(self.layers)
        variables = list({id(v): v for v in variables if not is_generator(v)}.values())
        if self.replicas_in_all == 1:
            variables = []  # what the call makes of them is right
        if tf.executing_eagerly():
            # Nothing but the trace shows there whether a variable is set.
            variables = [
                variable
                for variable in variables
                if id(variable) in self.averages or trace().of_variable(variable) is not None
            ]
        self.variables = variables
        self.before = [read(variable) for variable in variables]
        self.after = [[] for _ in variables]  # type: list

    def note(self):
        """Note what a replica has set, and take it back."""
        for variable, before, after in zip(self.variables, self.before, self.after):
            if is_set(variable):
                after.append(read(variable))
                variable.assign(before)

    def take_back(self):
        """Set all back to what it was before a replica that failed."""
        for variable, before in zip(self.variables, self.before):
            if is_set(variable):
                variable.assign(before)

    def finish(self, merging):
        """Set the state, once."""
        for variable, before, values in zip(self.variables, self.before, self.after):
            if not values:
                continue
            if id(variable) in self.averages:
                variable.assign(merging.mean(values))
                continue
            placement = self.trace().of_variable(variable)
            if placement is not None:  # else only read, by an operation that sets another one
                variable.assign(merging.value(values, placement, before))

    def set_by(self, trace):
        """Pairs of a variable that a call sets, and how its new value depends on the rows."""
        pairs = [(v, trace.of_variable(v)) for v in self.variables if id(v) not in self.averages]
        return [pair for pair in pairs if pair[1] is not None]


class Keras2State(VariableState):
    """Losses and state of tf.keras' layers."""

    def prepare(self, call, args, kwargs, trace):
        """Note the state.

        Eagerly, layers that are not built yet would make their state only then. (A tf.function
        that makes variables is traced twice, so that there the second trace finds them.)
        """
        model = self.model
        if tf.executing_eagerly() and not all(layer.built for layer in _keras.all_layers(model)):
            added = {id(each): len(each._eager_losses) for each in _keras.all_layers(model)}
            tf.function(call).get_concrete_function(*args, **kwargs)
            for layer in _keras.all_layers(model):
                del layer._eager_losses[added.get(id(layer), 0) :]
        self.layers = _keras.all_layers(model)
        self.replicas = 0  # begun
        state = list(model.non_trainable_variables)
        for layer in self.layers:
            state += [v for metric in getattr(layer, "_metrics", ()) for v in metric.variables]
        # Weights may be set within a call, too, by spectral normalization for example.
        self.watch(state + model.trainable_variables, trace)

    @contextlib.contextmanager
    def replica(self):
        with self._seeds_apart(), self.traced() as losses:
            yield losses
        self.note()

    @contextlib.contextmanager
    def traced(self):
        """Take the losses that are added within from the layers into a list."""
        losses = []  # type: list
        counts = [len(layer._eager_losses) for layer in self.layers]
        self.owners = []
        yield losses
        for layer, count in zip(self.layers, counts):
            losses += layer._eager_losses[count:]
            self.owners += [layer] * (len(layer._eager_losses) - count)
            del layer._eager_losses[count:]

    @contextlib.contextmanager
    def _seeds_apart(self):
        """Give seeded layers other masks in each replica; up to TensorFlow 2.3 they would repeat.

        There a layer hands its seed to an operation, whose random numbers start from it on every
        device. Later it starts a generator of the layer's, which goes on from replica to replica.
        """
        further = 104729 * self.replicas  # a prime: no neighbour's seed
        self.replicas += 1
        with contextlib.ExitStack() as stack:
            for layer in {id(layer): layer for layer in self.layers}.values():
                seed = vars(layer).get("seed")
                if isinstance(seed, int):
                    stack.enter_context(patching.replaced(layer, seed=seed + further))
            yield

    def add_loss(self, place, loss):
        self.owners[place]._eager_losses.append(loss)


class Keras3State:
    """Losses and state of a Keras 3 model: a stateless scope keeps them from being set."""

    squares_lookups = True  # its optimizers square the gradients of each lookup by themselves

    def __init__(self, model):
        self.keras = sys.modules["keras"]
        self.model = model
        self.variables = {}  # those that were set, by id
        self.updates = []  # for each replica, id of variable -> its value

    def prepare(self, call, args, kwargs, trace):
        self.trace = trace
        self.layers = _keras.all_layers(self.model)
        self.averages = averages(self.layers)

    def take_back(self):
        """Nothing is set before the end."""

    @contextlib.contextmanager
    def replica(self):
        variables, last = self.variables, self.updates[-1] if self.updates else {}

        class CollectingScope(self.keras.StatelessScope):
            def add_update(self, update):
                variables[id(update[0])] = update[0]
                super().add_update(update)

        carried = [(variables[key], last[key]) for key in last if _is_carried(variables[key])]
        with CollectingScope(carried, collect_losses=True) as scope:
            yield scope.losses
        self.updates.append(scope.state_mapping)

    @contextlib.contextmanager
    def traced(self):
        updates, variables = self.updates, self.variables
        self.updates, self.variables = [], {}
        try:
            with self.replica() as losses:
                yield losses
            (values,) = self.updates
            self.traced_updates = [(v, values[key]) for key, v in self.variables.items()]
        finally:
            self.updates, self.variables = updates, variables

    def add_loss(self, place, loss):
        # The base class's method: functional models refuse their own.
        self.keras.Layer.add_loss(self.model, loss)

    def finish(self, merging):
        for key, variable in self.variables.items():
            values = [update.get(key, variable.value) for update in self.updates]
            if _is_carried(variable):
                variable.assign(values[-1])
                continue
            values = [tf.convert_to_tensor(value) for value in values]
            if key in self.averages:
                variable.assign(merging.mean(values))
                continue
            before = tf.convert_to_tensor(variable._value)
            variable.assign(merging.value(values, self.trace().updates[key][1], before))

    def set_by(self, trace):
        found = [
            pair
            for key, pair in trace.updates.items()
            if not _is_carried(pair[0]) and key not in self.averages
        ]
        # What is set to its gradient, which replicas would add up: the largest values of float8.
        overwritten = [
            v for v in self.model.trainable_variables if getattr(v, "overwrite_with_gradient", None)
        ]
        return found + [(variable, Mixed()) for variable in overwritten]


def read_kernels():
    """From now on, have Keras 3 hand its convolutions values in place of variables.

    It has XLA compile a convolution in groups, and XLA takes no variable of another device.
    """
    nn = sys.modules.get("keras.src.backend.tensorflow.nn")
    if nn is None or patching.find(nn, "conv") is not None:
        return
    plain = nn.conv

    @functools.wraps(plain)
    def conv(inputs, kernel, *args, **kwargs):
        return plain(inputs, tf.convert_to_tensor(kernel), *args, **kwargs)

    patching.Patch(nn, "conv", conv)


def _is_carried(variable):
    """Whether a variable goes on from replica to replica: a seed's state."""
    return variable.name == "seed_generator_state"
