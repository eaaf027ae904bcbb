"""Functions of a Keras model that run the batch part of its graph on several devices."""

import contextlib
import re
import threading
from _thread import get_ident
from typing import Any, Dict, List, Optional

from ... import _keras, _rows, errors
from ..._rows import Fallback, Reason, splitting
from ..._runtime import patching, synchronized, work
from ..._runtime.process import process
from .._tensorflow.graph import v1_names
from .._tensorflow.profiler import as_configured
from . import arguments
from .configuration import sessions_in_use
from .fetches import ReplicatedResults
from .kept_weights import KeptWeights, Storage, can_keep_any
from .optimizer_order import counting_in_order
from .partition import BatchPart
from .replicas import Replicas
from .trial import ReplicasTrial
from .verification import VerifiedStep
from .weight_copies import WeightChain

# Names of operations that run a shard of the batch, and of those that merge tensors of replicas.
_OF_REPLICAS = re.compile(r"\breplica_\d|rows_in_order|mean_by_rows|reduced_over")

_HINT = (
    "\n\nparallelize() runs the operations named replica_... on a shard of the batch. An operation "
    "that needs the whole batch, or its size, fails there: use sizes of its inputs, such as "
    "K.shape(x)[0], or one device: parallelize(model, gpus=1)."
)

# Held while operations are added to a graph, whose scopes are those of all threads.
_making = threading.RLock()


class ReplicatedGraphFunctions:
    """Functions of a Keras model that run its batch part on several devices.

    Keras makes a function when it is first needed, by a method of the model. The instance gets
    other methods for that, which call Keras' and rewire the function. On one device this is done to
    the training function alone, so that its optimizer counts the first step as step 1.

    Arguments:
        model: the model.
        devices: the devices, as TensorFlow names them.

    Attributes:
        is_synchronized: whether all batch normalization uses the statistics of the whole batch.
        trying: held while a thread tries the replicas.
    """

    def __init__(self, model, devices):
        self.owner, self.model = model, None
        self.devices, self.verification = list(devices), None
        self.is_synchronized = synchronized.is_asked(model)
        self._made: "Dict[str, ReplicatedGraphFunction]" = {}
        self._part: "Optional[BatchPart]" = None
        self._part_key: "List[Any]" = []
        self._replicas: "Dict[bool, Replicas]" = {}  # by whether they keep weights
        self._storage = Storage()
        self._tried: "Dict[Any, Any]" = {}
        self._redistributes = True
        self.trying = threading.RLock()
        patching.attach(model, "_compat_functions", self)
        _keras.InnerModel.have_prepared(model, self._prepare)

    def _prepare(self, model):
        """Install the methods on a model; an old ``Sequential`` has several models in turn."""
        self.model = model
        for kind in _KINDS:
            is_wanted = len(self.devices) > 1 or _keras.trains(kind.function)
            if is_wanted and hasattr(model, kind.method):
                kind(self).install(model)
        if self.verification is not None:
            VerifiedStep.install_on(model, self.verification)

    def uninstall(self) -> None:
        """Remove the methods from the model."""
        for model in (self.owner, self.model):
            for kind in [_keras.InnerModel, *_KINDS] if model is not None else ():
                method = kind.of(model)
                if method is not None:
                    method.remove(model)
        self._storage.delete(sessions_in_use())
        patching.detach(self.owner, "_compat_functions")

    def made(self, name, made):
        """Replace a function that Keras has just made for the model."""
        self._made[name] = ReplicatedGraphFunction(self, made, _keras.trains(name))
        setattr(self.model, name, self._made[name])
        _learning_phase(self._backend())  # made now: the graph may be finalized later

    def try_on(self, replicas: "Replicas", fed: "Dict[Any, Any]") -> bool:
        """Try the tensors that functions take of the replicas, on rows of a first batch.

        If replicas compute other rows than the whole batch does, all functions are made anew.

        Arguments:
            replicas: the ``Replicas``.
            fed: the values that a function is fed, by tensor.

        Returns:
            Whether functions were made anew.
        """
        taken = [tensor for tensor in replicas.taken() if tensor not in replicas.part.passed]
        if not taken:
            return False
        with replicas.graph.as_default():  # this thread need not have it
            K = self._backend()
            trial = ReplicasTrial(K, replicas, fed, _learning_phase(K))
            failed = trial.differing(taken)
            if failed:
                self._refuse_finalized(replicas.graph)
                unsplit = _rows.Mixed(Fallback(Reason.TRIAL_DIFFERS))
                # If there are no new placements, the model runs unsplit.
                placements = trial.placements(failed) or dict.fromkeys(self.model.outputs, unsplit)
                self._tried.update(placements)
                self._make_anew()
        replicas.part.passed.update(taken)
        return bool(failed)

    def refuse_redistribution(self, replicas: "Replicas") -> bool:
        """Make all functions anew, without values that are gathered or split again.

        Inputs may have different numbers of rows where replicas read only some of them.

        Returns:
            Whether there were such values, and the functions are others now.
        """
        if not replicas.part.redistributes or replicas.graph.finalized:
            return False
        with self.trying, replicas.graph.as_default():
            if self._redistributes:
                self._redistributes = False
                self._make_anew()
        return True

    def _backend(self):
        K = _keras.keras_of(self.model).backend
        return K if hasattr(K, "get_session") else v1_names().keras.backend  # TensorFlow 2

    def _refuse_finalized(self, within):
        if within.finalized:
            raise errors.UnsupportedError(
                f"By a trial with rows of the first batch, model {self.owner.name!r} needs the "
                "whole batch where its graph has only shards, and its graph is finalized, so that "
                "no operation can be added. Run each of its functions once before "
                "graph.finalize(), as by model.predict(), or use one device: "
                "parallelize(model, gpus=1)."
            )

    def _make_anew(self):
        """Make all functions again; the existing ones run from then on what the new ones run."""
        self._part = None
        for name, function in list(self._made.items()):
            # Keras makes new variables for the optimizer's state with every train function.
            state = self.model.optimizer.get_weights() if function.training else None
            try:
                with _unmade(self.model, name):
                    getattr(self.model, _keras.maker_of(name))()
                function.become(self._made[name])
            finally:
                self._made[name] = function
            if state is not None:
                self.model.optimizer.set_weights(state)

    def replicas_now(self, training: bool) -> "Replicas":
        """Return the replicas of the model as it is now: layers may have been added or frozen.

        Arguments:
            training: whether gradients are computed; if not, devices may keep the weights.
        """
        model = self.model
        updates = list(model.updates) + list(model.state_updates)
        loss = getattr(model, "total_loss", None)  # once compiled
        losses = [] if loss is None else [loss]
        asking = [x for x in _keras.all_layers_of_keras2(model) if synchronized.asks(x)]
        key = list(map(id, list(model.inputs) + list(model.outputs) + updates + losses + asking))
        if self._part is None or key != self._part_key:
            self._part = BatchPart(
                model, losses, updates, self._tried, self.is_synchronized, self._redistributes
            )
            self._part_key, self._replicas = key, {}
            fallback = self._part.fallback
            if fallback is not None:
                scope, device = self._part.scope, self.devices[0]
                _rows.warn_unsplit(self.owner, model.name, fallback, device, scope, owner=self)
        keeps = not training and can_keep_any(model.weights)
        if keeps not in self._replicas:
            chain = KeptWeights(self.devices, self._storage) if keeps else WeightChain(self.devices)
            self._replicas[keeps] = Replicas(model, self._part, chain)
        return self._replicas[keeps]

    def training(self):
        """Have the optimizer count its steps in order, within a block.

        It takes its gradients from the replicas, if there are any, each on its device.
        """
        if len(self.devices) == 1:
            return counting_in_order(self.model.optimizer)
        return counting_in_order(
            self.model.optimizer,
            lambda loss, params: self.replicas_now(training=True).whole(loss),
            lambda: self.replicas_now(training=True).gradients_colocated(),
        )


