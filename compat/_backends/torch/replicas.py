"""Replicas of a model on several devices of one process, and the call that runs them.

A model runs there by a ``call`` (Keras) or a ``forward`` (torch) of its own: an attribute of the
instance that hides its class's method. It splits the batch, runs the class's method on each device
with weights copied there, and merges what the replicas made: results, losses, state (see
``split_calls``). The copies belong to autograd's graph, so that all gradients reach the one set of
weights. ``keras_replicas`` and ``native`` have the two kinds of models.
"""

import contextlib
import threading
from typing import Any, Callable, Collection, Dict, Iterator, List, Optional

import torch
from torch.nn.utils.rnn import PackedSequence

from ... import _keras, _rows, errors
from ..._rows import Fallback, Reason
from ..._rows.splitting import unsplit
from ..._runtime import patching, work
from . import executions, kept_rows, tracing, weight_copies
from .arguments import CallArguments, Layout, dimension_choices, make_layout, shard_on, size_along
from .containers import PLAIN, flatten
from .merge_rules import CallPlan
from .merging import NotMergeable
from .outcomes import untagged
from .reductions import MoreReductions
from .side_effects import CallEffects, Reach
from .split_calls import SplitCall

#: How many arguments may turn out to have as many rows as the batch by chance.
MOST_TRIED = 6
#: How often a call is repeated that needs more reductions.
MOST_ROUNDS = 12


class Replicas:
    """The replicas of a model in one call, and their state; each kind of models has a subclass.

    Attributes:
        side_effects: the ``CallEffects`` of the call.
        before: the values of state before the call, by key.
        values: weights and state, of which each replica has a copy, by key.
        copied: the keys of those that the replica on the first device may change, too.
    """

    side_effects: CallEffects
    before: "Dict[Any, Any]"
    values: "Dict[Any, torch.Tensor]"
    copied: "Collection[Any]"

    def prepared(self, watched: bool) -> "contextlib.AbstractContextManager[Any]":
        """Return a context in which replicas run.

        Arguments:
            watched: whether placements are inferred.
        """
        return contextlib.ExitStack()

    def run(self, plain, device, copies, args, kwargs, propagation, reducing):
        """Run one replica.

        Arguments:
            plain: the method of the model's class.
            device: where it computes.
            copies: its weights and state, by key.
            args: its shards of the arguments.
            kwargs: those by name.
            propagation: the ``Propagation`` that infers placements, another ``ReplicaMode``, or
                None.
            reducing: its ``ReplicaReductions``.

        Returns:
            The result; losses and state that the replica has set, by key; state before it, by key.
        """
        raise NotImplementedError

    def finish(self, merged: "Dict[Any, Any]") -> None:
        """Set merged state and losses, by key, once."""
        raise NotImplementedError


