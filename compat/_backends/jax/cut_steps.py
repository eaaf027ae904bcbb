"""A training step as several programs, with an exchange between ranks after each but the last.

The whole step is traced with this rank's shapes. What is marked in it (``gradient_marks``) becomes
the mean over ranks, so that an operation belongs to the program after as many exchanges as there
are on the way to it; what is marked at the same level is exchanged at once. Values that a later
program needs stay on the device.
"""

import collections

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from ..._ranks import arrays
from . import gradient_marks
from .inlined_calls import inlined, variables_among


class CutStep:
    """A function of the state, the data, this rank's share of the rows, and totals of all ranks.

    Arguments:
        step: the function; ``totals`` are the same on all ranks.
        exchange: a function of a flat array of this rank's part, which gives the sum of all ranks.
        is_local: a function of the state: a structure like it, of whether a value is a rank's own.
        check: a function of a ``Program`` and these arguments, called when one was made.
    """

    def __init__(self, step, exchange, is_local, check):
        self.step, self.exchange, self.is_local, self.check = step, exchange, is_local, check
        self.programs = {}  # type: dict

    def __call__(self, *args):
        leaves, tree = jax.tree.flatten(args)
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
        jaxpr: the whole step; ``results``: the structure of what it returns.
        marks: what is exchanged after each program.
    """

    def __init__(self, step, is_local, state, data, share, totals):
        closed, shapes = jax.make_jaxpr(step, return_shape=True)(state, data, share, totals)
        closed = inlined(closed)
        self.jaxpr = jaxpr = closed.jaxpr
        self.constants = dict(zip(jaxpr.constvars, closed.consts))
        self.results = jax.tree.structure(shapes)
        local = jax.tree.leaves(is_local)
        self.donated = len(local)  # so many inputs are the state
        local += [True] * (len(jax.tree.leaves(data)) + 1)
        self.share = len(local) - 1
        local += [False] * (len(jaxpr.invars) - len(local))
        self.inputs = set(jaxpr.invars)
        self.origins = {}  # type: dict  # variable -> the operation that made it a rank's own
        self.origins.update((each, None) for each, flag in zip(jaxpr.invars, local) if flag)
        self.marks = collections.defaultdict(list)  # type: dict  # level -> what is exchanged
        self.levels = {}  # type: dict  # variable -> how many exchanges come before it
        levels = self._earliest()
        self.last = max(self.marks, default=-1) + 1
        self.groups = self._groups(levels)
        self.segments = self._segments()

    def _earliest(self):
        """Return for each operation after how many exchanges its inputs are there."""
        levels, found = self.levels, []
        levels.update(dict.fromkeys([*self.jaxpr.invars, *self.jaxpr.constvars], 0))
        for operation in self.jaxpr.eqns:
            inputs = variables_among(operation.invars)
            level = max([levels[each] for each in inputs], default=0)
            found.append(level)
            is_mark = operation.primitive is gradient_marks.mark_p
            if is_mark and self._is_exchanged(operation, level):
                self.marks[level].append(operation)
                level += 1
            elif any(each in self.origins for each in inputs):
                self.origins.update(dict.fromkeys(operation.outvars, operation))
            levels.update(dict.fromkeys(operation.outvars, level))
        return found

    def _groups(self, levels):
        """Return the operations of each program.

        What depends on a rank's rows is computed at once, so that activations need not be kept; the
        rest, such as an optimizer's, as late as it can be.
        """
        groups = collections.defaultdict(list)  # type: dict
        due = {}  # type: dict  # variable -> the first program that needs it
        exchanged = {id(mark) for marks in self.marks.values() for mark in marks}
        for operation, level in reversed(list(zip(self.jaxpr.eqns, levels))):
            is_own = any(variable in self.origins for variable in operation.outvars)
            if id(operation) not in exchanged:
                if not is_own:
                    level = min([due.get(each, self.last) for each in operation.outvars] or [level])
                groups[level].append(operation)
            for variable in variables_among(operation.invars):
                due[variable] = min(due.get(variable, self.last), level)
        return {level: operations[::-1] for level, operations in groups.items()}

    def _is_exchanged(self, mark, level):
        """Return whether a mark is of this rank's part of a mean over all ranks' rows."""
        kind, (by, values) = kind_of(mark), map(variables_among, _parts(mark))
        if kind == gradient_marks.INNER or kind == gradient_marks.APPLIED and level:
            return False  # the latter was made of means, and of something else
        if kind == gradient_marks.GRADIENT and any(variable in self.origins for variable in by):
            return False  # what depends on a rank's rows, such as an input, has its own there
        is_own = any(variable in self.origins for variable in values)
        return is_own or kind == gradient_marks.SUM

    def origin_of(self, variables):
        """Return the operation that made the first of these a rank's own, or None."""
        return next(filter(None, map(self.origins.get, variables_among(variables))), None)

    def decision_of(self, variables):
        """Return where means were put together with what makes the first of these a rank's own.

        None: all of them are the same on all ranks.
        """
        last = self.origin_of(variables)
        found, due = {}, [last] if last else []  # type: dict, list
        while due:
            operation = due.pop()
            if id(operation) not in found:
                found[id(operation)] = operation
                due += filter(None, map(self.origins.get, variables_among(operation.invars)))
        for operation in self.jaxpr.eqns:
            inputs = variables_among(operation.invars)
            if id(operation) in found and any(
                self.levels[each] and each not in self.origins for each in inputs
            ):
                return operation
        return last

    def applied(self):
        """Return the operation that made what an optimizer is given a rank's own, or None."""
        marks = [mark for marks in self.marks.values() for mark in marks]
        applied = [mark for mark in marks if kind_of(mark) == gradient_marks.APPLIED]
        return self.origin_of([variable for mark in applied for variable in mark.invars])

    def inner(self):
        """Return a gradient by what all ranks have, within a differentiated function, or None."""
        for each in self.jaxpr.eqns:
            if each.primitive is gradient_marks.mark_p and kind_of(each) == gradient_marks.INNER:
                by, values = map(variables_among, _parts(each))
                own = [any(variable in self.origins for variable in some) for some in (by, values)]
                if own == [False, True]:
                    return each
        return None

    def _segments(self):
        needed = set(variables_among(self.jaxpr.outvars))  # after the segment under way
        state = set(self.jaxpr.invars[: self.donated])
        found = []  # type: list
        for level in range(self.last, -1, -1):
            segment = _Segment(self, level, needed, state)
            needed = (needed - segment.made).union(segment.given)
            found.insert(0, segment)
        return found

    def __call__(self, leaves, exchange):
        values = dict(zip(self.jaxpr.invars, leaves))
        share, mean = leaves[self.share], None
        for segment in self.segments:
            parts = segment(values, share, mean)
            mean = None if parts is None else exchange(parts)
        values.update(self.constants)
        found = [
            each.val if isinstance(each, Literal) else values[each] for each in self.jaxpr.outvars
        ]
        return jax.tree.unflatten(self.results, found)


