"""Plan of a Keras function on several devices: the functions compiled from its cut graph."""

import functools
import operator
import weakref
from typing import Any, Dict, List, NamedTuple

import numpy as np
import theano
from theano.gof import graph

from ... import _rows, errors
from ..._rows import splitting
from . import compilation, function_copies, merging
from .compilation import Body
from .graph import computed_by, gradients_of, value_like
from .partition import Cut, ModelGraph
from .side_effects import HasEffectsError


class ForwardPass(NamedTuple):
    """Results of the devices' forward pass.

    Attributes:
        sizes: the number of rows of each device's shard.
        parts: for each cut the devices' values there.
        kept: for each device what its backward function takes besides upstream gradients.
    """

    sizes: "List[int]"
    parts: "List[Any]"
    kept: "List[List[Any]]"


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
        forward: for each device the function from its shard to its values at the cuts, and what it
            keeps for the backward one; empty without cuts.
        backward: for each device the function from its shard, what is kept and upstream gradients
            at the cuts to gradients of ``body_weights``; empty where there are none.
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
        self.cuts = self._nearest_cuts(function, values)
        at_cuts = [cut.variable for cut in self.cuts]
        self.used = [
            v for v in graph.inputs(at_cuts) if hasattr(v, "get_value") and v not in values
        ]
        #: The head's inputs in place of the variables at cuts.
        in_head = {variable: variable.type() for variable in at_cuts}
        gradients = self._gradients_in_head(function, in_head)
        self.differentiated = [i for i, v in enumerate(in_head.values()) if v in gradients]
        self._compile_bodies(function, at_cuts)
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

    def _nearest_cuts(self, function, values) -> "List[Cut]":
        """Return the cuts nearest to the head; warn of what is not split."""
        owner, cuts, fallback, reach = self.owner, [], self.owner.fallback, "The model"
        if fallback is None:
            changing, tries = owner.python.changing, not owner.doubt
            of_model = ModelGraph(owner.model.outputs, self.sharded, values, tries, changing)
            cuts = of_model.cuts(function.outputs + list(function.updates.values()))
            fallback, reach = of_model.fallback(owner.doubt), _rows.DOWNSTREAM
        if fallback is not None:
            name, device = owner.owner.name, owner.devices[0].name
            _rows.warn_unsplit(owner.owner, name, fallback, device, reach, owner)
        return cuts

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

    def _compile_bodies(self, function, at_cuts):
        """Compile the devices' functions. Those of a body without gradients serve other functions.

        On one processor all are copies of the first device's.
        """
        owner, mode = self.owner, function.options.get("mode")
        weights = [weight for weight, _ in function.weights if weight in self.used]
        body = Body(
            self.body_inputs, self.sharded, at_cuts, self.used, self.differentiated, weights
        )
        key = tuple(at_cuts), mode
        made = [] if self.differentiated else owner.forward.get(key, [])
        is_apart = compilation.takes_values_away(mode)
        for number, device in enumerate(owner.devices if at_cuts and not made else ()):
            for variable in self.used:
                device.adopt(variable, number, is_apart)
            is_alike = number and device.target == owner.devices[0].target
            if is_alike and all(map(function_copies.can_be_copied, made[0])):
                swap = {owner.devices[0].variables[v]: device.variables[v] for v in self.used}
                made.append([function_copies.copied(compiled, swap) for compiled in made[0]])
            else:
                with device.current():
                    functions, weights = compilation.compiled(device, body, function.compile)
                made.append(functions)
                for compiled in functions:
                    owner.python.follow(compiled.maker.fgraph.outputs)
            device.functions.update(made[number])
        if not self.differentiated:
            owner.forward[key] = made
        self.body_weights = weights
        self.forward = [forward for forward, *_ in made]
        self.backward = [backward for _, *rest in made for backward in rest]

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

    def given_to_body(self, values: "Dict[Any, Any]", rows: "Any") -> "List[Any]":
        """Return a body's inputs.

        Arguments:
            values: those of the function's inputs, and of states that have rows, by variable.
            rows: a slice, or the numbers of rows to take of those that are sharded.
        """
        return [values[v][rows] if v in self.sharded else values[v] for v in self.body_inputs]

    def run(self, functions: "List[Any]", inputs: "List[List[Any]]") -> "List[Any]":
        """Call each device's function.

        A GPU's returns before it has computed: all of them start, then one is awaited.
        """
        results: "List[Any]" = []
        if not functions:
            return results
        with self.owner.python.unchanged():
            for device, function, args in zip(self.owner.devices, functions, inputs):
                with device.current():
                    results.append(function(*args))
        return results

    def take_weights(self) -> None:
        """Bring the weights of the devices up to date."""
        for device in self.owner.devices[: len(self.forward)]:
            device.take_weights()

    def forward_pass(self, values: "Dict[Any, Any]", rows: int) -> "ForwardPass":
        """Have each device compute its shard of a batch."""
        count = len(self.owner.devices)
        bounds = [splitting.run_bounds(rows, count, number) for number in range(len(self.forward))]
        shards = [self.given_to_body(values, slice(*bound)) for bound in bounds]
        computed = self.run(self.forward, shards)
        parts = list(zip(*[map(np.asarray, results[: len(self.cuts)]) for results in computed]))
        kept = [shard + results[len(self.cuts) :] for shard, results in zip(shards, computed)]
        return ForwardPass(splitting.sizes(rows, count), parts, kept)

    def compute_on_one(self, values: "Dict[Any, Any]") -> None:
        """Compute all rows on the first device. If that fails, too, the error is the user's."""
        self.run(self.forward[:1], [self.given_to_body(values, slice(None))])

    def finish(self, step: "ForwardPass", inputs: "List[Any]") -> "List[Any]":
        """Compute the rest of a step, with the whole batch, and return the function's results."""
        merged = [
            merging.merged(cut.placement, parts, step.sizes)
            for cut, parts in zip(self.cuts, step.parts)
        ]
        self.step = step
        try:
            return self.head(*(list(inputs) + merged))
        finally:
            self.step = None

    def _backward_pass(self, *upstream):
        """Return the sums of the bodies' gradients, for those of the whole batch at the cuts."""
        sizes, parts, kept = self.step
        split = [
            merging.split_gradient(gradient, self.cuts[index].placement, parts[index], sizes)
            for index, gradient in zip(self.differentiated, upstream)
        ]
        inputs = [of_step + list(shards) for of_step, shards in zip(kept, zip(*split))]
        try:
            gradients = self.run(self.backward, inputs)
        except HasEffectsError as error:  # the step has begun to change weights
            raise errors.unsupported(
                "theano",
                "train {!r} on several devices: the gradient of an operation has side effects, "
                "which each device would repeat".format(self.owner.model.name),
                "Run the model on one device: parallelize(model, gpus=1).",
            ) from error
        return [
            np.asarray(functools.reduce(operator.add, map(np.asarray, of_devices)))
            for of_devices in zip(*gradients)
        ]