@contextlib.contextmanager
def _unmade(model, name):
    """Let this thread, and no other, find within a block that a function has not been made.

    Keras makes a function where the attribute is None, and other threads call what it holds.
    """
    plain, thread, found = type(model), get_ident(), {}

    def of_thread(model):
        return found if get_ident() == thread else vars(model)

    function = property(
        lambda model: of_thread(model).get(name),
        lambda model, value: of_thread(model).update({name: value}),
    )
    patching.change_class(model, type(plain.__name__, (plain,), {name: function}))
    try:
        yield
    finally:
        patching.change_class(model, plain)


def _learning_phase(backend):
    return getattr(backend, "symbolic_learning_phase", backend.learning_phase)()


class MakeGraphFunction(patching.InstanceMethod):
    """Method by which Keras makes one of a model's functions, which becomes a replicated one.

    Arguments:
        functions: the model's ``ReplicatedGraphFunctions``.
    """

    function = ""  # its name

    def __init__(self, functions):
        super().__init__(functions.devices)
        self.functions = functions

    def invoke(self, model):
        """Call Keras' method, and rewire the function that it makes."""
        name = self.function
        trains = _keras.trains(name)
        with _making:
            before = getattr(model, name, None)
            with self.functions.training() if trains else contextlib.ExitStack() as losses:
                self.plain(model)()
            made = getattr(model, name)
            # A function that stands there already may be the user's.
            if made is not before and len(self.devices) > 1:
                if trains and not losses:
                    self._warn_of_gradients()
                self.functions.made(name, made)

    def _warn_of_gradients(self):
        name = self.functions.owner.name  # of an old Sequential, not of the one inside
        text = (
            f"The gradients of model {name!r} are computed unsplit on {self.devices[0]}: its "
            "training function was made without a call of model.optimizer.get_updates(), from "
            "which parallelize() has each device compute its own. Another library has replaced it: "
            "call parallelize() after such libraries have changed the model."
        )
        process.unused[name] = text
        if process.configuration is not None and process.configuration.settings.strict:
            raise errors.DevicesNotUsedError(text)
        errors.warn(text)


