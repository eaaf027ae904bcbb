"""One Keras model on several of Theano's contexts, or on simulated devices.

A ``transfer`` inside a graph is optimised away, and in a graph on a context that is not the default
one Theano 1.0.5 still does much on the default one: whatever does not say where (allocations, a
loop's states, a convolution's filters turned around), and what follows from that. So there are
functions of every device's own, with weights of its own, made and run while its context is the
default one. Keras builds the model, its loss and its metrics as ever;
when it then turns tensors into a function to run (``_make_train_function`` and its two
siblings), its graph is cut in two:

- The *body*, all that the model's outputs depend on, is compiled for each device and computes its
  shard of the batch. What leaves it, towards loss, metrics or updates, has rows, which are put
  together on the host.
- The *head*, the rest, runs once, with the whole batch: losses, metrics, penalties, statistics of
  the batch, and what computes across its rows (``_theano_rows.py``) with all that follows. Its
  gradient at the cut goes back to the devices' bodies, the sum of whose gradients the optimizer
  sees.

So any loss, also one that compares rows with one another, and every metric is that of one device,
however uneven the shards. A compiled function keeps nothing for the next one, so going back
computes the body anew.
"""

import collections
import contextlib
import warnings

import numpy as np

from .. import _keras, _replicas, errors
from . import _theano_rows

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Sequence


class Device:
    """A device: its ``name``, and Theano's ``target`` for it, a context's name or "cpu".

    ``place`` is the target in its own graphs: "cpu", or the default context, None.
    """

    def __init__(self, name, target):
        self.name = name
        self.target = target
        self.place = "cpu" if target == "cpu" else None
        self.variables = {}  # type: Any  # Keras' shared variables, and those used here

    @contextlib.contextmanager
    def current(self):
        """Within, Theano's default context is this device's."""
        if self.target == self.place:
            yield
            return
        from theano.gpuarray import type as contexts

        registered = contexts._context_reg  # what reg_context() fills refuses a second one
        default = {None: registered[None]} if None in registered else {}
        registered[None] = contexts.get_context(self.target)
        try:
            yield
        finally:
            del registered[None]
            registered.update(default)

    def run(self, function, arguments):
        """Call one of this device's functions."""
        with self.current():
            return function(*arguments)

    def adopt(self, variable, number):
        """Make this device's variable for one of Keras', unless it has one.

        Arguments:
            number: the device's among those of its model. The first uses Keras' variables
                themselves, if they lie there.
        """
        import theano

        if variable in self.variables:
            return
        if number == 0 and _context(variable) == self.target:
            self.variables[variable] = variable
            return
        value, options = variable.get_value(), {}
        if _is_random(variable):
            value = _independent(value, number)
        if hasattr(variable, "broadcastable"):
            options = {"target": self.place, "broadcastable": variable.broadcastable}
        value = value if isinstance(value, np.random.RandomState) else np.asarray(value)
        with self.current():
            self.variables[variable] = theano.shared(value, variable.name, **options)

    def take_weights(self):
        """Bring this device's weights up to date."""
        for keras, own in self.variables.items():
            if own is not keras and not _is_random(keras):
                value = np.asarray(keras.get_value(borrow=True))
                with self.current():
                    own.set_value(value)


