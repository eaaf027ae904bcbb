"""A function of a Keras model, run on several devices: forward, backward and what runs once."""

import collections

import numpy as np
import theano

from ... import _keras, _rows, errors
from ..._rows import split_rows
from ..._runtime import progress, work
from . import graph_cuts
from .device_body import Body, copied
from .graph_variables import depending_on, gradients_of, leaves_of

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
        self.metrics = {p: each for p, each in enumerate(outputs) if hasattr(each, "_is_metric")}
        self.outputs = [output for output in outputs if not hasattr(output, "_is_metric")]
        self.updates = list(collections.OrderedDict(reversed(list(updates))).items())
        self.loss, self.weights = gradients or (None, [])
        self.options = options
        self.is_made = False
        self.tried = {}  # type: Any  # with how many rows, for each shape of them
        self.cuts = []  # type: Any
        self.forward = []  # type: Any  # a Theano function for each device
        self.backward = []  # type: Any
        self.update = self.measure = None  # type: Any

    def __call__(self, inputs):
        rows, devices = inputs[0].shape[0], self.owner.devices
        given = dict(zip(self.inputs, inputs))
        self._prepare(given, rows)
        given = self._with_states(given)
        bounds = [split_rows.run_bounds(rows, len(devices), i) for i in range(len(self.forward))]
        shards = [self._given_to_body(given, slice(*each)) for each in bounds]
        for device, _ in zip(devices, self.forward):
            device.take_weights()
        # A GPU's functions return before it has computed: all of them start, then one is awaited.
        try:
            computed = [
                device.run(forward, shard)
                for device, forward, shard in zip(devices, self.forward, shards)
            ]
        except _ERRORS:
            self._compute_on_one(given)
            self._run_whole()
            return self(inputs)
        count, sizes = len(self.cuts), split_rows.sizes(rows, len(devices))
        shards = [shard + values[count:] for shard, values in zip(shards, computed)]
        # For each cut what the devices have computed.
        computed = list(zip(*[map(np.asarray, values[:count]) for values in computed]))
        whole = [cut.merge(parts, sizes) for cut, parts in zip(self.cuts, computed)]
        of_head = self.head(*(list(inputs) + whole)) if self.head else []
        values = dict(zip(self._cut_variables() + self.wanted, whole + of_head))
        if self.update is not None:
            gradients = dict(zip(self.differentiated, map(np.asarray, of_head[len(self.wanted) :])))
            if self.backward:
                self._add_gradients(gradients, computed, shards, sizes)
            self.update(*(list(inputs) + whole + [gradients[weight] for weight, _ in self.weights]))
        for variable, new in self.assigned:
            variable.set_value(np.asarray(values[new], dtype=variable.dtype))
        names = [device.name for device in devices]
        split = sizes if self.cuts else work.undivided(names, rows)  # the head computes all
        work.count(names, split, self.loss is not None)
        results = [np.asarray(values[output]) for output in self.outputs]
        for place, value in zip(self.metrics, self.measure() if self.metrics else ()):
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

    def _add_gradients(self, gradients, computed, shards, sizes):
        """Add those of all devices' bodies to the gradients that the head has of each weight.

        Arguments:
            gradients: the head's, by weight or cut.
            computed: for each cut, what the devices have computed.
            shards: for each device, what its backward function gets besides the gradients.
        """
        given = [
            cut.split(gradients[cut], parts, sizes)
            for cut, parts in zip(self.cuts, computed)
            if cut in self.cuts_back
        ]
        results = [
            device.run(backward, shard + list(parts))
            for device, backward, shard, parts in zip(
                self.owner.devices, self.backward, shards, zip(*given)
            )
        ]
        for result in results:
            for weight, value in zip(self.body_weights, map(np.asarray, result)):
                gradients[weight] = gradients[weight] + value if weight in gradients else value

    # Making -----------------------------------------------------------------------------------

    def _prepare(self, given, rows):
        """Make the functions, unless they are there, and try them on rows of this batch."""
        fed = [given[v].shape for v in self.owner.model.inputs if v in given]
        if len({shape[0] for shape in fed}) > 1 and (self.cuts or not self.is_made):
            self._run_whole()
        shapes = tuple(shape[1:] for shape in fed)
        while not self.is_made or self.cuts and self.tried.get(shapes, 0) < min(rows, _ENOUGH):
            with progress.shown("compiling model {!r} for Theano".format(self.owner.model.name)):
                finish = None if self.is_made else self._make(given)
                is_right = not self.cuts or self._is_right(given, rows)
                if is_right and finish is not None:
                    finish()
                    is_right = self._is_right_back(given, rows)
            self.is_made = is_right
            self.tried[shapes] = rows

    def _run_whole(self):
        """From now on, on one device."""
        self.owner.across = _rows.Across(None)
        self.is_made, self.tried = False, {}

    def _make(self, given):
        """Find where the graph is cut, and compile what the devices compute of their rows.

        Returns:
            A function that compiles the rest.
        """
        model = self.owner.model
        if any(variable not in self.inputs for variable in model.inputs):
            raise input_not_fed(model.name)
        self.states = _keras.states(model, "get_value")
        self.sharded = list(model.inputs) + self.states
        self._find_cuts(self._with_states(given))
        placeholders, values, updates = self._head_graphs()
        self.used = [
            variable
            for variable in leaves_of(self._cut_variables())
            if isinstance(variable, theano.compile.SharedVariable) and variable not in self.states
        ]
        bodies = self._make_bodies()

        def finish():
            given = self.inputs + placeholders
            self.backward = self._functions(bodies, Body.backward) if bodies else []
            self.head = self._compile(given, values) if values else None
            if self.loss is not None:
                given = given + [gradient for _, gradient in self.weights]
                self.update = self._compile(given, [], updates=updates)
            if self.metrics:
                self.measure = self._compile([], list(self.metrics.values()))

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
        in_inference = {v: 0 if v is phase else value for v, value in given.items()}

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

    def _is_right_back(self, given, rows):
        """Whether gradients of the user's own are those of the whole batch, by a trial as well."""
        from keras import backend as K

        owner, device, phase = self.owner, self.owner.devices[0], K.learning_phase()
        across = graph_cuts.own_gradient(self.cuts_back) if self.backward else None
        if across is None:
            return True
        given = {v: 0 if v is phase else value for v, value in self._with_states(given).items()}
        places = [self.cuts.index(cut) for cut in self.cuts_back]

        def compute(chosen):
            part = self._given_to_body(given, [row % rows for row in chosen])
            values = device.run(self.forward[0], part)
            upstream = [np.asarray(values[place]) + np.float32(0.5) for place in places]
            kept = values[len(self.cuts) :]
            return list(map(np.asarray, device.run(self.backward[0], part + kept + upstream)))

        try:
            with device.randomness_kept():
                whole, *parts = map(compute, (_rows.trial.WHOLE,) + _rows.trial.PARTS)
            is_right = all(map(_rows.trial.close, map(sum, zip(*parts)), whole))
        except Exception:  # whatever an operation of the user's does
            is_right = False
        if not is_right:
            owner.across = across
        return is_right

    def _head_graphs(self):
        """What runs once.

        Returns:
            The variables that stand for the values at the cuts; the head's results, which are the
            variables ``wanted`` and then the gradients of what is ``differentiated``; and the
            updates, which take the gradients of the weights besides.
        """
        placeholders = [cut.variable.type() for cut in self.cuts]
        at_cut = dict(zip(self._cut_variables(), placeholders))
        news = [new for _, new in self.updates]
        batch = depending_on(self.inputs + self._cut_variables(), news)
        later = depending_on([gradient for _, gradient in self.weights], news)
        # What depends on the gradients, or on no batch, is the optimizer's.
        optimizers = [
            (variable, new)
            for variable, new in self.updates
            if self.loss is not None and (new in later or new not in batch)
        ]
        self.assigned = [update for update in self.updates if update not in optimizers]
        wanted = dict.fromkeys(self.outputs + [new for _, new in self.assigned])
        self.wanted = [variable for variable in wanted if variable not in at_cut]
        loss = [] if self.loss is None else [self.loss]
        whole = self.wanted + [new for _, new in optimizers] + loss
        cloned = dict(zip(whole, theano.clone(whole, at_cut)))
        gradients = {}
        if loss:
            asked = {weight: weight for weight, _ in self.weights}
            for cut, placeholder in zip(self.cuts, placeholders):
                if "float" in placeholder.type.dtype:
                    asked[cut] = placeholder
            found = gradients_of(cloned[self.loss], list(asked.values()))
            gradients = {each: found[v] for each, v in asked.items() if v in found}
        self.differentiated = list(gradients)  # cuts and weights
        self.cuts_back = [cut for cut in self.cuts if cut in gradients]
        results = [cloned[variable] for variable in self.wanted] + list(gradients.values())
        return placeholders, results, [(variable, cloned[new]) for variable, new in optimizers]

    def _compile(self, inputs, outputs, **options):
        # As K.function has it.
        options = dict(self.options, allow_input_downcast=True, on_unused_input="ignore", **options)
        return theano.function(inputs, outputs, **options)

    # The devices' functions ---------------------------------------------------------------------

    def _make_bodies(self):
        """Make the devices' functions that go forward.

        Returns:
            The bodies whose functions go back, if there is a way back.
        """
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
                self.body_weights = body.differentiate(back, weights)
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
                pairs = [(first.variables[v], device.variables[v]) for v in self.used]
                swap = {old: new for old, new in pairs if old in held}
                functions.append(copied(functions[0], swap))
        return functions


def input_not_fed(model):
    return errors.unsupported(
        "theano",
        "run model {!r} on several devices: an input of it is a tensor of the user's, "
        "Input(tensor=...), whose rows cannot be split".format(model),
        "Give the model an Input(shape=...) and feed it.",
    )
