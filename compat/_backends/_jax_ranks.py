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

from .. import (
    _checksum,
    _engine,
    _keras,
    _keras3_ranks,
    _keras_ranks,
    _keras_ranks_losses,
    _launchers,
    _ranks,
    errors,
)

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
        host, port = _ranks.meeting(ranks, "jax.distributed")
        meeting = {"coordinator_address": _launchers.address(host, port)}
        if ranks.rank == 0:
            # JAX would listen at all addresses, and share the port with another job's service.
            listening = _ranks.listen(ranks, host, port)
            bound = listening.getsockname()[0]
            listening.close()
            meeting["coordinator_bind_address"] = _launchers.address(bound, port)
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
                num_processes=ranks.size,
                process_id=ranks.rank,
                local_device_ids=[0],  # the one that configure_gpu() has left visible
                initialization_timeout=int(self.timeout),
                **meeting,
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
        self.all_rows = jax.jit(lambda rows: rows, out_shardings=whole)
        atexit.register(self.end)
        threading.Thread(target=self.watch, daemon=True).start()

    def sum(self, values):
        import numpy as np

        # By their bytes: unless told to, JAX makes float32 of float64.
        row = np.asarray(values, "float64").view("uint32")
        rows = np.asarray(self.collect(self.all_rows, row, "for the others"))
        return rows.view("float64").sum(0)

    def sum_array(self, array, what="for the others' gradients"):
        """The sum of an array over all ranks, on this process's device."""
        return self.collect(self.total, array, what)

    def collect(self, function, array, what):
        """What a function makes of all ranks' arrays, on this process's device."""
        jax = self.jax
        with self.waiting(what):
            row = jax.device_put(array[None], jax.local_devices()[0])
            shape = (self.ranks.size,) + row.shape[1:]
            rows = jax.make_array_from_single_device_arrays(shape, self.rows, [row])
            return function(rows).addressable_data(0).block_until_ready()

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
        if model.train_function is None or force:
            model.train_function = model._make_function(Step(model, self.engine))


class RankedTestFunction(_keras_ranks.RankedMethod):
    """What Keras makes of ``test_step``, with its rows counted."""

    method = "make_test_function"

    def __call__(self, model, force=False):
        if model.test_function is not None and not force:
            return
        reduced = Reduced(
            model, self.engine, lambda state, data, share: model.test_step(state, data)
        )

        def counted(state, data):
            rows = _rows(model, data)
            _keras_ranks.count(model, rows, False)

            def share():
                _keras_ranks.in_step(model)
                return self.engine.share(rows)

            return reduced(state, data, share)

        model.test_function = model._make_function(counted)


def _compiled(model):
    return not model.run_eagerly and model.jit_compile


class Reduced:
    """A step in which Keras' losses divide by what all ranks have, where they are no means.

    Their totals (the rows that a mask leaves, for example) are exchanged before, by a program of
    their own. It has the whole step in it, of which XLA leaves out all that they do not need.
    """

    def __init__(self, model, engine, step):
        jax = sys.modules["jax"]
        self.engine = engine
        self.keras = _keras.keras_of(model)
        self.step = step  # of state, data and this rank's share of the rows
        self.asked = {}  # shapes of data -> whether losses ask for the share, and for totals
        self.compiled = _compiled(model)
        self.ask = jax.jit(self.find) if self.compiled else self.find
        self.run = jax.jit(self.reduced, donate_argnums=0) if self.compiled else self.reduced

    def __call__(self, state, data, share):
        """``share`` is a function that gives the share, and is called only where it is needed."""
        key = str([getattr(leaf, "shape", None) for leaf in self.keras.tree.flatten(data)])
        if key not in self.asked:
            self.asked[key] = self.what_is_asked(state, data)
        needs_share, needs_totals = self.asked[key]
        mine = share() if needs_share else 1.0
        totals = []
        if needs_totals:
            parts = self.ask(state, data, mine)
            sums = iter(self.engine.sum([float(part) for group in parts for part in group]))
            totals = [[float(next(sums)) for _ in group] for group in parts]
        return self.run(state, data, mine, totals)

    def what_is_asked(self, state, data):
        """Found by tracing the step; one that cannot be traced is taken to ask for all."""
        if not self.compiled:
            return True, True
        asked = []
        found = sys.modules["jax"].eval_shape(
            lambda state, data: self.find(state, data, 1.0, asked), state, data
        )
        return bool(asked or found), bool(found)

    def find(self, state, data, share, asked=None):
        """The lists of which losses ask the totals."""
        found = []

        def total(values):
            found.append(list(values))
            return values

        def give_share():
            if asked is not None:
                asked.append(share)
            return share

        with _keras_ranks_losses.Reductions(give_share, total).within(self.keras):
            self.step(state, data, give_share)
        return found

    def reduced(self, state, data, share, totals):
        rest = iter(totals)
        reductions = _keras_ranks_losses.Reductions(lambda: share, lambda values: next(rest))
        with reductions.within(self.keras):
            return self.step(state, data, lambda: share)