class ReplicatedFunctions:
    """The three functions of a Keras model, made to run its body on several devices.

    Keras makes a function when it is first needed, by a method of the model. The instance gets
    methods of its own for that, which hand Keras another ``K.function``.
    """

    def __init__(self, model: "Any", devices: "Sequence[Device]") -> None:
        self.model = model
        self.devices = list(devices)
        self._bodies = {}  # type: Any
        self._warned = False

    def install(self):
        vars(self.model)["_compat_functions"] = self
        for function in _keras.FUNCTIONS:
            vars(self.model)["_make_" + function] = self._maker(function)

    def uninstall(self):
        for name in ["_compat_functions"] + ["_make_" + name for name in _keras.FUNCTIONS]:
            del vars(self.model)[name]

    def _maker(self, function):
        make = getattr(self.model, "_make_" + function)

        def make_replicated():
            with self._making("train" in function):
                make()

        return make_replicated

    @contextlib.contextmanager
    def _making(self, train):
        """Within, ``K.function`` makes a replicated function, of gradients yet to come."""
        from keras import backend as K

        make, differentiate = K.function, K.gradients
        asked = []  # the loss, and (weight, variable in the place of its gradient)

        def gradients(loss, variables):
            ancestors = _ancestors([loss])
            if (asked and asked[0] is not loss) or any(v not in ancestors for v in variables):
                return differentiate(loss, variables)  # which fails for a weight of no influence
            placeholders = [_host_type(variable)() for variable in variables]
            asked[:] = [loss, (asked[1] if asked else []) + list(zip(variables, placeholders))]
            return placeholders

        def function(inputs, outputs, updates=(), **options):
            return ReplicatedFunction(self, inputs, outputs, updates, asked, options)

        K.function = function
        if train:
            K.gradients = gradients
        try:
            yield
        finally:
            K.function, K.gradients = make, differentiate

    def warn_of_whole_batches(self, operation):
        """Say, once, that the devices do not share all of the work."""
        if not self._warned:
            self._warned = True
            text = errors.across_rows(operation, self.model.name, self.devices[0].name)
            warnings.warn(text, errors.CompatWarning, stacklevel=2)

    def bodies(self, cuts, frozen, make):
        """The devices' functions that compute ``cuts``, which functions may have in common."""
        key = tuple(cut.variable for cut in cuts), frozen
        if key not in self._bodies:
            self._bodies[key] = make()
        return self._bodies[key]


