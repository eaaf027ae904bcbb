"""JAX as one of several ranks: jax.distributed, and one array over all processes for each sum.

A step is two programs of this process, with the sum of the gradients between: the shapes of a
program that spans processes would have to be the same on all ranks, and batches need not be.
"""

import atexit
import contextlib
import os
import pickle
import sys
import threading
import time

from .. import _engine, _keras, _keras_ranks, _ranks, errors

# How often a rank that waits looks whether another one has gone, in seconds.
_LOOK = 0.2
# How long one that gives up waits for the others to do so, in seconds.
_GIVE_UP = 3.0


class JaxDistributed(_engine.Engine):
    """jax.distributed: its coordination service, and sums over an array of one row per process.

    It has to be joined before JAX makes its devices.
    """

    def __init__(self, ranks):
        import jax
        import numpy as np

        super().__init__(ranks)
        self.jax = jax
        self.timeout = _ranks.timeout(os.environ)
        self.gave_up = False
        self.waits = None  # for what, and until when
        meeting = os.environ.get("COMPAT_MEETING")
        if meeting is None:
            raise errors.no_meeting_point(ranks, "jax.distributed", ["COMPAT_MEETING"])
        for name, value in (
            # Else JAX ends a rank by a signal when another one fails, and lets none end alone.
            ("jax_enable_recoverability", True),
            # It would ignore the signal by which launchers end ranks.
            ("jax_enable_preemption_service", False),
            ("jax_cpu_collectives_implementation", "gloo"),
        ):
            if hasattr(jax.config, name):
                jax.config.update(name, value)
        try:
            jax.distributed.initialize(
                meeting,
                ranks.size,
                ranks.rank,
                local_device_ids=[0],  # the one that configure_gpu() has left visible
                initialization_timeout=int(self.timeout),
            )
        except RuntimeError as error:
            raise errors.rank_lost(ranks, "to start", [], str(error).split("\n")[0]) from error
        self.check_size(jax.process_count())
        self.store = jax._src.distributed.global_state.client
        firsts = [
            next(device for device in jax.devices() if device.process_index == rank)
            for rank in range(ranks.size)
        ]
        mesh = jax.sharding.Mesh(np.array(firsts), ("ranks",))
        self.rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("ranks"))
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        self.total = jax.jit(lambda rows: rows.sum(0, dtype=rows.dtype), out_shardings=whole)
        atexit.register(self.end)
        threading.Thread(target=self.watch, daemon=True).start()

    def sum(self, values):
        import numpy as np

        return np.asarray(self.sum_array(np.asarray(values, "float32"), "for the others"))

    def sum_array(self, array, what="for the others' gradients"):
        """The sum of an array over all ranks, on this process's device."""
        jax = self.jax
        with self.waiting(what):
            row = jax.device_put(array[None], jax.local_devices()[0])
            shape = (self.ranks.size,) + row.shape[1:]
            rows = jax.make_array_from_single_device_arrays(shape, self.rows, [row])
            total = self.total(rows).addressable_data(0)
            return total.block_until_ready()

    def broadcast(self, value):
        import numpy as np

        chief = self.ranks.rank == 0
        mine = np.frombuffer(pickle.dumps(value), "uint8") if chief else np.zeros(0, "uint8")
        what = "for rank 0's weights"
        size = int(self.sum_array(np.array([mine.size], "int32"), what)[0])
        sent = self.sum_array(mine if chief else np.zeros(size, "uint8"), what)
        return pickle.loads(np.asarray(sent).tobytes())

    # Nothing waits for ever -------------------------------------------------------------------

    @contextlib.contextmanager
    def waiting(self, what):
        """Bound a wait: JAX's own collectives have no limit."""
        self.waits = what, time.monotonic() + self.timeout
        try:
            with super().waiting(what):
                yield
        finally:
            self.waits = None

    def problem(self, error):
        if not isinstance(error, (self.jax.errors.JaxRuntimeError, ValueError)):  # gloo's, NCCL's
            return None
        line = str(error).split("\n")[0]
        return line.partition("] ")[2] or line  # "Gloo ... failed: [...pair.cc:547] Conn..."

    def absent(self):
        self.waits = None
        return self.give_up()

    def watch(self):
        """End this process where it waits for a rank that has ended, or too long."""
        while True:
            time.sleep(_LOOK)
            waits = self.waits
            if waits is None:
                continue
            what, until = waits
            ended = self.marked("ended")
            if (ended or time.monotonic() > until) and self.waits is waits:
                problem = "no answer for {:g} s".format(self.timeout)
                lost = self.give_up()
                self.exit(
                    errors.rank_lost(
                        self.ranks, what, ended or lost, "it has ended" if ended else problem
                    )
                )

    def exit(self, error):
        """The main thread is in JAX's hands."""
        _engine.print_for_main_thread(error)
        self.end()
        os._exit(1)

    def mark(self, what):
        with contextlib.suppress(self.jax.errors.JaxRuntimeError):
            self.store.key_value_set("compat/{}/{}".format(what, self.ranks.rank), "-")

    def marked(self, what):
        """The other ranks that have left this mark; rank 0, which keeps them, where it is gone."""
        try:
            found = self.store.key_value_dir_get("compat/{}".format(what))
        except self.jax.errors.JaxRuntimeError:
            return [0]
        ranks = sorted(int(key.rsplit("/", 1)[1]) for key, _ in found)
        return [rank for rank in ranks if rank != self.ranks.rank]

    def give_up(self):
        """Tell the others, and return those that do not give up as well."""
        self.mark("gave up")
        until = time.monotonic() + _GIVE_UP
        others = set(range(self.ranks.size)) - {self.ranks.rank}
        absent = others
        while absent and time.monotonic() < until:
            time.sleep(_LOOK)
            absent = others - set(self.marked("gave up"))
        self.gave_up = True
        return sorted(absent)

    def end(self):
        """At the end of the program. Rank 0 is the last to go.

        It keeps the marks, and without it JAX ends the others before they have told anything.
        """
        self.mark("ended")
        if self.gave_up:
            time.sleep(0.0 if self.ranks.rank else _GIVE_UP)
            return
        until = time.monotonic() + self.timeout
        while self.ranks.rank == 0 and time.monotonic() < until:
            ended, gave_up = self.marked("ended"), self.marked("gave up")
            if len(ended) == self.ranks.size - 1 and not gave_up:
                self.see_off()
            if len(set(ended) | set(gave_up)) == self.ranks.size - 1:
                return
            time.sleep(_LOOK)

    def see_off(self):
        """Wait until all others have left JAX's service: that answers then, and not before."""
        everyone = list(range(self.ranks.size))
        thread = threading.Thread(target=self.store.get_live_nodes, args=(everyone,), daemon=True)
        thread.start()
        thread.join(self.timeout)


