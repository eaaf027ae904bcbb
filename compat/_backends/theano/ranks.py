"""Theano as one of several ranks: an operation in the graph of a step computes means, over MPI.

Keras makes the training function by a method of the model. Within, the gradients that its optimizer
gets are the means over all ranks: one operation takes all of them, and state such as moving
averages as the step would set it, and returns their means. So whatever the optimizer does with
gradients (it clips them, for example) it does with the means, and it remains the user's object.
"""

import contextlib
import functools

from ... import _keras
from ..._ranks import keras2, own_functions, script_gradients, state
from . import gradient_marks, loss_gradients


class MakeTheanoTrainFunction(keras2.MakeFunction):
    """Method by which Keras makes the function that trains."""

    step_share = None  # this rank's fraction of the rows, in the step that runs
    loss = None  # of the model, a TheanoLoss

    def run(self, function, inputs):
        """Run a step with this rank's shard."""
        self.step_share, inputs = self.share(function, inputs)
        try:
            return function.made(inputs)
        finally:
            self.step_share = None

    @staticmethod
    def lines_of_gradients(model, outputs):
        """Return the script's lines that computed gradients in outputs that are not exchanged."""
        exchanged = loss_gradients.exchanged_by(_losses())
        return gradient_marks.lines_of_marked(model, outputs, exchanged)

    def share_of(self, rows):
        """Return this rank's fraction of the rows of all ranks, which run the same function."""
        if self.step_share is not None:
            return self.step_share
        return rows / float(self.engine.sum([rows])[0])

    def loss_of_ranks(self, model, loss):
        """Return the ``TheanoLoss`` of the model's loss, which is made once."""
        if self.loss is None or self.loss.loss is not loss:
            self.loss = loss_gradients.TheanoLoss(self.engine, model, loss, self.share_of)
        return self.loss

    @contextlib.contextmanager
    def making(self, model):
        """Make gradients and the model's new state means over all ranks within a block."""
        from keras import backend as K

        make, update = K.function, model.optimizer.get_updates
        others = _keras.states(model, "get_value") + state.tried(model)  # see keras2_state
        updates = [(v, new) for v, new in model.updates if v not in others and "float" in v.dtype]
        # The values that a step gives to moving averages and the like.
        averages = [new for _, new in updates if "float" in new.dtype]

        def get_updates(loss, params):
            """Give the optimizer the mean of the loss, with its gradients."""
            loss = self.loss_of_ranks(model, loss)
            loss.is_used = True
            try:
                updates = update(loss=loss.mean(params, averages), params=params)
            finally:
                loss.is_used = False
            new = [update[1] if isinstance(update, tuple) else update for update in updates]
            script_gradients.refuse_updates(model, self.lines_of_gradients(model, new))
            return updates

        def function(inputs, outputs, updates=(), **options):
            lines_of = functools.partial(self.lines_of_gradients, model)
            script_gradients.warn_of_metrics(model, outputs, lines_of)
            means = self.loss.means if self.loss is not None else {}
            updates = [(variable, means.get(new, new)) for variable, new in updates]
            return make(inputs, outputs, updates, **options)

        optimizer = model.optimizer
        with self.replaced(model, K, function=function):
            with self.replaced(model, optimizer, get_updates=get_updates):
                yield


class MakeTheanoTestFunction(keras2.MakeTestFunction):
    """Method by which Keras makes the function that evaluates."""

    @contextlib.contextmanager
    def making(self, model):
        """Check the metrics of the function that is made within a block."""
        from keras import backend as K

        make = K.function
        lines_of = functools.partial(MakeTheanoTrainFunction.lines_of_gradients, model)

        def function(inputs, outputs, *args, **options):
            script_gradients.warn_of_metrics(model, outputs, lines_of)
            return make(inputs, outputs, *args, **options)

        with self.replaced(model, K, function=function):
            yield


def distribute(model, engine):
    """Make a Keras model one of the ranks', in place. A second call changes nothing."""
    watch_gradients()
    keras2.install(model, engine, (MakeTheanoTrainFunction, MakeTheanoTestFunction))
    return model


def watch_gradients():
    """Make gradients of a model's loss those of all ranks, and mark others, from now on."""
    loss_gradients.watch(_loss_of, _losses)


def _losses():
    """Return the ``TheanoLoss`` of the models of the ranks."""
    makers = map(MakeTheanoTrainFunction.of, own_functions.models())
    return [maker.loss for maker in makers if maker.loss is not None]


def _loss_of(cost):
    """Return the ``TheanoLoss`` that exchanges the gradients of a cost, or None."""
    for loss in _losses():
        if loss.is_used:
            return loss
    for model in own_functions.models():
        if cost is getattr(model, "total_loss", None):
            return MakeTheanoTrainFunction.of(model).loss_of_ranks(model, cost)
    return None
