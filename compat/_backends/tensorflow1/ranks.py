"""TensorFlow 1's graphs of Keras, as one of several ranks: Horovod exchanges the gradients.

Keras makes the training function by a method of the model, in which the optimizer computes the
updates of a loss. There it gets another loss, which is the mean over all ranks and whose gradients
are the mean of theirs. So whatever the optimizer does with gradients (it clips, scales, or is one
of TensorFlow) it does with that mean, and it remains the user's object.
"""

import contextlib
import functools
import itertools
from typing import Any, List, Optional

from ... import _keras, errors
from ..._ranks import keras2, keras2_divisors, keras_model, own_functions, script_gradients
from ..._ranks import state as rank_state
from ..._ranks.engines import tensorflow_horovod
from . import gradient_marks, loss_gradients, ranked_batch_norm
from .graph import variables_written
from .optimizer_order import counting_in_order
from .resource_variables import warn_of_reference_variables

_numbers = itertools.count()  # of models


def distribute(model, place):
    """Make a Keras model one of the ranks', in place. A second call changes nothing."""
    engine = tensorflow_horovod.TensorFlowHorovod.join(place)
    if engine.tf.executing_eagerly():
        raise errors.unsupported(
            "tensorflow1",
            "train as one of several ranks after tf.enable_eager_execution()",
            "Remove that call, or use TensorFlow 2.",
        )
    warn_of_reference_variables(model)
    watch_gradients()
    keras2.install(model, engine, _KINDS)
    inner = _keras.inner_model(model)
    maker = inner and MakeTensorFlow1TrainFunction.of(inner)
    if maker and maker.requested not in (None, ranked_batch_norm.requested(inner)):
        _keras.trace_again(model)
    own_functions.watch_optimizers(
        [engine.tf.train.Optimizer, _keras.keras_of(model).optimizers.Optimizer]
    )
    return model


class MakeTensorFlow1Function(keras2.MakeFunction):
    """Method by which Keras makes one of a model's functions, whose graph is extended.

    Subclasses have ``extend(model, made)``, which adds operations to the function's graph, and
    ``begin(function, inputs)``, which agrees on the step before the graph runs, so that the graph
    need not.
    """

    def invoke(self, model):
        """Call Keras' method, and extend the function that it makes."""
        before = vars(model).get(self.function)
        super().invoke(model)
        function = vars(model)[self.function]
        if function is not before:
            with function.updates_op.graph.as_default(), self.engine.tf.name_scope("ranks"):
                self.extend(model, function.made)
            outputs = function.made.outputs
            lines_of = functools.partial(gradient_marks.lines_of_marked, model)
            script_gradients.warn_of_metrics(model, outputs, lines_of)

    def called(self, function, model):
        """Return a tensor: the result of ``function`` for the number of rows of the batch."""
        rows = self.rows(model)
        return self.engine.called(lambda rows: function(int(rows)), [rows], self.engine.tf.float64)

    def rows(self, model):
        """Return the number of rows of the batch, a tensor."""
        tf, batch = self.engine.tf, model.inputs[0]
        sparse = isinstance(batch, tf.SparseTensor)
        return batch.dense_shape[0] if sparse else tf.shape(batch)[0]

    def run(self, function, inputs):
        """Run a step, in which ranks wait for each other."""
        with self.engine.waiting("for the others' gradients"):
            if inputs and hasattr(inputs[0], "shape"):
                inputs = self.begin(function, inputs)
            return function.made(inputs)

    @staticmethod
    def written(made, updates, weights):
        """Return the variables that a function writes, those of ``weights`` among them."""
        return variables_written([made.updates_op], weights)

    lines_of_gradients = staticmethod(gradient_marks.lines_of_marked)

    @staticmethod
    def waiting_for_others(made, outputs):
        """Return a function of a script that waits where ranks exchange what it returns."""
        engine = gradient_marks.exchanging_engine(outputs)
        return made if engine is None else _WaitingFunction(made, engine)


class _WaitingFunction:
    """Function of ``K.function`` in which ranks exchange gradients, so that all must call it."""

    def __init__(self, made, engine):
        self.made, self.engine = made, engine

    def __getattr__(self, name):
        return getattr(self.made, name)

    def __call__(self, *args, **kwargs):
        with self.engine.waiting("for the others' gradients"):
            return self.made(*args, **kwargs)


class MakeTensorFlow1TestFunction(MakeTensorFlow1Function, keras2.MakeTestFunction):
    """Method by which Keras makes the function that evaluates."""

    begun = False  # this step's rows are counted

    def begin(self, function, inputs):
        """Agree on a step of ``evaluate()``; return this rank's shard."""
        if keras_model.RankedFit.of(function.model).in_step:
            _, inputs = self.share(function, inputs)
            self.begun = True
        return inputs

    def extend(self, model, made):
        """Count the rows of each step."""

        def count(rows):
            if not self.begun:
                keras_model.count(model, rows, False)
            self.begun = False
            return float(rows)

        made.updates_op = self.engine.tf.group(made.updates_op, self.called(count, model))


