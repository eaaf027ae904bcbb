"""A Keras model as one of several ranks: what is the same on every engine.

The model gets methods of its own that hide its class's: ``fit`` begins with rank 0's weights on
all ranks, ends every epoch on all at once and averages its metrics; ``evaluate`` averages; what
saves does so on rank 0 alone. How gradients are averaged is each backend's.
"""

import contextlib
import inspect
import os
import shutil
import tempfile

from . import _keras, errors

# Names of the methods that write files. Other ranks do nothing there.
SAVING = ("save", "save_weights", "export")


def install(model, engine):
    """Make the methods of this model those of a rank. A second time changes nothing."""
    for kind in (RankedFit, RankedFitGenerator, RankedEvaluate, RankedEvaluateGenerator):
        if hasattr(type(model), kind.method) and kind.of(model) is None:
            kind(engine).install(model)
    for method in SAVING:
        if hasattr(type(model), method) and RankedSave.named(method).of(model) is None:
            RankedSave.named(method)(engine).install(model)


class RankedMethod(_keras.InstanceMethod):
    """A method of a model that is one of several ranks."""

    def __init__(self, engine):
        super().__init__([])
        self.engine = engine


# The same weights -----------------------------------------------------------------------------


def same_start(model, engine):
    """Set the weights, and the optimizer's state, to rank 0's.

    Raises:
        RankError: rank 0's model has other weights.
    """
    variables, read, write = _variables(model)
    mine = read(variables)
    # MXNet's optimizers make their state as they train, so that rank 0's may have more of it.
    optimizer = getattr(model, "optimizer", None) if _is_of_mxnet(model) else None
    sent, state = engine.broadcast([mine, optimizer.get_weights() if optimizer else []])
    if [value.shape for value in sent] != [value.shape for value in mine]:
        raise errors.ranks_differ(engine.ranks, model.name)
    if engine.ranks.rank:
        write(list(zip(variables, sent)))
        if optimizer:
            optimizer.set_weights(state)


def _is_of_mxnet(model):
    return hasattr(getattr(model, "optimizer", None), "create_state")


def _variables(model):
    """The variables of a model and its optimizer, and what reads and writes a list of them."""
    keras = _keras.keras_of(model)
    optimizer = getattr(model, "optimizer", None)
    state = []
    maker = _keras.that_makes_functions(model)
    if _is_of_mxnet(model):
        pass  # see same_start()
    elif optimizer is not None and hasattr(maker, "_make_train_function"):
        maker._make_train_function()  # before that Keras 2's optimizers have no state
        # The second is what keeps the state of one of TensorFlow's own, in Keras 2.
        own = getattr(optimizer, "optimizer", None)
        state = optimizer.weights if own is None else own.variables()
    elif optimizer is not None and maker is not None:
        # The second is what tf.keras' legacy optimizers have.
        make = getattr(optimizer, "build", None) or optimizer._create_all_weights
        if not getattr(optimizer, "built", False):
            make(model.trainable_variables)
        state = optimizer.variables
    variables = list(model.weights) + list(state() if callable(state) else state)
    if hasattr(keras.backend, "batch_set_value"):
        return variables, keras.backend.batch_get_value, keras.backend.batch_set_value

    def read(variables):
        return [keras.ops.convert_to_numpy(variable) for variable in variables]

    def write(pairs):
        for variable, value in pairs:
            variable.assign(value)

    return variables, read, write


# Fit and evaluate -----------------------------------------------------------------------------


def count(model, rows, training):
    """Note a batch of so many rows. Called wherever a backend sees one."""
    fit = RankedFit.of(model)
    if fit is not None:
        fit.rows[training] += rows


