"""tf.keras 2 and Keras 3 in ranks: Horovod, or TensorFlow's workers, exchange the gradients.

A step of training is the model's ``train_step``, Keras' or a custom one. While it runs (or is
traced), tapes return the mean of gradients over all ranks: see ``gradient_exchange``. So the step
and its optimizers, which are not changed, clip and scale that mean. The steps of Keras 3 are
subclasses of those of tf.keras 2.
"""

import contextlib
import functools
from typing import Any, Dict, Iterable, List, Tuple

import tensorflow as tf

from ... import _keras, errors
from ..._keras.steps import has_own_training
from ..._ranks import (
    evaluated_batch_norm,
    keras3_state,
    keras_model,
    losses,
    metrics,
    step_functions,
    tables,
)
from ..._ranks.engines import tensorflow_collectives, tensorflow_horovod
from ..._ranks.tf_config import TF_CONFIG
from ..._rows import own_statistics
from ..._runtime import synchronized
from ..._runtime.within import Within
from ..._verification import keras_steps, steps
from . import batch_norm, gradient_exchange, ranked_state, ranked_step_trial
from .arguments import as_tensors, has_rows, rows_of, with_tensors
from .configuration import unsupported
from .graph import only_traced, recording
from .ranked_reductions import RankedReductions, present_graph
from .replicas import ReplicatedCall
from .state import read

# Batches are told apart by so many of their rows, and so many numbers of each.
_SEEN, _SEEN_OF_ROW = 8, 64

_stepping = Within()  # within, gradients are exchanged, also those of models within the model


class RankedFunction:
    """A function that Keras has made to train or to evaluate, in which ranks may wait.

    One that trains begins with rank 0's weights.
    """

    begun = False  # with rank 0's weights

    def __init__(self, engine: "Any", model: "Any", function: "Any", training: bool) -> None:
        self.engine, self.model, self.function, self.training = engine, model, function, training

    def __call__(self, iterator):
        if not self.training:
            with self.engine.waiting("for the others' losses"):
                return self.function(iterator)
        model, step = self.model, RankedStep.of(self.model)
        with self.engine.waiting("for the others' gradients"):
            if not self.begun:
                self.function, iterator = step.begin(model, self.function, iterator)
                self.begun = True
            result = self.function(iterator)
        if step.first_batch is not None:
            batch, step.first_batch = step.first_batch, None
            if step.unproven or has_own_training(model):
                ranked_step_trial.check(step, model, batch)
            if losses.loss_may_mix_rows(model):
                losses.check_loss(model, batch, _loss)
        keras_model.RankedFit.of(model).stepped(model)
        return result


class RankedMaking(keras_model.RankedMethod):
    """The method that makes the function that trains."""

    method = "make_train_function"
    steps = ("train",)

    def invoke(self, model, *args, **kwargs):
        self.plain(model)(*args, **kwargs)  # in Keras 3 it does not return the function
        attribute = self.method[len("make_") :]
        function = getattr(model, attribute)
        if not isinstance(function, RankedFunction):
            function = RankedFunction(self.engine, model, function, attribute == "train_function")
            setattr(model, attribute, function)
        return function

    def again(self, model: "Any") -> "Any":
        """Return another function that trains, not yet traced; the model keeps the present one."""
        present, model.train_function = model.train_function, None
        self.plain(model)()
        function, model.train_function = model.train_function, present
        return function


class RankedTestMaking(RankedMaking):
    """The method that makes the function that evaluates."""

    method = "make_test_function"
    steps = ("evaluate",)