class MakeTensorFlow1TrainFunction(MakeTensorFlow1Function):
    """Method by which Keras makes the function that trains."""

    begun = None  # this rank's weight in the step, where it is known before the graph runs
    is_running = False  # a step is

    def __init__(self, engine):
        super().__init__(engine)
        self.number = next(_numbers)
        self.losses: "List[loss_gradients.TensorFlow1Loss]" = []  # those in use
        # The layers that these have use the statistics of the whole batch.
        self.requested: "Optional[List[Any]]" = None

    def begin(self, function, inputs):
        """Agree on a step, or check its loss; return this rank's shard."""
        if keras2_divisors.knows_divisors(function.made_for):
            self.begun, inputs = self.share(function, inputs)
        else:
            self.check_loss(function, inputs)
        return inputs

    def run(self, function, inputs):
        """Run a training step."""
        self.is_running = True
        try:
            return super().run(function, inputs)
        finally:
            self.is_running = False

    @contextlib.contextmanager
    def making(self, model):
        """Have the optimizer take the gradients of all ranks within a block."""
        name, before = f"{type(model.optimizer).__name__}.get_updates", vars(model)[self.function]
        self.engine.unexchanged[name] = None

        def loss_of(loss, parameters):
            self.engine.unexchanged.pop(name, None)
            with loss.graph.as_default(), self.engine.tf.name_scope("ranks"):
                return self.loss_of_ranks(model, loss).mean(parameters)

        def check(updates):
            script_gradients.refuse_updates(model, gradient_marks.lines_of_marked(model, updates))

        with counting_in_order(model.optimizer, loss_of, check=check):
            yield
        if vars(model)[self.function] is not before and name in self.engine.unexchanged:
            self.engine.unreached[name] = None  # gradients are exchanged, but not the loss

    def loss_of_ranks(self, model, loss):
        """Return the ``TensorFlow1Loss`` of a loss of the model, which is made once."""
        requested = ranked_batch_norm.requested(model)
        if requested != self.requested:
            self.requested, self.losses = requested, []
        for of_ranks in self.losses:
            if of_ranks.loss is loss:
                return of_ranks
        tf, share = self.engine.tf, self.share_of_step(model)
        with tf.name_scope(None), tf.control_dependencies(None):
            batch_norm = ranked_batch_norm.RankedBatchNorm(
                self.engine, model, self.rows(model), self.number
            )
        made = loss_gradients.TensorFlow1Loss(
            self.engine, model, loss, share, self.number, batch_norm
        )
        self.losses = [used for used in self.losses if used.loss is model.total_loss] + [made]
        return made

    def share_of_step(self, model):
        """Return this rank's fraction of the rows of whatever the graph computes, a tensor."""
        tf = self.engine.tf

        def count(rows):
            if self.is_running:  # else it is no step
                keras_model.count(model, rows, training=True)

        def share(rows):
            begun, self.begun = self.begun, None
            if begun is None:
                count(rows)
                begun = self.engine.share(rows)
            return begun

        with tf.name_scope("ranks"), tf.control_dependencies(None):
            if keras2_divisors.knows_divisors(model):
                return self.called(share, model)
            return self.engine.share_in_graph(self.rows(model), count)

    def extend(self, model, made):
        """Give state that a step sets (moving averages) its mean over all ranks."""
        tf = self.engine.tf
        if self.losses:
            whole = self.losses[-1].batch_norm.whole
            made.outputs = list(map(whole, made.outputs))
            made.updates_op = whole(made.updates_op)
        state = model.non_trainable_weights + self.engine.state_besides(model)
        written = variables_written([made.updates_op], state)
        tried = set(map(id, rank_state.tried(model)))  # see keras2_state
        state = [v for v in state if v.dtype.is_floating and v in written and id(v) not in tried]
        if not state:
            return
        with tf.control_dependencies([made.updates_op]):
            values = [variable.read_value() for variable in state]
            means = self.engine.mean(values, self.losses[-1].share, "state")
            assigned = [variable.assign(mean).op for variable, mean in zip(state, means)]
        made.updates_op = tf.group(*assigned)


def watch_gradients():
    """Make gradients of a model's loss those of all ranks, and mark others, from now on."""
    loss_gradients.watch(_loss_of_ranks)


def _loss_of_ranks(tensor):
    """Return the ``TensorFlow1Loss`` of the model whose loss a tensor is, or None."""
    for model in own_functions.models():
        maker = MakeTensorFlow1TrainFunction.of(model)
        losses = [used.loss for used in maker.losses] + [getattr(model, "total_loss", None)]
        if any(tensor is loss for loss in losses):
            return maker.loss_of_ranks(model, tensor)
    return None


def _kinds():
    """Yield the methods that make functions, also those for epochs of 1.13's tf.keras."""
    for kind in (MakeTensorFlow1TrainFunction, MakeTensorFlow1TestFunction):
        yield kind
        name = _keras.OF_EPOCHS[kind.function]
        names = {"function": name, "method": _keras.maker_of(name), "is_optional": True}
        yield type(kind.__name__, (kind,), names)


_KINDS = tuple(_kinds())