# Models ---------------------------------------------------------------------------------------


def distribute(model, ranks):
    """Make a model one of the ranks', in place. A second time changes nothing."""
    engine = JaxDistributed.join(ranks)
    for kind in (RankedTrainFunction, RankedTestFunction, RankedStatelessCall):
        if kind.of(model) is None:
            kind(engine).install(model)
            model.train_function = model.test_function = None
    _keras_ranks.install(model, engine)
    if model.built:
        _keras_ranks.same_start(model, engine)
    return model


def _rows(model, data):
    batch = next(leaf for leaf in _keras.keras_of(model).tree.flatten(data) if leaf is not None)
    return int(batch.shape[0])


class RankedTrainFunction(_keras_ranks.RankedMethod):
    """What Keras makes of ``train_step``: a step in two programs."""

    method = "make_train_function"

    def __call__(self, model, force=False):
        if model.train_function is not None and not force:
            return
        step = Step(model, self.engine)
        if not model.run_eagerly and model.jit_compile:
            jax = sys.modules["jax"]
            step.compute = jax.jit(step.compute, donate_argnums=0)
            step.update = jax.jit(step.update, donate_argnums=(0, 1))
        model.train_function = model._make_function(step)


class RankedTestFunction(_keras_ranks.RankedMethod):
    """What Keras makes of ``test_step``, with its rows counted."""

    method = "make_test_function"

    def __call__(self, model, force=False):
        if model.test_function is not None and not force:
            return
        step = model.test_step
        if not model.run_eagerly and model.jit_compile:
            step = sys.modules["jax"].jit(step, donate_argnums=0)

        def counted(state, data):
            _keras_ranks.count(model, _rows(model, data), False)
            return step(state, data)

        model.test_function = model._make_function(counted)


