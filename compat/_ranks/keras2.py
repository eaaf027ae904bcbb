"""Functions that Keras 2 makes to train and evaluate a model, as those of one of several ranks.

Before Keras 2.3 losses are divided by masks and sample weights, too. These divisors are summed up
over all ranks where they agree on a step, and the sample weights that Keras is handed correct what
it divides by too little (``keras2_divisors``).
"""

import contextlib
import functools

from .. import _keras
from .._runtime import patching
from . import (
    keras2_divisors,
    keras2_losses,
    keras2_state,
    keras_model,
    own_functions,
    ranked_methods,
    step_functions,
)
from .keras2_divisors import Divisors
from .keras_model import RankedFit, RankedMethod, count


def install(model, engine, kinds):
    """Make the methods of a model those of a rank, and the functions that Keras makes for it.

    Training goes on. A second time changes nothing. BatchNorm normalises each rank's rows by
    their own statistics, and its moving averages take one step to the mean of theirs.

    Arguments:
        model: one of Keras 2.
        engine: that of the ranks.
        kinds: the backend's subclasses of ``MakeFunction``.
    """
    if RankedFit.of(model) is not None:
        return

    with _keras.rebuilding_functions(_keras.inner_model(model)):
        _keras.InnerModel.have_prepared(
            model, lambda maker: ranked_methods.install(maker, engine, kinds)
        )
        own_functions.watch(model, kinds[0])
    keras_model.install(model, engine)
    RankedFit.of(model).divides = keras2_divisors.divides


class MakeFunction(RankedMethod):
    """The method by which Keras 2 makes a model's function, here the one that trains.

    ``MakeTestFunction`` has the names of the other one.
    """

    method = "_make_train_function"
    steps = ("train",)
    one_of = "what makes train functions"
    function = "train_function"
    training = True
    updates_by_itself = False  # whether there is ``update()``, which does a step's updates alone

    def invoke(self, model):
        """Have Keras make the function, and make a rank's of it."""
        make, function = self.plain(model), vars(model).get(self.function)
        keras2_losses.refuse_sums(model)
        with own_functions.by_keras(), self.making(model):
            make()  # which may only warn
        # tf.keras makes another one where there are sample weights for the first time; keras-mxnet
        # makes another one each time, of which the first will do.
        if not isinstance(function, RankedKeras2Function) or function.feeds != _feeds(model):
            function = RankedKeras2Function(self, model, vars(model)[self.function])
        patching.attach(model, self.function, function)

    @staticmethod
    def written(made, updates, weights):
        """Return those weights that a function of ``K.function`` sets by its updates."""
        return [update[0] for update in updates if isinstance(update, tuple)]

    @staticmethod
    def lines_of_gradients(model, outputs):
        """Return the lines that compute outputs from gradients of this rank's rows alone.

        There are none where Keras computes no gradients.
        """
        return ()

    @staticmethod
    def waiting_for_others(made, outputs):
        """Return a user-defined function so that it waits for other ranks if it has gradients."""
        return made

    @contextlib.contextmanager
    def making(self, model):
        """Return the context in which Keras makes the function."""
        yield

    def replaced(self, model, owner, **functions):
        """Replace functions that Keras calls to make this one, as ``step_functions.replaced``."""
        before = vars(model).get(self.function)

        def is_due(called):
            return vars(model).get(self.function) is not before

        return step_functions.replaced(self.engine, owner, is_due, **functions)

    def run(self, function, inputs):
        """Run one step of a ``RankedKeras2Function``, which calls ``function.made``."""

    def share(self, function, inputs):
        """Return this rank's share of the step that all ranks begin, and the function's inputs.

        Arguments:
            function: a ``RankedKeras2Function``.
            inputs: those that Keras passes: arrays of rows, and whether it is training.
        """
        rows = rows_of(inputs)
        count(function.model, rows, self.training)
        self.check_loss(function, inputs)
        divisors = function.divisors.of_inputs(inputs)
        share = self.engine.share(rows, [rows * value for value in divisors])
        total = rows / share
        return share, function.divisors.corrected(inputs, divisors, self.engine.totals / total)

    def check_loss(self, function, inputs):
        """Try custom losses before the first step."""
        if self.training and not function.started:
            keras2_losses.check_loss(function.made_for, inputs, rows_of(inputs))


def _feeds(model):
    """Return the placeholders of the model's sample weights."""
    return list(map(id, getattr(model, "_feed_sample_weights", None) or ()))


def rows_of(inputs):
    """Return the number of rows of a function's inputs."""
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
        compute = functools.partial(maker.update, self) if maker.updates_by_itself else None
        self.state = keras2_state.UpdatedState(maker.engine, model, compute)
        self.divisors = Divisors(model)

    def __getattr__(self, name):  # its outputs, for example, and callbacks may add to them
        return getattr(self.made, name)

    def __call__(self, inputs):
        if self.maker.training and not self.started:
            keras_model.same_start(self.model, self.maker.engine)
            RankedFit.of(self.model).first_batch.see(inputs)
        if self.maker.training:
            with self.state.merged(inputs):
                result = self.maker.run(self, inputs)
        else:
            result = self.maker.run(self, inputs)
        self.started = True
        if self.maker.training:
            RankedFit.of(self.model).stepped(self.model)
        return self.divisors.corrected_results(result)


class MakeTestFunction(MakeFunction):
    """The method by which Keras 2 makes the function that evaluates."""

    method = "_make_test_function"
    steps = ("evaluate",)
    one_of = "what makes test functions"
    function = "test_function"
    training = False

    def run(self, function, inputs):
        """Run one batch of an evaluation."""
        if RankedFit.of(function.model).in_step:
            _, inputs = self.share(function, inputs)
        else:
            count(function.model, rows_of(inputs), False)
        return function.made(inputs)