class RankedComputation(keras_model.RankedMethod):
    """A step of a model in which Keras computes losses of the rows of all ranks."""

    autograph_info__: "Dict[str, Any]" = {}  # as in ReplicatedCall

    def weighs_losses(self, model):
        """Return whether losses are weighed by this rank's rows."""
        return True

    @contextlib.contextmanager
    def computing(self, model, share):
        """Let Keras compute losses of the rows of all ranks.

        Keras 3 weighs the losses of single outputs, which logs show, by the rows of the batch, if
        their number is known as it traces the step. On TensorFlow it is not, and each batch counts
        once (3.15, ``CompileLoss.call``). Within, they are weighed as in one process.

        Arguments:
            model: the model of the step.
            share: as that of ``losses.Reductions``.
        """
        keras, compute = _keras.keras_of(model), getattr(model, "_compile_loss", None)
        before = []  # results of the last exchange: the next one waits for them

        def total(values):
            with tf.control_dependencies(before or [share()]):
                sums = self.engine.total(values)
            before[:] = sums[:1]
            return sums

        def weigh(loss):
            """Multiply a loss by the weight of this rank's rows in the whole batch."""
            if not self.weighs_losses(model):
                return loss
            return loss * tf.cast(share() * self.engine.place.size, loss.dtype)

        def of_outputs():
            """Return the metrics of the losses of single outputs: Keras before 3.5 has none."""
            return getattr(compute, "metrics", ())

        def update_state(metric, values, sample_weight=None):
            if sample_weight is None and any(metric is loss for loss in of_outputs()):
                values = weigh(values)
            return update(metric, values, sample_weight)

        reductions = losses.Reductions(share, total, model, self.engine)
        with reductions.within(keras), contextlib.ExitStack() as stack:
            if compute is not None:
                kind, update = keras.metrics.Mean, keras.metrics.Mean.update_state
                replaced = step_functions.replaced(
                    self.engine,
                    kind,
                    lambda _: of_outputs() and losses.computes_losses(model),
                    update_state=update_state,
                )
                stack.enter_context(replaced)
            yield


