"""Plan of a Keras function on several devices: the functions compiled from its cut graph."""

import functools
import operator
import weakref
from typing import Any, Dict, List, NamedTuple, Sequence, Tuple

import numpy as np
import theano
from theano.gof import graph

from ... import _rows, errors
from ..._rows import splitting
from . import batch_norm, compilation, function_copies, merging
from .compilation import Body
from .graph import computed_by, gradients_of, value_like
from .partition import Cut, ModelGraph
from .reductions import AllGather, BodyGraph, reduced
from .side_effects import HasEffectsError


class Run(NamedTuple):
    """The computation of a device in a step.

    Attributes:
        device: the ``Device``.
        program: its ``Program``.
        values: what is computed so far, by variables of the program.
    """

    device: "Any"
    program: "compilation.Program"
    values: "Dict[Any, Any]"


class ForwardPass(NamedTuple):
    """Results of the devices' forward pass.

    Attributes:
        sizes: the number of rows of each device's shard.
        parts: for each cut the devices' values there.
        runs: for each device its ``Run``, with what the backward pass needs.
    """

    sizes: "List[int]"
    parts: "List[Any]"
    runs: "List[Run]"


class CompiledPlan:
    """The functions that a ``ReplicatedFunction`` is compiled to for its first batch.

    Once made, it does not change, except that a trial finds the placements at cuts that were
    unknown. Where a trial finds it wrong, another plan takes its place.

    Arguments:
        function: the ``ReplicatedFunction``.
        values: those of its inputs, and of states that have rows, by variable.

    Attributes:
        sharded: the variables of which each device gets its shard.
        body_inputs: the inputs of a body: these, and others that are replicated.
        cuts: where the graph is cut, each a ``Cut``; none where the head computes all.
        differentiated: the indices of the cuts that have a gradient.
        used: the shared variables that the bodies read.
        body_weights: the weights whose gradients the bodies compute.
        programs: for each device the functions of the body, from its shard to its values at the
            cuts, and from upstream gradients to those of ``body_weights``; empty without cuts.
        phase: the learning phase, if the body has only what is for inference; or None.
        head: the function that computes the rest, of the whole batch, and updates variables. While
            it runs, it calls the backward functions.
        step: the ``ForwardPass`` whose head is running, or None.
    """

    def __init__(self, function: "Any", values: "Dict[Any, Any]") -> None:
        owner = function.owner
        self.owner, self.inputs = owner, function.inputs
        self.step: "Any" = None
        outputs = owner.model.outputs
        self.sharded = list(owner.model.inputs) + [v for v in values if v not in self.inputs]
        leaves = set(graph.inputs(outputs)).difference(self.sharded)
        self.body_inputs = self.sharded + [v for v in self.inputs if v in leaves]
        owner.python.follow(outputs)
        self.phase, self.rows, self.numbers = None, None, None
        self.cuts, of_model = self._nearest_cuts(function, values)
        at_cuts = [cut.variable for cut in self.cuts]
        computed = self._with_reductions(at_cuts, of_model, values)
        self.used = [
            v for v in graph.inputs(computed) if hasattr(v, "get_value") and v not in values
        ]
        #: The head's inputs in place of the variables at cuts.
        in_head = {variable: variable.type() for variable in at_cuts}
        gradients = self._gradients_in_head(function, in_head)
        self.differentiated = [i for i, v in enumerate(in_head.values()) if v in gradients]
        self._compile_bodies(function, at_cuts, computed)
        gradients = self._with_those_of_bodies(function, gradients, list(in_head.values()))
        replaced = {v: value_like(v, gradients[weight]) for weight, v in function.weights}
        replaced.update(in_head)
        results = theano.clone(function.outputs + list(function.updates.values()), replaced)
        count = len(function.outputs)
        updates = list(zip(function.updates, results[count:]))
        head_inputs = self.inputs + list(in_head.values())
        self.head = function.compile(head_inputs, results[:count], updates)
        owner.heads.add(self.head)

    # Making -----------------------------------------------------------------------------------

    def _nearest_cuts(self, function, values) -> "Tuple[List[Cut], Any]":
        """Return the cuts nearest to the head, and the graph; warn of what is not split."""
        owner, cuts, fallback, reach = self.owner, [], self.owner.fallback, "The model"
        of_model: "Any" = None
        if fallback is None:
            of_model = ModelGraph(
                owner.model.outputs, self.sharded, values, not owner.doubt, owner.python.changing,
                batch_norm.synchronized_in(owner.owner),
            )  # fmt: skip
            cuts = of_model.cuts(function.outputs + list(function.updates.values()))
            fallback, reach = of_model.fallback(owner.doubt), _rows.DOWNSTREAM
        if fallback is not None:
            name, device = owner.owner.name, owner.devices[0].name
            _rows.warn_unsplit(owner.owner, name, fallback, device, reach, owner)
        return cuts, of_model

    def _with_reductions(self, at_cuts, of_model, values):
        """Return the variables at cuts as devices compute them, by reductions where these are."""
        if not at_cuts or not (of_model.whole or of_model.lowered or of_model.split_again):
            return at_cuts
        from keras import backend as K

        # In inference, what is for training would be reduced in vain.
        phase = K.learning_phase()
        self.phase = phase if phase in values and not values[phase] else None
        body = BodyGraph(of_model, self.sharded[0], self.phase)
        computed = body.variables(at_cuts)
        leaves = graph.inputs(computed)
        if body.rows in leaves:
            self.rows = body.rows
            self.body_inputs.append(body.rows)
        if body.numbers in leaves:
            self.numbers = body.numbers
            self.body_inputs.append(body.numbers)
        return computed

    def is_for(self, values: "Dict[Any, Any]") -> bool:
        """Return whether this is a plan for the learning phase among some values."""
        return self.phase is None or not values.get(self.phase)

    @staticmethod
    def _gradients_in_head(function, in_head):
        """Return the loss's gradients for weights and for inputs of the head, as the head has them.

        Arguments:
            function: the ``ReplicatedFunction``.
            in_head: by variables at cuts, the inputs of the head in their place.
        """
        if function.loss is None:
            return {}
        floats = [variable for variable in in_head.values() if "float" in variable.dtype]
        weights = list(dict(function.weights))
        return gradients_of(theano.clone(function.loss, in_head), weights + floats)

    def _compile_bodies(self, function, at_cuts, computed):
        """Compile the devices' functions. Those of a body without gradients serve other functions.

        On one processor all are copies of the first device's.

        Arguments:
            function: the ``ReplicatedFunction``.
            at_cuts: the model's variables at the cuts.
            computed: these as devices compute them.
        """
        owner, mode = self.owner, function.options.get("mode")
        weights = [weight for weight, _ in function.weights if weight in self.used]
        body = Body(
            self.body_inputs, self.sharded, computed, self.used, self.differentiated, weights
        )
        key = tuple(at_cuts), mode, self.phase
        made = [] if self.differentiated else owner.forward.get(key, [])
        is_apart = compilation.takes_values_away(mode)
        for number, device in enumerate(owner.devices if at_cuts and not made else ()):
            for variable in self.used:
                device.adopt(variable, number, is_apart)
            is_alike = number and device.target == owner.devices[0].target
            if is_alike and all(map(function_copies.can_be_copied, made[0].functions())):
                swap = {owner.devices[0].variables[v]: device.variables[v] for v in self.used}
                made.append(made[0].copied(swap))
            else:
                with device.current():
                    program, weights = compilation.compiled(device, body, function.compile)
                made.append(program)
                for compiled in program.functions():
                    owner.python.follow(compiled.maker.fgraph.outputs)
            device.functions.update(made[number].functions())
        if not self.differentiated:
            owner.forward[key] = made
        self.body_weights = weights
        self.programs = made

    def _with_those_of_bodies(self, function, gradients, head_inputs):
        """Return the loss's gradients for the weights, with what the bodies add to them.

        Arguments:
            function: the ``ReplicatedFunction``.
            gradients: those in the head.
            head_inputs: its inputs at the cuts.
        """
        weights, gradients = dict(function.weights), dict(gradients)
        if self.differentiated:
            backward_pass = weakref.WeakMethod(self._backward_pass)  # Theano's profiles keep ops

            def of_bodies(*upstream):
                return backward_pass()(*upstream)

            upstream = [gradients[head_inputs[index]] for index in self.differentiated]
            like = [weights[weight] for weight in self.body_weights]
            for weight, value in zip(self.body_weights, computed_by(of_bodies, upstream, like)):
                gradients[weight] = gradients[weight] + value if weight in gradients else value
        without = [weight for weight in weights if weight not in gradients]
        if without:  # as on one device: zeros with respect to integers, or Theano's error
            gradients.update(zip(without, theano.grad(function.loss, without)))
        return gradients

    # Running ----------------------------------------------------------------------------------

    def _begun(self, device, program, values, chosen, numbers):
        """Return the ``Run`` of a device with some rows.

        Arguments:
            device: the ``Device``.
            program: its ``Program``.
            values: those of the function's inputs, and of states that have rows, by variable.
            chosen: a slice, or the numbers of rows to take of those that are sharded.
            numbers: the numbers of these rows in the whole batch.
        """
        values = dict(values)
        values[self.numbers] = np.array(numbers, "int64")
        given = [values[v][chosen] if v in self.sharded else values[v] for v in self.body_inputs]
        return Run(device, program, dict(zip(program.shard, given)))

    def _run(self, runs, stages, sizes):
        """Have devices compute some stages.

        A GPU's function returns before it has computed: all of them start, then one is awaited.

        Arguments:
            runs: the ``Run`` of each device.
            stages: for each device its stages.
            sizes: the numbers of rows of the devices' shards.
        """
        for of_devices in zip(*stages):
            with self.owner.python.unchanged():
                for run, stage in zip(runs, of_devices):
                    with run.device.current():
                        results = stage.function(*[run.values[v] for v in stage.inputs])
                    run.values.update(zip(stage.outputs, results))
            for nodes in zip(*[stage.reductions for stage in of_devices]):
                self._reduce(runs, nodes, sizes)

    @staticmethod
    def _reduce(runs, nodes, sizes):
        """Compute a reduction over the devices, which each of them has as a node of its graph."""
        parts = [
            [np.asarray(run.values[v]) for v in node.inputs[: len(node.outputs)]]
            for run, node in zip(runs, nodes)
        ]
        op = nodes[0].op
        if isinstance(op, AllGather):
            numbers = [np.asarray(run.values[node.inputs[1]]) for run, node in zip(runs, nodes)]
            of_all = [[op.gathered([value for (value,) in parts], numbers, sizes)]] * len(runs)
        else:
            of_all = reduced(op.how, parts, sizes)
        for run, node, results in zip(runs, nodes, of_all):
            run.values.update(zip(node.outputs, results))

    def take_weights(self) -> None:
        """Bring the weights of the devices up to date."""
        for device in self.owner.devices[: len(self.programs)]:
            device.take_weights()

    def forward_pass(self, values: "Dict[Any, Any]", rows: int) -> "ForwardPass":
        """Have each device compute its shard of a batch."""
        devices = self.owner.devices[: len(self.programs)]
        count = len(self.owner.devices)
        bounds = [splitting.run_bounds(rows, count, n) for n in range(len(devices))]
        shards, numbers = [slice(*pair) for pair in bounds], [range(*pair) for pair in bounds]
        runs = zip(devices, self.programs)
        return self._computed(values, shards, splitting.sizes(rows, count), runs, numbers)

    def compute_on_first(
        self, values: "Dict[Any, Any]", parts: "List[Any]", numbers: "Any" = None
    ) -> "ForwardPass":
        """Have the first device compute some rows in parts, as if each were another device's.

        Arguments:
            values: those of the function's inputs, and of states that have rows, by variable.
            parts: for each part the numbers of its rows.
            numbers: likewise, as if all were different rows, in order; by default ``parts``.
        """
        runs = [(self.owner.devices[0], self.programs[0])] * len(parts)
        return self._computed(values, parts, list(map(len, parts)), runs, numbers or parts)

    def _computed(self, values, shards, sizes, places, numbers):
        if self.rows is not None:
            values = dict(values)
            values[self.rows] = sum(sizes)
        runs = [
            self._begun(*place, values, chosen, of_all)
            for place, chosen, of_all in zip(places, shards, numbers)
        ]
        self._run(runs, [run.program.forward for run in runs], sizes)
        at_cuts = [[np.asarray(run.values[v]) for v in run.program.at_cuts] for run in runs]
        return ForwardPass(sizes, list(zip(*at_cuts)), runs)

    def merged(self, step: "ForwardPass") -> "List[Any]":
        """Return the values of the whole batch at the cuts."""
        return [
            merging.merged(cut.placement, parts, step.sizes)
            for cut, parts in zip(self.cuts, step.parts)
        ]

    def finish(self, step: "ForwardPass", inputs: "List[Any]") -> "List[Any]":
        """Compute the rest of a step, with the whole batch, and return the function's results."""
        self.step = step
        try:
            return self.head(*(list(inputs) + self.merged(step)))
        finally:
            self.step = None

    def gradients(self, step: "ForwardPass", upstream: "Sequence[Any]") -> "List[Any]":
        """Return the sums of the bodies' gradients, for those of the whole batch at the cuts."""
        split = [
            merging.split_gradient(gradient, self.cuts[i].placement, step.parts[i], step.sizes)
            for i, gradient in zip(self.differentiated, upstream)
        ]
        for run, shards in zip(step.runs, zip(*split)):
            run.values.update(zip(run.program.upstream, shards))
        self._run(step.runs, [run.program.backward for run in step.runs], step.sizes)
        of_devices = [[run.values[v] for v in run.program.gradients] for run in step.runs]
        return [
            np.asarray(functools.reduce(operator.add, map(np.asarray, gradients)))
            for gradients in zip(*of_devices)
        ]

    def _backward_pass(self, *upstream):
        """Compute the gradients in a step whose head is running."""
        try:
            return self.gradients(self.step, upstream)
        except HasEffectsError as error:  # the step has begun to change weights
            raise errors.unsupported(
                "theano",
                "train {!r} on several devices: the gradient of an operation has side effects, "
                "which each device would repeat".format(self.owner.model.name),
                "Run the model on one device: parallelize(model, gpus=1).",
            ) from error
