"""Check that a Keras model of a rank trains and evaluates together with the other ranks.

Steps are those that Keras reports by its public methods and its callbacks, which do not depend on
the methods that ``parallelize()`` replaces. Their number is compared with how often the engine
exchanged gradients and results, and with the batches that were counted. Each rank checks its steps
by itself, since ranks that exchange nothing cannot agree on a problem.
"""

import contextlib
import weakref

from .. import _keras
from .._keras import steps, watched_methods
from .._runtime import usage, work
from . import checksum, keras_model, losses


class RanksCheck(usage.UsageCheck):
    """Checks each training step and evaluation of one model of a rank.

    Arguments:
        model: one that ``Backend.distribute`` has returned.
        place: this process's place among the ranks.
        engine: that of the ranks; None: exchanges are not counted.
        hooks: as ``UsageCheck`` has them.
    """

    def __init__(self, model, place, engine, hooks):
        super().__init__(model.name, [], None, hooks)
        self.place, self.engine = place, engine
        self._installed = hooks()  # also those that another library replaces later
        self._model = weakref.ref(model)
        self._running = None  # the outermost call
        self._reported = set()

    @contextlib.contextmanager
    def step(self, kind, function=None, name="", waits=False):
        """Check the steps of a call of one of Keras' methods, which runs within.

        Arguments:
            kind: one of ``usage.KINDS``.
            function: not used: see ``is_confirmed``.
            name: that of the method.
            waits: not used: the steps begin with the call.
        """
        if self._running is not None or kind == "predict" or work.uncounted:
            yield  # a rank predicts its own rows alone
            return
        self._running = call = _Call(self, kind, name)
        try:
            yield
        except BaseException:
            if self.engine is not None:
                self.engine.unreached.clear()  # of a step that did not end
            raise
        finally:
            self._running = None
        call.end()

    def call(self, method, args, kwargs):
        """Call a method; ``fit`` gets a callback, by which Keras reports its steps."""
        call = self._running
        if call is None or call.name not in ("fit", "fit_generator") or call.is_reported:
            return method(*args, **kwargs)
        args, kwargs = keras_model.arguments_by_name(method, args, kwargs)
        callbacks = kwargs.get("callbacks") or []
        callbacks = callbacks if isinstance(callbacks, (list, tuple)) else [callbacks]
        kwargs["callbacks"] = list(callbacks) + [call.callback(callbacks)]
        call.is_reported = True
        return method(*args, **kwargs)

    def model_now(self):
        """Return the model, which no check keeps alive."""
        return self._model()

    def all_hooks(self):
        """Return the methods that compat has put on the model, also those replaced since."""
        return dict(self._installed, **self.hooks())

    def is_confirmed(self, kind, name):
        """Return whether the function by which a method does a kind of step was checked."""
        function = watched_methods.function_of(self._model(), kind, name)
        return kind in self._confirmed and self._confirmed[kind] is function

    def confirm(self, kind, name):
        """Note that the function by which a method does a kind of step was checked."""
        self._confirmed[kind] = watched_methods.function_of(self._model(), kind, name)

    def report(self, step, name, problem, hooks):
        """Report a problem, once.

        Arguments:
            step: the step in which it occurred, in a phrase.
            name: Keras' method that did it.
            problem: the predicate of a sentence on this rank.
            hooks: the names of functions and methods that were not called.
        """
        if (problem, *hooks) not in self._reported:
            self._reported.add((problem, *hooks))
            self._report(step, name, f"{self.place} {problem}. {usage.unreached(hooks)}")


