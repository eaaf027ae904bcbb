"""When the ranks' weights are compared, and what is said where they differ."""

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
    """When the ranks' variables are compared, which they must be at the same step on all ranks."""

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
        if self.steps == self.begun:  # engines that compare weights in steps count none here
            self.steps += steps
        self.begun = self.steps

    def is_due(self, ends):
        """Return whether to compare at the end of this epoch, with which all training may end."""
        return self.steps - self.compared >= (1 if ends else _OFTEN)

    def compare(self, model, when, causes=checksum.CAUSES):
        """See ``checksum.verify``."""
        self.resolve(model, when, self.engine.gather(self.numbers(model)), causes)

    def numbers(self, model):
        """Return the checksum that ranks gather to compare."""
        process.comparisons += 1
        self.compared = self.steps
        read, _ = _keras.reader_and_writer(model)
        return checksum.numbers(read(self.variables(model)))

    def resolve(self, model, when, rows, causes=checksum.CAUSES):
        """Act upon the checksums of all ranks: see ``checksum.verify``."""
        if not checksum.same(rows):
            self._resolve(model, self.variables(model), when, causes)

    def held(self, model):
        """Return the checksum of what a model computes with, which is not the optimizer's state."""
        read, _ = _keras.reader_and_writer(model)
        return checksum.numbers(read(self._shared(model, arrays_of(model))))

    def resolve_held(self, model, when, rows):
        """As ``resolve``, of the checksums that ``held`` gives."""
        if not checksum.same(rows):
            self._resolve(model, self._shared(model, arrays_of(model)), when, _SET_ON_ONE_RANK)

    def _resolve(self, model, variables, when, causes):
        read, write = _keras.reader_and_writer(model)
        names = [getattr(variable, "path", None) or variable.name for variable in variables]

        def write_one(place, value):
            write([(variables[place], value)])

        checksum.resolve(self.engine, names, read(variables), write_one, when, causes)

    def variables(self, model):
        return self._shared(model, variables_of(model, self.engine))

    def _shared(self, model, variables):
        """Return those that are the same on all ranks.

        Each rank has its own metrics, whole numbers, and states of stateful RNNs.
        """
        merged = set(map(id, state.tried(model))) if hasattr(model, "train_step") else ()
        numbers = [
            weight
            for weight in model.weights
            if "int" in str(getattr(weight, "dtype", "")) and id(weight) not in merged
        ]
        own = metrics.variables(model) + numbers + _keras.states(model, "dtype")
        ids = set(map(id, own))
        return [each for each in variables if id(each) not in ids]
