"""What fit() and evaluate() of a Keras model give, of all ranks' rows.

Metrics are computed from the sums of the ranks' state, not from their values.

A mean of the ranks' areas under a curve is not the area under the curve of all rows. But what
Keras' metrics keep of the batches that they have seen (totals, counts, histograms, confusion
matrices) adds up.
"""

import ast
import contextlib
import inspect
import textwrap
import types

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
    """Return the metrics of a model that keep state.

    Before Keras 2.3 they are plain functions.
    """
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
    """Keras 2.3's metrics have weights alone, Keras 3's variables alone."""
    return getattr(metric, "variables", None) or getattr(metric, "weights", ())


class Results:
    """The results of one model. All ranks ask for them at once."""

    def __init__(self, engine):
        self.engine = engine
        self.made = None  # in a graph: the metrics, and the function that computes their results
        self.warned = set()  # type: set  # of metrics
        self.expected = 0  # numbers at most that all ranks have summed up for one

    def over_ranks(self, model, moments, logs, more=()):
        """In one exchange, where the ranks have results of the same names, as most have.

        Arguments:
            moments: by what the names of results of a moment begin with, "" first: what ``state()``
                gave then, or None where this rank has seen no rows; and how many rows and batches
                it has seen.
            logs: this rank's results by name.
            more: whole numbers to gather on the way.

        Returns:
            All ranks' ``more``; and the results that rank 0 has, by name: those of metrics that add
            up, which this rank may name otherwise, and the means of those others that are numbers.
        """
        self.engine.count("results")
        others = {}  # type: dict
        for _, seen in moments.values():
            others.update(not_added(model, seen["rows"], seen["batches"]))
        names = [name for name, value in logs.items() if not getattr(value, "shape", ())]
        told = [sorted(others.items()), names, list(logs), self.untracked(model, moments, logs)]
        states = [state for state, _ in moments.values()]
        values = _numbers([state for state in states if state is not None])

        head = [len(_numbers(states[:1])) % checksum.LARGEST, *checksum.of_text(repr(told))]
        rows, sums = self.engine.gather_and_sum(
            head + list(more), values + _weighted(names, logs, moments), self.expected
        )
        if sums is not None:
            self.expected = max(self.expected, len(sums))
        if sums is None or not checksum.same([row[: len(head)] for row in rows]):
            counts = [count for count, *_ in rows]
            if not checksum.same(counts):
                raise errors.RankError(
                    "The ranks' metrics have different numbers of values: {}, by rank. Compile the "
                    "model with the same metrics on every rank, and call evaluate() on all of "
                    "them.".format(", ".join(map(str, counts)))
                )
            told = self.engine.broadcast(told)
            states = [[0 * v for v in states[0]] if s is None else s for s in states]
            values = _numbers(states)
            sums = self.engine.sum(values + _weighted(told[1], logs, moments))
        others, names, all_names, untracked = dict(told[0]), *told[1:]
        self.warn_of(others)
        of_states, means = np.split(np.asarray(sums), [len(values)])
        results = {name: logs[name] for name in all_names if name in logs}
        for name, weight, total in zip(names, *np.split(means, 2)):
            if weight:
                results[name] = float(total / weight)
        for prefix, found in zip(moments, self.of_sums(model, of_states)):
            for name, value in found.items():
                adds_up = not any(name == each or name.endswith("_" + each) for each in others)
                name = prefix + name
                if adds_up and name not in untracked and (name in all_names or name in logs):
                    results[name] = value
        return [row[len(head) :] for row in rows], results

    def untracked(self, model, moments, logs):
        """Return the names of results that are not those of the metrics with the same names.

        A custom step may return a number by the name of a metric that it does not update, as that
        of the loss.
        """
        if not has_own_steps(model):
            return []
        states = {prefix: state for prefix, (state, _) in moments.items() if state is not None}
        computed = self.of_sums(model, np.asarray(_numbers(states.values())))
        return [
            prefix + name
            for prefix, of_metrics in zip(states, computed)
            for name, value in of_metrics.items()
            if prefix + name in logs and not _is_close(logs[prefix + name], value)
        ]

    def warn_of(self, others):
        """Warn once of each metric that does not add up. ``others``: why, by name."""
        for name in sorted(set(others) - self.warned):
            self.warned.add(name)
            errors.warn(
                f"Metric {name!r} is the mean of the ranks' values, weighted by their rows, and "
                f"not what one process computes: {others[name]}. For that have update_state() add "
                "to its variables with assign_add(), or a function return one value for each row."
            )

    def of_sums(self, model, sums):
        """Return what the metrics make of the sums of all ranks' state, at each moment, by name."""
        _, write = _keras.reader_and_writer(model)
        of_metrics, found = variables(model), []
        with _keras.kept(model, of_metrics) as mine:  # what is seen from now on counts once
            count = sum(value.size for value in mine)
            for start in range(0, len(sums), max(count, 1)):
                write(list(zip(of_metrics, arrays.like(mine, sums[start : start + count]))))
                found.append(self.computed(model))
        return found

    def computed(self, model):
        """Return what the metrics make of their state, by name.

        In a graph, that is made once.
        """
        metrics, found = of(model), {}
        if hasattr(model, "_get_training_eval_metrics"):
            if self.made is None or self.made[0] != metrics:
                # What functions that Keras makes later put out; result() replaces it by a tensor
                # that waits for no update.
                with contextlib.ExitStack() as kept:
                    for metric in metrics:
                        kept.enter_context(patching.replaced(metric, _call_result=None))
                    tensors = [metric.result() for metric in metrics]
                self.made = metrics, _keras.keras_of(model).backend.function([], tensors)
            return {m.name: _number(v) for m, v in zip(metrics, self.made[1]([]))}
        for metric in metrics:
            result = metric.result()
            found.update(result if isinstance(result, dict) else {metric.name: result})
        read, _ = _keras.reader_and_writer(model)
        return dict(zip(found, map(_number, read(list(found.values())))))


