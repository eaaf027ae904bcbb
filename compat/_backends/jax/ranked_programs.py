"""A training step as several programs, with an exchange between ranks after each but the last.

The whole step is traced with this rank's shapes. Values that are marked in it
(``gradient_marks``) become means or sums over ranks, so that an operation belongs to the program
after as many exchanges as there are on the way to it; values marked at the same level are exchanged
at once. Values that a later program needs stay on the device.
"""

import collections
from typing import Any, Dict, List, Set

import jax
import jax.numpy as jnp
from jax.tree_util import tree_flatten, tree_leaves, tree_structure, tree_unflatten

from ..._ranks import arrays
from . import gradient_marks
from .configuration import Literal
from .inlined_calls import inlined, jaxpr_with, variables_among


class CutStep:
    """A function of the state, the data, this rank's share of the rows, and totals of all ranks.

    Arguments:
        step: the function; ``totals`` are the same on all ranks.
        exchange: a function of a flat array of this rank's part, which gives the sum of all ranks.
        is_local: a function of the state that returns a structure like it, of whether each value
            may differ between ranks.
        check: a function of a ``Program`` and these arguments, called when one was made.
    """

    def __init__(self, step, exchange, is_local, check):
        self.step, self.exchange, self.is_local, self.check = step, exchange, is_local, check
        self.programs: "Dict[Any, Program]" = {}  # by structure and types of the arguments

    def __call__(self, *args):
        leaves, tree = tree_flatten(args)
        key = tree, tuple(map(_type_of, leaves))
        if key not in self.programs:
            self.programs[key] = program = Program(self.step, self.is_local(args[0]), *args)
            self.check(program, *args)
        return self.programs[key](leaves, self.exchange)


def _type_of(leaf):
    return getattr(leaf, "shape", None), getattr(leaf, "dtype", type(leaf))


