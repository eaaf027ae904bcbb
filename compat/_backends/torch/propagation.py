"""Placements of the tensors that a replica computes, inferred while torch's functions run."""

import inspect
import re
from typing import Any, Dict, List, Optional, Set, Tuple

import torch
from torch.utils import _pytree as tree

from ... import _rows
from ..._rows import Reason
from ..._runtime import synchronized
from . import batch_functions, batch_norm, graph, rules
from .expressions import (
    EXPRESSIONS,
    ComputedTotal,
    Constant,
    State,
    Total,
    TotalValue,
    expression_of,
    totals_in,
)
from .graph import Call, call_tensors, is_packing, is_sharded, tag, tag_of
from .host_values import HostValue
from .merging import NotMergeable
from .reductions import SMALL, ReplicaMode, ReplicaReductions, is_counted, is_recomputed
from .row_counts import PLAIN_USE, CountComparison, RowCount, has_count
from .trial import try_function

# Kinds of torch's functions, by their names.
DROPOUT = re.compile("(alpha_|feature_|feature_alpha_)?dropout|rrelu")
RANDOM = re.compile(
    DROPOUT.pattern + "|rand|bernoulli|normal_?$|uniform_|multinomial|exponential_|poisson$"
)
#: Functions that return what a tensor has besides its values.
METADATA = frozenset(
    "dim ndimension stride element_size storage_offset data_ptr untyped_storage storage get_device "
    "dim_order register_hook register_post_accumulate_grad_hook names has_names _nnz sparse_dim "
    "dense_dim __hash__ __dir__ __reduce_ex__ __get__".split()
) | {name for name, kind in vars(torch._C.TensorBase).items() if inspect.isgetsetdescriptor(kind)}
#: Functions that may be given a number of rows, as ``len()`` returns it.
GROWING = rules.MADE + ("expand", "repeat", "tile", "broadcast_to")
COUNTING = GROWING + ("__getitem__", "arange")
#: Functions to which a number of rows may be passed as any other number.
ARITHMETIC = tuple("add sub mul div truediv true_divide divide multiply subtract pow".split())
#: Their results are means over the rows, weighted by the counted targets.
CLASS_LOSSES = ("cross_entropy", "nll_loss")
#: Functions that return sizes.
SIZES = ("shape", "size", "numel", "nelement", "nbytes", "__len__")


def targets_weight(input, target, weight=None, ignore_index=-100, **_):
    """Return the number by which the mean of a loss over classes was divided."""
    if target.is_floating_point():
        return target.numel()
    counted = target != ignore_index
    if weight is None:
        return counted.sum()
    return (weight.detach()[target.clamp(min=0)] * counted).sum()