class ReplicatedFunction:
    """What Keras calls in the place of a ``K.function``; made in full for its first batch.

    Arguments:
        owner: the model's ``ReplicatedFunctions``.
        inputs, outputs, updates, options: as ``K.function`` has them.
        gradients: empty, or the loss and the pairs of a weight and the variable that stands for
            its gradient in ``updates``.
    """

    def __init__(self, owner, inputs, outputs, updates, gradients, options):
        self.owner = owner
        self.inputs = list(inputs)
        # Keras 2.3 wants its metrics' results as they are after the updates.
        self.places_of_metrics = [i for i, o in enumerate(outputs) if hasattr(o, "_is_metric")]
        self.metrics = [outputs[place] for place in self.places_of_metrics]
        self.outputs = [output for output in outputs if not hasattr(output, "_is_metric")]
        self.updates = list(collections.OrderedDict(reversed(list(updates))).items())
        self.loss, self.weights = gradients or (None, [])
        self.options = options
        self.forward = []  # type: Any  # a Theano function for each device
        self.backward = []  # type: Any
        self.head = None  # type: Any
        self.update = None  # type: Any
        self.measure = None  # type: Any

    def __call__(self, inputs):
        model, rows = self.owner.model, inputs[0].shape[0]
        given = dict(zip(self.inputs, inputs))
        counts = [given[variable].shape[0] for variable in model.inputs if variable in given]
        if len(set(counts)) > 1:
            named = " and ".join(map(str, counts))
            raise errors.rows_cannot_be_cut(model.name, "its inputs have {} rows".format(named))
        if not self.forward:
            with _shape_errors(model.name):
                self._make(inputs)
        devices = self.owner.devices
        for device in devices:
            device.take_weights()
        given.update((state, state.get_value(borrow=True)) for state in self.states)
        shards = []
        for index in range(len(devices)):
            start, stop = _replicas.run_bounds(rows, len(devices), index)
            shards.append(
                [given[v][start:stop] if v in self.sharded else given[v] for v in self.body_inputs]
            )
        # A GPU's functions return before it has computed: all of them start, then one is awaited.
        with _shape_errors(model.name):
            computed = [
                device.run(forward, shard)
                for device, forward, shard in zip(devices, self.forward, shards)
            ]
        computed = [[np.asarray(value) for value in values] for values in computed]
        sizes = _replicas.sizes(rows, len(devices))
        whole = [cut.merge(parts, sizes) for cut, parts in zip(self.cuts, zip(*computed))]
        values = self.head(*(list(inputs) + whole)) if self.head else []
        results = [
            (whole if where == "cut" else values)[position] for where, position in self.places
        ]
        if self.update is not None:
            self.update(*(list(inputs) + whole + self._gradients(values, computed, shards, sizes)))
        for (variable, _), value in zip(self.assigned, results[len(self.outputs) :]):
            variable.set_value(np.asarray(value, dtype=variable.dtype))
        results = [np.asarray(value) for value in results[: len(self.outputs)]]
        if self.metrics:
            for place, value in zip(self.places_of_metrics, self.measure()):
                results.insert(place, value)
        return results

    def _gradients(self, values, computed, shards, sizes):
        """The gradient of each weight: of the head, and of all devices' bodies."""
        values = values[self.head_values :]
        at_cuts, totals = values[: len(self.cuts_back)], {}
        for weight, value in zip(self.head_weights, values[len(self.cuts_back) :]):
            totals[weight] = np.asarray(value)
        if self.backward:
            back = [self.cuts.index(cut) for cut in self.cuts_back]
            split = [
                self.cuts[number].split(gradient, [parts[number] for parts in computed], sizes)
                for number, gradient in zip(back, at_cuts)
            ]
            results = [
                device.run(self.backward[index], shards[index] + [parts[index] for parts in split])
                for index, device in enumerate(self.owner.devices)
            ]
            for result in results:
                for weight, value in zip(self.body_weights, result):
                    value = np.asarray(value)
                    totals[weight] = totals[weight] + value if weight in totals else value
        return [totals[weight] for weight, _ in self.weights]

    # Making -----------------------------------------------------------------------------------

    def _make(self, inputs):
        from theano.compile import SharedVariable

        model = self.owner.model
        if any(variable not in self.inputs for variable in model.inputs):
            raise errors.theano_input_not_fed(model.name)
        self.states = _keras.states(model, "get_value")
        self.sharded = list(model.inputs) + self.states
        self._find_cuts(inputs)
        self._make_head()
        self.used = [
            variable
            for variable in _leaves(self._cut_variables())
            if isinstance(variable, SharedVariable) and variable not in self.states
        ]
        frozen = self.loss is not None and any(map(_is_random, self.used))
        self.forward = self.owner.bodies(
            self.cuts, frozen, lambda: self._functions(self._forward, not frozen)
        )
        if self.metrics:
            self.measure = self._compile([], self.metrics)
        if self.cuts_back:
            self.backward = self._functions(self._backward, True)

    def _cut_variables(self):
        return [cut.variable for cut in self.cuts]

    def _find_cuts(self, inputs):
        """Find where the head begins: the variables nearest to it that the body computes."""
        outputs = self.owner.model.outputs
        leaves = set(_leaves(outputs))
        self.body_inputs = self.sharded + [
            v for v in self.inputs if v in leaves and v not in self.sharded
        ]
        wanted = self.outputs + [new for _, new in self.updates]
        body = _following(self.sharded, outputs) & _ancestors(outputs)
        body.difference_update(self.sharded)
        body -= self._whole(outputs)
        passed = set()  # type: set
        while True:
            cuts = _frontier(wanted, body, passed)
            given = dict(zip(self.inputs, inputs))
            given.update((state, state.get_value(borrow=True)) for state in self.states)
            _find_axes(cuts, self.body_inputs, self.sharded, given)
            # What has no rows is the head's to compute, from rows: sums over the batch, its length.
            wrong = [cut.variable for cut in cuts if not cut.has_rows()]
            if not wrong:
                break
            passed.update(wrong)
        # Of what the head gets itself, it knows the shape; a shape that it is given it would have
        # to compute with, which OpenCL cannot (``maximum`` of integers).
        whole = [cut.variable for cut in cuts if not cut.is_shape]
        self.cuts = [cut for cut in cuts if not (cut.is_shape and cut.measured in whole)]
        self.shapes = [cut for cut in cuts if cut not in self.cuts]

    def _whole(self, outputs):
        """What is computed across rows, and what follows from that: not for parts of a batch."""
        mixed = _theano_rows.mixed_rows(self.sharded, outputs)
        whole = _following(mixed, outputs)
        if any(v in whole and v.ndim and not v.broadcastable[0] for v in outputs):
            self.owner.warn_of_whole_batches(str(mixed[0].owner.op))
        return whole

    def _make_head(self):
        import theano
        from theano import tensor

        placeholders = [cut.variable.type() for cut in self.cuts]
        at_cut = {cut.variable: number for number, cut in enumerate(self.cuts)}
        given = dict(zip(self._cut_variables(), placeholders))
        given.update((cut.variable, given[cut.measured].shape) for cut in self.shapes)
        batch = _following(self.inputs + self._cut_variables(), [n for _, n in self.updates])
        later = _following([g for _, g in self.weights], [n for _, n in self.updates])
        # What depends on the gradients, or on no batch, is the optimizer's.
        mine = [u for u in self.updates if u[1] in later or u[1] not in batch]
        if self.loss is None:
            mine = []
        self.assigned = [u for u in self.updates if not any(u is other for other in mine)]
        wanted = self.outputs + [new for _, new in self.assigned]
        rest = [variable for variable in wanted if variable not in at_cut]
        self.places = [
            ("cut", at_cut[v]) if v in at_cut else ("head", rest.index(v)) for v in wanted
        ]
        loss = [self.loss] if self.loss is not None else []
        cloned = theano.clone(rest + loss + [new for _, new in mine], given)
        values = cloned[: len(rest)]
        self.head_values = len(values)
        self.cuts_back, self.head_weights = [], []
        if loss:
            back = [(c, p) for c, p in zip(self.cuts, placeholders) if c.is_differentiable()]
            weights = [weight for weight, _ in self.weights]
            gradients = tensor.grad(
                cloned[len(rest)],
                [placeholder for _, placeholder in back] + weights,
                disconnected_inputs="ignore",
                return_disconnected="None",
            )
            for (cut, _), gradient in zip(back, gradients):
                if gradient is not None:
                    self.cuts_back.append(cut)
                    values.append(gradient)
            for weight, gradient in zip(weights, gradients[len(back) :]):
                if gradient is not None:
                    self.head_weights.append(weight)
                    values.append(gradient)
            self.update = self._compile(
                self.inputs + placeholders + [gradient for _, gradient in self.weights],
                [],
                updates=[(u[0], new) for u, new in zip(mine, cloned[len(rest) + 1 :])],
            )
        if values:
            self.head = self._compile(self.inputs + placeholders, values)

    def _compile(self, inputs, outputs, **options):
        import theano

        # As K.function has it.
        options = dict(self.options, allow_input_downcast=True, on_unused_input="ignore", **options)
        return theano.function(inputs, outputs, **options)

    # The devices' functions ---------------------------------------------------------------------

    def _functions(self, make, randoms):
        """A function for each device, by ``make``; on one processor the first one's is copied."""
        functions = []  # type: Any
        devices = self.owner.devices
        for number, device in enumerate(devices):
            for variable in self.used:
                device.adopt(variable, number)
            if number and device.target == devices[0].target:
                held = {given.variable for given in functions[0].maker.inputs}
                swap = {devices[0].variables[v]: device.variables[v] for v in self.used}
                functions.append(
                    functions[0].copy(swap={old: new for old, new in swap.items() if old in held})
                )
            else:
                with device.current():
                    functions.append(make(device, randoms))
        return functions

    def _forward(self, device, randoms):
        inputs, values, updates = self._body(device)
        return self._compile_body(inputs, values, updates if randoms else [], device)

    def _backward(self, device, randoms):
        from theano import tensor

        inputs, values, updates = self._body(device)
        given = [_placeholder(cut.variable, device.place) for cut in self.cuts_back]
        at_cut = [values[self.cuts.index(cut)] for cut in self.cuts_back]
        # The sum's gradient is that of each value with what is given for it.
        total = sum((value * _on_host(g)).sum() for value, g in zip(at_cut, given))
        weights = [weight for weight, _ in self.weights if weight in self.used]
        gradients = tensor.grad(
            total,
            [device.variables[weight] for weight in weights],
            disconnected_inputs="ignore",
            return_disconnected="None",
        )
        pairs = [(w, gradient) for w, gradient in zip(weights, gradients) if gradient is not None]
        self.body_weights = [weight for weight, _ in pairs]
        values = [gradient for _, gradient in pairs]
        return self._compile_body(inputs + given, values, updates if randoms else [], device)

    def _body(self, device):
        """The body, for a device.

        Returns:
            Variables for its inputs, for the values at the cut, and the updates of the states of
            its random numbers.
        """
        import theano

        inputs, replaced = [], {}
        wanted = self._cut_variables()
        randoms = [variable for variable in self.used if _is_random(variable)]
        wanted += [variable.default_update for variable in randoms]
        for variable in self.body_inputs:
            place = device.place if variable in self.sharded else "cpu"
            inputs.append(_placeholder(variable, place))
            replaced[variable] = _like(variable, inputs[-1])
        for variable in self.used:
            replaced[variable] = _like(variable, device.variables[variable])
        cloned = theano.clone(wanted, replaced)
        states = [device.variables[variable] for variable in randoms]
        return inputs, cloned[: len(self.cuts)], list(zip(states, cloned[len(self.cuts) :]))

    def _compile_body(self, inputs, values, updates, device):
        floats = ("float16", "float32", "float64")
        values = [
            value.transfer(device.place) if value.type.dtype in floats else value
            for value in values
        ]
        return self._compile(inputs, values, updates=updates, no_default_updates=True)


