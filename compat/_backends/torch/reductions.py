"""Values of the whole batch that a model needs while it runs: reduced over its replicas.

The first call of a kind is watched, which shows the functions whose results, totals over the rows,
are needed whole: ``CallReductions`` has their numbers in the order of the call. The call is then
repeated, and reduces these totals where they are made, as each later call does. Some functions of
the whole batch, such as a softmax over it, are computed by reductions: see ``batch_functions``.
"""

import sys
from typing import Any, Dict, List, NamedTuple, Optional, Sequence

import torch
from torch.utils import _pytree as tree

from ... import _rows
from ..._rows.replica_threads import ReplicaTurn
from .graph import call_tensors
from .merging import NotMergeable, merge_tensors

#: Reduced values may have so many elements, and else no more than what they are reduced from.
SMALL = 1 << 16


#: Functions that a library may call once more for some number of rows, as for a warning.
_UNCOUNTED = frozenset("__get__ size dim numel nelement __len__ stride is_floating_point".split())


def is_counted(function: Any) -> bool:
    """Return whether a function counts in the order of a call's functions."""
    return getattr(function, "__name__", "") not in _UNCOUNTED


class MoreReductions(BaseException):
    """A call has shown more reductions that it needs, and is to be repeated with them."""


class ReducedFunction(NamedTuple):
    """A function of a call before which, or after which, replicas reduce values.

    Arguments:
        compute: a function of ``batch_functions`` that computes it by reductions; or None.
        results: the placements of its results that are reduced, by their places.
        counts: the places of arguments that are the number of rows, and how many each row counts
            for; they become that of all rows.
    """

    compute: Any
    results: "Dict[int, Any]"
    counts: "Dict[int, int]"

    def add(self, other: "ReducedFunction") -> None:
        """Add what another step has besides."""
        self.results.update(other.results)
        self.counts.update(other.counts)


class CallReductions:
    """The reductions of one kind of call.

    Attributes:
        steps: whether it is a trial -> the ``ReducedFunction`` of each function, by number.
        functions: those that such a call has called, up to the last one of these.
        in_layers: whether layers of Keras reduce values, too.
    """

    def __init__(self) -> None:
        self.steps: "Dict[bool, Dict[int, ReducedFunction]]" = {True: {}, False: {}}
        self.functions: "Dict[bool, List[Any]]" = {True: [], False: []}
        self.in_layers = False

    def __bool__(self) -> bool:
        return self.in_layers or any(self.steps.values())

    @property
    def any_merged(self) -> bool:
        """True if replicas need values of each other."""
        steps = [step for steps in self.steps.values() for step in steps.values()]
        return self.in_layers or any(step.compute or step.results for step in steps)

    def forget(self) -> None:
        """Forget what calls need, which have taken another way.

        Raises:
            MoreReductions: always.
        """
        for steps in self.steps.values():
            steps.clear()
        raise MoreReductions

    def learn(self, probing: bool, sequences: "Sequence[ReplicaReductions]") -> None:
        """Take over what replicas have shown that were watched.

        Raises:
            MoreReductions: they need more of them.
            NotMergeable: they have called different functions.
        """
        steps = self.steps[probing]
        needs: "Dict[int, ReducedFunction]" = {}
        for sequence in sequences:
            for number, step in sequence.needs.items():
                needs.setdefault(number, ReducedFunction(step.compute, {}, {})).add(step)
        for number, step in needs.items():
            steps.setdefault(number, ReducedFunction(step.compute, {}, {})).add(step)
        count = max(steps, default=-1) + 1
        functions = [sequence.functions[:count] for sequence in sequences]
        self.functions[probing] = functions[0]
        if needs:
            raise MoreReductions
        if any(other != functions[0] for other in functions):
            raise NotMergeable()

    def learn_host_values(self, probing: bool, sequences: "Sequence[ReplicaReductions]") -> None:
        """Have totals reduced that Python has read, by which replicas have taken other ways.

        Raises:
            MoreReductions: there are some.
        """
        for sequence in sequences:
            if sequence.propagation is not None:
                sequence.propagation.need_host_values()
        if any(sequence.needs for sequence in sequences):
            self.learn(probing, sequences)