class Step:
    """One step of this rank and the others, in place of Keras' program of ``train_step``."""

    def __init__(self, model, engine):
        self.model = model
        self.engine = engine
        made = {id(v) for layer in model._flatten_layers() for v in layer._non_trainable_variables}
        # Moving averages and their like; not weights that are frozen.
        self.averaged = [
            place
            for place, variable in enumerate(model.non_trainable_variables)
            if id(variable) in made and "float" in str(variable.dtype)
        ]

    def __call__(self, state, data):
        rows = _rows(self.model, data)
        _keras_ranks.count(self.model, rows, True)
        share = self.engine.share(rows)
        logs, flat, trainable, others = self.compute(state, data, share)
        trainable, others = self.update(trainable, others, self.engine.sum_array(flat))
        non_trainable, optimizer, metrics = others
        return logs, (trainable, non_trainable, optimizer, metrics)

    def compute(self, state, data, share):
        """Keras' own step up to the update: this rank's part of gradients and averages."""
        jnp = sys.modules["jax"].numpy
        trainable, before, _, _ = state
        with _captured(self.model) as gradients:
            logs, (trainable, non_trainable, optimizer, metrics) = self.model.train_step(
                state, data
            )
        if len(gradients) != 1:
            raise errors.not_one_update(self.model.name, len(gradients))
        changes = [non_trainable[place] - before[place] for place in self.averaged]
        parts = [jnp.ravel(part).astype("float32") for part in list(gradients[0]) + changes]
        non_trainable = [
            before[place] if place in self.averaged else value
            for place, value in enumerate(non_trainable)
        ]
        return logs, jnp.concatenate(parts) * share, trainable, (non_trainable, optimizer, metrics)

    def update(self, trainable, others, flat):
        """Keras' own update, with the gradients of all ranks."""
        non_trainable, optimizer, metrics = others
        targets = list(trainable) + [non_trainable[place] for place in self.averaged]
        parts, start = [], 0
        for target in targets:
            part = flat[start : start + target.size]
            parts.append(part.reshape(target.shape).astype(target.dtype))
            start += target.size
        for place, change in zip(self.averaged, parts[len(trainable) :]):
            non_trainable[place] = non_trainable[place] + change
        trainable, optimizer = self.model.optimizer.stateless_apply(
            optimizer, parts[: len(trainable)], trainable
        )
        return trainable, (non_trainable, optimizer, metrics)


_step = threading.local()


@contextlib.contextmanager
def _captured(model):
    """Within, the optimizer updates nothing; yields the list of gradients that it was given."""
    gradients = []

    def capture(variables, given, trainable):
        gradients.append(given)
        return trainable, variables

    # Not by setattr: Keras would track it.
    model.optimizer.__dict__["stateless_apply"] = capture
    _step.running = True
    try:
        yield gradients
    finally:
        _step.running = False
        del model.optimizer.__dict__["stateless_apply"]


class RankedStatelessCall(_keras_ranks.RankedMethod):
    """``stateless_call``, refused where a loop of the user's own trains with it: it would do so
    alone, since no part of it is the model's."""

    method = "stateless_call"

    def __call__(self, model, *args, **kwargs):
        if kwargs.get("training") and not getattr(_step, "running", False):
            raise errors.own_loop_in_rank(model.name, self.engine.ranks)
        return self.plain(model)(*args, **kwargs)
