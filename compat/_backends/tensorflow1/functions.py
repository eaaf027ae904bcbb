"""The functions of a Keras model, made to run the batch part of its graph on several devices."""

import contextlib

from ... import _keras, _rows
from . import row_trial
from .function_errors import become, explain
from .graph import v1_names
from .replicas import GraphReplicas
from .step_counter import counting_in_order


class ReplicatedGraphFunctions:
    """The three functions of a Keras model, made to run its batch part on several devices.

    Keras makes a function when it is first needed, by a method of the model. The instance gets
    methods of its own for that, which call Keras' and rewire what it made.
    """

    def __init__(self, model, devices):
        self.owner = model
        self.model = _keras.inner_model(model)
        self.devices = list(devices)
        self._made = {}  # type: Dict[str, Any]
        self._replicas = None  # type: Optional[GraphReplicas]
        self._replicas_key = []  # type: List[Any]
        self._tried = {}  # type: Dict[Any, Any]
        self._warned = False

    def install(self):
        vars(self.owner)["_compat_functions"] = self
        if _keras.wraps_a_model(self.owner):
            vars(self.owner)["build"] = self._build
        if self.model is not None:
            for function in _keras.FUNCTIONS:
                vars(self.model)["_make_" + function] = self._maker(function)

    def uninstall(self):
        vars(self.owner).pop("build", None)
        del vars(self.owner)["_compat_functions"]
        for function in _keras.FUNCTIONS if self.model is not None else ():
            del vars(self.model)["_make_" + function]

    def _build(self, input_shape=None):
        """What an old Sequential does to make its inner model anew, when layers were added."""
        type(self.owner).build(self.owner, input_shape)
        self.model = _keras.inner_model(self.owner)
        self.install()

    def _maker(self, function):
        make = getattr(self.model, "_make_" + function)

        def make_replicated():
            before = getattr(self.model, function, None)
            with self._training_on_replicas() if "train" in function else contextlib.ExitStack():
                make()
            made = getattr(self.model, function)
            if made is not before:  # what stands there already may be the user's own
                replicas = self._replicas_now()
                made.outputs = [replicas.whole(tensor) for tensor in made.outputs]
                made.updates_op = replicas.whole(made.updates_op)
                explain(made, self, replicas, "train" in function)
                self._made[function] = made, make_replicated

        return make_replicated

    def try_on(self, replicas, inputs, values):
        """Try what a function takes of the replicas on the first rows that it is fed.

        Where that gives other rows than the whole batch would, its functions are made anew.

        Returns:
            Whether they were.
        """
        taken = [tensor for tensor in replicas.taken() if tensor not in replicas.tried]
        replicas.tried.update(taken)
        K = _keras.keras_of(self.model).backend
        K = K if hasattr(K, "get_session") else v1_names().keras.backend  # TensorFlow 2
        phase = getattr(K, "symbolic_learning_phase", K.learning_phase)()
        trial = row_trial.ReplicasTrial(K, replicas, dict(zip(inputs, values)), phase)
        failed = trial.differing(taken) if taken else {}
        if failed:
            found = trial.placements(failed)
            # Nothing new: then all of it runs whole.
            self._tried.update(found or dict.fromkeys(self.model.outputs, _rows.Mixed("tried")))
            self._make_anew()
        return bool(failed)

    def _make_anew(self):
        """Make all functions again; those that were there do from then on what the new ones do."""
        self._replicas = None
        for function, (made, make) in list(self._made.items()):
            current = getattr(self.model, function)
            # Keras makes new variables for the optimizer's state with every train function.
            state = self.model.optimizer.get_weights() if "train" in function else None
            setattr(self.model, function, None)
            try:
                make()
                become(made, self._made[function][0])
            finally:
                self._made[function] = made, make
                setattr(self.model, function, current)
            if state is not None:
                self.model.optimizer.set_weights(state)

    def _replicas_now(self):
        """The replicas of the model as it is now: layers may have been added or frozen."""
        model = self.model
        updates = list(model.updates) + list(model.state_updates)
        loss = getattr(model, "total_loss", None)  # once compiled
        losses = [] if loss is None else [loss]
        key = list(map(id, list(model.inputs) + list(model.outputs) + updates + losses))
        if self._replicas is None or key != self._replicas_key:
            self._replicas = GraphReplicas(model, losses, updates, self._tried, self.devices)
            self._replicas_key = key
            across = self._replicas.part.across
            if across is not None and not self._warned:
                self._warned = True
                _rows.runs_whole(model.name, across, self.devices[0])
        return self._replicas

    def _training_on_replicas(self):
        """Within, the optimizer takes its gradients from the replicas, each on its device."""
        return counting_in_order(
            self.model.optimizer,
            lambda loss, params: self._replicas_now().whole(loss),
            lambda: self._replicas_now().gradients_colocated(),
        )