class ReplicatedCall(patching.InstanceMethod):
    """A method of a model that runs on several devices.

    Arguments with as many rows as the batch, the first tensor among them, are sliced; all else
    is passed whole. What becomes of the results is decided by how they were made: the first call
    of each kind is watched, see ``split_calls``.

    Arguments:
        devices: their names.
        belongs_to_step: whether a Keras model became replicated with the one whose steps call it.
    """

    def __init__(self, devices, belongs_to_step=False):
        super().__init__(devices)
        self.belongs_to_step = belongs_to_step
        # By kind of call; None: it runs unsplit. Deep copies, of the same architecture, share it.
        self.plans: "Dict[Any, Optional[CallPlan]]" = {}
        self.choices: Any = None  # possible batch dimensions: arguments of ``make_layout``
        self.kept_rows = kept_rows.KeptRows()
        self.kept_copies: Any = torch.utils.weak.WeakIdKeyDictionary()  # of weights, by model
        self.tried: "Dict[Any, Any]" = {}  # placements of functions without a rule, by kind
        self.lock = threading.RLock()  # one call at a time: the model's weights are the replica's

    # What kinds of models differ in -----------------------------------------------------------

    def converter(self, model: Any) -> "Optional[Callable[[Any], Any]]":
        """Return a function that converts arguments to tensors, or None."""
        raise NotImplementedError

    def is_only_traced(self, model: Any, batch: Any) -> bool:
        """Return whether nothing is computed: shapes or a graph are inferred."""
        raise NotImplementedError

    def home(self, model: Any, arguments: CallArguments) -> torch.device:
        """Return the device of the plain model's results."""
        raise NotImplementedError

    def reach(self, model: Any) -> Reach:
        """Return the model's ``Reach``."""
        raise NotImplementedError

    def replicas(self, model: Any) -> Replicas:
        """Return new ``Replicas`` of the model."""
        raise NotImplementedError

    def unsplittable(self, model: Any) -> "Optional[Fallback]":
        """Return why no call of this model can be split, a ``Fallback``; None: calls are tried."""
        return None

    def one_device(self, model: Any) -> "contextlib.AbstractContextManager[Any]":
        """Return a context in which the model runs unsplit."""
        return unsplit

    # Copies of weights ------------------------------------------------------------------------

    def send(self, model, values, count, copied):
        """Return copies of weights and state on the first ``count`` devices.

        Arguments:
            model: the model.
            values: the weights and the state, by key.
            count: the number of devices.
            copied: the keys of values that are copied even if they are on the first device.
        """
        is_captured = (
            self.devices[0].startswith("cuda") and torch.cuda.is_current_stream_capturing()
        )
        if torch.is_grad_enabled() or is_captured:
            self.kept_copies.pop(model, None)  # an optimizer is about to change the values
            return weight_copies.send(values, self.devices[:count], copied)
        if model not in self.kept_copies:
            self.kept_copies[model] = weight_copies.KeptCopies(self.devices)
        return self.kept_copies[model].send(values, count, copied)

    def remove(self, model):
        """Remove this method, and the copies of weights that it keeps."""
        self.kept_copies.pop(model, None)
        super().remove(model)

    # The call ---------------------------------------------------------------------------------

    @torch.compiler.disable  # what it makes of a model around a parallelized one stops here
    def invoke(self, model, *args, **kwargs):
        """Run the model on all devices, where its call can be split."""
        if unsplit.here():
            with self.one_device(model):
                return self.plain(model)(*args, **kwargs)
        arguments = CallArguments(args, kwargs, self.converter(model))
        tensor = next((v for v in arguments.leaves if isinstance(v, torch.Tensor)), None)
        if self.is_only_traced(model, tensor):
            return self.plain(model)(*args, **kwargs)
        executions.begin_call()
        with self.lock:
            return self.run(model, arguments, args, kwargs)

    def run(self, model, arguments, args, kwargs):
        """Run a call, split where that is possible."""
        if tracing.is_transformed():
            fallback = Fallback(Reason.TRANSFORMED)
            return self.run_unsplit(model, arguments, None, fallback)
        packed = [v for v in arguments.leaves if isinstance(v, PackedSequence)]
        if packed:
            fallback = Fallback(Reason.NO_RULE, "PackedSequence")
            return self.run_unsplit(model, arguments, size_along(packed[0], 0), fallback)
        layouts = self.layouts(model, arguments)
        if layouts:
            return self.run_split(SplitCall(self, model, arguments), layouts)
        if not all(isinstance(leaf, PLAIN) for leaf in arguments.leaves):
            errors.warn(
                f"{type(model).__name__} was given no tensor that torch.utils._pytree finds, "
                "so that there is nothing to split: it runs unsplit, on one device."
            )
        work.count(self.devices, None, torch.is_grad_enabled())
        return self.plain(model)(*args, **kwargs)

    def run_split(self, call, layouts):
        """Run a call by the plan of its kind, which the first one finds; without a plan, unsplit.

        Arguments:
            call: the ``SplitCall``.
            layouts: how its arguments may be cut, the likeliest first.
        """
        model, arguments, rows = call.model, call.arguments, layouts[0].rows
        switches, numbers = self.reach(model).switches()
        # A call without gradients shows nothing of them.
        mode = model.training, torch.is_grad_enabled(), arguments.key, switches
        kept = call.kept(rows)
        kinds = {mode + (layout.cuts, kept): layout._replace(kept=kept) for layout in layouts}
        kind = next((kind for kind in kinds if self.plans.get(kind) is not None), None)
        plan = self.plans.get(kind)
        # Of one row nothing can be learned.
        untried = {k: v for k, v in kinds.items() if k not in self.plans and v.rows > 1}
        if plan is None and not untried:
            return self.run_unsplit(model, arguments, rows)
        if plan is not None:
            plan.follow_numbers(numbers)
        drawn = contextlib.ExitStack()
        if plan is None or plan.watch:
            drawn = self.replicas(model).side_effects.random_numbers()
        try:
            with tracing.counted_changes():
                if plan is None:
                    return self.first_call(call, untried, numbers)
                return call.computed(kinds[kind], plan)
        except kept_rows.CutOtherwise:
            drawn.close()
            return self.run_split(call, layouts)
        except MoreReductions:
            drawn.close()
            call.rounds += 1
            if plan is not None:
                plan.watch, plan.rules = True, {}
            if call.rounds < MOST_ROUNDS:
                return self.run_split(call, layouts)
            result = self.run_unsplit(model, arguments, rows, Fallback(Reason.DIVERGES))
            self.plans.update(dict.fromkeys(untried if plan is None else [kind]))
            return result
        except NotMergeable as error:
            drawn.close()
            fallback = error.fallback if rows > 1 else None
            result = self.run_unsplit(model, arguments, rows, fallback)
            self.plans.update(dict.fromkeys(untried if plan is None else [kind]))
            return result

    def run_unsplit(self, model, arguments, rows, fallback=None):
        """Run with the whole batch where one device would, which may raise as that would.

        Arguments:
            model: the model.
            arguments: the ``CallArguments``.
            rows: how many it has, or None.
            fallback: the reason, if a warning is due.
        """
        home = self.home(model, arguments)
        leaves = [shard_on(home, None, None, leaf) for leaf in arguments.leaves]
        with self.one_device(model), arguments.substituted(leaves) as (args, kwargs):
            result = self.plain(model)(*args, **kwargs)
            changed, unflatten, _ = flatten(arguments.changed())
        # It may change the caller's containers.
        unflatten([untagged(arguments.marked(leaf)) for leaf in changed])
        sizes = None if rows is None else work.unsplit_sizes(self.devices, rows)
        work.count(self.devices, sizes, torch.is_grad_enabled())
        if fallback is not None:
            name = type(model).__name__ if _keras.keras_of(model) is None else model.name
            _rows.warn_unsplit(model, name, fallback, self.devices[0], "The model", self)
        return result

    def first_call(self, call, layouts, numbers):
        """Run a call of a new kind by the first plan that merges what one device computes.

        Where the model fails on parts of the batch, or mixes their rows, the rows may be elsewhere,
        or an argument may have as many by chance. One that is passed whole is what one device
        computes with.

        Arguments:
            call: the ``SplitCall``.
            layouts: how its arguments may be cut, by the kind of call that each makes of it.
            numbers: that a script may set between calls.

        Raises:
            NotMergeable: no plan does.
        """
        fallback = self.unsplittable(call.model)
        if fallback is not None:
            raise NotMergeable(fallback)
        failed = []
        for kind, layout in layouts.items():
            for plan in plans_to_try(layout, numbers):
                try:
                    result = call.tried(layout, plan)
                except NotMergeable as error:
                    if len(layouts) == 1 or plan.trial.finds_sequences():
                        failed.append(error)
                else:
                    self.plans[kind], plan.trial = plan, None
                    return result
        raise (failed + [NotMergeable(Fallback(Reason.BATCH_DIMENSION))])[0]

    def layouts(self, model: Any, arguments: CallArguments) -> "List[Layout]":
        """List how the arguments may be cut, the likeliest first."""
        self.choices = self.choices or dimension_choices(model)
        layouts = [make_layout(arguments, *choice) for choice in self.choices]
        return [layout for layout in layouts if layout is not None]


def plans_to_try(layout: Layout, numbers: Any) -> "Iterator[CallPlan]":
    """Yield plans for a call: all that has rows is cut; then all but one of them, passed whole."""
    others = [place for place, cut in enumerate(layout.cuts) if cut is not None][1:]
    others += [rows for rows in layout.kept if rows.other is None]
    for whole in [None] + others[:MOST_TRIED]:
        cuts = [None if place == whole else cut for place, cut in enumerate(layout.cuts)]
        kept = tuple(rows for rows in layout.kept if rows != whole)
        yield CallPlan(tuple(cuts), kept, numbers)