def _numbers(states):
    """Return several results of ``state()`` as one list of numbers that ranks sum up."""
    return arrays.flat([value for state in states for value in state], "float64").tolist()


def _weighted(names, logs, moments):
    """Return the rows that count for results of these names, then each result times its rows.

    Arguments:
        logs, moments: as ``Results.over_ranks()`` has them.
    """
    rows = []
    for name in names:
        prefix = [each for each in moments if str(name).startswith(each)][-1]
        rows.append(float(moments[prefix][1]["rows"]) if name in logs else 0.0)
    return rows + [count * float(logs.get(name, 0)) for count, name in zip(rows, names)]


def _is_close(value, other):
    value, other = np.asarray(value, "float64"), np.asarray(other, "float64")
    is_same_shape = value.shape == other.shape
    return is_same_shape and np.allclose(value, other, _ROUNDING, _ROUNDING**2, equal_nan=True)


def _number(value):
    return np.asarray(value) if np.ndim(value) else float(value)


# Metrics that do not add up -------------------------------------------------------------------


def not_added(model, rows, batches):
    """Return the metrics whose sums over ranks are not those of all rows.

    Their names, and why.

    Arguments:
        rows, batches: how many they have seen.
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
    """Keras 3 has all metrics of ``compile()`` in one."""
    parts = getattr(metric, "metrics", None)
    if not isinstance(parts, list) or not parts:
        return [metric]
    return [leaf for part in parts for leaf in _leaves(part)]


def _sets_state(metric):
    """Return whether the state of a metric of the user's own may be something else than a sum."""
    hidden = set(_NOT_OF_ROWS)
    for kind in type(metric).__mro__:
        if not _keras.is_users(kind):
            break  # all of Keras' own add up
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

    So Keras 3's documentation writes metrics. What is added may not depend on the metric: the
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
    own = isinstance(node, ast.Attribute) and getattr(node.value, "id", None) == "self"
    return node.attr if own else None


def _names_in(code):
    names = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= _names_in(constant)
    return names


def _is_of_batches(metric, read, rows, batches):
    """Return whether a function of the user's own gives one number for a whole batch."""
    function, count = getattr(metric, "_fn", None), getattr(metric, "count", None)
    if function is None or count is None or rows <= batches or not _keras.is_users(function):
        return None
    (seen,) = read([count])
    return "it is one number for each batch" if abs(float(seen) - batches) < 0.5 else None