class RankedStep(RankedComputation):
    """The ``train_step`` of a model that trains together with the other ranks."""

    method = "train_step"
    steps = ("train",)
    exchange = gradient_exchange.GradientExchange
    exchanges = 0  # of gradients, in the step that was traced last
    started = None  # the optimizer with which an eager step began
    first_batch = None  # kept for checks of its loss and gradients
    kept = False  # whether it was
    lines: "Iterable[str]" = ()  # see ``GradientExchange``
    unproven: "Iterable[str]" = ()  # likewise
    synchronized: "List[Any]" = []  # layers of batch normalization, in the step traced last
    warned: "List[Any]" = []  # layers whose own statistics were warned of
    is_trial = False  # by ``ranked_step_trial``

    def __init__(self, engine: "Any") -> None:
        super().__init__(engine)
        self.is_asked = False  # for the statistics of all ranks
        self.set_by_steps = ranked_state.TracedState(engine)

    def invoke(self, model, data):
        with self.engine.noting():
            data = as_tensors(data)  # Keras 3 hands arrays to a step that runs eagerly
            asked_for = _keras.compiled_with(model).get("jit_compile")
            # The second is Keras 3's, which warns and goes on without XLA.
            if getattr(model, "_jit_compile", None) or asked_for not in (None, False, "auto"):
                raise unsupported(
                    "train as one of several ranks under jit_compile=True: XLA compiles no "
                    "messages",
                    "Compile the model with jit_compile=False.",
                )
            if tf.executing_eagerly() and not self.is_trial:
                self.begin_eagerly(model, data)
            rows = _rows(data)
            share = self.engine.share_in_graph(rows, functools.partial(_begun, model), _some(data))
            state = self.set_by_steps.variables(self.state(model))
            before = [read(variable.handle) for variable in state]
            layers = [] if self.is_trial else self.synchronizable(model)
            plain = self.plain(model)
            graph = None if hasattr(plain, "get_concrete_function") else present_graph()
            reductions = RankedReductions(self.engine, share, graph)
            gradients = self.exchange(self.engine, model, rows, share, reductions)
            with _stepping, self.computing(model, lambda: share):
                with batch_norm.synchronizing(layers, reductions):
                    result = gradients.run(plain, data)
            reductions.finish()
            for layer in layers:
                averages = functools.partial(ranked_state.has_averaged, layer, state, before)
                if reductions.have_missed(layer, averages):
                    self.warn_of_statistics(model, layer)
            self.exchanges = gradients.exchanges
            self.lines, self.unproven = gradients.lines, gradients.unproven
            self.check(model)
            if self.is_trial:
                return result
            self.set_by_steps.merge(state, before, share)
            if self.unproven or has_own_training(model) or losses.loss_may_mix_rows(model):
                self.keep_first(data, share)
            return result

    def synchronizable(self, model):
        """Return the layers that are to use the statistics of all ranks, and can."""
        self.synchronized = batch_norm.requested_within(model)
        layers = []
        for layer in self.synchronized:
            if batch_norm.is_synchronizable(layer):
                layers.append(layer)
            else:
                self.warn_of_statistics(model, layer)
        return layers

    def warn_of_statistics(self, model, layer):
        """Warn that a layer uses the statistics of this rank's samples where it is called."""
        if not any(layer is warned for warned in self.warned):
            self.warned.append(layer)
            names, is_asked = [layer.name], synchronized.is_asked(model)
            own_statistics.warn_of_layers("tensorflow2", model.name, "rank", names, is_asked)

    # Different in Keras 3 ---------------------------------------------------------------------

    def begin(self, model: "Any", function: "Any", iterator: "Any") -> "Tuple[Any, Any]":
        """Begin with rank 0's weights; return a function, and an iterator with the same batches.

        The function is another one if the step has to be traced again.
        """
        if hasattr(function, "get_concrete_function"):
            # Tracing makes all weights that are still to be made, and runs nothing.
            function.get_concrete_function(iterator)
            self.check(model)
            keras_model.same_start(model, self.engine)
            # The trace has made layers, or built them.
            has_others = self.synchronized != batch_norm.requested_within(model)
            is_due = self.set_by_steps.is_due(model)
            if is_due:
                iterator = self.set_by_steps.begin(model, self.plain(model), iterator, _stepping)
            if is_due or has_others:
                function = RankedMaking.of(model).again(model)
        return function, iterator

    def begin_eagerly(self, model: "Any", data: "Any") -> None:
        """Begin with rank 0's weights in an eager step."""
        if self.started is not model.optimizer:
            self.started = model.optimizer
            counters = steps.numbers_held(keras_steps.optimizers(model))
            with _stepping:
                tf.function(self.plain(model)).get_concrete_function(data)
            counters.put_back()  # Nadam of Keras 2.15 counts when it is traced
            keras_model.same_start(model, self.engine)
            if self.set_by_steps.is_due(model):
                with _stepping:
                    self.set_by_steps.decide(model, self.plain(model), data)

    def state(self, model: "Any") -> "List[tf.Variable]":
        """Return the variables that a step may set without training them, as far as they exist."""
        try:
            of_metrics = set(map(id, metrics.variables(model)))  # summed up when an epoch ends
            variables = [v for v in model.non_trainable_variables if id(v) not in of_metrics]
            return [v for v in variables if not tables.is_table(v) and v.dtype.is_floating]
        except ValueError:  # Keras: none exists; a step that makes them is traced again to be run
            return []

    # ------------------------------------------------------------------------------------------

    def keep_first(self, data: "Any", share: "tf.Tensor") -> None:
        """Keep the batch of the step that runs first, for checks of its loss and gradients."""
        present = [value for value in tf.nest.flatten(data) if value is not None]
        if not all(isinstance(value, tf.Tensor) for value in present):
            return

        def keep(*arrays):
            self.first_batch = with_tensors(data, [array.copy() for array in arrays])
            self.kept = True
            return 0.0

        is_first = self.engine.called(lambda share: not self.kept, [share], tf.bool)
        tf.cond(is_first, lambda: tf.numpy_function(keep, present, tf.float64), lambda: share)

    def check(self, model: "Any") -> None:
        """Refuse a step that has exchanged no gradients."""
        if not self.exchanges and model.trainable_variables:
            raise unsupported(
                "train {!r} as one of several ranks: its train_step neither asks a "
                "tf.GradientTape for the gradients of the model's weights nor applies any by an "
                "optimizer that is an attribute of the model".format(model.name),
                "Have train_step do that, with the optimizer given to compile() for example.",
            )


class RankedTestStep(RankedComputation):
    """The ``test_step`` of a model, which counts rows, the weights of metrics."""

    method = "test_step"
    steps = ("evaluate",)
    watch: Any = None  # of batch normalization

    def weighs_losses(self, model):
        return keras_model.RankedFit.of(model).in_step

    def invoke(self, model, data):
        data = as_tensors(data)
        rows = _rows(data)

        def count(rows):
            keras_model.count(model, int(rows), False)
            return float(rows)

        self.engine.called(count, [rows], tf.float64)

        @functools.lru_cache(None)
        def share():
            """Return this rank's fraction of the rows of all ranks, which evaluate in step then."""
            keras_model.RankedFit.of(model).in_step = True
            return self.engine.called(lambda rows: self.engine.share(int(rows)), [rows], tf.float64)

        self.watch = self.watch or evaluated_batch_norm.Watch(model)
        layers = batch_norm.requested_within(model)
        with self.engine.noting(), self.computing(model, share), self.watch.watching(layers):
            return self.plain(model)(data)


