"""The functions of Keras 2, which train and evaluate a model, as those of one of several ranks.

Before Keras 2.3 the loss of an output is divided by the share of its rows that a mask leaves, and
by that of the sample weights that are not zero. A rank knows both of its own rows before it runs
the function. So all ranks' are summed up where they agree on a step, and what Keras divided by too
little is in the sample weights that it is handed (``RankedKeras2Function``).
"""

import contextlib
import functools

import numpy as np

from .. import _keras, errors
from .._runtime import patching
from . import keras2_state, keras_model, losses, own_functions, ranked_methods, step_functions
from .keras_model import RankedFit, RankedMethod, count

# In place of weights that are all zero, by whose number Keras would divide: adds nothing.
_NEXT_TO_NOTHING = 1e-30


def install(model, engine, kinds):
    """As ``keras_model.install``, and the model makes functions of a rank from now on.

    Training goes on. A second time changes nothing. BatchNorm normalises each rank's rows by
    their own statistics, and its moving averages take one step to the mean of theirs.

    Arguments:
        kinds: subclasses of ``MakeFunction``.
    """
    if RankedFit.of(model) is not None:
        return

    with _keras.rebuilding_functions(_keras.inner_model(model)):
        _keras.InnerModel.have_prepared(
            model, lambda maker: ranked_methods.install(maker, engine, kinds)
        )
        own_functions.watch(model, kinds[0])
    keras_model.install(model, engine)
    RankedFit.of(model).divides = _divides


class MakeFunction(RankedMethod):
    """The method by which Keras 2 makes one of a model's functions, which becomes a rank's.

    That of the function that trains; ``MakeTestFunction`` has the other one's names.
    """

    method = "_make_train_function"
    steps = ("train",)
    one_of = "what makes train functions"
    function = "train_function"
    training = True
    updates_by_itself = False  # whether there is ``update()``, which does a step's updates alone

    def invoke(self, model):
        make, function = self.plain(model), vars(model).get(self.function)
        _refuse_sums(model)
        with own_functions.by_keras(), self.making(model):
            make()  # which may only warn
        # tf.keras makes another one where there are sample weights for the first time; keras-mxnet
        # makes another one each time, of which the first will do.
        if not isinstance(function, RankedKeras2Function) or function.feeds != _feeds(model):
            function = RankedKeras2Function(self, model, vars(model)[self.function])
        patching.attach(model, self.function, function)

    @staticmethod
    def written(made, updates, weights):
        """Return those of some weights that a function of ``K.function`` with updates sets."""
        return [update[0] for update in updates if isinstance(update, tuple)]

    @staticmethod
    def lines_of_gradients(model, outputs):
        """Return the lines at which gradients of this rank's rows alone in outputs were computed.

        Gradients of the model's weights. None where Keras has no gradients to compute with.
        """
        return ()

    @staticmethod
    def waiting_for_others(made, outputs):
        """Return a function of a script's; one that exchanges gradients waits for the others."""
        return made

    @contextlib.contextmanager
    def making(self, model):
        """The context in which Keras makes the function."""
        yield

    def replaced(self, model, owner, **functions):
        """As ``step_functions.replaced``, while Keras makes a function, which it does by these."""
        before = vars(model).get(self.function)

        def is_due(called):
            return vars(model).get(self.function) is not before

        return step_functions.replaced(self.engine, owner, is_due, **functions)

    def run(self, function, inputs):
        """Call a ``RankedKeras2Function``'s, ``function.made``."""

    def share(self, function, inputs):
        """Return this rank's share of the step that all ranks begin, and the function's inputs.

        Arguments:
            inputs: what Keras calls it with: arrays of rows, and whether it is training.
        """
        rows = rows_of(inputs)
        count(function.model, rows, self.training)
        self.check_loss(function, inputs)
        mine = function.divisors(inputs)
        share = self.engine.share(rows, [rows * value for value in mine])
        total = rows / share
        return share, function.divided(inputs, mine, self.engine.totals / total)

    def check_loss(self, function, inputs):
        """Try a loss that is not Keras' own before the first step."""
        if self.training and not function.started:
            _check_loss(function.made_for, inputs)