@contextlib.contextmanager
def _shape_errors(name):
    """Within, Theano's errors about shapes say that batches of model ``name`` are cut by rows."""
    try:
        yield
    except (ValueError, IndexError, AssertionError) as error:
        raise errors.rows_cannot_be_cut(name, str(error).partition("\n")[0]) from error


# The cut --------------------------------------------------------------------------------------


class _Cut:
    """A variable that leaves the body.

    Attributes:
        variable: the variable.
        measured: the one whose rows count: itself, or the one whose shape it is.
        axis: where its rows are, or None.
    """

    def __init__(self, variable, measured):
        self.variable = variable
        self.measured = measured
        self.axis = None  # type: Any
        self.is_shape = variable is not measured

    def is_differentiable(self):
        return not self.is_shape and "float" in self.variable.type.dtype

    def has_rows(self):
        return self.is_shape or self.axis is not None

    def merge(self, parts, sizes):
        """What the devices computed, as one, their rows in order."""
        kept = [part for part, size in zip(parts, sizes) if size]
        if self.is_shape:
            shape = np.array(kept[0])
            if self.axis is not None:
                shape[self.axis] = sum(part[self.axis] for part in kept)
            return shape
        return np.concatenate(kept, axis=self.axis)

    def split(self, gradient, parts, sizes):
        """Each device's part of the gradient with respect to what was merged."""
        gradient, result, start = np.asarray(gradient), [], 0
        for part, size in zip(parts, sizes):
            if size:
                stop = start + part.shape[self.axis]
                result.append(gradient[(slice(None),) * self.axis + (slice(start, stop),)])
                start = stop
            else:  # a row computed for an empty shard counts for nothing
                result.append(np.zeros_like(part))
        return result