class ReplicaReductions:
    """The reductions of one replica's call, while it runs.

    Arguments:
        reductions: the ``CallReductions``.
        probing: whether the call is a trial.
        sizes: how many rows each replica has.
        device: the replica's.
        turn: its ``ReplicaTurn``, or None where there is no other replica.
        is_watched: whether placements are inferred.
        shards: the numbers of the rows of each replica, which a trial takes in other orders.

    Attributes:
        needs: reductions that the call needs besides, by number.
        functions: those that it has called.
        propagation: the ``Propagation`` that watches, or None.
    """

    propagation: Any = None

    def __init__(
        self,
        reductions,
        probing,
        sizes,
        device,
        turn: "Optional[ReplicaTurn]",
        is_watched,
        shards=(),
    ):
        self.shards = shards
        self.is_watched = is_watched
        self.steps, self.expected = reductions.steps[probing], reductions.functions[probing]
        self.reductions, self.sizes, self.device, self.turn = reductions, sizes, device, turn
        self.number, self.met = -1, 0
        self.needs: "Dict[int, ReducedFunction]" = {}
        self.functions: "List[Any]" = []

    def count(self, function: Any) -> "Optional[ReducedFunction]":
        """Count a function that is called, and return its ``ReducedFunction``.

        Raises:
            MoreReductions: it is not the one that was called in this place before.
        """
        if self.turn is not None:
            self.turn.check()
        if not is_counted(function):
            return None
        self.number += 1
        if self.is_watched:
            self.functions.append(function)
        elif self.number < len(self.expected) and self.expected[self.number] != function:
            self.forget()
        return self.steps.get(self.number)

    def forget(self) -> None:
        """Forget all reductions: see ``CallReductions``."""
        self.reductions.forget()

    def need(self, number: int, compute: Any = None, results: Any = (), counts: Any = ()) -> None:
        """Note what the call needs at the function of this number: see ``ReducedFunction``."""
        step = ReducedFunction(compute, dict(results), dict(counts))
        self.needs.setdefault(number, ReducedFunction(compute, {}, {})).add(step)

    def with_total(self, counts: "Dict[int, int]", args: Any, kwargs: Any) -> Any:
        """Return arguments with the number of all rows in some places: see ``ReducedFunction``."""
        leaves, spec = tree.tree_flatten((args, kwargs))
        for place, per in counts.items():
            leaves[place] = per * self.total
        return tree.tree_unflatten(leaves, spec)

    def reduce(self, how: str, value: torch.Tensor) -> torch.Tensor:
        """Return the whole batch's value of a sum, mean, maximum or minimum over the rows."""
        return self.merge(_rows.Partial(how), value)

    def merge(self, placement: Any, value: torch.Tensor) -> torch.Tensor:
        """Return the whole batch's value, from those of all replicas."""

        def merge(values, sizes):
            tensors = [value for (value,) in values]
            return (merge_tensors(placement, tensors, sizes, tensors[0].device),)

        return self.meet((value,), merge, placement)[0]

    def gather(self, value: torch.Tensor, axis: int) -> torch.Tensor:
        """Return the rows of all replicas, in order, from those along an axis."""
        rows = self.merge(_rows.Sharded(axis), value)
        numbers = [number for shard in self.shards for number in shard]
        places = sorted(range(len(numbers)), key=numbers.__getitem__)
        in_order = self.turn is None or places == list(range(len(places)))
        return rows if in_order else rows.index_select(axis, torch.tensor(places).to(rows.device))

    def meet(self, values: "Sequence[torch.Tensor]", merge: Any, kind: Any = None) -> "List[Any]":
        """Return what ``merge`` returns for values of all replicas, on this one's device.

        Arguments:
            values: those of this replica.
            merge: a function of the values of each replica that has rows, on one device, and of
                how many these have. It returns tensors.
            kind: the same in all replicas.
        """
        if self.turn is None:
            return list(values)
        self.met += 1
        is_differentiated = torch.is_grad_enabled()

        def merged(all_values):
            home = all_values[0][0].device
            pairs = [(v, size) for v, size in zip(all_values, self.sizes) if size]
            with torch.set_grad_enabled(is_differentiated):
                return merge(
                    [[v.to(home) for v in values] for values, _ in pairs], [n for _, n in pairs]
                )

        axis = kind.axis if isinstance(kind, _rows.Sharded) else None
        shapes = [
            v.shape if axis is None else (*v.shape[:axis], *v.shape[axis + 1 :]) for v in values
        ]
        with torch._C.DisableTorchFunction():
            key = self.number, self.met, kind, shapes, is_differentiated
            results = self.turn.meet(key, values, merged)
        # Each replica may change its own copy in place.
        return [v.to(self.device, copy=True) for v in results]

    def moments(self, value: torch.Tensor, dims: Any) -> Any:
        """Return mean and variance of the whole batch, and the number of values.

        Arguments:
            value: the replica's rows.
            dims: the dimensions of which they are, which are kept.
        """
        variance, mean = torch.var_mean(value, dims, correction=0, keepdim=True)
        count = value.numel() // max(1, mean.numel()) * self.total // self.rows
        return (*self.meet((mean, variance), merged_moments), count)

    def reduced(self, step: ReducedFunction, result: Any) -> Any:
        """Return a function's result, with those totals reduced that the step names."""
        whole = {}
        for place, value in enumerate(call_tensors([result])):
            if place in step.results:
                whole[id(value)] = self.merge(step.results[place], value)
        return tree.tree_map(lambda value: whole.get(id(value), value), result)

    @property
    def total(self) -> int:
        """The number of rows of all replicas."""
        return sum(self.sizes)

    @property
    def rows(self) -> int:
        """The number of rows that the replica computes, of which none may be its own."""
        return max(1, self.sizes[self.turn.index if self.turn is not None else 0])


