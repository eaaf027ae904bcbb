"""A function of a Keras model, run on several devices: forward, backward and what runs once."""

import collections

import numpy as np

from ... import _keras, _replicas, _rows, _work, errors
from . import graph_cuts
from .device_body import Body, copied
from .graph_variables import depending_on, leaves_of

#: What Theano raises where the sizes of a part of a batch do not fit each other.
_ERRORS = (ValueError, IndexError, AssertionError)
#: Rows that a trial takes; of fewer it is repeated when there are more.
_ENOUGH = len(_rows.trial.WHOLE)


class ReplicatedFunction:
    """What Keras calls in the place of a ``K.function``; made in full for its first batch.

    Arguments:
        owner: the model's ``ReplicatedTheanoFunctions``.
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
        self.is_made = False
        self.tried = {}  # type: Any  # with how many rows, for each shape of them
        self.cuts = []  # type: Any
        self.forward = []  # type: Any  # a Theano function for each device
        self.backward = []  # type: Any
        self.measure = None  # type: Any

    def __call__(self, inputs):
        rows, devices = inputs[0].shape[0], self.owner.devices
        given = dict(zip(self.inputs, inputs))
        self._prepare(given, rows)
        given = self._with_states(given)
        for device in devices[: len(self.forward)]:
            device.take_weights()
        bounds = [_replicas.run_bounds(rows, len(devices), i) for i in range(len(self.forward))]
        shards = [self._given_to_body(given, slice(*each)) for each in bounds]
        # A GPU's functions return before it has computed: all of them start, then one is awaited.
        try:
            computed = [
                device.run(forward, shard)
                for device, forward, shard in zip(devices, self.forward, shards)
            ]
        except _ERRORS:
            self._compute_on_one(given)
            self._run_whole(_rows.Across(None))
            return self(inputs)
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
        for place, value in zip(self.places_of_metrics, self.measure() if self.metrics else ()):
            results.insert(place, value)
        return results

    def _given_to_body(self, given, rows):
        """A body's inputs: ``rows``, a slice or numbers, of what has rows."""
        return [given[v][rows] if v in self.sharded else given[v] for v in self.body_inputs]

    def _with_states(self, given):
        """What is given, and a state for each row."""
        found = dict(given)
        found.update((state, state.get_value(borrow=True)) for state in self.states)
        return found

    def _compute_on_one(self, given):
        """Have the first device compute all rows. What is an error there, too, is the user's."""
        self.owner.devices[0].run(self.forward[0], self._given_to_body(given, slice(None)))

    def _gradients(self, values, computed, shards, sizes):
        """The gradient of each weight: of the head, and of all devices' bodies.

        Arguments:
            shards: for each device, what its backward function gets besides the gradients.
        """
        of_head = values[len(values) - len(self.differentiated) :]
        totals = {each: np.asarray(g) for each, g in zip(self.differentiated, of_head)}
        if self.backward:
            computed = dict(zip(self.cuts, zip(*computed)))
            split = [cut.split(totals[cut], computed[cut], sizes) for cut in self.cuts_back]
            results = [
                device.run(self.backward[index], shards[index] + [parts[index] for parts in split])
                for index, device in enumerate(self.owner.devices)
            ]
            for result in results:
                for weight, value in zip(self.body_weights, map(np.asarray, result)):
                    totals[weight] = totals[weight] + value if weight in totals else value
        return [totals[weight] for weight, _ in self.weights]

    # Making -----------------------------------------------------------------------------------

    def _prepare(self, given, rows):
        """Make the functions, unless they are there, and try them on rows of this batch."""
        owner = self.owner
        counts = {given[v].shape[0] for v in owner.model.inputs if v in given}
        if len(counts) > 1 and (self.cuts or not self.is_made):
            self._run_whole(_rows.Across(None))
        shapes = tuple(given[v].shape[1:] for v in owner.model.inputs if v in given)
        while not self.is_made or self.cuts and self.tried.get(shapes, 0) < min(rows, _ENOUGH):
            finish = None if self.is_made else self._make(given)
            is_right = not self.cuts or self._is_right(given, rows)
            if is_right and finish is not None:
                finish()
            self.is_made = is_right
            self.tried[shapes] = rows

    def _run_whole(self, across):
        """From now on, on one device."""
        self.owner.across = across
        self.is_made, self.tried = False, {}

    def _make(self, given):
        """Find where the graph is cut, and compile what the devices compute of their rows.

        Returns:
            A function that compiles the rest.
        """
        from theano.compile import SharedVariable

        model = self.owner.model
        if any(variable not in self.inputs for variable in model.inputs):
            raise input_not_fed(model.name)
        self.states = _keras.states(model, "get_value")
        self.sharded = list(model.inputs) + self.states
        self._find_cuts(self._with_states(given))
        compile_head = self._make_head()
        self.used = [
            variable
            for variable in leaves_of(self._cut_variables())
            if isinstance(variable, SharedVariable) and variable not in self.states
        ]
        bodies = self._make_bodies()

        def finish():
            self.backward = self._functions(bodies, Body.backward) if bodies else []
            compile_head()
            if self.metrics:
                self.measure = self._compile([], self.metrics)

        return finish

    def _cut_variables(self):
        return [cut.variable for cut in self.cuts]

    def _find_cuts(self, given):
        """Find where the head begins: the variables nearest to it that the body computes."""
        owner, outputs = self.owner, self.owner.model.outputs
        leaves = set(leaves_of(outputs))
        self.body_inputs = self.sharded + [
            v for v in self.inputs if v in leaves and v not in self.sharded
        ]
        wanted = self.outputs + [new for _, new in self.updates]
        self.cuts, across, reach = [], owner.across, "The model"
        if across is None:
            graph = graph_cuts.ModelGraph(
                outputs, self.sharded, {v: given[v] for v in self.body_inputs}, not owner.doubt
            )
            self.cuts = graph_cuts.frontier(wanted, graph.body())
            across, reach = graph.across(owner.doubt), _rows.FROM_THERE_ON
        if across is not None:
            owner.runs_whole(across, reach)

    def _is_right(self, given, rows):
        """Whether a trial, in inference, finds at the cut what was thought.

        Otherwise what no rule knows is doubted from now on; where all is known, the model is.
        """
        from keras import backend as K

        owner, device, phase = self.owner, self.owner.devices[0], K.learning_phase()
        given = self._with_states(given)
        in_inference = dict(given)
        in_inference.update((v, 0) for v in self.body_inputs if v is phase)

        def compute(chosen):
            part = self._given_to_body(in_inference, [row % rows for row in chosen])
            return [np.asarray(value) for value in device.run(self.forward[0], part)][:count]

        count = len(self.cuts)
        device.take_weights()
        with device.randomness_kept():
            try:
                found = _rows.trial.tried(compute)
            except Exception:
                self._compute_on_one(given)
                found = None
        wrong = [
            result
            for cut, result in zip(self.cuts, found or [None] * count)
            if not cut.is_right(result) and not graph_cuts.is_normalized(cut, phase)
        ]
        if not wrong:
            return True
        why = (
            "unknown" if all(r is None or isinstance(r, _rows.Unknown) for r in wrong) else "tried"
        )
        if any(isinstance(cut.placement, _rows.Unknown) for cut in self.cuts):
            owner.doubt = why
        else:
            owner.across = _rows.Across(None, why=why)
        return False

    def _make_head(self):
        """Find the graphs of what runs once.

        Returns:
            A function that compiles them.
        """
        import theano
        from theano import tensor

        placeholders = [cut.variable.type() for cut in self.cuts]
        at_cut = {cut.variable: number for number, cut in enumerate(self.cuts)}
        given = dict(zip(self._cut_variables(), placeholders))
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
        cloned = theano.clone([new for _, new in mine] + rest + loss, given)
        updates = list(zip([variable for variable, _ in mine], cloned))
        values = cloned[len(mine) : len(mine) + len(rest)]
        self.differentiated = []  # the cuts and weights whose gradients are the head's last values
        if loss:
            asked = [(cut, given[cut.variable]) for cut in self.cuts if cut.is_differentiable()]
            asked += [(weight, weight) for weight, _ in self.weights]
            gradients = tensor.grad(
                cloned[-1],
                [variable for _, variable in asked],
                disconnected_inputs="ignore",
                return_disconnected="None",
            )
            found = [(each, g) for (each, _), g in zip(asked, gradients) if g is not None]
            self.differentiated = [each for each, _ in found]
            values += [gradient for _, gradient in found]
        self.cuts_back = [cut for cut in self.cuts if cut in self.differentiated]

        def compile_head():
            given = self.inputs + placeholders
            self.head = self._compile(given, values) if values else None
            self.update = None
            if loss:
                asked = given + [gradient for _, gradient in self.weights]
                self.update = self._compile(asked, [], updates=updates)

        return compile_head

    def _compile(self, inputs, outputs, **options):
        import theano

        # As K.function has it.
        options = dict(self.options, allow_input_downcast=True, on_unused_input="ignore", **options)
        return theano.function(inputs, outputs, **options)

    # The devices' functions ---------------------------------------------------------------------

    def _make_bodies(self):
        """Make the devices' functions that go forward.

        Returns:
            The bodies whose functions go back, if there is a way back.
        """
        self.kept = range(0)  # places of what these return for the backward functions
        if not self.cuts_back:
            self.forward = self.owner.bodies(
                self.cuts, lambda: self._functions(self._bodies(), Body.forward)
            )
            return {}
        weights = [weight for weight, _ in self.weights if weight in self.used]
        back = [self.cuts.index(cut) for cut in self.cuts_back]
        bodies = self._bodies()
        for device, body in bodies.items():
            with device.current():
                has_gradient = body.differentiate(back, [device.variables[w] for w in weights])
            self.body_weights = [w for w, has in zip(weights, has_gradient) if has]
            self.kept = range(len(self.cuts), len(self.cuts) + len(body.kept))
        self.forward = self._functions(bodies, Body.forward)
        return bodies

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
                swap = {old: new for old, new in swap.items() if old in held}
                functions.append(copied(functions[0], swap))
        return functions


def input_not_fed(model):
    return errors.unsupported(
        "theano",
        "run model {!r} on several devices: an input of it is a tensor of the user's, "
        "Input(tensor=...), whose rows cannot be split".format(model),
        "Give the model an Input(shape=...) and feed it.",
    )