def _frontier(wanted, body, passed):
    """Cuts at the variables in ``body``, those in ``passed`` left out, nearest to ``wanted``."""
    from theano.tensor import Shape

    found, seen, stack = [], set(), list(reversed(wanted))
    while stack:
        variable = stack.pop()
        if variable in seen or variable.owner is None:
            continue
        seen.add(variable)
        node = variable.owner
        if isinstance(node.op, Shape) and node.inputs[0] in body:
            found.append(_Cut(variable, node.inputs[0]))  # spares bringing all of its rows
        elif variable in body and variable not in passed:
            found.append(_Cut(variable, variable))
        else:
            stack.extend(reversed(node.inputs))
    return found


def _find_axes(cuts, body_inputs, sharded, given):
    """Find the axis of each cut that grows with the batch.

    Theano derives shapes from shapes, and computes no value for them where it need not.
    """
    import theano

    if not cuts:
        return
    inputs = [variable.type() for variable in body_inputs]
    measured = theano.clone([cut.measured for cut in cuts], dict(zip(body_inputs, inputs)))
    shapes = theano.function(
        inputs,
        [variable.shape for variable in measured],
        mode=theano.Mode("py", theano.gof.Query(include=["ShapeOpt", "canonicalize"])),
        allow_input_downcast=True,
        on_unused_input="ignore",
        no_default_updates=True,
    )
    found = []
    for rows in (2, 3):
        values = [
            np.zeros((rows,) + given[v].shape[1:], v.dtype) if v in sharded else given[v]
            for v in body_inputs
        ]
        found.append(shapes(*values))
    for cut, two, three in zip(cuts, *found):
        grown = np.flatnonzero(two != three)
        # Of all pairs, or of all rows but the first, the devices' parts do not make the whole.
        if len(grown) == 1 and 3 * two[grown[0]] == 2 * three[grown[0]]:
            cut.axis = int(grown[0])


