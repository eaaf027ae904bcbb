"""Losses and state of a model's replicas on TensorFlow 2, one class for each kind of model.

Each replica starts from the same state, and the state is set once, to what one device would have
made of all rows. Generators of random numbers go from replica to replica instead, so that
dropout masks are independent. Moving averages of batch normalization are the mean of the
replicas'. How other variables are put together is read off a ``Trace`` of the call.
"""

import contextlib

from ... import _keras, _patching

# Operations on a variable that leave it as it is.
_READS = ("ReadVariableOp", "ResourceGather", "ResourceGatherNd", "VariableShape")


def is_set(tf, variable):
    """Whether the function being traced may set the variable."""
    if tf.executing_eagerly():
        return True
    handle = tf.compat.v1.get_default_graph().capture(variable.handle)
    return any(user.type not in _READS for user in handle.consumers())


def read(tf, variable):
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
    """The layers among these that normalize by statistics of the batch."""
    return [layer for layer in layers if hasattr(layer, "moving_mean")]


def averages(layers):
    """The ids of their moving averages."""
    names = ("moving_mean", "moving_variance", "moving_stddev")
    found = [getattr(layer, name, None) for layer in normalizations(layers) for name in names]
    return {id(variable) for variable in found if variable is not None}


@contextlib.contextmanager
def noting_operations(tf, layers):
    """Yield a list; note there from which operation to which each call of a layer went."""
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
            if _patching.find(layer, "call") is None:  # TensorFlow 2.0 lists shared layers twice
                stack.enter_context(_patching.replaced(layer, call=noting(layer.call)))
        yield noted


class VariableState:
    """State in variables of TensorFlow, which are set back after each replica."""

    # What a traced call sets without an operation on a variable.
    traced_ids, traced_updates = (), ()

    def __init__(self, tf, model, replicas):
        self.tf = tf
        self.model = model
        self.replicas_in_all = replicas
        self.layers = []  # type: list

    def watch(self, variables, trace):
        """Note the values as they are before the first replica.

        Arguments:
            variables: those that the call may set.
            trace: returns the trace of the call.
        """
        tf = self.tf
        self.trace = trace
        self.averages = averages(self.layers)
        variables = list({id(v): v for v in variables if not is_generator(v)}.values())
        if self.replicas_in_all == 1:
            variables = []  # what the call makes of them is right
        if tf.executing_eagerly():
            # Nothing shows there whether a variable was set, so none is set needlessly.
            others = [v for v in variables if id(v) not in self.averages and self.is_state(v)]
            known = [v for v in variables if id(v) in self.averages]
            variables = known
            if others:
                traced = trace()
                variables = known + [v for v in others if traced.of_variable(v) is not None]
        self.variables = variables
        self.before = [read(tf, variable) for variable in self.variables]
        self.after = [[] for _ in self.variables]  # type: list

    def is_state(self, variable):
        """Whether a variable may be set by the call, as far as can be told without a trace."""
        return True

    def note(self):
        """Note what a replica has set, and take it back."""
        for variable, before, after in zip(self.variables, self.before, self.after):
            if is_set(self.tf, variable):
                after.append(read(self.tf, variable))
                variable.assign(before)

    def finish(self, merging):
        """Set the state, once."""
        for variable, before, values in zip(self.variables, self.before, self.after):
            if not values:
                continue
            known = id(variable) in self.averages
            if not known and self.trace().of_variable(variable) is None:
                continue  # read alone, by an operation that sets another one
            what = "variable {!r}".format(variable.name)

            def kind_in(trace, variable=variable):
                return trace.of_variable(variable)

            variable.assign(
                merging.mean(values) if known else merging.value(values, kind_in, what, before)
            )


class Keras2State(VariableState):
    """Losses and state of tf.keras' layers."""

    def prepare(self, call, args, kwargs, trace):
        """Note the state.

        Eagerly, layers that are not built yet would make their state only then. (A tf.function
        that makes variables is traced twice, so that there the second trace finds them.)
        """
        tf, model = self.tf, self.model
        if tf.executing_eagerly() and not all(layer.built for layer in _keras.all_layers(model)):
            tf.function(call).get_concrete_function(*args, **kwargs)
        self.layers = _keras.all_layers(model)
        self.replicas = 0  # begun
        state = list(model.non_trainable_variables)
        for layer in self.layers:
            state += [v for metric in getattr(layer, "_metrics", ()) for v in metric.variables]
        # Weights may be set within a call, too, by spectral normalization for example.
        state += [v for v in model.trainable_variables if self.may_be_set(state)]
        self.watch(state, trace)

    def may_be_set(self, state):
        """Whether the call may set weights: eagerly, where it has state of its own."""
        if not self.tf.executing_eagerly():
            return True
        known = averages(self.layers)
        return any(id(v) not in known and not is_generator(v) for v in state)

    @contextlib.contextmanager
    def replica(self):
        losses = []  # type: list
        with self._seeds_apart(), self._losses_to(losses):
            yield losses
        self.note()

    @contextlib.contextmanager
    def traced(self):
        losses, owners = [], getattr(self, "owners", [])  # type: list, list
        with self._losses_to(losses):
            yield losses
        self.owners = owners

    @contextlib.contextmanager
    def _losses_to(self, losses):
        """Take the losses that are added within from the layers into a list."""
        counts = [len(layer._eager_losses) for layer in self.layers]
        self.owners = []
        yield
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
        seeds = [(vars(layer), vars(layer).get("seed")) for layer in self.layers]
        seeds = [(attributes, seed) for attributes, seed in seeds if isinstance(seed, int)]
        for attributes, seed in seeds:
            attributes["seed"] = seed + 104729 * self.replicas  # a prime: no neighbour's seed
        self.replicas += 1
        try:
            yield
        finally:
            for attributes, seed in seeds:
                attributes["seed"] = seed

    def name_of_loss(self, place):
        return "the loss added by layer {!r}".format(self.owners[place].name)

    def add_loss(self, place, loss):
        self.owners[place]._eager_losses.append(loss)


class Keras3State(_keras.StatelessReplicas):
    """Losses and state of a Keras 3 model."""

    def __init__(self, tf, keras, model):
        super().__init__(keras, model, None)
        self.tf = tf

    def prepare(self, call, args, kwargs, trace):
        self.trace = trace
        self.layers = _keras.all_layers(self.model)
        self.averages = averages(self.layers)

    def is_carried(self, variable):
        return variable.name == "seed_generator_state"

    @contextlib.contextmanager
    def traced(self):
        updates, variables = self.updates, self.variables
        self.updates, self.variables = [], {}
        try:
            with self.replica() as losses:
                yield losses
            (values,) = self.updates
            self.traced_ids = list(self.variables)
            self.traced_updates = [values[key] for key in self.traced_ids]
        finally:
            self.updates, self.variables = updates, variables

    def finish(self, merging):
        for key, variable in self.variables.items():
            values = [update.get(key, variable.value) for update in self.updates]
            if self.is_carried(variable):
                variable.assign(values[-1])
                continue
            values = [self.tf.convert_to_tensor(value) for value in values]
            if key in self.averages:
                variable.assign(merging.mean(values))
                continue
            before = self.tf.convert_to_tensor(variable._value)
            what = "variable {!r}".format(variable.path)

            def kind_in(trace, key=key):
                return trace.updates[key]

            variable.assign(merging.value(values, kind_in, what, before))

    def name_of_loss(self, place):
        return "loss {} of those added by layers".format(place + 1)