_KINDS: "List[Any]" = [
    type(
        "MakeGraphFunction",
        (MakeGraphFunction,),
        {"method": _keras.maker_of(name), "function": name},
    )
    for name in _keras.ALL_FUNCTIONS
]


class RewiredFunction:
    """A function that Keras has made, whose outputs and updates are taken from replicas.

    Arguments:
        replicas: the ``Replicas`` of the model.
        made: the function that ``K.function`` returned.

    Attributes:
        results: its outputs and fetches, a ``ReplicatedResults``.
        is_tried: whether all that it takes of the replicas was tried.
    """

    def __init__(self, replicas, made):
        self.replicas, self.made, self.is_tried = replicas, made, False
        self.results = ReplicatedResults(replicas, made)
        made.updates_op = replicas.whole_update(made.updates_op)

    def holder_of(self, name: str) -> "Any":
        """Return the object that has an attribute of the function: callbacks add to ``results``."""
        return self.results if name in ReplicatedResults.added else self.made


class ReplicatedGraphFunction:
    """A function of a model that runs replicas, and checks and counts the batches that it is fed.

    The model and callbacks keep this object, while what it runs may be made anew. It has the
    attributes of the function that Keras made, and passes on what is set.

    Arguments:
        owner: the ``ReplicatedGraphFunctions`` of the model.
        made: the function that ``K.function`` returned.
        training: whether it trains.
    """

    _OF_ITSELF = ("owner", "training", "rewired")

    def __init__(self, owner, made, training):
        self.owner, self.training = owner, training
        self.rewired = RewiredFunction(owner.replicas_now(training), made)

    @property
    def made(self):
        """The function that ``K.function`` returned."""
        return self.rewired.made

    @property
    def results(self):
        """Outputs and fetches, taken from the replicas."""
        return self.rewired.results

    def become(self, other: "ReplicatedGraphFunction") -> None:
        """Run what a function runs that was made anew, and keep what callbacks have added."""
        self.results.give_to(other)
        if hasattr(self, "fetch_callbacks"):
            other.fetch_callbacks = self.fetch_callbacks
        self.rewired = other.rewired

    def __getattr__(self, name):  # its outputs, for example, and callbacks may add to them
        if name in self._OF_ITSELF:  # of a copy, before it has anything
            raise AttributeError(name)
        return getattr(self.rewired.holder_of(name), name)

    def __setattr__(self, name, value):  # what a run is to record, for example
        if name in self._OF_ITSELF:
            super().__setattr__(name, value)
        else:
            setattr(self.rewired.holder_of(name), name, value)

    def __call__(self, inputs):
        from tensorflow.python.framework.errors import InvalidArgumentError

        rows = self.try_on(inputs)
        try:
            results = self.made(inputs)
        except InvalidArgumentError as error:
            if not _OF_REPLICAS.search(error.message):
                raise
            raise type(error)(error.node_def, error.op, error.message + _HINT) from error
        self._count(inputs, rows)
        return results

    def try_on(self, inputs: "List[Any]") -> "Dict[str, int]":
        """Try the tensors that it takes of the replicas; return the numbers of rows it is fed."""
        rows, replicas = self._checked_rows(inputs), self.rewired.replicas
        with self.owner.trying:  # other threads wait for the first one
            while self.results.wire() or not self.rewired.is_tried:
                fed = dict(zip(self.made.inputs, inputs))
                # A trial that fails has this function become another one, to be tried in turn.
                is_tried = not self.owner.try_on(self.rewired.replicas, fed)
                self.rewired.is_tried = is_tried
        return rows if self.rewired.replicas is replicas else self._checked_rows(inputs)

    def _count(self, inputs, rows):
        replicas = self.rewired.replicas
        devices, sizes = _as_configured(replicas.devices), None
        if rows:
            sizes = splitting.sizes(next(iter(rows.values())), len(devices))
        elif not replicas.part.split_inputs and inputs and arguments.rows_of(inputs[0]) is not None:
            sizes = work.unsplit_sizes(devices, arguments.rows_of(inputs[0]))
        work.count(devices, sizes, self.training)  # None: the model has tensors that are not fed

    def _checked_rows(self, inputs):
        """Return the number of rows of each tensor that is split and fed, by name."""
        replicas = self.rewired.replicas
        split = set(map(id, replicas.part.split_inputs))
        rows = {
            getattr(tensor, "name", ""): arguments.rows_of(value)
            for tensor, value in zip(self.made.inputs, inputs)
            if id(tensor) in split and arguments.rows_of(value) is not None
        }
        if len(set(rows.values())) > 1 and self.owner.refuse_redistribution(replicas):
            return self._checked_rows(inputs)
        arguments.check_fed_rows(self.owner.model.name, rows)
        return rows


def devices_of(model: "Any") -> "Optional[List[str]]":
    """Return the devices that a model runs on, by their configured names, or None."""
    functions = vars(model).get("_compat_functions")
    return functions and _as_configured(functions.devices)


def _as_configured(devices):
    configuration = process.configuration
    names = None if configuration is None else configuration.devices
    return devices if names is None else as_configured(devices, names)