def merged_moments(moments: Any, sizes: Any) -> Any:
    """Return mean and variance of all rows from those of parts, as Chan, Golub and LeVeque do.

    Arguments:
        moments: pairs of a part's mean, and of the variance about it.
        sizes: how many rows each of them has.
    """
    shares = [size / float(sum(sizes)) for size in sizes]
    mean = sum(share * mean for share, (mean, _) in zip(shares, moments))
    return mean, sum(s * (v + (m - mean).square()) for s, (m, v) in zip(shares, moments))


class ReplicaMode(torch.overrides.TorchFunctionMode):
    """A context of one replica, which an interruption may leave on torch's stack."""

    paused = False

    def __init__(self) -> None:
        super().__init__()
        self.depth = 0  # of torch's stack of modes, with this one

    def __enter__(self):
        depth = torch._C._len_torch_function_stack()
        while depth and getattr(torch._C._get_function_stack_at(depth - 1), "paused", False):
            torch._C._pop_torch_function_stack()  # left by a step that was interrupted
            depth -= 1
        self.depth = depth + 1
        return super().__enter__()

    def __exit__(self, *raised):
        # torch takes a mode off its stack for each function. One that is interrupted may put it
        # back only when nothing refers to the interruption any more.
        self.paused = True
        if torch._C._len_torch_function_stack() >= self.depth:
            super().__exit__(*raised)


class ReducingMode(ReplicaMode):
    """The context of a replica that is not watched, and reduces what its ``CallReductions`` name.

    Arguments:
        reductions: the ``ReplicaReductions``.
    """

    def __init__(self, reductions: ReplicaReductions) -> None:
        super().__init__()
        self.reductions = reductions

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.paused:
            return func(*args, **kwargs)
        step = self.reductions.count(func)
        if step is None:
            return func(*args, **kwargs)
        if step.compute is not None:
            return step.compute(self.reductions, func, args, kwargs)
        if step.counts:
            args, kwargs = self.reductions.with_total(step.counts, args, kwargs)
        return self.reductions.reduced(step, func(*args, **kwargs))


def is_recomputed() -> bool:
    """Return whether the backward pass will repeat what runs now, where nothing can be reduced."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__") != __package__ + ".split_calls":
        if frame.f_globals.get("__name__") == "torch.utils.checkpoint":
            return True
        frame = frame.f_back
    return False
