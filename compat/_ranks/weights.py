"""The weights of a Keras model with which all ranks begin."""

from .. import _keras, errors
from . import checksum, horovod_optimizers, tables


class Start:
    """The start of training from rank 0's weights and optimizer's state, on all ranks.

    Attributes:
        numbers: the checksum of these and of the model's tables, which the ranks gather.
    """

    def __init__(self, model, engine):
        horovod_optimizers.refuse(model)
        self.model, self.engine = model, engine
        self.variables = variables_of(model, engine)
        self.read, self.write = _keras.reader_and_writer(model)
        self.mine = self.read(self.variables)
        # MXNet's optimizers make their state in training, so that rank 0's may have more of it.
        self.optimizer = model.optimizer if _is_of_mxnet(model) else None
        self.state = self.optimizer.get_weights() if self.optimizer else []
        self.numbers = tables.numbers(model) + checksum.numbers(self.mine + list(self.state))

    def agree(self, rows):
        """Set them to rank 0's, unless all ranks have gathered the same.

        Raises:
            RankError: rank 0's model has other weights, or other tables.
        """
        count = len(rows[0]) // 2
        tables.agree(self.model, self.engine, [row[:count] for row in rows])
        # As after any fit() but the first, unless a script has set them on some ranks.
        if checksum.same(rows):
            return
        sent, state = self.engine.broadcast([self.mine, self.state])
        if [value.shape for value in sent] != [value.shape for value in self.mine]:
            raise errors.ranks_differ(self.engine.place, self.model.name)
        if self.engine.place.rank:
            self.write(list(zip(self.variables, sent)))
            if self.optimizer:
                self.optimizer.set_weights(state)


def same_start(model, engine):
    """Set the weights, and the optimizer's state, to rank 0's: see ``Start``."""
    start = Start(model, engine)
    start.agree(engine.gather(start.numbers))


def _is_of_mxnet(model):
    return hasattr(getattr(model, "optimizer", None), "create_state")


def variables_of(model, engine):
    """Return the variables of a model and of its optimizer, and others that training sets."""
    # For MXNet's see same_start().
    optimizer = None if _is_of_mxnet(model) else getattr(model, "optimizer", None)
    state = []
    maker = _keras.inner_model(model)
    if optimizer is not None and hasattr(maker, "_make_train_function"):
        # Of a Sequential that was built without an input, tf.keras 1.15 postpones compile().
        if getattr(maker, "_is_compiled", True):
            maker._make_train_function()  # before that Keras 2's optimizers have no state
            # In Keras 2 an optimizer of TensorFlow's keeps its state itself.
            wrapped = getattr(optimizer, "optimizer", None)
            state = optimizer.weights if wrapped is None else wrapped.variables
    elif optimizer is not None and maker is not None:
        # tf.keras' legacy optimizers have the second one.
        make = getattr(optimizer, "build", None) or optimizer._create_all_weights
        # Keras 3 builds what is left of a model, and then its optimizer, as fit() begins.
        is_left = hasattr(model, "_symbolic_build") and not _is_complete(model)
        if not (getattr(optimizer, "built", False) or is_left) and model.trainable_variables:
            make(model.trainable_variables)
        state = optimizer.variables
    state = list(state() if callable(state) else state)
    # A LossScaleOptimizer of tf.keras has more.
    scale = getattr(optimizer, "_loss_scale", None)
    if scale is not None and hasattr(scale, "current_loss_scale"):
        state += [scale.current_loss_scale, scale.counter]
    return arrays_of(model) + state + engine.state_besides(model)


def _is_complete(model):
    return all(layer.built for layer in _keras.all_layers(model))


def arrays_of(model):
    """Return the weights that are arrays; others are tables."""
    return [weight for weight in model.weights if not tables.is_table(weight)]
