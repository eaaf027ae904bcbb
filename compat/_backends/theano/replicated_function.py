"""A function of a Keras model, as ``K.function`` makes it, that runs its body on several devices.

When Keras turns tensors into a function to run, its graph is cut in two:

- The *body*, all that the model's outputs depend on, is compiled for each device and computes its
  shard of the batch. What leaves it, towards loss, metrics or updates, has rows, which are merged
  on the host.
- The *head*, the rest, runs once, with the whole batch: losses, metrics, penalties, statistics of
  the batch, and what computes across its rows (``partition.py``) with all that follows. Its
  gradient at the cut goes back to the devices' bodies, the sum of whose gradients the optimizer
  sees.

So any loss, also one that compares rows with one another, and every metric is that of one device,
however uneven the shards. A compiled function keeps nothing for the next one, so the one that goes
forward returns, besides, whatever the one that goes back needs of what it has computed.
"""

import functools
import operator
import threading
import weakref

import numpy as np
import theano
from theano.gof import graph

from ... import _keras, _rows, errors
from ..._rows import splitting
from ..._runtime import progress, work
from ..._runtime.patching import replaced
from . import compilation, custom_gradients, function_copies, merging, trial
from .graph import computed_by, gradients_of, value_like
from .partition import ModelGraph
from .side_effects import HasEffectsError

#: Held while one thread makes functions: K.function is replaced for that, and Theano's own state
#: is not made for several.
making = threading.RLock()

#: What Theano raises where the sizes of a part of a batch do not fit each other.
_ERRORS = (ValueError, IndexError, AssertionError)
#: Rows that a trial takes; of fewer it is repeated when there are more.
_ENOUGH = len(_rows.trial.WHOLE)


