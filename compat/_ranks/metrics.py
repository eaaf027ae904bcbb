"""Results of fit() and evaluate() of a Keras model, over all ranks' rows.

Metrics are computed from the sums of the ranks' states, not from their values: the mean of the
ranks' areas under a curve is not the area under the curve of all rows. But the states that Keras'
metrics keep of batches (totals, counts, histograms, confusion matrices) add up.
"""

import ast
import contextlib
import inspect
import textwrap
import types
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

import numpy as np

from .. import _keras, errors
from .._keras.steps import has_own_steps
from .._runtime import patching
from . import arrays, checksum

# A result within this, relatively, of what its metric computes here is the metric's.
_ROUNDING = 1e-4
# Methods of a metric that see no rows, so that they may set its state as they like.
_NOT_OF_ROWS = ("__init__", "build", "reset_state", "reset_states", "result", "get_config")
_SETTERS = {"assign", "update"}  # variable.assign(), K.update()


def of(model):
    """Return the metrics of a model that keep state; before Keras 2.3 metrics are functions."""
    find = getattr(model, "_get_training_eval_metrics", None)  # in graphs: those of losses, too
    metrics = find() if find is not None else getattr(model, "metrics", None) or ()
    return [metric for metric in metrics if hasattr(metric, "update_state")]


def state(model):
    """Return the state of the model's metrics, as a list of arrays."""
    read, _ = _keras.reader_and_writer(model)
    return read(variables(model))


def variables(model):
    """Return the variables of the model's metrics."""
    return [variable for metric in of(model) for variable in _variables_of(metric)]


def _variables_of(metric):
    """Return the variables of a metric: Keras 2.3 calls them weights."""
    return getattr(metric, "variables", None) or getattr(metric, "weights", ())


class Moment(NamedTuple):
    """The rows that a rank had seen when results were computed, and its metrics.

    Attributes:
        prefix: what the names of these results begin with: "" or "val_".
        state: that of the metrics, as ``state()`` returns it; None: this rank has seen no rows.
        seen: how many "rows" and "batches".
    """

    prefix: str
    state: Optional[List[Any]]
    seen: Mapping[str, int]


class Recipe(NamedTuple):
    """How the results of all ranks are combined. Where the ranks' differ, rank 0's counts.

    Attributes:
        names: of all results.
        scalars: the names of those that are single numbers, of which there is a mean.
        unsummed: pairs of a metric whose state is not a sum over rows, and why; its mean is taken.
        untracked: the names of results that are not those of the metrics with the same names.
    """

    names: List[str]
    scalars: List[str]
    unsummed: List[Tuple[str, str]]
    untracked: List[str]

    def is_of_metric(self, moment: Moment, metric: str) -> bool:
        """Return whether a result is computed from the sums of a metric's state."""
        return moment.prefix + metric not in self.untracked and not any(
            metric == name or metric.endswith("_" + name) for name, _ in self.unsummed
        )

    def weighted(self, moments: Sequence[Moment], logs: Mapping[str, Any]) -> List[float]:
        """Return the rows that count for each scalar, and then each scalar times its rows."""
        rows = []
        for name in self.scalars:
            moment = [moment for moment in moments if str(name).startswith(moment.prefix)][-1]
            rows.append(float(moment.seen["rows"]) if name in logs else 0.0)
        return rows + [count * float(logs.get(name, 0)) for count, name in zip(rows, self.scalars)]