class Program:
    """The step for one set of shapes.

    Attributes:
        jaxpr: the whole step.
        results: the structure of its results.
        marks: the marks whose values are exchanged after each program, by its level.
    """

    def __init__(self, step, is_local, state, data, share, totals):
        # By a new function: JAX would keep the trace of one, which a trial traces otherwise.
        traced = jax.make_jaxpr(lambda *args: step(*args), return_shape=True)
        closed, shapes = traced(state, data, share, totals)
        closed = inlined(closed)
        self.jaxpr = jaxpr = closed.jaxpr
        self.constants = dict(zip(jaxpr.constvars, closed.consts))
        self.results = tree_structure(shapes)
        local = tree_leaves(is_local)
        self.donated = len(local)  # so many inputs are the state
        local += [True] * (len(tree_leaves(data)) + 1)
        self.share = len(local) - 1
        local += [False] * (len(jaxpr.invars) - len(local))
        self.inputs = set(jaxpr.invars)
        # For each variable that may differ between ranks: the operation because of which it does,
        # or None for an input.
        self.origins: "Dict[Any, Any]" = {v: None for v, flag in zip(jaxpr.invars, local) if flag}
        self.marks: "Dict[int, List[Any]]" = collections.defaultdict(list)
        self.levels: "Dict[Any, int]" = {}  # by variable: how many exchanges come before it
        self.averaged: "Set[Any]" = set()  # variables that depend on means, and not only on sums
        levels = self._earliest()
        self.last = max(self.marks, default=-1) + 1
        self.groups = self._groups(levels)
        self.segments = self._segments()

    def _earliest(self):
        """Return for each operation the number of exchanges that its inputs depend on."""
        levels, earliest = self.levels, []
        levels.update(dict.fromkeys([*self.jaxpr.invars, *self.jaxpr.constvars], 0))
        for operation in self.jaxpr.eqns:
            inputs = variables_among(operation.invars)
            level = max([levels[variable] for variable in inputs], default=0)
            earliest.append(level)
            is_mark = operation.primitive is gradient_marks.mark_p
            if is_mark and self._is_exchanged(operation):
                self.marks[level].append(operation)
                level += 1
                if kind_of(operation) != gradient_marks.SUM:
                    self.averaged.update(operation.outvars)
            elif any(variable in self.origins for variable in inputs):
                self.origins.update(dict.fromkeys(operation.outvars, operation))
            levels.update(dict.fromkeys(operation.outvars, level))
            if not self.averaged.isdisjoint(inputs):
                self.averaged.update(operation.outvars)
        return earliest

    def _groups(self, levels):
        """Return the operations of each program.

        Operations that depend on a rank's rows are computed as early as possible, so that
        activations need not be kept; others, such as an optimizer's, as late as possible.
        """
        groups: "Dict[int, List[Any]]" = collections.defaultdict(list)
        due: "Dict[Any, int]" = {}  # by variable: the first program that needs it
        exchanged = {id(mark) for marks in self.marks.values() for mark in marks}
        for operation, level in reversed(list(zip(self.jaxpr.eqns, levels))):
            differs = any(variable in self.origins for variable in operation.outvars)
            if id(operation) not in exchanged:
                if not differs:
                    level = min([due.get(v, self.last) for v in operation.outvars] or [level])
                groups[level].append(operation)
            for variable in variables_among(operation.invars):
                due[variable] = min(due.get(variable, self.last), level)
        return {level: operations[::-1] for level, operations in groups.items()}

    def _is_exchanged(self, mark):
        """Return whether marked values are this rank's contribution to a mean over all ranks."""
        kind, (by, values) = kind_of(mark), map(variables_among, _parts(mark))
        if kind == gradient_marks.INNER:
            return False
        if kind == gradient_marks.APPLIED and not self.averaged.isdisjoint(values):
            return False  # computed from means, among others
        if kind == gradient_marks.GRADIENT and any(variable in self.origins for variable in by):
            return False  # a gradient with respect to a rank's rows, such as an input
        differs = any(variable in self.origins for variable in values)
        return differs or kind == gradient_marks.SUM

    def origin_of(self, variables):
        """Return the operation because of which the first of these differs between ranks."""
        return next(filter(None, map(self.origins.get, variables_among(variables))), None)

    def decision_of(self, variables):
        """Return the operation that combines means with values of one rank alone.

        It makes the first of these variables differ between ranks. None: none of them does.
        """
        last = self.origin_of(variables)
        origins, due = set(), [last] if last else []
        while due:
            operation = due.pop()
            if id(operation) not in origins:
                origins.add(id(operation))
                due += filter(None, map(self.origins.get, variables_among(operation.invars)))
        for operation in self.jaxpr.eqns:
            inputs = variables_among(operation.invars)
            if id(operation) in origins and any(
                variable in self.averaged and variable not in self.origins for variable in inputs
            ):
                return operation
        return last

    def applied(self):
        """Return the operation because of which an optimizer's inputs differ between ranks."""
        marks = [mark for marks in self.marks.values() for mark in marks]
        applied = [mark for mark in marks if kind_of(mark) == gradient_marks.APPLIED]
        return self.origin_of([variable for mark in applied for variable in mark.invars])

    def inner(self):
        """Return a mark of a gradient within a differentiated function, or None.

        One with respect to values that all ranks share, such as weights.
        """
        for mark in self.jaxpr.eqns:
            if mark.primitive is gradient_marks.mark_p and kind_of(mark) == gradient_marks.INNER:
                by, values = map(variables_among, _parts(mark))
                by_differs, differs = [
                    any(v in self.origins for v in some) for some in (by, values)
                ]
                if differs and not by_differs:
                    return mark
        return None

    def _segments(self):
        needed = set(variables_among(self.jaxpr.outvars))  # after the segment under way
        state = set(self.jaxpr.invars[: self.donated])
        segments: "List[_Segment]" = []
        for level in range(self.last, -1, -1):
            segment = _Segment(self, level, needed, state)
            needed = (needed - segment.made).union(segment.inputs)
            segments.insert(0, segment)
        return segments

    def __call__(self, leaves, exchange):
        values = dict(zip(self.jaxpr.invars, leaves))
        share, mean = leaves[self.share], None
        for segment in self.segments:
            parts = segment(values, share, mean)
            mean = None if parts is None else exchange(parts)
        values.update(self.constants)
        results = [
            atom.val if isinstance(atom, Literal) else values[atom] for atom in self.jaxpr.outvars
        ]
        return tree_unflatten(self.results, results)