class Propagation(ReplicaMode):
    """Context in which results of torch's functions get tags, where an argument has one.

    A tag is a placement: ``Sharded``, or ``Mixed`` with a ``Fallback`` that says where; or one of
    the ``EXPRESSIONS``, from which ``merging`` computes values that have no rows. A
    tensor without a tag does not depend on the batch.

    Arguments:
        model: the model, whose modules are named in warnings.
        rows: how many rows of the batch the replica computes.
        total: how many the batch has.
        tried: placements of functions without a rule, by kinds of calls, which this adds to.
        reductions: those of the replica, which this adds to.
        probing: whether nothing is random, and batch normalization that of inference, so that parts
            of a batch can be compared with all of it.
    """

    def __init__(
        self,
        model: Any,
        rows: int,
        total: int,
        tried: "Dict[Any, Any]",
        reductions: ReplicaReductions,
        probing: bool = False,
    ) -> None:
        super().__init__()
        self.reductions = reductions
        self.model, self.rows, self.total, self.tried = model, rows, total, tried
        self.probing = probing
        # By id: numbers that were taken from tensors, and these.
        self.items: "Dict[int, Tuple[float, torch.Tensor]]" = {}
        self.host_values: "List[HostValue]" = []
        self.counting = False  # whether len() has given Python the number of rows
        self.comparisons: "Set[CountComparison]" = set()
        self.misplaced = False  # whether a layer of sequences was given rows where it has none
        # Where Python may have chosen its way by the number of rows.
        self.by_count: "Optional[_rows.Fallback]" = None
        self.hooks: "List[_rows.Fallback]" = []  # where hooks on gradients are registered
        self.synchronizes = synchronized.is_asked(model)

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        step = self.reductions.count(func)
        if self.paused:
            return func(*args, **kwargs)
        call = Call(func, args, kwargs, self.rows, counting=self.counting)
        try:
            result = self.watched(call)
            return result if step is None else self.reduced(call, step, result)
        except (RuntimeError, IndexError, ValueError, TypeError) as error:
            if not hasattr(error, "fallback"):
                error.fallback = self.fallback(call.name, Reason.FAILS_ON_SHARD)
            raise

    def watched(self, call: Call) -> Any:
        """Return the result of a call, tagged."""
        name, args = call.name, call.args
        if self.probing and RANDOM.match(name):
            return self.not_random(call)
        is_computed = bool(call.present_tags) and all(
            isinstance(present, EXPRESSIONS) for present in call.present_tags
        )
        if call.tensors and rules.canonical(name) in ARITHMETIC and not is_computed:
            if has_count(call.args, call.kwargs):
                call = self.with_total(call)
                args = call.args
        if not call.present_tags:
            return self.made(call, call.func(*args, **call.kwargs))
        if name in SIZES:
            return self.sizes(call, call.func(*args, **call.kwargs))
        if name == "register_hook":
            self.hooks.append(self.fallback(name, Reason.CUSTOM_GRADIENT))
        if name == "__iter__":
            return iter(self.watched(Call(torch.Tensor.unbind, args, call.kwargs, self.rows)))
        kept = self.kept(call) if is_computed else None
        result = self.called(call)
        call.results = [args[0]] if name == "__setitem__" else list(call_tensors([result]))
        if call.results:
            self.tag(call, self.follow(call, kept, isinstance(result, (list, tuple))))
        else:
            self.escaped(call, result)
        return result

    def reduced(self, call: Call, step: Any, result: Any) -> Any:
        """Return the result of a function of which totals are reduced: the same on all replicas."""
        tensors = list(call_tensors([result]))
        for place, placement in step.results.items():
            current = tag_of(tensors[place]) if place < len(tensors) else None
            if not isinstance(current, Total) or current.placement != placement:
                self.need_host_values()
                if self.reductions.needs:
                    raise NotMergeable()  # first, what has led another way
                self.reductions.forget()
            tag(tensors[place], None)
        return self.reductions.reduced(step, result)

    def made(self, call: Call, result: Any) -> Any:
        """Tag a result of arguments without tags, among which may be a number of rows."""
        if not isinstance(result, torch.Tensor):
            return result
        by_count = self.counting and call.name in COUNTING
        if by_count or call.present_tags or has_count(call.args, call.kwargs):
            call.results = [result]
            self.tag(call, self.by_rules(call))
        return result

    def called(self, call: Call) -> Any:
        """Call the function itself, as it is right for some of the rows."""
        is_alone = len(call.args) + len(call.kwargs) == 1
        if call.name == "squeeze" and is_alone and is_sharded(call.first):
            dims = [dim for dim in range(call.first.dim()) if dim != call.tags[0].axis]
            return call.first.squeeze(dims)  # one row is not what one device would squeeze
        if call.name == "batch_norm" and self.probing:
            bound = dict(call.bound(), training=False)
            for key, make in (("running_mean", torch.zeros), ("running_var", torch.ones)):
                if bound[key] is None:
                    bound[key] = make(bound["input"].shape[1], dtype=bound["input"].dtype)
            return call.func(**bound)
        call.compute = self.by_reductions(call)
        if call.compute is None:
            return call.func(*call.args, **call.kwargs)
        if self.reductions.number not in self.reductions.steps:
            self.reductions.need(self.reductions.number, call.compute)
        return call.compute(self.reductions, call.func, call.args, call.kwargs)

    def by_reductions(self, call: Call) -> Any:
        """Return a function that computes this call by reductions, or None."""
        if isinstance(call.first, (list, tuple)) and not is_recomputed():
            return batch_functions.gathering(call)
        if not is_sharded(call.first) or not call.tags[0].even:
            return None
        rows = call.tags[0]
        if call.name == "batch_norm":
            fits = rows.axis != 1 and not self.probing and batch_norm.uses_batch(call.bound())
            is_asked = fits and (self.synchronizes or batch_norm.is_asked_here())
            return batch_norm.compute if is_asked and not is_recomputed() else None
        is_known = rows.copies == 1 and batch_functions.can_compute(call)
        if not is_known or rows.axis not in _rows.listed(rules.dims_of(call), call.first.dim()):
            return None
        return None if is_recomputed() else batch_functions.compute

    def not_random(self, call: Call) -> Any:
        """Return the result of a random function that is made deterministic."""
        if DROPOUT.match(call.name):
            return call.args[0]
        result = call.func(*call.args, **call.kwargs)
        for tensor in call_tensors([result]):
            if call.name == "randperm":
                tensor.copy_(torch.arange(len(tensor)).flip(0))
            else:
                tensor.fill_(0.5 if tensor.is_floating_point() else 0)
        return self.made(call, result)

    def as_count(self, value: Any) -> Any:
        """Return a ``RowCount`` for a plain number that is that of the rows, as from ``len()``."""
        if isinstance(value, slice):
            return slice(value.start, self.as_count(value.stop), value.step)
        is_number = isinstance(value, int) and not isinstance(value, bool)
        return RowCount(1, self) if is_number and value == self.rows else value

    def sizes(self, call: Call, result: Any) -> Any:
        """Return a shape in which the sizes that grow with the batch are ``RowCount``s."""
        name, args, tensor, rows = call.name, call.args, call.tensors[0], call.tags[0]
        self.counting = self.counting or name == "__len__"
        if not is_sharded(tensor) or not rows.even:
            # There may be as many as some values of rows ask for.
            if isinstance(rows, _rows.Placement) and not is_packing():
                self.host_values.append(HostValue(self.fallback(name), self.mixed(name), result))
            return result
        if name == "__len__" and rows.axis == 0 or name in ("numel", "nelement", "nbytes"):
            self.compare(PLAIN_USE, name)

        def counted(dim, size):
            if dim % tensor.dim() == rows.axis and size % self.rows == 0 and size:
                return RowCount(size // self.rows, self)
            return size

        if isinstance(result, torch.Size):
            return torch.Size([counted(dim, size) for dim, size in enumerate(result)])
        return counted(args[1], result) if len(args) > 1 and isinstance(args[1], int) else result

    def kept(self, call: Call) -> "Tuple[Any, Any]":
        """Return the arguments before the function runs: tags, constants, numbers."""

        def keep(value):
            if not isinstance(value, torch.Tensor):
                return value
            if isinstance(tag_of(value), (State, ComputedTotal)):
                return tag_of(value)
            is_changed = call.in_place and value is call.args[0]
            kept = value.clone() if is_changed else value
            return Constant(kept) if tag_of(value) is None else TotalValue(tag_of(value), kept)

        args, kwargs = call.mapped(keep)
        kwargs.pop("out", None)  # it is the result
        return args, kwargs

    # Inferring --------------------------------------------------------------------------------

    def follow(self, call, kept, is_one_of_several):
        """Return the tag of each result.

        Arguments:
            call: the call.
            kept: its arguments before it, if all are computed from totals; else None.
            is_one_of_several: whether the function has returned a list or a tuple.
        """
        name, first, count = call.name, call.args[:1], len(call.results)
        mixed = [present for present in call.present_tags if isinstance(present, _rows.Mixed)]
        # State from before is a constant among rows.
        moving = [
            present for present in call.present_tags if not getattr(present, "constant", False)
        ]
        if not moving and name in GROWING and has_count(call.args, call.kwargs):
            return self.by_rules(call)
        if kept is not None:
            picks = range(count) if is_one_of_several else [None] * count
            return [
                ComputedTotal(call.func, *kept, call.in_place, pick, value.dtype)
                for pick, value in zip(picks, call.results)
            ]
        if call.compute is not None:
            return [call.tags[0] if name in batch_functions.SHARDED else None] * count
        if name in ("batch_norm", "instance_norm"):
            self.statistics(call.bound())
        if name == "batch_norm":
            bound = call.bound()
            if (self.synchronizes or batch_norm.is_asked_here()) and batch_norm.uses_batch(bound):
                if not self.probing:
                    return [self.mixed(name)]  # which cannot be reduced here
            # Each device's own rows.
            return [self.placement_of(*first) if is_sharded(*first) else self.mixed(name)]
        # A mixed value may only be an index, or an example of a type.
        is_read = name == "__getitem__" and not isinstance(call.tags[0], _rows.Mixed)
        if mixed and not is_read and name not in rules.MADE:
            return mixed[:1] * count
        changed = [tag_of(*first)] if call.in_place else []
        if any(isinstance(present, EXPRESSIONS) for present in changed):
            return [self.mixed(name)] * count
        tags = self.by_rules(call)
        expressions = [present for present in moving if isinstance(present, EXPRESSIONS)]
        if not expressions or self.need(expressions, tags):
            return tags
        return [self.mixed(name)] * count

    def need(self, expressions: "List[Any]", tags: "List[Any]") -> bool:
        """Note that the totals in some tags are needed whole; return whether they can be reduced.

        This is ``redistribute`` from ``Partial`` to ``Replicated``, as ``_rows`` has it: rules take
        such tensors for replicated ones, ``tags`` are of results then.
        """
        totals, has_grown = totals_in(expressions, GROWING, ARITHMETIC)
        if totals is None or any(total.origin is None for total in totals):
            return False
        # What has grown has rows, once it is made of what is reduced.
        if has_grown or not all(isinstance(each, _rows.Mixed) for each in tags):
            for total in totals:
                number, place = total.origin
                self.reductions.need(number, results={place: total.placement})
        return True

    def need_host_values(self) -> None:
        """Note that those totals are needed whole that Python has read."""
        for value in self.host_values:
            if isinstance(value.tag, (TotalValue, ComputedTotal)):
                self.need([value.tag], [None])

    def with_total(self, call: Call) -> Call:
        """Return a call whose numbers of rows are those of the whole batch."""
        leaves = tree.tree_leaves((call.args, call.kwargs))
        counts = {n: leaf.per for n, leaf in enumerate(leaves) if isinstance(leaf, RowCount)}
        step = self.reductions.steps.get(self.reductions.number)
        if step is None or step.counts != counts:
            self.reductions.need(self.reductions.number, counts=counts)
        args, kwargs = self.reductions.with_total(counts, call.args, call.kwargs)
        return Call(call.func, args, kwargs, self.rows, counting=self.counting)

    def by_rules(self, call):
        """Return the tag of each result, by a rule or by a trial."""
        if self.counting and call.name in COUNTING:
            call.args, call.kwargs = call.mapped(self.as_count)
        if is_packing() and call.name not in rules.PACKED:
            first = next((self.placement_of(t) for t in call.tensors if is_sharded(t)), None)
            placements = [first or _rows.REPLICATED] * len(call.results)
        else:
            try:
                placements = rules.placements(call)
            except (IndexError, KeyError, TypeError, ValueError, AttributeError, AssertionError):
                placements = None  # another form of the call
            if placements is None or any(isinstance(p, _rows.Unknown) for p in placements):
                placements = self.tried_function(call)
        if call.name in rules.SEQUENCES and isinstance(placements[0], _rows.Mixed):
            self.misplaced = True
        return [self.tag_for(call, *pair) for pair in zip(call.results, placements)]

    def tag_for(self, call: Call, value: torch.Tensor, placement: _rows.Placement) -> Any:
        """Return the tag of a result that has this placement."""
        if isinstance(placement, (_rows.Mixed, _rows.Unknown)):
            return _rows.Mixed(placement.fallback or self.fallback(call.name))
        if isinstance(placement, _rows.Sharded):
            return self.of_loss(call, value, placement)
        if isinstance(placement, _rows.Partial):
            regular = all(t.even for t in call.tags if isinstance(t, _rows.Sharded))
            is_mean = placement.how == "mean"
            weight = call.first.numel() / float(max(1, value.numel())) if is_mean else None
            return Total(placement, weight, regular)
        return None

    def of_loss(self, call: Call, value: torch.Tensor, placement: _rows.Sharded) -> Any:
        """Return the tag of a loss that may have been reduced, or of any other value of rows."""
        name = rules.canonical(call.name)
        try:
            is_loss = name.endswith(("_loss", "cross_entropy", "kl_div", "with_logits"))
            bound = call.bound() if is_loss else {}
        except (TypeError, ValueError):  # not a Python function
            return self.mixed(call.name) if name == "ctc_loss" else placement
        reduction = bound.get("reduction", "none")
        if reduction == "none":
            return placement
        if bound.get("size_average") is not None or bound.get("reduce") is not None:
            return self.mixed(call.name)
        if reduction == "sum":
            return Total(_rows.Partial("sum"), is_regular=placement.even)
        if call.name in CLASS_LOSSES:
            return Total(_rows.Partial("mean"), targets_weight(**bound))
        first = next(tensor for tensor in call.tensors if is_sharded(tensor))
        weight = bound["input"].shape[0] if reduction == "batchmean" else first.numel()
        return Total(_rows.Partial("mean"), weight, placement.even)

    def statistics(self, bound: "Dict[str, Any]") -> None:
        """Tag running averages of a normalization as means over the rows."""
        if (bound.get("training") or bound.get("use_input_stats")) and not self.probing:
            for value in (bound.get("running_mean"), bound.get("running_var")):
                if value is not None:
                    count = bound["input"].shape[0]
                    tag(value, Total(_rows.Partial("mean"), count, is_regular=True))

    def tag(self, call: Call, tags: "List[Any]") -> None:
        """Tag the results of a call; and the bases of views that it has changed."""
        for place, (value, new) in enumerate(zip(call.results, tags)):
            tag(value, new)
            if isinstance(new, Total) and self.is_reducible(call, value, new):
                new.origin = self.reductions.number, place
            if call.in_place and value._base is not None:
                kinds = {type(new), type(tag_of(value._base))}
                if kinds not in ({_rows.Sharded}, {type(None)}):
                    is_mixed = isinstance(new, _rows.Mixed)
                    tag(value._base, new if is_mixed else self.mixed(call.name))

    def is_reducible(self, call: Call, value: torch.Tensor, total: Total) -> bool:
        """Return whether a total can be reduced, in any batch, at little cost."""
        elements = sum(t.numel() for t in call.tensors) * self.total / max(1, self.rows)
        is_regular = total.is_regular or total.placement.how in ("max", "min")
        is_small = value.numel() <= max(SMALL, elements)
        is_result = is_counted(call.func) and not call.in_place
        return is_regular and is_small and is_result and not is_recomputed()

    # Functions without a rule -------------------------------------------------------------------

    def tried_function(self, call: Call) -> "List[_rows.Placement]":
        """Return the placements of a function's results by computing with some of its rows."""
        key = (call.name, str(call.mapped(call.described)))
        if key not in self.tried:
            is_tried = call.rows > 1 and not call.in_place and not RANDOM.match(call.name)
            placements = try_function(call) if is_tried else None
            if placements is None:
                return [_rows.Mixed(self.fallback(call.name, Reason.NO_RULE))] * len(call.results)
            self.tried[key] = placements
        fallback = _rows.Mixed(self.fallback(call.name, Reason.TRIAL_DIFFERS))
        return [p if isinstance(p, _rows.Sharded) else fallback for p in self.tried[key]]

    # Values that Python reads -------------------------------------------------------------------

    def escaped(self, call: Call, result: Any) -> None:
        """Note a result that is not a tensor: Python may choose by it."""
        name, tags = call.name, call.tags
        is_metadata = name in METADATA or name.startswith("is_") and name != "is_nonzero"
        kinds = (type(None), torch.dtype, torch.device, str, torch.layout)
        is_constant = all(getattr(present, "constant", False) for present in call.present_tags)
        if is_metadata or is_constant or isinstance(result, kinds) or is_packing():
            return
        source = next((t for t in tags if isinstance(t, _rows.Mixed)), self.mixed(name))
        if len(tags) == 1 and isinstance(tags[0], EXPRESSIONS):
            source = expression_of(call.tensors[0])
        if name in ("item", "__float__") and isinstance(result, float):
            self.items[id(result)] = (result, call.tensors[0])
        self.host_values.append(HostValue(self.fallback(name), source, result))

    def compare(self, comparison: CountComparison, name: str = "size") -> None:
        """Note a ``CountComparison`` of a number of rows.

        Arguments:
            comparison: what was compared.
            name: the function that has given the number.
        """
        if self.paused:
            return
        self.comparisons.add(comparison)
        if comparison.differs([self.rows], self.total):
            self.by_count = self.by_count or self.fallback(name)

    # Tags -------------------------------------------------------------------------------------

    #: The placement of a tensor, as its tag has it.
    placement_of = staticmethod(graph.placement_of)

    def mixed(self, name: str) -> _rows.Mixed:
        """Return the placement of a result of this function, which is a cross-batch operation."""
        return _rows.Mixed(self.fallback(name))

    def fallback(self, name: str, reason: Reason = Reason.CROSS_BATCH) -> _rows.Fallback:
        """Return the ``Fallback`` of the function of this name that is called now."""
        return graph.fallback(self.model, name, reason)
