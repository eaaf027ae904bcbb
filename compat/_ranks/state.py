"""Variables that a step sets besides the weights that it trains, merged over all ranks.

Each rank computes them from its own rows. The value of one process, for all rows, follows from the
placement of the value over rows (``_rows.placements``): sums are added, means are weighted by rows,
the largest of maxima is taken, and replicated values are the same on all ranks.

The moving averages of Keras' own layers are means. For other variables a trial before the first
step decides.
"""

import contextlib

from .. import _keras, errors
from .._rows import trial
from .._rows.placements import Mixed
from . import metrics, state_trial
from .losses import KERAS
from .merging import Merge

# Horovod's layers are batch normalization.
_KNOWN = KERAS + ("horovod.",)


class StepState:
    """The variables that a model's steps set.

    Arguments:
        engine: that of the ranks.
        names: those of all variables.
        dtypes: the names of their types.
        tried: the places of those that are tried; the others are means.
    """

    def __init__(self, engine, names, dtypes, tried=()):
        self.engine, self.names, self.tried = engine, list(names), list(tried)
        self.dtypes = [str(dtype).rpartition(".")[2].strip("'<>") for dtype in dtypes]
        self.merges = [Merge() for _ in self.names]
        self.is_decided = not self.tried

    def decide(self, rows, values, run):
        """Decide by a trial how variables are merged. All ranks do so at once.

        Arguments:
            rows: the number of rows of this rank's batch.
            values: those of the variables that are tried, as arrays.
            run: as ``state_trial.samples_of`` takes it.
        """
        self.is_decided = True
        dtypes, problem = [self.dtypes[place] for place in self.tried], None
        try:
            samples = state_trial.samples_of(run, rows, values, dtypes)
            merges = list(map(state_trial.merge_of, samples, dtypes))
        except Exception as error:  # of a custom step, which may take no such rows
            if trial.is_fault(error):
                raise
            problem = "{}: {}".format(type(error).__name__, str(error).split("\n")[0])
            samples, merges = None, [Merge(Mixed(), "float" in dtype) for dtype in dtypes]
        # By rank 0's rows, unless those of another rank contradict.
        merges = self.engine.broadcast(merges)
        fits = [
            bool(samples) and self._fits(merge, of_variable)
            for merge, of_variable in zip(merges, samples or merges)
        ]
        for place, merge, *all_fit in zip(self.tried, merges, *self.engine.gather(fits)):
            if not all(all_fit):
                merge = Merge(Mixed(), merge.is_float)
                if self.engine.place.rank == 0:
                    self.warn_of(place, merge, problem)
            self.merges[place] = merge

    def _fits(self, merge, samples):
        if isinstance(merge.placement, Mixed):
            return False
        return all(sample.fits(merge) for sample in state_trial.usable(samples))

    def warn_of(self, place, merge, problem):
        """Warn that the ranks' value is not one process's."""
        value = "the mean of the ranks' values, weighted by rows" if merge.is_float else "rank 0's"
        if problem is None:
            errors.warn(
                f"Training sets variable {self.names[place]!r} from the rows of a batch, but not "
                f"to their sum, mean, maximum or minimum. All ranks get {value}, which is not what "
                "one process computes. Set the variable to one of these, and compute the rest "
                "where it is used."
            )
        else:
            errors.warn(
                f"Training sets variable {self.names[place]!r}, and how that depends on the rows "
                f"of a batch is not known: a step on some of them failed ({problem}). All ranks "
                f"get {value}, which may not be what one process computes."
            )


# Models of tf.keras and Keras 3 ---------------------------------------------------------------


def tried(model):
    """Return the variables of a model that are tried: those of user-defined layers."""
    has_all = hasattr(model, "_flatten_layers")
    layers = _keras.all_layers(model) if has_all else _keras.all_layers_of_keras2(model)
    untried = {
        id(variable)
        for layer in layers
        if type(layer).__module__.startswith(_KNOWN)
        for variable in _variables_of(layer)
    }
    untried.update(map(id, metrics.variables(model) + _keras.states(model, "dtype")))
    variables = {id(variable): variable for layer in layers for variable in _variables_of(layer)}
    kinds = ("float", "int", "bool")
    return [
        variable
        for key, variable in variables.items()
        if key not in untried and any(kind in str(getattr(variable, "dtype", "")) for kind in kinds)
    ]


def _variables_of(layer):
    """Return the non-trainable variables of a layer itself, without those of layers within it."""
    attribute = "_non_trainable_variables"  # of Keras 3
    return getattr(layer, attribute, None) or getattr(layer, "_non_trainable_weights", None) or ()


# Attributes of layers that draw random numbers in training, or make rows depend on one another.
_RANDOM = ("rate", "stddev", "dropout", "recurrent_dropout")


@contextlib.contextmanager
def steady(model):
    """Have no row's values depend on chance or on other rows within, where a trial runs.

    Dropout and noise do nothing, and batch normalization uses its moving averages.
    """
    changed = []
    for layer in _keras.all_layers(model):
        if not type(layer).__module__.startswith(_KNOWN):
            continue
        held = vars(layer)
        others = {name: 0.0 for name in _RANDOM if isinstance(held.get(name), float)}
        if hasattr(layer, "moving_mean"):
            others["call"] = _in_inference(layer.call)
        changed.append((held, dict(held), others))
    # Not by setattr, by which Keras tracks what a layer has.
    for held, _, others in changed:
        held.update(others)
    try:
        yield
    finally:
        for held, before, others in changed:
            for name in others:
                if name in before:
                    held[name] = before[name]
                else:
                    del held[name]


def _in_inference(call):
    def call_in_inference(inputs, training=None, **options):
        return call(inputs, training=False, **options)

    return call_in_inference


def some_rows(keras, data, rows, places):
    """Return some rows of the data that Keras passes to a step.

    Arguments:
        keras: the Keras of the model.
        data: a structure of tensors.
        rows: how many the batch has.
        places: those of the rows.
    """

    def chosen(leaf):
        has_rows = getattr(leaf, "shape", None) and leaf.shape[0] == rows
        return leaf[list(places)] if has_rows else leaf

    return _keras.tree_of(keras).map_structure(chosen, data)
