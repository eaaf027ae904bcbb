"""What fit() and evaluate() of a Keras model give, of all ranks' rows."""

from .. import errors
from . import checksum, metrics


class Results:
    """The results of one model. All ranks ask for them at once."""

    def __init__(self, engine):
        self.engine = engine
        self.of_metrics = metrics.MetricResults()
        self.warned = set()  # type: set  # of metrics
        self.expected = 0  # numbers at most that all ranks have summed up for one

    def over_ranks(self, model, seen, states, logs, training, more=()):
        """In one exchange, where the ranks have results of the same names, as most have.

        Arguments:
            seen: how many rows and batches this rank has seen, by whether it was in training.
            states: what ``metrics.state()`` gave at several moments, or None where this rank has
                seen no rows.
            logs: this rank's results by name.
            training: a function that tells of a name whether that is of the training.
            more: whole numbers to gather on the way.

        Returns:
            All ranks' ``more``; for each state the results of those metrics that add up, by name;
            the means of all results that are numbers; and the names of all results, as rank 0 has
            them.
        """
        not_added = {}
        for each in seen.values():
            not_added.update(metrics.not_added(model, each["rows"], each["batches"]))
        names = [name for name, value in logs.items() if not getattr(value, "shape", ())]
        told = [sorted(not_added.items()), names, list(logs)]
        values = metrics.numbers([state for state in states if state is not None])

        def weighted(names):
            rows = [seen[training(name)]["rows"] if name in logs else 0 for name in names]
            pairs = [(row, row * float(logs.get(name, 0))) for row, name in zip(rows, names)]
            return [float(number) for pair in pairs for number in pair]

        head = [len(metrics.numbers(states[:1])) % checksum.LARGEST]
        head += checksum.of_text(repr(told))
        rows, sums = self.engine.gather_and_sum(
            head + list(more), values + weighted(names), self.expected
        )
        if sums is not None:
            self.expected = max(self.expected, len(sums))
        if sums is None or not checksum.same([row[: len(head)] for row in rows]):
            self.check(rows)
            told = self.engine.broadcast(told)
            states = [[0 * v for v in states[0]] if s is None else s for s in states]
            values = metrics.numbers(states)
            sums = self.engine.sum(values + weighted(told[1]))
        not_added, names, all_names = dict(told[0]), told[1], told[2]
        self.warn(not_added)
        moments = len(values) // (head[0] or 1)
        found = metrics.of_sums(model, sums[: len(values)], moments, self.of_metrics)
        found += [{}] * (len(states) - len(found))

        def adds_up(name):
            return not any(name == n or name.endswith("_" + n) for n in not_added)

        found = [{name: v for name, v in result.items() if adds_up(name)} for result in found]
        sums = sums[len(values) :]
        means = {
            name: float(total / weight) if weight else logs.get(name)
            for name, weight, total in zip(names, sums[::2], sums[1::2])
        }
        return [row[len(head) :] for row in rows], found, means, all_names

    def check(self, rows):
        """Check that all ranks have numbers of metrics that can be summed up."""
        counts = [count for count, *_ in rows]
        if not checksum.same(counts):
            raise errors.RankError(
                "The ranks' metrics have different numbers of values: {}, by rank. Compile the "
                "model with the same metrics on every rank, and call evaluate() on all of "
                "them.".format(", ".join(map(str, counts)))
            )

    def warn(self, not_added):
        """Warn of metrics that do not add up, of each once."""
        for name in sorted(set(not_added) - self.warned):
            self.warned.add(name)
            errors.warn(
                f"Metric {name!r} is the mean of the ranks' values, weighted by their rows, and "
                f"not what one process computes: {not_added[name]}. For that have update_state() "
                "add to its variables with assign_add(), or a function return one value for each "
                "row."
            )
