"""TensorFlow 1's graphs of Keras, as one of several ranks: Horovod carries the gradients.

Keras makes the function that trains by a method of the model, where it asks the optimizer for
updates of a loss. The optimizer gets another loss there, which is the mean of all ranks' and has
the mean of their gradients, so that whatever it does with them (it clips, scales, or is
TensorFlow's own) it does with that mean, and stays the user's.
"""

import contextlib
import functools

from ... import _keras, errors
from ..._ranks import keras2, keras_model, own_functions
from ..._ranks import state as rank_state
from ..._ranks.engines import tensorflow_horovod
from .graph import variables_written
from .step_order import counting_in_order
from .variables import warn_of_reference_variables


def distribute(model, place):
    """Make a model of Keras one of the ranks', in place. A second time changes nothing."""
    engine = tensorflow_horovod.TensorFlowHorovod.join(place)
    if engine.tf.executing_eagerly():
        raise errors.unsupported(
            "tensorflow1",
            "train as one of several ranks after tf.enable_eager_execution()",
            "Remove that call, or use TensorFlow 2.",
        )
    warn_of_reference_variables(model)
    keras2.install(model, engine, _KINDS)
    own_functions.watch_optimizers(
        [engine.tf.train.Optimizer, _keras.keras_of(model).optimizers.Optimizer]
    )
    return model


class MakeTensorFlow1Function(keras2.MakeFunction):
    """The method by which Keras makes one of a model's functions, whose graph gets some more.

    Subclasses have ``extend(model, made)``, which adds to what the function does, and
    ``begin(function, inputs)``, which agrees on the step before the graph runs; that then asks for
    no more.
    """

    def invoke(self, model):
        before = vars(model).get(self.function)
        super().invoke(model)
        function = vars(model)[self.function]
        if function is not before:
            with function.updates_op.graph.as_default(), self.engine.tf.name_scope("ranks"):
                self.extend(model, function.made)

    def called(self, function, model):
        """A tensor: what ``function`` returns for the number of rows of the batch."""
        rows = self.rows(model)
        return self.engine.called(lambda rows: function(int(rows)), [rows], self.engine.tf.float64)

    def rows(self, model):
        tf, batch = self.engine.tf, model.inputs[0]
        sparse = isinstance(batch, tf.SparseTensor)
        return batch.dense_shape[0] if sparse else tf.shape(batch)[0]

    def run(self, function, inputs):
        with self.engine.waiting("for the others' gradients"):
            if inputs and hasattr(inputs[0], "shape"):
                inputs = self.begin(function, inputs)
            return function.made(inputs)

    @staticmethod
    def written(made, updates, weights):
        return variables_written([made.updates_op], weights)


class MakeTensorFlow1TestFunction(MakeTensorFlow1Function, keras2.MakeTestFunction):
    begun = False  # this step's rows are counted

    def begin(self, function, inputs):
        if keras_model.RankedFit.of(function.model).in_step:
            _, inputs = self.share(function, inputs)
            self.begun = True
        return inputs

    def extend(self, model, made):
        def count(rows):
            if not self.begun:
                keras_model.count(model, rows, False)
            self.begun = False
            return float(rows)

        made.updates_op = self.engine.tf.group(made.updates_op, self.called(count, model))


class MakeTensorFlow1TrainFunction(MakeTensorFlow1Function):
    share_tensor = None  # of the function made last
    begun = None  # the share of the step, where it is known before the graph runs

    def begin(self, function, inputs):
        if keras2.knows_divisors(function.made_for):
            self.begun, inputs = self.share(function, inputs)
        else:
            self.check_loss(function, inputs)
        return inputs

    @contextlib.contextmanager
    def making(self, model):
        """Within, the optimizer takes the gradients of all ranks."""
        name = f"{type(model.optimizer).__name__}.get_updates"
        self.engine.unexchanged[name] = None

        def loss_of(*arguments):
            self.engine.unexchanged.pop(name, None)
            return self.loss_of_all_ranks(model, *arguments)

        with counting_in_order(model.optimizer, loss_of):
            yield

    def loss_of_all_ranks(self, model, loss, parameters):
        """The mean of the loss over all ranks' rows, whose gradients are those of all ranks."""
        tf, count = self.engine.tf, functools.partial(keras_model.count, model, training=True)

        def share(rows):
            begun, self.begun = self.begun, None
            if begun is None:
                count(rows)
                begun = self.engine.share(rows)
            return begun

        with loss.graph.as_default(), tf.name_scope("ranks"):
            if keras2.knows_divisors(model):
                self.share_tensor = self.called(share, model)
            else:
                self.share_tensor = self.engine.share_in_graph(self.rows(model), count)
            gradients = tf.gradients(loss, parameters)
            pairs = [(p, g) for p, g in zip(parameters, gradients) if g is not None]
            means = self.engine.mean([g for _, g in pairs], self.share_tensor, "gradients")
            zeros = [_zero(tf, p, mean, model.name) for mean, (p, _) in zip(means, pairs)]
            # Exchanged by steps alone that use the loss itself, such as one whose rate it is.
            (mean,) = self.engine.mean([loss], self.share_tensor, "loss")
            return tf.add_n(
                [tf.stop_gradient(mean)] + [tf.cast(zero, mean.dtype) for zero in zeros]
            )

    def extend(self, model, made):
        """Give state that a step sets (moving averages) its mean over all ranks."""
        tf = self.engine.tf
        state = model.non_trainable_weights + self.engine.state_besides(model)
        written = variables_written([made.updates_op], state)
        tried = set(map(id, rank_state.tried(model)))  # see keras2_state
        state = [v for v in state if v.dtype.is_floating and v in written and id(v) not in tried]
        if not state:
            return
        with tf.control_dependencies([made.updates_op]):
            values = [variable.read_value() for variable in state]
            means = self.engine.mean(values, self.share_tensor, "state")
            assigned = [variable.assign(mean).op for variable, mean in zip(state, means)]
        made.updates_op = tf.group(*assigned)


def _zero(tf, parameter, gradient, name):
    """A scalar that is 0, and whose gradient with respect to a parameter is this one."""

    def once(mean):
        def refuse(upstream):
            raise errors.UnsupportedError(
                f"The optimizer of {name!r} differentiates the gradients that it is given once "
                "more. Ranks exchange first derivatives alone: such a step would use those of each "
                "rank's own rows. Use an optimizer of first derivatives on several ranks."
            )

        return tf.identity(mean), refuse

    def zero(value):
        def times(upstream):
            if isinstance(gradient, tf.IndexedSlices):
                rows = tf.custom_gradient(once)(gradient.values)
                rows *= tf.cast(upstream, rows.dtype)
                return tf.IndexedSlices(rows, gradient.indices, gradient.dense_shape)
            mean = tf.custom_gradient(once)(gradient)
            return mean * tf.cast(upstream, mean.dtype)

        return tf.zeros([], value.dtype), times

    return tf.custom_gradient(zero)(parameter)


def _kinds():
    """The methods that make functions, with those for epochs of TensorFlow 1.13's tf.keras."""
    for kind in (MakeTensorFlow1TrainFunction, MakeTensorFlow1TestFunction):
        yield kind
        name = _keras.OF_EPOCHS[kind.function]
        names = {"function": name, "method": _keras.maker_of(name), "is_optional": True}
        yield type(kind.__name__, (kind,), names)


_KINDS = tuple(_kinds())