def _feeds(model):
    """Return the placeholders of the model's sample weights."""
    return list(map(id, getattr(model, "_feed_sample_weights", None) or ()))


def rows_of(inputs):
    return int(inputs[0].shape[0])


class RankedKeras2Function:
    """A function that Keras 2 made for a model that is one of several ranks."""

    def __init__(self, maker, model, made):
        self.maker = maker
        self.made_for = model
        # A Sequential before Keras 2.2 has another model in it, which made the function.
        self.model = getattr(model, "callback_model", None) or model
        self.feeds = _feeds(model)
        self.made = made
        self.started = False
        self.means = None  # the function of ``_left``
        self.factors = None  # by which each output's unweighted metrics are too large
        compute = functools.partial(maker.update, self) if maker.updates_by_itself else None
        self.state = keras2_state.UpdatedState(maker.engine, model, compute)
        # What it is called with has the sample weights at these places.
        self.places = range(0)
        self.masks = {}  # place among the weights -> the mask
        if knows_divisors(model):
            before = len(model._feed_inputs) + len(model._feed_targets)
            self.places = range(before, before + len(model._feed_sample_weights))
            self.masks = masks_of(model)

    def __getattr__(self, name):  # its outputs, for example, and callbacks may add to them
        return getattr(self.made, name)

    def __call__(self, inputs):
        if self.maker.training and not self.started:
            keras_model.same_start(self.model, self.maker.engine)
        if self.maker.training:
            with self.state.merged(inputs):
                result = self.maker.run(self, inputs)
        else:
            result = self.maker.run(self, inputs)
        self.started = True
        if self.maker.training:
            RankedFit.of(self.model).comparison.stepped(self.model)
        return self.of_all_ranks(result)

    # What Keras before 2.3 divides the loss of each output by, as a share of the rows -----------

    def divisors(self, inputs):
        """Return the share that masks leave, and that of nonzero weights, for each output."""
        left = [1.0] * len(self.places)
        for output, mean in zip(sorted(self.masks), self._left(inputs) if self.masks else ()):
            left[output] = float(mean)
            if not left[output]:
                raise errors.UnsupportedError(
                    "All rows of a batch on one rank are masked in output {!r} of {!r}: this "
                    "Keras divides by the number of those left. Shuffle the rows, or use "
                    "larger batches.".format(self.made_for.output_names[output], self.made_for.name)
                )
        return left + [float(np.mean(inputs[place] != 0)) for place in self.places]

    def _left(self, inputs):
        model = self.made_for
        K = _keras.keras_of(model).backend
        rest = list(inputs[self.places[-1] + 1 :])
        if self.means is None:
            masks = [self.masks[output] for output in sorted(self.masks)]
            means = [K.mean(K.cast(mask, K.floatx())) for mask in masks]
            phase = [K.learning_phase()] * bool(rest)
            self.means = K.function(model._feed_inputs + phase, means)
        return self.means(list(inputs[: len(model._feed_inputs)]) + rest)

    def divided(self, inputs, mine, all_ranks):
        """Return the function's inputs, weighted so that each loss is a part of all ranks'."""
        outputs = len(self.places)
        ratios = [m / a if a else 1.0 for m, a in zip(mine, all_ranks)]
        self.factors = ratios[:outputs]
        if all(ratio == 1.0 for ratio in ratios):
            return inputs
        inputs = list(inputs)
        for place, left, given in zip(self.places, ratios[:outputs], ratios[outputs:]):
            weights = np.asarray(inputs[place])
            if given:
                inputs[place] = (weights * (left * given)).astype(weights.dtype)
            else:
                inputs[place] = np.full_like(weights, _NEXT_TO_NOTHING)
        return inputs

    def of_all_ranks(self, result):
        """Return the function's result.

        Metrics without weights are divided by masks, too.
        """
        if not self.masks or self.factors is None or not isinstance(result, (list, tuple)):
            return result
        result = list(result)
        names = getattr(self.made_for, "output_names", [])
        place = 1 + (len(names) if len(names) > 1 else 0)  # after the losses
        for output, (plain, weighted) in enumerate(_numbers_of_metrics(self.made_for)):
            for metric in range(place, place + plain):
                result[metric] = result[metric] * self.factors[output]
            place += plain + weighted
        self.factors = None
        return result