class Results:
    """The results of one model, which all ranks combine at once."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.made: Any = None  # in a graph: the metrics, and the function of their results
        self.warned: Set[str] = set()  # of metrics
        self.expected = 0  # the most numbers that all ranks have summed up at once

    def over_ranks(
        self,
        model: Any,
        moments: Sequence[Moment],
        logs: Mapping[str, Any],
        more: Sequence[int] = (),
    ) -> Tuple[List[List[int]], Dict[str, Any]]:
        """Combine the results of all ranks.

        This takes one exchange where the ranks have results of the same names, as they mostly do.

        Arguments:
            model: the one that has computed them.
            moments: at which they were computed; that with the prefix "" comes first.
            logs: this rank's results by name.
            more: whole numbers to gather on the way.

        Returns:
            All ranks' ``more``; and the results that rank 0 has, by name: those of metrics that add
            up, which this rank may name otherwise, and the means of those others that are numbers.
        """
        self.engine.count("results")
        recipe = self.recipe(model, moments, logs)
        recipe, states, means, rows = self._exchange(recipe, moments, logs, list(more))
        self.warn_of(dict(recipe.unsummed))
        results = {name: logs[name] for name in recipe.names if name in logs}
        for name, weight, total in zip(recipe.scalars, *np.split(means, 2)):
            if weight:
                results[name] = float(total / weight)
        for moment, of_metrics in zip(moments, self.of_sums(model, states)):
            for metric, value in of_metrics.items():
                name = moment.prefix + metric
                if recipe.is_of_metric(moment, metric) and (name in recipe.names or name in logs):
                    results[name] = value
        return rows, results

    def _exchange(self, recipe, moments, logs, more):
        """Exchange the numbers of this rank's results, and agree on one recipe.

        Returns:
            The recipe; the sums of the metrics' states at each moment, one after the other; those
            of ``Recipe.weighted``; and all ranks' ``more``.
        """
        engine = self.engine
        states = [moment.state for moment in moments]
        values = _numbers([state for state in states if state is not None])
        head = [len(_numbers(states[:1])) % checksum.LARGEST, *checksum.of_text(repr(recipe))]
        rows, sums = engine.gather_and_sum(
            head + more, values + recipe.weighted(moments, logs), self.expected
        )
        heads, more = zip(*[(row[: len(head)], row[len(head) :]) for row in rows])
        if sums is not None:
            self.expected = max(self.expected, len(sums))
        if sums is None or not checksum.same(heads):
            counts = [count for count, *_ in heads]
            if not checksum.same(counts):
                raise errors.RankError(
                    "The ranks' metrics have different numbers of values: {}, by rank. Compile the "
                    "model with the same metrics on every rank, and call evaluate() on all of "
                    "them.".format(", ".join(map(str, counts)))
                )
            recipe = Recipe(*engine.broadcast(list(recipe)))
            # A rank that has seen no rows adds nothing.
            states = [[0 * v for v in states[0]] if s is None else s for s in states]
            values = _numbers(states)
            sums = engine.sum(values + recipe.weighted(moments, logs))
        return (recipe, *np.split(np.asarray(sums), [len(values)]), list(more))

    def recipe(self, model: Any, moments: Sequence[Moment], logs: Mapping[str, Any]) -> Recipe:
        """Return the recipe by which this rank would combine the results."""
        unsummed: Dict[str, str] = {}
        for moment in moments:
            unsummed.update(not_added(model, moment.seen["rows"], moment.seen["batches"]))
        scalars = [name for name, value in logs.items() if not getattr(value, "shape", ())]
        untracked = self.untracked(model, moments, logs)
        return Recipe(list(logs), scalars, sorted(unsummed.items()), untracked)

    def untracked(
        self, model: Any, moments: Sequence[Moment], logs: Mapping[str, Any]
    ) -> List[str]:
        """Return the names of results that are not those of the metrics with the same names.

        A custom step may return a number by the name of a metric that it does not update, as that
        of the loss.
        """
        if not has_own_steps(model):
            return []
        moments = [moment for moment in moments if moment.state is not None]
        numbers = np.asarray(_numbers(moment.state for moment in moments))
        return [
            moment.prefix + name
            for moment, computed in zip(moments, self.of_sums(model, numbers))
            for name, value in computed.items()
            if moment.prefix + name in logs and not _is_close(logs[moment.prefix + name], value)
        ]

    def warn_of(self, unsummed: Mapping[str, str]) -> None:
        """Warn once of each metric that does not add up.

        Arguments:
            unsummed: the reasons, by the names of metrics.
        """
        for name in sorted(set(unsummed) - self.warned):
            self.warned.add(name)
            errors.warn(
                f"Metric {name!r} is the mean of the ranks' values, weighted by their rows, and "
                f"not what one process computes: {unsummed[name]}. For that have update_state() "
                "add to its variables with assign_add(), or a function return one value for each "
                "row."
            )

    def of_sums(self, model: Any, sums: Any) -> List[Dict[str, Any]]:
        """Return the results of the metrics at each moment, by name.

        Arguments:
            model: the one that has the metrics, which keep their own state.
            sums: of all ranks' states of the metrics, an array that has one moment's numbers
                after the other's.
        """
        _, write = _keras.reader_and_writer(model)
        of_metrics, results = variables(model), []
        with _keras.kept(model, of_metrics) as mine:  # later rows are added to this rank's
            count = sum(value.size for value in mine)
            for start in range(0, len(sums), max(count, 1)):
                write(list(zip(of_metrics, arrays.like(mine, sums[start : start + count]))))
                results.append(self.computed(model))
        return results

    def computed(self, model: Any) -> Dict[str, Any]:
        """Return the results of the metrics, by name, from the state that they have now."""
        metrics, results = of(model), {}
        if hasattr(model, "_get_training_eval_metrics"):
            if self.made is None or self.made[0] != metrics:
                # result() would replace what later functions of Keras return by a tensor that
                # waits for no update.
                with contextlib.ExitStack() as kept:
                    for metric in metrics:
                        kept.enter_context(patching.replaced(metric, _call_result=None))
                    tensors = [metric.result() for metric in metrics]
                self.made = metrics, _keras.keras_of(model).backend.function([], tensors)
            return {m.name: _number(v) for m, v in zip(metrics, self.made[1]([]))}
        for metric in metrics:
            result = metric.result()
            results.update(result if isinstance(result, dict) else {metric.name: result})
        read, _ = _keras.reader_and_writer(model)
        return dict(zip(results, map(_number, read(list(results.values())))))


def _numbers(states):
    """Return several states of metrics as one list of numbers that ranks sum up."""
    return arrays.flat([value for state in states for value in state], "float64").tolist()


def _is_close(value, other):
    value, other = np.asarray(value, "float64"), np.asarray(other, "float64")
    is_same_shape = value.shape == other.shape
    return is_same_shape and np.allclose(value, other, _ROUNDING, _ROUNDING**2, equal_nan=True)


def _number(value):
    return np.asarray(value) if np.ndim(value) else float(value)


# Metrics that do not add up -------------------------------------------------------------------


def not_added(model, rows, batches):
    """Return the metrics whose states do not add up over ranks: their names, and why.

    Arguments:
        model: the one that has the metrics.
        rows: how many they have seen.
        batches: how many they have seen.
    """
    metrics = of(model)
    if not metrics:  # before Keras 2.3; these are layers, whose variables only they know
        why = "this Keras does not tell what the metric keeps"
        return {name: why for name in getattr(model, "stateful_metric_names", None) or ()}
    read, _ = _keras.reader_and_writer(model)
    return {
        leaf.name: why
        for metric in metrics
        for leaf in _leaves(metric)
        for why in [_sets_state(leaf) or _is_of_batches(leaf, read, rows, batches)]
        if why
    }


def _leaves(metric):
    """Return the metrics within a metric: Keras 3 has all those of ``compile()`` in one."""
    parts = getattr(metric, "metrics", None)
    if not isinstance(parts, list) or not parts:
        return [metric]
    return [leaf for part in parts for leaf in _leaves(part)]


def _sets_state(metric):
    """Return why the state of a user-defined metric may not be a sum, or None."""
    hidden = set(_NOT_OF_ROWS)
    for kind in type(metric).__mro__:
        if not _keras.is_users(kind):
            break  # Keras' own add up
        for name, function in vars(kind).items():
            function = getattr(function, "python_function", function)  # under tf.function
            if name in hidden or not isinstance(function, types.FunctionType):
                continue
            function = inspect.unwrap(function)
            names = _names_in(function.__code__)
            if names & _SETTERS and ("update" in names or not _only_adds(function)):
                return "{}() sets its variables, and does not add to them".format(name)
            if "super" not in names:
                hidden.add(name)
        for variable in _variables_of(metric):
            aggregation = str(getattr(variable, "aggregation", "sum")).rpartition(".")[2]
            if aggregation.lower() not in ("sum", "none"):  # or none is declared
                return "its variable {!r} is not to be summed up: its aggregation is {}".format(
                    variable.name, aggregation.lower()
                )
    return None


def _only_adds(function):
    """Return whether all that a method does with its metric is ``self.x.assign(self.x + ...)``.

    Keras 3's documentation writes metrics like that. The term may not depend on the metric: the
    method uses nothing else of it but its ``dtype``.
    """
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, SyntaxError, TypeError):  # of a notebook's cell that is gone, for example
        return False
    nodes = list(ast.walk(tree))
    selves = [node for node in nodes if isinstance(node, ast.Name) and node.id == "self"]
    sets = [node for node in nodes if getattr(node, "attr", None) == "assign"]
    types_of_number = [node for node in nodes if _own_name(node) == "dtype"]
    added = list(filter(None, map(_added_to, nodes)))
    each_once = len(set(added)) == len(added) == len(sets)
    return each_once and len(selves) == 2 * len(added) + len(types_of_number)


def _added_to(node):
    """Return the name x of a call ``self.x.assign(self.x + ...)``, or None."""
    value = node.args[0] if isinstance(node, ast.Call) and node.args else None
    is_sum = isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add)
    if is_sum and getattr(node.func, "attr", None) == "assign":
        name = _own_name(node.func.value)
        return name if name == _own_name(getattr(value, "left", None)) else None
    return None


def _own_name(node):
    """Return the name x of ``self.x``, or None."""
    is_own = isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "self"
    return node.attr if is_own else None


def _names_in(code):
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def _is_of_batches(metric, read, rows, batches):
    """Return the reason, if a user-defined function returns one number for a whole batch."""
    function, count = getattr(metric, "_fn", None), getattr(metric, "count", None)
    if function is None or count is None or rows <= batches or not _keras.is_users(function):
        return None
    (seen,) = read([count])
    return "it is one number for each batch" if abs(float(seen) - batches) < 0.5 else None
