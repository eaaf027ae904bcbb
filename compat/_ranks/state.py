"""Variables that a step sets besides the weights that it trains, over the rows of all ranks.

Each rank computes them from its own rows. What one process computes of all rows follows from how a
value depends on them, in the words of ``_rows.placements``: sums are added, means are weighted by
rows, of maxima the largest is taken, and what depends on no rows is the same on all ranks.

The moving averages of Keras' own layers are means. Of other variables a trial decides in front of
the first step.
"""

import contextlib

from .. import _keras, errors
from .._rows import trial
from .._rows.placements import Mixed
from . import metrics, state_trial
from .losses import KERAS, tree_of
from .merging import Merge


class StepState:
    """The variables that a model's steps set.

    Arguments:
        names: of all of them.
        dtypes: the names of their types.
        tried: the places of those that are tried; the others are means.
    """

    def __init__(self, engine, names, dtypes, tried=()):
        self.engine, self.names, self.tried = engine, list(names), list(tried)
        self.dtypes = [str(dtype).rpartition(".")[2].strip("'<>") for dtype in dtypes]
        self.merges = [Merge() for _ in self.names]
        self.is_decided = not self.tried

    def decide(self, rows, values, run):
        """Try how the variables in question are merged. All ranks do so at once.

        Arguments:
            rows: the number of rows of this rank's batch.
            values: of the variables that are tried, as arrays.
            run: as that of ``state_trial.samples_of``.
        """
        self.is_decided = True
        dtypes, problem = [self.dtypes[place] for place in self.tried], None
        try:
            samples = state_trial.samples_of(run, rows, values, dtypes)
            merges = list(map(state_trial.merge_of, samples, dtypes))
        except Exception as error:  # whatever a step of the user's does with such rows
            if trial.is_fault(error):
                raise
            problem = "{}: {}".format(type(error).__name__, str(error).split("\n")[0])
            samples, merges = None, [Merge(Mixed(), "float" in dtype) for dtype in dtypes]
        # By rank 0's rows, unless those of another rank contradict.
        merges = self.engine.broadcast(merges)
        fits = [
            bool(samples) and self._fits(merge, each)
            for merge, each in zip(merges, samples or merges)
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
        what = "the mean of the ranks' values, weighted by rows" if merge.is_float else "rank 0's"
        if problem is None:
            errors.warn(
                f"Training sets variable {self.names[place]!r} from the rows of a batch, but not "
                f"to their sum, mean, maximum or minimum. All ranks get {what}, which is not what "
                "one process computes. Set the variable to one of these, and compute the rest "
                "where it is used."
            )
        else:
            errors.warn(
                f"Training sets variable {self.names[place]!r}, and how that depends on the rows "
                f"of a batch is not known: a step on some of them failed ({problem}). All ranks "
                f"get {what}, which may not be what one process computes."
            )


# Models of tf.keras and Keras 3 ---------------------------------------------------------------


def tried(model):
    """Return the variables of a model that a trial decides of.

    Those of layers that are not Keras' own.
    """
    has_all = hasattr(model, "_flatten_layers")
    layers = _keras.all_layers(model) if has_all else _keras.all_layers_of_keras2(model)
    own = {
        id(variable)
        for layer in layers
        if type(layer).__module__.startswith(KERAS)
        for variable in _variables_of(layer)
    }
    own.update(map(id, metrics.variables(model) + _keras.states(model, "dtype")))
    found = {id(variable): variable for layer in layers for variable in _variables_of(layer)}
    kinds = ("float", "int", "bool")
    return [
        variable
        for key, variable in found.items()
        if key not in own and any(kind in str(getattr(variable, "dtype", "")) for kind in kinds)
    ]


def _variables_of(layer):
    """Return the variables that a layer itself, not one within it, has and does not train."""
    attribute = "_non_trainable_variables"  # of Keras 3
    return getattr(layer, attribute, None) or getattr(layer, "_non_trainable_weights", None) or ()


# What draws random numbers, or has the rows of a batch depend on one another, unlike in inference.
_RANDOM = ("rate", "stddev", "dropout", "recurrent_dropout")


@contextlib.contextmanager
def steady(model):
    """The context of a trial: a row's values depend neither on chance nor on the other rows.

    In it dropout and noise do nothing, and batch normalization takes its moving averages.
    """
    changed = []
    for layer in _keras.all_layers(model):
        if not type(layer).__module__.startswith(KERAS):
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
    """Return what Keras hands to a step, of these rows alone."""

    def chosen(leaf):
        has_rows = getattr(leaf, "shape", None) and leaf.shape[0] == rows
        return leaf[list(places)] if has_rows else leaf

    return tree_of(keras).map_structure(chosen, data)