class MakeTestFunction(MakeFunction):
    method = "_make_test_function"
    steps = ("evaluate",)
    one_of = "what makes test functions"
    function = "test_function"
    training = False

    def run(self, function, inputs):
        if RankedFit.of(function.model).in_step:
            _, inputs = self.share(function, inputs)
        else:
            count(function.model, rows_of(inputs), False)
        return function.made(inputs)


# What Keras divides by ------------------------------------------------------------------------


def knows_divisors(model):
    """Return whether this Keras divides by more than the number of rows, as before 2.3."""
    return hasattr(model, "_feed_sample_weights") and not hasattr(model, "_prepare_total_loss")


def _divides(model, weighted):
    """Return whether evaluating divides by what other ranks know.

    ``weighted``: by sample weights.
    """
    maker = _keras.inner_model(model)
    if maker is None or not knows_divisors(maker) or not maker._feed_sample_weights:
        return False
    return weighted or bool(masks_of(maker))


def masks_of(model):
    """Return the masks of the outputs that have a loss, by their places among those."""
    masks = model.compute_mask(model.inputs, mask=None) if model.inputs else None
    masks = masks if isinstance(masks, list) else [masks]
    trained = [place for place, weight in enumerate(model.sample_weights) if weight is not None]
    return {
        number: masks[place]
        for number, place in enumerate(trained)
        if place < len(masks) and masks[place] is not None
    }


def _numbers_of_metrics(model):
    """Return how many plain and weighted metrics each output has."""

    def of(metrics, name):
        if isinstance(metrics, dict):
            metrics = metrics.get(name, [])
        return len(metrics) if isinstance(metrics, (list, tuple)) else int(bool(metrics))

    return [
        (of(model.metrics, name), of(getattr(model, "weighted_metrics", None), name))
        for name in model.output_names
    ]


# Losses that are no means ---------------------------------------------------------------------


def _refuse_sums(model):
    """Keras 2.3 and tf.keras have losses that are objects, which know how they reduce."""
    for loss in getattr(model, "loss_functions", None) or ():
        reduction = getattr(loss, "reduction", None)
        if reduction in ("sum", "none"):
            raise errors.UnsupportedError(
                "{!r} cannot train on several ranks with a loss of reduction={!r}: ranks average "
                "means over rows. Use reduction='sum_over_batch_size', and a learning rate times "
                "the batch size for the steps of a sum.".format(model.name, reduction)
            )


def _check_loss(model, inputs):
    """Try a loss that may be no mean over rows, on this rank's first batch."""
    K = _keras.keras_of(model).backend
    functions = [loss for loss in getattr(model, "loss_functions", None) or () if loss is not None]
    own = [loss for loss in functions if losses.may_mix_rows(loss)]
    of_weights = set(map(id, model.get_losses_for(None)))
    added = [loss for loss in model.losses if id(loss) not in of_weights]
    if not own and not added or any(mask is not None for mask in masks_of(model).values()):
        return
    phase = [K.learning_phase()] if isinstance(inputs[-1], (int, float)) else []
    feeds_of_weights = model._feed_sample_weights
    feeds = model._feed_inputs + model._feed_targets + feeds_of_weights
    function = K.function(feeds + phase, [model.total_loss])
    arrays = inputs[: len(feeds)]
    if any(np.any(weights != 1) for weights in arrays[len(feeds) - len(feeds_of_weights) :]):
        return

    def loss_of(places):
        return float(function([array[places] for array in arrays] + [0] * len(phase))[0])

    losses.check(model.name, None, rows_of(inputs), loss_of)