def mean(engine, values, rows):
    """Each rank's means, by name, to the means over all ranks' rows; rank 0's names count.

    A rank that lacks one of them (validation data on rank 0 alone) counts for nothing there.
    """
    names = engine.broadcast(list(values))
    parts = []
    for name in names:
        weight = float(rows(name)) if name in values else 0.0
        parts += [weight, weight * float(values.get(name, 0.0))]
    sums = engine.sum(parts) if parts else []
    return {
        name: float(total / weight) if weight else values.get(name)
        for name, weight, total in zip(names, sums[::2], sums[1::2])
    }


class RankedFit(RankedMethod):
    """``fit`` from rank 0's weights, with metrics over all ranks' rows."""

    method = "fit"

    def __init__(self, engine):
        super().__init__(engine)
        self.rows = {True: 0, False: 0}  # seen in this epoch, by whether it was in training
        self.running = False

    def __call__(self, model, *args, **kwargs):
        return self.run(model, self.plain(model), args, kwargs)

    def run(self, model, fit, args, kwargs):
        if self.running:  # fit() itself calls fit_generator(), in Keras 2.3
            return fit(*args, **kwargs)
        # In front, so that the user's callbacks see what all ranks see; and in the place where
        # they were given: Keras 2 takes no more by position than its old versions did.
        names = list(inspect.signature(fit).parameters)
        place = names.index("callbacks") if "callbacks" in names else len(args)
        given = args[place] if place < len(args) else kwargs.get("callbacks")
        given = list(given) if isinstance(given, (list, tuple)) else [given] if given else []
        callbacks = [self.epochs(model)] + given
        if place < len(args):
            args = args[:place] + (callbacks,) + args[place + 1 :]
        else:
            kwargs["callbacks"] = callbacks
        if model.built:
            same_start(model, self.engine)
        self.running = True
        try:
            return fit(*args, **kwargs)
        finally:
            self.running = False

    def epochs(self, model):
        """The callback that ends every epoch on all ranks at once."""
        ranked = self

        class Epochs(_keras.keras_of(model).callbacks.Callback):  # type: ignore  # any Keras
            def on_epoch_begin(self, epoch, logs=None):
                ranked.rows.update({True: 0, False: 0})

            def on_epoch_end(self, epoch, logs=None):
                ranked.engine.close()
                rows = ranked.rows
                logs.update(mean(ranked.engine, logs, lambda name: rows[name[:4] != "val_"]))

        return Epochs()


class RankedFitGenerator(RankedMethod):
    """The method of Keras 2 that is ``fit`` for batches that come from a generator."""

    method = "fit_generator"

    def __call__(self, model, *args, **kwargs):
        return RankedFit.of(model).run(model, self.plain(model), args, kwargs)


class RankedEvaluate(RankedMethod):
    """``evaluate`` with metrics over all ranks' rows. Within ``fit`` the epoch's end does that."""

    method = "evaluate"

    def __call__(self, model, *args, **kwargs):
        evaluate = self.plain(model)
        fit = RankedFit.of(model)
        if fit.running:  # or evaluate() itself, which calls evaluate_generator() in Keras 2.3
            return evaluate(*args, **kwargs)
        fit.rows[False] = 0
        fit.running = True
        try:
            result = evaluate(*args, **kwargs)
        finally:
            fit.running = False
        if isinstance(result, dict):
            return mean(self.engine, result, lambda name: fit.rows[False])
        results = result if isinstance(result, (list, tuple)) else [result]
        named = {str(place): value for place, value in enumerate(results)}
        means = mean(self.engine, named, lambda name: fit.rows[False])
        means = [means[str(place)] for place in range(len(results))]
        return means if isinstance(result, (list, tuple)) else means[0]


class RankedEvaluateGenerator(RankedEvaluate):
    """The method of Keras 2 that is ``evaluate`` for batches that come from a generator."""

    method = "evaluate_generator"


# The functions of Keras 2 ----------------------------------------------------------------------