def _loss(model, arrays):
    tensors = tf.nest.map_structure(
        lambda array: None if array is None else tf.convert_to_tensor(array), arrays
    )
    return losses.loss_in_inference(model, tensors)


def _begun(model, rows, *numbers):
    """Count a batch of training, and see some numbers of its first rows."""
    keras_model.count(model, rows, True)
    keras_model.RankedFit.of(model).first_batch.see(numbers)


def _some(data):
    """Return some numbers of the first rows of each tensor of a batch, in a list of tensors."""
    tensors = []
    for tensor in filter(has_rows, tf.nest.flatten(data)):
        dtype = tensor.dtype
        has_values = dtype.is_floating or dtype.is_integer or dtype.is_bool or dtype == tf.string
        if isinstance(tensor, tf.Tensor) and tensor.shape.rank and has_values:
            columns, first = tensor.shape[1:].num_elements(), tensor[:_SEEN]
            if columns:
                flat = tf.reshape(first, [tf.shape(first)[0], columns])
                first = flat[:, :: -(-columns // _SEEN_OF_ROW)]
            tensors.append(first)
    return tensors


def _rows(data):
    """Return the number of rows of a batch."""
    batch = next((value for value in tf.nest.flatten(data) if has_rows(value)), None)
    return 1 if batch is None else rows_of(batch)


class RankedCall(ReplicatedCall):
    """The ``call`` of a model, which refuses gradients that would not be exchanged."""

    steps = ("train",)
    is_of_keras_steps = True
    one_of = ""

    def __init__(self, engine: "Any") -> None:
        super().__init__([])

    def invoke(self, model, *args, **kwargs):
        is_of_step = _stepping.here() or only_traced(model)
        if recording() and not is_of_step:
            raise unsupported(
                "train {!r} as one of several ranks in a loop of your own around "
                "tf.GradientTape".format(model.name),
                "Put the step into the model's train_step(), and call fit() or train_on_batch().",
            )
        return self._unreplicated(model, *args, **kwargs)


class RankedKeras3Step(RankedStep):
    """The ``train_step`` of a Keras 3 model."""

    exchange = gradient_exchange.Keras3Exchange

    def begin(self, model, function, iterator):
        """Begin with rank 0's weights: Keras' function calls several of TensorFlow's."""
        if not all(layer.built for layer in _keras.all_layers(model)):
            iterator = ranked_state.build(model, iterator)
        keras_model.same_start(model, self.engine)
        step = self.plain(model)
        return function, self.set_by_steps.begin(model, step, iterator, _stepping)

    def begin_eagerly(self, model, data):
        """Do nothing: ``begin`` is called in eager steps, too."""

    def state(self, model):
        return [variable._value for variable in keras3_state.averaged(model)]


def distribute(model: "Any", place: "Any") -> "Any":
    """Let a Keras model train together with those of the other ranks; once or several times."""
    keras, step = _keras.keras_of(model), RankedStep
    if hasattr(keras, "StatelessScope"):
        step = RankedKeras3Step
    elif not (hasattr(model, "_eager_losses") and hasattr(model, "train_step")):
        raise unsupported(
            f"train a model of {keras.__name__} {keras.__version__} as one of several ranks",
            "Use tf.keras from TensorFlow 2.4, or Keras 3.",
        )
    engine = join(place)
    if RankedStep.of(model) is None:
        kinds = step, RankedTestStep, RankedCall, RankedMaking, RankedTestMaking
        keras_model.install(model, engine, kinds)
        _keras.forget_compiled_steps(model)
    step = RankedStep.of(model)
    if step.is_asked != synchronized.is_asked(model):
        step.is_asked = not step.is_asked
        _keras.forget_compiled_steps(model)
    # The front end has named these.
    step.warned = [
        layer
        for layer in batch_norm.requested(model, _keras.all_layers(model))
        if not batch_norm.is_synchronizable(layer)
    ]
    return model


def join(place: "Any") -> "Any":
    """Return the engine for the launcher.

    Raises:
        NotInstalledError: it is Horovod, which is not installed.
    """
    if place.launcher == TF_CONFIG:
        return tensorflow_collectives.TensorFlowCollectives.join(place)
    try:
        return tensorflow_horovod.TensorFlowHorovod.join(place)
    except errors.NotInstalledError as error:
        raise errors.NotInstalledError(
            f"{error} From TensorFlow 2.4 on, compat run -n {place.size} needs no Horovod."
        ) from None
