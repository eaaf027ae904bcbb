"""The weights of a Keras model on several ranks: the same at the start, and compared later on."""

from .. import _keras, errors
from . import checksum, metrics


def same_start(model, engine):
    """Set the weights, and the optimizer's state, to rank 0's.

    Raises:
        RankError: rank 0's model has other weights.
    """
    variables = _variables(model) + engine.state_besides(model)
    read, write = _keras.reader_and_writer(model)
    mine = read(variables)
    # MXNet's optimizers make their state as they train, so that rank 0's may have more of it.
    optimizer = model.optimizer if _is_of_mxnet(model) else None
    state = optimizer.get_weights() if optimizer else []
    # As after any fit() but the first, unless a script has set them on some ranks.
    if checksum.are_same(engine, list(map(checksum.checksum, mine + list(state)))):
        return
    sent, state = engine.broadcast([mine, state])
    if [value.shape for value in sent] != [value.shape for value in mine]:
        raise errors.ranks_differ(engine.place, model.name)
    if engine.place.rank:
        write(list(zip(variables, sent)))
        if optimizer:
            optimizer.set_weights(state)


def _is_of_mxnet(model):
    return hasattr(getattr(model, "optimizer", None), "create_state")


def _variables(model):
    """The variables of a model and its optimizer."""
    # For MXNet's see same_start().
    optimizer = None if _is_of_mxnet(model) else getattr(model, "optimizer", None)
    state = []
    maker = _keras.inner_model(model)
    if optimizer is not None and hasattr(maker, "_make_train_function"):
        maker._make_train_function()  # before that Keras 2's optimizers have no state
        # The second is what keeps the state of one of TensorFlow's own, in Keras 2.
        own = getattr(optimizer, "optimizer", None)
        state = optimizer.weights if own is None else own.variables()
    elif optimizer is not None and maker is not None:
        # The second is what tf.keras' legacy optimizers have.
        make = getattr(optimizer, "build", None) or optimizer._create_all_weights
        if not getattr(optimizer, "built", False) and model.trainable_variables:
            make(model.trainable_variables)
        state = optimizer.variables
    state = list(state() if callable(state) else state)
    # What a LossScaleOptimizer of tf.keras has besides.
    scale = getattr(optimizer, "_loss_scale", None)
    if scale is not None and hasattr(scale, "current_loss_scale"):
        state += [scale.current_loss_scale, scale.counter]
    return list(model.weights) + state


# Comparison ---------------------------------------------------------------------------------

# An epoch ends with a comparison if there were so many steps since the last one.
_OFTEN = 100


class WeightComparison:
    """When the ranks' variables are compared, which they must be at the same step on all ranks."""

    def __init__(self, engine):
        self.engine = engine
        self.steps = 0
        self.compared = 0  # after so many steps
        self.begun = 0  # how many there were when the last epoch ended
        self.names = []  # type: list  # rank 0's: Keras numbers layers by what else a rank has made

    def stepped(self, model):
        """Count a step of training."""
        self.steps += 1
        if checksum.is_due(self.steps):
            self.compare(model, self.steps)

    def epoch_ended(self, model, epoch, steps):
        if self.steps == self.begun:  # engines that compare weights in steps count none here
            self.steps += steps
        self.begun = self.steps
        if self.steps - self.compared >= _OFTEN:
            self.compare(model, "after epoch {}".format(epoch))

    def training_ended(self, model):
        if self.steps > self.compared:
            self.compare(model, "after the last epoch")

    def compare(self, model, when):
        """See ``checksum.verify``."""
        self.compared = self.steps
        read, write = _keras.reader_and_writer(model)
        own = set(map(id, _own(model)))
        variables = _variables(model) + self.engine.state_besides(model)
        variables = [v for v in variables if id(v) not in own]
        if len(self.names) != len(variables):
            names = [getattr(variable, "path", None) or variable.name for variable in variables]
            sent = self.engine.broadcast(names)
            self.names = sent if len(sent) == len(names) else names
        checksum.verify(
            self.engine,
            self.names,
            read(variables),
            lambda place, value: write([(variables[place], value)]),
            when,
        )


def _own(model):
    """Variables that are each rank's: metrics, whole numbers, and the states of stateful RNNs."""
    numbers = [weight for weight in model.weights if "int" in str(weight.dtype)]
    return metrics.variables(model) + numbers + _keras.states(model, "dtype")
