"""Comparison of the ranks' weights as training goes on."""

from .. import _keras
from .._runtime.process import process
from . import checksum, metrics, state
from .weights import arrays_of, variables_of

_SET_ON_ONE_RANK = (
    "Likely causes: weights that were set or loaded on one rank alone, as by load_weights() under "
    "is_chief(); a model that was built after parallelize(), of which each rank has drawn its own "
    "initial weights until fit() begins."
)

# An epoch ends with a comparison if there were so many steps since the last one.
_OFTEN = 100


class WeightComparison:
    """Comparisons of the ranks' variables, which all ranks make at the same steps."""

    def __init__(self, engine):
        self.engine = engine
        self.steps = 0
        self.compared = 0  # after so many steps
        self.begun = 0  # how many there were when the last epoch ended

    def stepped(self, model):
        """Count a step of training."""
        self.steps += 1
        if checksum.is_due(self.steps):
            self.compare(model, self.steps)

    def epoch_ended(self, steps):
        """Count the steps of an epoch, unless they were counted one by one."""
        if self.steps == self.begun:  # engines that compare weights in steps count none here
            self.steps += steps
        self.begun = self.steps

    def is_due(self, ends):
        """Return whether a comparison is due at the end of an epoch.

        Arguments:
            ends: whether training ends with it.
        """
        return self.steps - self.compared >= (1 if ends else _OFTEN)

    def compare(self, model, when, causes=checksum.CAUSES):
        """Compare the variables of a model: see ``checksum.verify``."""
        self.resolve(model, when, self.engine.gather(self.numbers(model)), causes)

    def numbers(self, model):
        """Return the checksum that ranks gather to compare."""
        process.comparisons += 1
        self.compared = self.steps
        read, _ = _keras.reader_and_writer(model)
        return checksum.numbers(read(self.variables(model)))

    def resolve(self, model, when, rows, causes=checksum.CAUSES):
        """Resolve differences of the ranks' gathered checksums: see ``checksum.verify``."""
        if not checksum.same(rows):
            self._resolve(model, self.variables(model), when, causes)

    def held(self, model):
        """Return the checksum of the variables with which a model computes its outputs."""
        read, _ = _keras.reader_and_writer(model)
        return checksum.numbers(read(self._shared(model, arrays_of(model))))

    def resolve_held(self, model, when, rows):
        """Resolve differences of the ranks' checksums that ``held`` has returned."""
        if not checksum.same(rows):
            self._resolve(model, self._shared(model, arrays_of(model)), when, _SET_ON_ONE_RANK)

    def _resolve(self, model, variables, when, causes):
        read, write = _keras.reader_and_writer(model)
        names = [getattr(variable, "path", None) or variable.name for variable in variables]

        def write_one(place, value):
            write([(variables[place], value)])

        checksum.resolve(self.engine, names, read(variables), write_one, when, causes)

    def variables(self, model):
        """Return the variables of a model and its training that are the same on all ranks."""
        return self._shared(model, variables_of(model, self.engine))

    def _shared(self, model, variables):
        """Return those variables that are the same on all ranks.

        Metrics, whole numbers, and the states of stateful RNNs differ.
        """
        merged = set(map(id, state.tried(model))) if hasattr(model, "train_step") else ()
        numbers = [
            weight
            for weight in model.weights
            if "int" in str(getattr(weight, "dtype", "")) and id(weight) not in merged
        ]
        differing = metrics.variables(model) + numbers + _keras.states(model, "dtype")
        ids = set(map(id, differing))
        return [variable for variable in variables if id(variable) not in ids]
