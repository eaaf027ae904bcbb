"""The weights of a Keras model on several ranks: the same at the start, and compared later on."""

from .. import _keras, errors
from .._runtime.process import process
from . import checksum, horovod_optimizers, metrics, state, tables


class Start:
    """The weights and the optimizer's state with which a model begins: rank 0's, on all ranks.

    Attributes:
        numbers: their checksum and that of the model's tables, which the ranks gather.
    """

    def __init__(self, model, engine):
        horovod_optimizers.refuse(model)
        self.model, self.engine = model, engine
        self.variables = _variables(model, engine)
        self.read, self.write = _keras.reader_and_writer(model)
        self.mine = self.read(self.variables)
        # MXNet's optimizers make their state as they train, so that rank 0's may have more of it.
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


def _variables(model, engine):
    """The variables of a model and its optimizer, and those that its training sets besides."""
    # For MXNet's see same_start().
    optimizer = None if _is_of_mxnet(model) else getattr(model, "optimizer", None)
    state = []
    maker = _keras.inner_model(model)
    if optimizer is not None and hasattr(maker, "_make_train_function"):
        maker._make_train_function()  # before that Keras 2's optimizers have no state
        # The second is what keeps the state of one of TensorFlow's own, in Keras 2.
        own = getattr(optimizer, "optimizer", None)
        state = optimizer.weights if own is None else own.variables
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
    return _arrays(model) + state + engine.state_besides(model)


def _arrays(model):
    """The weights that are arrays; others are tables."""
    return [weight for weight in model.weights if not tables.is_table(weight)]


# Comparison ---------------------------------------------------------------------------------

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
        """Whether to compare at the end of this epoch, with which all training may end."""
        return self.steps - self.compared >= (1 if ends else _OFTEN)

    def compare(self, model, when, causes=checksum.CAUSES):
        """See ``checksum.verify``."""
        self.resolve(model, when, self.engine.gather(self.numbers(model)), causes)

    def numbers(self, model):
        """The checksum that ranks gather to compare."""
        process.comparisons += 1
        self.compared = self.steps
        read, _ = _keras.reader_and_writer(model)
        return checksum.numbers(read(self.variables(model)))

    def resolve(self, model, when, rows, causes=checksum.CAUSES):
        """Act upon the checksums of all ranks: see ``checksum.verify``."""
        if not checksum.same(rows):
            self._resolve(model, self.variables(model), when, causes)

    def held(self, model):
        """The checksum of what a model computes with, which is not the optimizer's state."""
        read, _ = _keras.reader_and_writer(model)
        return checksum.numbers(read(self._shared(model, _arrays(model))))

    def resolve_held(self, model, when, rows):
        """As ``resolve``, of the checksums that ``held`` gives."""
        if not checksum.same(rows):
            self._resolve(model, self._shared(model, _arrays(model)), when, _SET_ON_ONE_RANK)

    def _resolve(self, model, variables, when, causes):
        read, write = _keras.reader_and_writer(model)
        names = [getattr(variable, "path", None) or variable.name for variable in variables]

        def write_one(place, value):
            write([(variables[place], value)])

        checksum.resolve(self.engine, names, read(variables), write_one, when, causes)

    def variables(self, model):
        return self._shared(model, _variables(model, self.engine))

    def _shared(self, model, variables):
        """Those that are the same on all ranks.

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


# State of Keras 3 ---------------------------------------------------------------------------


def averaged(model, by_users=False):
    """The moving averages and their like: floats that layers set as they compute.

    Not weights that are frozen, nor what is a rank's own.

    Arguments:
        by_users: whether it is to be those alone that belong to layers of the user's own.
    """
    found = {
        id(variable): variable
        for layer in _keras.all_layers(model)
        if not (by_users and type(layer).__module__.startswith("keras."))
        for variable in layer._non_trainable_variables
        if "float" in str(variable.dtype)
    }
    own = _states(model) if found else ()
    return [variable for key, variable in found.items() if key not in own]


def same(model):
    """The variables that are the same on all ranks. Seeds and metrics are no weights."""
    own = _states(model)
    return [variable for variable in model.weights if id(variable) not in own]


def _states(model):
    """The ids of those that have a row for each row of the batch: the states of stateful RNNs."""
    keras = _keras.keras_of(model)
    return {
        id(state)
        for layer in _keras.all_layers(model)
        if isinstance(layer, keras.layers.RNN) and layer.stateful
        for state in keras.tree.flatten(layer.states)
        if state is not None
    }


def warn_of_mean(variable):
    """Say what becomes of a variable that each rank has set to another value."""
    errors.warn(
        "Each rank sets {!r} from its own rows. All ranks get the mean, weighted by rows, which is "
        "one process's value for a moving average; it is not for a sum over rows. Divide such a "
        "sum by the number of rows.".format(variable.path)
    )


def scaling(optimizer, share):
    """What has a ``LossScaleOptimizer`` scale the loss of this rank's share of the rows.

    So gradients overflow where those of one process would.

    Arguments:
        share: a function that gives the share in a loss's type of number.

    Returns:
        The method to replace, by its name; and a list, empty until a loss was scaled.
    """
    scaled = []  # type: list
    if not hasattr(optimizer, "inner_optimizer"):
        return {}, scaled
    scale_loss = optimizer.scale_loss

    def scale_share(loss):
        scaled.append(loss)
        return scale_loss(loss) * share(loss.dtype)

    return {"scale_loss": scale_share}, scaled