class Step:
    """One step of this rank and the others, in place of Keras' program of ``train_step``."""

    def __init__(self, model, engine):
        self.model = model
        self.engine = engine
        self.compute = Reduced(model, engine, self.gradients)
        self.update = self.updated
        if _compiled(model):
            self.update = sys.modules["jax"].jit(self.updated, donate_argnums=(0, 1))
        averaged = {id(variable) for variable in _keras3_ranks.averaged(model)}
        self.averaged = [
            place
            for place, variable in enumerate(model.non_trainable_variables)
            if id(variable) in averaged
        ]
        self.count = 0

    def __call__(self, state, data):
        rows = _rows(self.model, data)
        _keras_ranks.count(self.model, rows, True)
        share = self.engine.share(rows)
        if not self.count:
            self.check_loss(state, data)
        logs, buckets, trainable, others = self.compute(state, data, lambda: share)
        means = [self.engine.sum_array(bucket) for bucket in buckets]
        trainable, others = self.update(trainable, others, means)
        self.count += 1
        non_trainable, optimizer, metrics = others
        state = trainable, non_trainable, optimizer, metrics
        return logs, self.verified(state) if _checksum.is_due(self.count) else state

    def gradients(self, state, data, share):
        """Keras' own step up to the update: this rank's part of gradients and averages."""
        trainable, before, _, _ = state
        with _captured(self.model, share) as captured:
            logs, (trainable, non_trainable, optimizer, metrics) = self.model.train_step(
                state, data
            )
        if len(captured.gradients) != 1:
            raise errors.not_one_update(self.model.name, len(captured.gradients))
        scale = 1.0 if captured.scaled else share()
        parts = [gradient * scale for gradient in captured.gradients[0]]
        parts += [(non_trainable[place] - before[place]) * share() for place in self.averaged]
        non_trainable = [
            before[place] if place in self.averaged else value
            for place, value in enumerate(non_trainable)
        ]
        return logs, _flat(parts), trainable, (non_trainable, optimizer, metrics)

    def updated(self, trainable, others, buckets):
        """Keras' own update, with the gradients of all ranks."""
        non_trainable, optimizer, metrics = others
        targets = list(trainable) + [non_trainable[place] for place in self.averaged]
        parts = _shaped(buckets, targets)
        for place, change in zip(self.averaged, parts[len(trainable) :]):
            non_trainable[place] = non_trainable[place] + change
        trainable, optimizer = self.model.optimizer.stateless_apply(
            optimizer, parts[: len(trainable)], trainable
        )
        return trainable, (non_trainable, optimizer, metrics)

    def verified(self, state):
        """The state, compared with the other ranks'. See ``_checksum.verify``."""
        model = self.model
        same = {id(variable) for variable in _keras3_ranks.same(model)}
        groups = model.trainable_variables, model.non_trainable_variables, model.optimizer.variables
        state = [list(part) for part in state]
        places = [
            (part, place, variable.path)
            for part, variables in zip(state, groups)
            for place, variable in enumerate(variables)
            if part is state[2] or id(variable) in same
        ]

        def write(number, value):
            part, place, _ = places[number]
            part[place] = self.engine.jax.numpy.asarray(value)

        arrays = [part[place] for part, place, _ in places]
        names = [name for _, _, name in places]
        _checksum.verify(self.engine, names, arrays, write, self.count)
        return tuple(state)

    def check_loss(self, state, data):
        trainable, non_trainable, _, metrics = state
        keras = _keras.keras_of(self.model)

        def loss_of(data):
            x, y, weights = keras.utils.unpack_x_y_sample_weight(data)
            loss, _ = self.model.compute_loss_and_updates(
                trainable, non_trainable, metrics, x, y, weights, training=False
            )
            return float(loss)

        _keras3_ranks.check_loss(self.model, data, loss_of)


def _summed(dtype):
    """The type of number in which arrays of a type are summed up."""
    return "float64" if dtype == "float64" else "float32"


def _flat(parts):
    """All numbers in a row for each type in which they are summed up."""
    jnp = sys.modules["jax"].numpy
    buckets = {}
    for part in parts:
        dtype = _summed(part.dtype)
        buckets.setdefault(dtype, []).append(jnp.ravel(part).astype(dtype))
    return [jnp.concatenate(bucket) for bucket in buckets.values()]


def _shaped(buckets, targets):
    """The opposite, as arrays like the targets."""
    starts, parts = {}, []
    for target in targets:
        dtype = _summed(target.dtype)
        number, start = starts.get(dtype, (len(starts), 0))
        part = buckets[number][start : start + target.size]
        parts.append(part.reshape(target.shape).astype(target.dtype))
        starts[dtype] = number, start + target.size
    return parts


_step = threading.local()


class _Captured:
    """What a step would have updated with."""

    def __init__(self):
        self.gradients = []  # the lists that the optimizer was given
        self.scaled = False  # whether the loss was multiplied by the share


@contextlib.contextmanager
def _captured(model, share):
    """Within, the optimizer updates nothing; yields a ``_Captured``.

    A ``LossScaleOptimizer`` scales the loss of this rank's share of the rows, so that gradients
    overflow where those of one process would.
    """
    captured = _Captured()
    optimizer = model.optimizer
    scale_loss = optimizer.scale_loss

    def capture(variables, given, trainable):
        captured.gradients.append(given)
        return trainable, variables

    def scale_share(loss):
        captured.scaled = True
        return scale_loss(loss) * sys.modules["jax"].numpy.asarray(share(), loss.dtype)

    # Not by setattr: Keras would track it.
    optimizer.__dict__["stateless_apply"] = capture
    if hasattr(optimizer, "inner_optimizer"):
        optimizer.__dict__["scale_loss"] = scale_share
    _step.running = True
    try:
        yield captured
    finally:
        _step.running = False
        del optimizer.__dict__["stateless_apply"]
        optimizer.__dict__.pop("scale_loss", None)


class RankedStatelessCall(_keras_ranks.RankedMethod):
    """``stateless_call``, refused where a loop of the user's own trains with it: it would do so
    alone, since no part of it is the model's."""

    method = "stateless_call"

    def __call__(self, model, *args, **kwargs):
        if kwargs.get("training") and not getattr(_step, "running", False):
            raise errors.own_loop_in_rank(model.name, self.engine.ranks)
        return self.plain(model)(*args, **kwargs)