class _Segment:
    """The operations between two exchanges, compiled.

    Arguments:
        program: the whole step.
        level: the number of exchanges before this segment.
        needed: the variables that are needed after it.
        state: variables whose memory it may reuse if they are not needed after it.
    """

    def __init__(self, program, level, needed, state):
        self.operations = program.groups.get(level, [])
        self.marks = program.marks[level]
        self.means = [mean for mark in program.marks[level - 1] for mean in mark.outvars]
        made = [v for operation in self.operations for v in operation.outvars] + self.means
        self.made = set(made)
        parts = [value for mark in self.marks for value in _parts(mark)[1]]
        used = [v for operation in self.operations for v in variables_among(operation.invars)]
        used += variables_among(parts)
        self.results = [variable for variable in made if variable in needed]
        self.inputs = [
            variable
            for variable in dict.fromkeys(used)
            if variable not in self.made and variable not in program.constants
        ]
        free = collections.Counter(map(_type, self.results))
        self.donated: "List[Any]" = []
        self.kept: "List[Any]" = []
        for variable in self.inputs:
            is_state = variable in state or variable not in program.inputs
            is_free = is_state and variable not in needed and free[_type(variable)] > 0
            free[_type(variable)] -= is_free
            (self.donated if is_free else self.kept).append(variable)
        types = [variable.aval.dtype for mark in self.marks for variable in mark.outvars]
        self.dtype = "float64" if "float64" in map(str, types) else "float32"
        self.body = jaxpr_with(
            program.jaxpr,
            eqns=self.operations,
            invars=self.means + self.donated + self.kept,
            outvars=self.results + parts,
        )
        self.constants = program.constants
        self.run = jax.jit(self.compute, donate_argnums=0)

    def compute(self, donated, kept, share, mean):
        """Return variables that are needed later, and this rank's part of the next exchange."""
        means = arrays.like([variable.aval for variable in self.means], mean) if self.means else []
        constants = list(self.constants.values())
        values = jax.core.eval_jaxpr(self.body, constants, *means, *donated, *kept)
        results, parts = values[: len(self.results)], values[len(self.results) :]
        flags = [mark.params["is_weighted"] for mark in self.marks for _ in mark.outvars]
        parts = [
            jnp.asarray(part, self.dtype).ravel() * (share if flag else 1)
            for part, flag in zip(parts, flags)
        ]
        return results, jnp.concatenate(parts) if parts else None

    def __call__(self, values, share, mean):
        """Run the segment.

        Arguments:
            values: by variable; those that are needed later are added, and donated ones removed.
            share: of the rows, this rank's.
            mean: the flat result of the exchange before it.

        Returns:
            This rank's part of the next exchange, or None.
        """
        donated = [values.pop(variable) for variable in self.donated]
        kept = [values[variable] for variable in self.kept]
        results, parts = self.run(donated, kept, share, mean)
        values.update(zip(self.results, results))
        return parts


def kind_of(mark):
    """Return the kind of values that are marked: see ``gradient_marks``."""
    return mark.params["kind"]


def _parts(mark):
    """Return the primals that a mark was differentiated by, and the values to exchange."""
    count = mark.params["primals"]
    return mark.invars[:count], mark.invars[count:]


def _type(variable):
    return variable.aval.shape, variable.aval.dtype
