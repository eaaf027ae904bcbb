"""A function of a Keras model, run on several devices: forward, backward and what runs once."""

import collections

import numpy as np
import theano
from theano.gof import graph

from ... import _keras, _rows
from ..._rows import split_rows
from ..._runtime import progress, work
from . import graph_cuts
from .device_body import Body, copied
from .graph_variables import depending_on, gradients_of

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
        self.updates = list(collections.OrderedDict(reversed(list(updates))).items())
        self.outputs = [
            # Keras 2.3 wants its metrics' results as they are after the updates.
            theano.clone(each, dict(self.updates)) if hasattr(each, "_is_metric") else each
            for each in outputs
        ]
        self.loss, self.weights = gradients or (None, [])
        self.options = options
        self.is_made = False
        self.tried = {}  # type: Any  # with how many rows, for each shape of them
        self.cuts = []  # type: Any
        self.forward = []  # type: Any  # a Theano function for each device
        self.backward = []  # type: Any

    def __call__(self, inputs):
        rows, devices = inputs[0].shape[0], self.owner.devices
        states = _keras.states(self.owner.model, "get_value")
        given = {state: state.get_value(borrow=True) for state in states}  # for each row one
        given.update(zip(self.inputs, inputs))
        self._prepare(given, rows)
        bounds = [split_rows.run_bounds(rows, len(devices), i) for i in range(len(self.forward))]
        shards = [self._given_to_body(given, slice(*each)) for each in bounds]
        for device, _ in zip(devices, self.forward):
            device.take_weights()
        try:
            computed = self._run(self.forward, shards)
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
        if self.loss is not None:
            gradients = dict(zip(self.differentiated, map(np.asarray, of_head[len(self.wanted) :])))
            self._add_gradients(gradients, computed, shards, sizes)
            self.update(*(list(inputs) + whole + [gradients[weight] for weight, _ in self.weights]))
        for variable, new in self.assigned:
            variable.set_value(np.asarray(values[new], dtype=variable.dtype))
        names = [device.name for device in devices]
        split = sizes if self.cuts else work.undivided(names, rows)  # the head computes all
        work.count(names, split, self.loss is not None)
        return [np.asarray(values[output]) for output in self.outputs]

    def _given_to_body(self, given, rows):
        """A body's inputs: ``rows``, a slice or numbers, of what has rows."""
        return [given[v][rows] if v in self.sharded else given[v] for v in self.body_inputs]

    def _run(self, functions, given):
        """Call each device's function. A GPU's returns before it has computed: all of them start,
        then one is awaited."""
        results = []
        for device, function, each in zip(self.owner.devices, functions, given):
            with device.current():
                results.append(function(*each))
        return results

    def _compute_on_one(self, given):
        """Have the first device compute all rows. What is an error there, too, is the user's."""
        self._run(self.forward[:1], [self._given_to_body(given, slice(None))])

    def _add_gradients(self, gradients, computed, shards, sizes):
        """Add those of all devices' bodies to the gradients that the head has of each weight.

        Arguments:
            gradients: the head's, by weight or cut.
            computed: for each cut, what the devices have computed.
            shards: for each device, what its backward function gets besides the gradients.
        """
        upstream = [
            cut.split(gradients[cut], parts, sizes)
            for cut, parts in zip(self.cuts, computed)
            if cut in self.cuts_back
        ]
        given = [shard + list(parts) for shard, parts in zip(shards, zip(*upstream))]
        for result in self._run(self.backward, given):
            for weight, value in zip(self.body_weights, map(np.asarray, result)):
                gradients[weight] = gradients[weight] + value if weight in gradients else value

    # Making -----------------------------------------------------------------------------------

    def _prepare(self, given, rows):
        """Make the functions, unless they are there, and try them on rows of this batch."""
        fed = [given[v].shape for v in self.owner.model.inputs]
        if len({shape[0] for shape in fed}) > 1 and (self.cuts or not self.is_made):
            self._run_whole()
        shapes = tuple(shape[1:] for shape in fed)
        while not self.is_made or self.cuts and self.tried.get(shapes, 0) < min(rows, _ENOUGH):
            with progress.shown(f"compiling model {self.owner.model.name!r} for Theano"):
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
        self._find_cuts(given)
        placeholders, values, updates = self._head_graphs()
        self.used = [
            variable
            for variable in graph.inputs(self._cut_variables())
            if isinstance(variable, theano.compile.SharedVariable) and variable not in given
        ]
        cuts = tuple(self._cut_variables())
        made = None if self.cuts_back else self.owner.forward.get(cuts)
        bodies = self._bodies() if made is None else {}
        self.forward = self._functions(bodies, Body.forward) if made is None else made
        if not self.cuts_back:
            self.owner.forward[cuts] = self.forward

        def finish():
            given = self.inputs + placeholders
            self.backward = self._functions(bodies, Body.backward) if self.cuts_back else []
            self.head = self._compile(given, values) if values else None
            if self.loss is not None:
                given = given + [gradient for _, gradient in self.weights]
                self.update = self._compile(given, [], updates=updates)

        return finish

    def _cut_variables(self):
        return [cut.variable for cut in self.cuts]

    def _find_cuts(self, given):
        """Find where the head begins: the variables nearest to it that the body computes."""
        owner, outputs = self.owner, self.owner.model.outputs
        leaves = set(graph.inputs(outputs))
        states = [variable for variable in given if variable not in self.inputs]
        self.sharded = list(owner.model.inputs) + states
        others = [v for v in self.inputs if v in leaves and v not in self.sharded]
        self.body_inputs = self.sharded + others
        self.cuts, across, reach = [], owner.across, "The model"
        if across is None:
            given = {v: given[v] for v in self.body_inputs}
            of_model = graph_cuts.ModelGraph(outputs, self.sharded, given, not owner.doubt)
            wanted = self.outputs + [new for _, new in self.updates]
            self.cuts = of_model.cuts(wanted)
            across, reach = of_model.across(owner.doubt), _rows.FROM_THERE_ON
        if across is not None:
            owner.runs_whole(across, reach)

    def _in_inference(self, given, rows, chosen):
        """What the first device gets for some rows of the batch, and what it computes of them."""
        from keras import backend as K

        phase = K.learning_phase()
        given = {v: 0 if v is phase else value for v, value in given.items()}
        part = self._given_to_body(given, [row % rows for row in chosen])
        return part, self._run(self.forward[:1], [part])[0]

    def _is_right(self, given, rows):
        """Whether a trial, in inference, finds at the cut what was thought.

        Otherwise what no rule knows is doubted from now on; where all is known, the model is.
        """

        def compute(chosen):
            values = self._in_inference(given, rows, chosen)[1]
            return list(map(np.asarray, values[: len(self.cuts)]))

        owner, device = self.owner, self.owner.devices[0]
        device.take_weights()
        with device.randomness_kept():
            try:
                found = _rows.trial.tried(compute)
            except Exception:
                self._compute_on_one(given)
                found = [None] * len(self.cuts)
        wrong = [
            result
            for cut, result in zip(self.cuts, found)
            if not cut.is_right(result) and not graph_cuts.is_normalized(cut)
        ]
        if not wrong:
            return True
        untold = all(result is None or isinstance(result, _rows.Unknown) for result in wrong)
        why = "unknown" if untold else "tried"
        if any(isinstance(cut.placement, _rows.Unknown) for cut in self.cuts):
            owner.doubt = why
        else:
            owner.across = _rows.Across(None, why=why)
        return False

    def _is_right_back(self, given, rows):
        """Whether gradients of the user's own are those of the whole batch, by a trial as well."""
        across = graph_cuts.own_gradient(self.cuts_back)
        if across is None:
            return True
        places = [self.cuts.index(cut) for cut in self.cuts_back]

        def compute(chosen):
            part, values = self._in_inference(given, rows, chosen)
            upstream = [np.asarray(values[place]) + np.float32(0.5) for place in places]
            part = part + values[len(self.cuts) :] + upstream
            return list(map(np.asarray, self._run(self.backward[:1], [part])[0]))

        try:
            with self.owner.devices[0].randomness_kept():
                whole, *parts = map(compute, (_rows.trial.WHOLE,) + _rows.trial.PARTS)
            is_right = all(map(_rows.trial.close, map(sum, zip(*parts)), whole))
        except Exception:  # whatever an operation of the user's does
            is_right = False
        if not is_right:
            self.owner.across = across
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
            floats = zip(self.cuts, placeholders)
            asked.update((cut, given) for cut, given in floats if "float" in given.dtype)
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

    def _bodies(self):
        """Their graphs. On one processor all are copies of the first's."""
        found, devices = {}, self.owner.devices
        given = self.body_inputs, self.sharded, self._cut_variables(), self.used
        back = [self.cuts.index(cut) for cut in self.cuts_back]
        weights = [weight for weight, _ in self.weights if weight in self.used]
        for number, device in enumerate(devices):
            for variable in self.used:
                device.adopt(variable, number)
            if number == 0 or device.target != devices[0].target:
                with device.current():
                    body = Body(device, self._compile, *given)
                    self.body_weights = body.differentiate(back, weights) if back else []
                found[device] = body
        return found

    def _functions(self, bodies, make):
        """A function for each device: that of its body, or a copy of the first one's."""
        functions = []  # type: Any
        first = self.owner.devices[0]
        for device in self.owner.devices:
            if device in bodies:
                with device.current():
                    functions.append(make(bodies[device]))
            else:
                swap = {first.variables[v]: device.variables[v] for v in self.used}
                functions.append(copied(functions[0], swap))
        return functions