def install_functions(model, engine, kinds):
    """As ``install``, and a model of Keras 2 makes functions of a rank from now on.

    Training goes on. A second time changes nothing.

    Arguments:
        kinds: subclasses of ``MakeFunction``.
    """
    if RankedFit.of(model) is not None:
        return
    maker = _keras.that_makes_functions(model)
    with _keras.training_goes_on(maker):
        if _keras.wraps_a_model(model):
            RankedBuild(engine, kinds).install(model)
        for kind in kinds if maker is not None else ():
            kind(engine).install(maker)
    install(model, engine)


class RankedBuild(RankedMethod):
    """What a Sequential before Keras 2.2 does to make its inner model anew."""

    method = "build"

    def __init__(self, engine, kinds):
        super().__init__(engine)
        self.kinds = kinds

    def __call__(self, model, *args, **kwargs):
        self.plain(model)(*args, **kwargs)
        for kind in self.kinds:
            kind(self.engine).install(_keras.that_makes_functions(model))


class MakeFunction(RankedMethod):
    """The method by which Keras 2 makes one of a model's functions, which becomes a rank's."""

    function = ""

    def __call__(self, model):
        make, function = self.plain(model), vars(model).get(self.function)
        if function is not None:
            make()  # which warns, perhaps; keras-mxnet makes another one each time
            vars(model)[self.function] = function
            return
        with self.making(model):
            make()
        made = vars(model)[self.function]
        vars(model)[self.function] = RankedFunction(self, model, made)

    @contextlib.contextmanager
    def making(self, model):
        """The context in which Keras makes the function."""
        yield

    def run(self, function, inputs):
        """Call a ``RankedFunction``'s, ``function.made``."""
        raise NotImplementedError


class RankedFunction:
    """A function that Keras 2 made for a model that is one of several ranks."""

    def __init__(self, maker, model, made):
        self.maker = maker
        # A Sequential before Keras 2.2 has another model in it, which made the function.
        self.model = getattr(model, "callback_model", None) or model
        self.made = made
        self.started = False

    def __getattr__(self, name):  # its outputs, for example, and callbacks may add to them
        return getattr(self.made, name)

    def __call__(self, inputs):
        result = self.maker.run(self, inputs)
        self.started = True
        return result


class MakeTestFunction(MakeFunction):
    method = "_make_test_function"
    function = "test_function"

    def run(self, function, inputs):
        count(function.model, len(inputs[0]), False)
        return function.made(inputs)


# Saving ---------------------------------------------------------------------------------------


class RankedSave(RankedMethod):
    """A method that saves, on rank 0 alone; what it writes is whole or not there."""

    @classmethod
    def named(cls, method):
        return _SAVING[method]

    def __call__(self, model, *args, **kwargs):
        if self.engine.ranks.rank:
            return None
        save = self.plain(model)
        bound = inspect.signature(save).bind(*args, **kwargs)
        place = next(iter(bound.arguments))  # the first parameter, whatever its name
        path = bound.arguments[place]
        replaces = bound.arguments.get("overwrite", True)  # else Keras asks what to do
        if not isinstance(path, (str, os.PathLike)) or not replaces and os.path.exists(path):
            return save(*bound.args, **bound.kwargs)
        with whole(os.fspath(path)) as aside:
            bound.arguments[place] = aside
            return save(*bound.args, **bound.kwargs)


_SAVING = {name: type("RankedSave", (RankedSave,), {"method": name}) for name in SAVING}


@contextlib.contextmanager
def whole(path):
    """Yield a path to write to, in a new folder beside; what is there afterwards moves to ``path``.

    A rank may be ended at any time: the file that stands there is the old one or the new one.
    """
    folder, name = os.path.split(os.path.abspath(path))
    aside = tempfile.mkdtemp(prefix=".{}.".format(name), dir=folder)
    try:
        yield os.path.join(aside, name)
        for written in sorted(os.listdir(aside)):
            target = os.path.join(folder, written)
            if os.path.isdir(target) and not os.path.islink(target):
                os.rename(target, os.path.join(aside, written + ".old"))
            os.replace(os.path.join(aside, written), target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