class _Call:
    """One call of ``fit()``, ``evaluate()`` or a similar method, and the counts before it."""

    def __init__(self, check, kind, name):
        self.check, self.kind, self.name = check, kind, name
        self.is_reported = False  # whether Keras reports steps to ``callback()``
        self.steps = self.epochs = 0
        self.before = self._state()
        self.calls = {name: hook.calls for name, hook in check.all_hooks().items()}
        self.weights = None
        if kind == "train" and not check.is_confirmed(kind, name):
            self.weights = self._weights()

    def _state(self):
        engine, counted = self.check.engine, {True: 0, False: 0}
        for (_, _, training), number in work.batches().items():
            counted[training] += number
        exchanged = engine.exchanged if engine is not None else lambda kind: None
        state = {kind: exchanged(kind) for kind in ("gradients", "results")}
        return dict(state, train=counted[True], evaluate=counted[False])

    def _weights(self):
        """Return a checksum of the trainable weights, or None where they cannot be read."""
        model = self.check.model_now()
        keras = _keras.keras_of(model)
        # On JAX a fit() holds them elsewhere.
        if not getattr(model, "built", True) or _keras.backend_name(keras) == "jax":
            return None
        read, _ = _keras.reader_and_writer(model)
        return checksum.numbers(read(model.trainable_weights))

    def _since(self, event):
        """Return how often an event has happened in this call, or None where it is not counted."""
        before = self.before[event]
        return None if before is None else self._state()[event] - before

    # Steps that Keras reports -----------------------------------------------------------------

    def callback(self, others):
        """Return the callback by which ``fit`` reports its steps, after all others."""
        call, callbacks = self, _keras.keras_of(self.check.model_now()).callbacks
        saving = _saving(callbacks.ModelCheckpoint, others)

        class Steps(callbacks.Callback):  # type: ignore  # any Keras
            # It takes no values of logs, and changes nothing.
            _supports_tf_logs = async_safe = watches = True

            def set_model(self, model):
                """Not as ``self.model``: see ``keras_model.RankedFit.stops``."""

            def on_batch_end(self, batch, logs=None):
                call.steps += 1
                if call.steps == 1:
                    call.trained("the first training step", 1)

            def on_epoch_end(self, epoch, logs=None):
                call.epochs += 1
                # Of Keras 2; a rank that does not validate has the others' losses in its logs.
                validates = (getattr(self, "params", None) or {}).get("do_validation", True)
                call.epoch_ended(validates and call.has_validated(logs or ()), saving)

        return Steps()

    def has_validated(self, logs):
        """Return whether an epoch with these logs has validated.

        A custom test step may return no loss. Its function is not traced again by ``evaluate()``,
        whose check would not find the methods called that tracing calls.
        """
        if "val_loss" in logs:
            return True
        return bool(self._since("evaluate")) and any(str(name).startswith("val_") for name in logs)

    def epoch_ended(self, validated, saving):
        """Check an epoch, at whose end ranks combine losses and metrics.

        Arguments:
            validated: whether this rank has validated.
            saving: the methods that have saved the model at the end.
        """
        step = "the first epoch" if self.epochs == 1 else f"epoch {self.epochs}"
        model = self.check.model_now()
        step_of_model = getattr(type(model), "train_step", None)
        # A custom one may leave out an update.
        if getattr(step_of_model, "__module__", losses.KERAS[0]).startswith(losses.KERAS):
            self.trained(step, self.steps)
        if validated:
            self.evaluated(step)
        if self.check.engine is not None:
            uncalled = [name for name, _ in self._uncalled() if name in saving]
            self.check.engine.unreached.update((f"model.{name}", None) for name in uncalled)
        self.combined(step, self.epochs)

    def end(self):
        """Check the call, whose steps Keras may have reported already."""
        if self.is_reported:
            if not self.steps and self.weights is not None and self._trains():
                self.trained("the first training step", 1)  # in a fit() that knows no callbacks
            return
        step = f"the first {usage.KINDS[self.kind]}"
        if self.kind == "train":
            self.trained(step, 1)
        else:
            self.evaluated(step)
        self.combined(step, 1)

    # Checks -----------------------------------------------------------------------------------

    def trained(self, step, number):
        """Check that a number of steps exchanged gradients and were counted."""
        exchanged, counted, problem = self._since("gradients"), self._since("train"), ""
        if exchanged is not None and exchanged < number and self._trains():
            self.check.engine.unreached.update(self.check.engine.unexchanged)
            problem = "exchanged no gradients with the other ranks"
            if exchanged:
                problem = "exchanged gradients with the other ranks in {} of {}"
                problem = problem.format(_steps(exchanged), number)
        elif counted < number:
            problem = f"counted {counted} of {number} batches" if counted else "counted no batch"
        self._check(step, "train", problem)

    def evaluated(self, step):
        """Check that a batch was counted, by whose rows results are combined."""
        self._check(step, "evaluate", "" if self._since("evaluate") else "counted no batch")

    def combined(self, step, times):
        """Check that losses and metrics became those of all ranks' rows."""
        combined, problem = self._since("results"), ""
        if combined is not None and combined < times:
            problem = "did not combine losses and metrics with those of the other ranks"
        self._check(step, "", problem)

    def _trains(self):
        """Return whether weights were, or may have been, trained in this call."""
        model = self.check.model_now()
        if not model.trainable_weights:
            return False
        return self.weights is None or self._weights() != self.weights

    def _check(self, step, kind, problem):
        """Report a problem, and of a first step the methods that Keras did not call."""
        is_first = bool(kind) and not self.check.is_confirmed(kind, self.name)
        if kind:
            self.check.confirm(kind, self.name)
        hooks, engine = self._unreached(kind if is_first or problem else ""), self.check.engine
        if engine is not None:
            hooks += engine.unreached
            engine.unreached.clear()
        if problem or hooks:
            problem = problem or "did not do all that ranks depend on"
            self.check.report(step, self.name, problem, hooks)

    def _unreached(self, kind):
        """Return the names of methods that this call's steps have to call, and did not."""
        own_steps = steps.has_own_steps(self.check.model_now())
        uncalled = self._uncalled()
        called = set(self.check.all_hooks().items()).difference(uncalled)
        groups = {getattr(hook, "one_of", "") for _, hook in called}

        def is_due(name, hook):
            if name == self.name:
                return True
            if kind not in getattr(hook, "steps", ()) or own_steps and hook.is_of_keras_steps:
                return False
            return not hook.one_of or hook.one_of not in groups

        return [f"model.{name}" for name, hook in uncalled if is_due(name, hook)]

    def _uncalled(self):
        hooks = self.check.all_hooks().items()
        return [(name, hook) for name, hook in hooks if hook.calls == self.calls.get(name, 0)]


def _saving(kind, callbacks):
    """Return the methods by which a ``ModelCheckpoint`` of Keras' saves a model in each epoch."""
    return {
        "save_weights" if callback.save_weights_only else "save"
        for callback in callbacks
        if type(callback) is kind and not callback.save_best_only
        if getattr(callback, "save_freq", "epoch") == "epoch"
        if getattr(callback, "period", 1) == 1
    }


def _steps(number):
    return "1 step" if number == 1 else f"{number} steps"
