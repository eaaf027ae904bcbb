"""A function of a Keras model, run on several devices: forward, backward and what runs once."""

import collections
import contextlib

import numpy as np

from ... import _keras, _replicas, _work, errors
from . import across_rows, graph_cuts
from .device_body import Body
from .graph_variables import ancestors_of, depending_on, leaves_of

TYPE_CHECKING = False
if TYPE_CHECKING:
    pass


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
        self.kept = range(0)  # places of what the forward functions return for the backward ones
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
        kept = [[values[place] for place in self.kept] for values in computed]
        count = len(self.cuts)
        computed = [[np.asarray(value) for value in values[:count]] for values in computed]
        sizes = _replicas.sizes(rows, len(devices))
        whole = [cut.merge(parts, sizes) for cut, parts in zip(self.cuts, zip(*computed))]
        values = self.head(*(list(inputs) + whole)) if self.head else []
        results = [
            (whole if where == "cut" else values)[position] for where, position in self.places
        ]
        if self.update is not None:
            if self.backward:
                shards = [shard + of_forward for shard, of_forward in zip(shards, kept)]
            self.update(*(list(inputs) + whole + self._gradients(values, computed, shards, sizes)))
        for (variable, _), value in zip(self.assigned, results[len(self.outputs) :]):
            variable.set_value(np.asarray(value, dtype=variable.dtype))
        names = [device.name for device in devices]
        split = sizes if self.cuts else _work.undivided(names, rows)  # the head computes all
        _work.count(names, split, self.loss is not None)
        results = [np.asarray(value) for value in results[: len(self.outputs)]]
        if self.metrics:
            for place, value in zip(self.places_of_metrics, self.measure()):
                results.insert(place, value)
        return results

    def _gradients(self, values, computed, shards, sizes):
        """The gradient of each weight: of the head, and of all devices' bodies.

        Arguments:
            shards: for each device, what its backward function gets besides the gradients.
        """
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
            raise input_not_fed(model.name)
        self.states = _keras.states(model, "get_value")
        self.sharded = list(model.inputs) + self.states
        self._find_cuts(inputs)
        self._make_head()
        self.used = [
            variable
            for variable in leaves_of(self._cut_variables())
            if isinstance(variable, SharedVariable) and variable not in self.states
        ]
        if self.cuts_back:
            self._make_bodies()
        else:
            self.forward = self.owner.bodies(
                self.cuts, lambda: self._functions(self._bodies(), Body.forward)
            )
        if self.metrics:
            self.measure = self._compile([], self.metrics)

    def _cut_variables(self):
        return [cut.variable for cut in self.cuts]

    def _find_cuts(self, inputs):
        """Find where the head begins: the variables nearest to it that the body computes."""
        outputs = self.owner.model.outputs
        leaves = set(leaves_of(outputs))
        self.body_inputs = self.sharded + [
            v for v in self.inputs if v in leaves and v not in self.sharded
        ]
        wanted = self.outputs + [new for _, new in self.updates]
        body = depending_on(self.sharded, outputs) & ancestors_of(outputs)
        body.difference_update(self.sharded)
        body -= self._whole(outputs)
        passed = set()  # type: set
        while True:
            cuts = graph_cuts.frontier(wanted, body, passed)
            given = dict(zip(self.inputs, inputs))
            given.update((state, state.get_value(borrow=True)) for state in self.states)
            graph_cuts.find_axes(cuts, self.body_inputs, self.sharded, given)
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
        mixed = across_rows.mixed_rows(self.sharded, outputs)
        whole = depending_on(mixed, outputs)
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
        batch = depending_on(self.inputs + self._cut_variables(), [n for _, n in self.updates])
        later = depending_on([g for _, g in self.weights], [n for _, n in self.updates])
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

    def _make_bodies(self):
        """Make the devices' functions: two for each, if there is a way back."""
        weights = [weight for weight, _ in self.weights if weight in self.used]
        back = [self.cuts.index(cut) for cut in self.cuts_back]
        bodies = self._bodies()
        for device, body in bodies.items():
            with device.current():
                has_gradient = body.differentiate(back, [device.variables[w] for w in weights])
            self.body_weights = [w for w, has in zip(weights, has_gradient) if has]
            self.kept = range(len(self.cuts), len(self.cuts) + len(body.kept))
        self.forward = self._functions(bodies, Body.forward)
        self.backward = self._functions(bodies, Body.backward)

    def _bodies(self):
        """Their graphs. On one processor all are copies of the first's."""
        found, devices = {}, self.owner.devices
        for number, device in enumerate(devices):
            for variable in self.used:
                device.adopt(variable, number)
            if number == 0 or device.target != devices[0].target:
                with device.current():
                    found[device] = Body(
                        device, self.body_inputs, self.sharded, self._cut_variables(), self.used
                    )
        return found

    def _functions(self, bodies, make):
        """A function for each device: that of its body, or a copy of the first one's."""
        functions = []  # type: Any
        first = self.owner.devices[0]
        for device in self.owner.devices:
            if device in bodies:
                with device.current():
                    functions.append(make(bodies[device], self._compile))
            else:
                held = {given.variable for given in functions[0].maker.inputs}
                swap = {first.variables[v]: device.variables[v] for v in self.used}
                functions.append(
                    functions[0].copy(swap={old: new for old, new in swap.items() if old in held})
                )
        return functions


@contextlib.contextmanager
def _shape_errors(name):
    """Within, Theano's errors about shapes say that batches of model ``name`` are cut by rows."""
    try:
        yield
    except (ValueError, IndexError, AssertionError) as error:
        raise errors.rows_cannot_be_cut(name, str(error).partition("\n")[0]) from error


def input_not_fed(model):
    return errors.unsupported(
        "theano",
        "run model {!r} on several devices: an input of it is a tensor of the user's, "
        "Input(tensor=...), whose rows cannot be split".format(model),
        "Give the model an Input(shape=...) and feed it.",
    )