# Graphs ---------------------------------------------------------------------------------------


def _leaves(variables):
    from theano.gof import graph

    return graph.inputs(variables)


def _ancestors(variables):
    from theano.gof import graph

    return set(graph.ancestors(variables))


def _following(starts, wanted):
    """``starts``, and the variables that depend on them and that ``wanted`` need."""
    from theano.gof import graph

    following = set(starts)
    for node in graph.io_toposort([], wanted):
        if any(variable in following for variable in node.inputs):
            following.update(node.outputs)
    return following


def _is_random(variable):
    """Whether this is the state of a generator of random numbers."""
    return getattr(variable, "default_update", None) is not None


def _independent(value, number):
    """The state of a generator whose numbers are independent of those that ``value`` gives."""
    from theano.sandbox import rng_mrg

    if isinstance(value, np.random.RandomState):
        return np.random.RandomState([number] + list(value.get_state()[1][:8]))
    states = np.array(value)
    for _ in range(number):
        states = np.array([rng_mrg.ff_2p134(state) for state in states], dtype=states.dtype)
    return states


def _context(variable):
    """The name of the context that a variable lies on, or "cpu"."""
    return getattr(variable.type, "context_name", "cpu")


def _host_type(variable):
    from theano import tensor

    return tensor.TensorType(variable.dtype, variable.broadcastable)


def _placeholder(variable, place):
    """A variable to be given a value, like ``variable``, that lies at ``place``."""
    if place == "cpu" or not hasattr(variable, "broadcastable"):
        return _host_type(variable)() if hasattr(variable, "broadcastable") else variable.type()
    from theano.gpuarray import GpuArrayType

    return GpuArrayType(variable.dtype, variable.broadcastable, context_name=place)()


def _on_host(variable):
    """A variable's value as a graph of Keras uses it; Theano then moves what it can to the GPU."""
    return variable.transfer("cpu") if hasattr(variable, "transfer") else variable


def _like(variable, own):
    """The value of ``own`` where ``variable`` has its own."""
    return own if variable.type == own.type else own.transfer(_context(variable))