class ReplicatedFunction:
    """Replacement of a ``K.function``, made in full for its first batch.

    Arguments:
        owner: the model's ``Replicas``.
        inputs, outputs, updates, options: as ``K.function`` has them.
        gradients: empty, or the loss and the pairs of a weight and the variable that stands for
            its gradient in ``updates``.
    """

    def __init__(self, owner, inputs, outputs, updates, gradients, options):
        self.owner = owner
        self.inputs = list(inputs)
        self.updates = dict(reversed(list(updates)))  # of a variable's the first, as K.function
        self.outputs = [
            # Keras 2.3 wants its metrics' results as they are after the updates.
            theano.clone(each, self.updates) if hasattr(each, "_is_metric") else each
            for each in outputs
        ]
        self.loss, self.weights = gradients or (None, [])
        self.options = options
        self.is_made = False
        self.tried = {}  # type: Any  # with how many rows, for each shape of them
        self.cuts = []  # type: Any
        self.batch = None  # type: Any  # what `_go_back` takes of the one that runs

    def __reduce__(self):
        """Make copies None: Keras before 2.2 copies, and pickles, a model with its functions."""
        model = self.owner.model
        if self.loss is not None and getattr(model.optimizer, "weights", None):
            errors.warn(
                f"The copy of model {model.name!r} will train from the beginning of its "
                "optimizer's state (momentum, moments): a function that runs on several devices "
                "is not copied, and the one that Keras makes anew has none. Use model.save() and "
                "load_model(), which keep it."
            )
        return type(None), ()

    def __call__(self, inputs):
        with self.owner.running:  # a function of Theano's has places for one call's values
            while True:
                try:
                    return self._call(inputs)
                except HasEffectsError:
                    self._make_again()

    def _call(self, inputs):
        rows, devices = inputs[0].shape[0], self.owner.devices
        states = _keras.states(self.owner.model, "get_value")
        given = {state: state.get_value(borrow=True) for state in states}  # for each row one
        given.update(zip(self.inputs, inputs))
        self._prepare(given, rows)
        bounds = [splitting.run_bounds(rows, len(devices), i) for i in range(len(self.forward))]
        shards = [self.given_to_body(given, slice(*each)) for each in bounds]
        for device in devices[: len(self.forward)]:
            device.take_weights()
        try:
            computed = self.run(self.forward, shards)
        except _ERRORS:
            self.compute_on_one(given)
            self._run_whole()
            return self._call(inputs)
        count, sizes = len(self.cuts), splitting.sizes(rows, len(devices))
        # For each cut what the devices have computed.
        parts = list(zip(*[map(np.asarray, values[:count]) for values in computed]))
        handed_over = [s + values[count:] for s, values in zip(shards, computed)]
        whole = [merging.merged(cut.placement, each, sizes) for cut, each in zip(self.cuts, parts)]
        with replaced(self, batch=(handed_over, parts, sizes)):
            results = self.head(*(list(inputs) + whole))
        names = [device.name for device in devices]
        split = sizes if self.cuts else work.undivided(names, rows)  # the head computes all
        work.count(names, split, self.loss is not None)
        return list(map(np.asarray, results))

    def given_to_body(self, given, rows):
        """Return a body's inputs: ``rows``, a slice or numbers, of those that have rows."""
        return [given[v][rows] if v in self.sharded else given[v] for v in self.body_inputs]

    def run(self, functions, given):
        """Call each device's function.

        A GPU's returns before it has computed: all of them start, then one is awaited.
        """
        results = []  # type: list
        if not functions:
            return results
        with self.owner.python.unchanged():
            for device, function, each in zip(self.owner.devices, functions, given):
                with device.current():
                    results.append(function(*each))
        return results

    def compute_on_one(self, given):
        """Compute all rows on the first device. What fails there, too, is the user's error."""
        self.run(self.forward[:1], [self.given_to_body(given, slice(None))])

    def _go_back(self, *gradients):
        """Return the sums of the bodies' gradients, for those of the whole batch at the cuts."""
        shards, parts, sizes = self.batch
        at_cut = zip(self.back, gradients)
        split = [
            merging.split_gradient(each, self.cuts[place].placement, parts[place], sizes)
            for place, each in at_cut
        ]
        try:
            found = self.run(self.backward, [s + list(g) for s, g in zip(shards, zip(*split))])
        except HasEffectsError as error:  # the step has begun to change weights
            raise errors.unsupported(
                "theano",
                "train {!r} on several devices: the gradient of an operation has side effects, "
                "which each device would repeat".format(self.owner.model.name),
                "Run the model on one device: parallelize(model, gpus=1).",
            ) from error
        return [np.asarray(functools.reduce(operator.add, map(np.asarray, e))) for e in zip(*found)]

    # Making -----------------------------------------------------------------------------------

    def _prepare(self, given, rows):
        """Make the functions, unless they are there, and try them on rows of this batch."""
        fed = [given[v].shape for v in self.owner.model.inputs]
        if len({shape[0] for shape in fed}) > 1 and (self.cuts or not self.is_made):
            self._run_whole()
        shapes = tuple(shape[1:] for shape in fed)
        while not self.is_made or self.cuts and self.tried.get(shapes, 0) < min(rows, _ENOUGH):
            with progress.shown(f"compiling model {self.owner.model.name!r} for Theano"):
                if not self.is_made:
                    with making:
                        self._make(given)
                arguments = self, given, rows
                self.is_made = trial.is_right(*arguments) and custom_gradients.are_right(*arguments)
            self.tried[shapes] = rows

    def _run_whole(self):
        """Run on one device from now on."""
        self.owner.across = _rows.Across(None)
        self._make_again()

    def _make_again(self):
        self.is_made, self.tried = False, {}

    def _make(self, given):
        """Find where the graph is cut, and compile what devices compute of rows, and the rest.

        The head begins at the variables nearest to it that the body computes.
        """
        owner, outputs = self.owner, self.owner.model.outputs
        self.sharded = list(owner.model.inputs) + [v for v in given if v not in self.inputs]
        leaves = set(graph.inputs(outputs)).difference(self.sharded)
        self.body_inputs = self.sharded + [v for v in self.inputs if v in leaves]
        self.cuts, across, reach = [], owner.across, "The model"
        owner.python.follow(outputs)
        if across is None:
            changing = owner.python.changing
            tries = not owner.doubt
            of_model = ModelGraph(outputs, self.sharded, given, tries, changing)
            self.cuts = of_model.cuts(self.outputs + list(self.updates.values()))
            across, reach = of_model.across(owner.doubt), _rows.FROM_THERE_ON
        if across is not None:
            _rows.runs_whole(owner.owner.name, across, owner.devices[0].name, reach, owner)
        at_cut = {cut.variable: cut.variable.type() for cut in self.cuts}
        leaves = graph.inputs(list(at_cut))
        self.used = [v for v in leaves if hasattr(v, "get_value") and v not in given]
        gradients = self._gradients(at_cut)
        replaced = {own: value_like(own, gradients[weight]) for weight, own in self.weights}
        replaced.update(at_cut)
        values = theano.clone(self.outputs + list(self.updates.values()), replaced)
        count = len(self.outputs)
        updates = list(zip(self.updates, values[count:]))
        self.head = self._compile(self.inputs + list(at_cut.values()), values[:count], updates)
        owner.heads.add(self.head)

    def _gradients(self, at_cut):
        """Return the loss's gradients for the weights, of which the bodies compute a part.

        Arguments:
            at_cut: by variables at cuts, what stands for them in the head.
        """
        weights, gradients = dict(self.weights), {}
        if self.loss is not None:
            floats = [given for given in at_cut.values() if "float" in given.dtype]
            gradients = gradients_of(theano.clone(self.loss, at_cut), list(weights) + floats)
        # The places of the cuts from which it goes back.
        self.back = [place for place, v in enumerate(at_cut.values()) if v in gradients]
        self._make_bodies(list(at_cut))
        if self.back:
            go_back = weakref.WeakMethod(self._go_back)  # Theano's profiles keep operations

            def of_bodies(*upstream):
                return go_back()(*upstream)

            upstream = [gradients[v] for v in at_cut.values() if v in gradients]
            own = [weights[weight] for weight in self.body_weights]
            for weight, value in zip(self.body_weights, computed_by(of_bodies, upstream, own)):
                gradients[weight] = gradients[weight] + value if weight in gradients else value
        without = [weight for weight in weights if weight not in gradients]
        if without:  # as on one device: zeros, of what is no float, or Theano's error
            gradients.update(zip(without, theano.grad(self.loss, without)))
        return gradients

    def _compile(self, inputs, outputs, updates, **options):
        # As K.function has it.
        options = dict(self.options, allow_input_downcast=True, on_unused_input="ignore", **options)
        return theano.function(inputs, outputs, updates=updates, **options)

    # The devices' functions ---------------------------------------------------------------------

    def _make_bodies(self, cuts):
        """Compile them: forward and, of the cuts that have a gradient, backward."""
        devices, back = self.owner.devices, self.back
        weights = [weight for weight, _ in self.weights if weight in self.used]
        mode = self.options.get("mode")
        made = [] if back else self.owner.forward.get((tuple(cuts), mode), [])
        is_apart = compilation.takes_values_away(mode)
        for number, device in enumerate(devices if cuts and not made else ()):
            for variable in self.used:
                device.adopt(variable, number, is_apart)
            is_alike = number and device.target == devices[0].target
            if not (is_alike and all(map(function_copies.can_be_copied, made[0]))):
                given = self.body_inputs, self.sharded, cuts, self.used, back, weights
                with device.current():
                    functions, weights = compilation.compiled(device, self._compile, *given)
                made.append(functions)
                for function in functions:
                    self.owner.python.follow(function.maker.fgraph.outputs)
            else:  # on one processor all are copies of the first's
                swap = {devices[0].variables[v]: device.variables[v] for v in self.used}
                made.append([function_copies.copied(function, swap) for function in made[0]])
            device.functions.update(made[number])
        if not back:
            self.owner.forward[tuple(cuts), mode] = made
        self.body_weights = weights
        self.forward = [forward for forward, *_ in made]
        self.backward = [backward for _, *rest in made for backward in rest]