class _Segment:
    """The operations between two exchanges, compiled.

    Arguments:
        needed: the variables that are needed after it.
        state: those whose memory it may use if they are not.
    """

    def __init__(self, program, level, needed, state):
        self.operations = program.groups.get(level, [])
        self.marks = program.marks[level]
        self.means = [each for mark in program.marks[level - 1] for each in mark.outvars]
        made = [each for operation in self.operations for each in operation.outvars] + self.means
        self.made = set(made)
        parts = [value for mark in self.marks for value in _parts(mark)[1]]
        used = [variable for each in self.operations for variable in variables_among(each.invars)]
        used += variables_among(parts)
        self.results = [variable for variable in made if variable in needed]
        self.given = [
            each
            for each in dict.fromkeys(used)
            if each not in self.made and each not in program.constants
        ]
        free = collections.Counter(map(_type, self.results))
        self.donated, self.kept = [], []  # type: list, list
        for variable in self.given:
            is_state = variable in state or variable not in program.inputs
            is_free = is_state and variable not in needed and free[_type(variable)] > 0
            free[_type(variable)] -= is_free
            (self.donated if is_free else self.kept).append(variable)
        types = [variable.aval.dtype for mark in self.marks for variable in mark.outvars]
        self.dtype = "float64" if "float64" in map(str, types) else "float32"
        self.body = program.jaxpr.replace(
            eqns=self.operations,
            invars=self.means + self.donated + self.kept,
            outvars=self.results + parts,
        )
        self.constants = program.constants
        self.run = jax.jit(self.compute, donate_argnums=0)

    def compute(self, donated, kept, share, mean):
        means = arrays.like([variable.aval for variable in self.means], mean) if self.means else []
        constants = list(self.constants.values())
        found = jax.core.eval_jaxpr(self.body, constants, *means, *donated, *kept)
        results, parts = found[: len(self.results)], found[len(self.results) :]
        flags = [mark.params["is_weighted"] for mark in self.marks for _ in mark.outvars]
        parts = [
            jnp.asarray(part, self.dtype).ravel() * (share if flag else 1)
            for part, flag in zip(parts, flags)
        ]
        return results, jnp.concatenate(parts) if parts else None

    def __call__(self, values, share, mean):
        """Compute; ``values`` by variables gets what is needed later.

        Returns:
            This rank's part of what is exchanged next, or None.
        """
        donated = [values.pop(variable) for variable in self.donated]
        kept = [values[variable] for variable in self.kept]
        results, parts = self.run(donated, kept, share, mean)
        values.update(zip(self.results, results))
        return parts


def kind_of(mark):
    """Return what is marked: see ``gradient_marks``."""
    return mark.params["kind"]


def _parts(mark):
    """Return the primals that a mark was differentiated by, and the values to exchange."""
    count = mark.params["primals"]
    return mark.invars[:count], mark.invars[count:]


def _type(variable):
    return variable.aval.shape, variable.aval.dtype
