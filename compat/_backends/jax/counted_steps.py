"""Batches counted where the functions that Keras makes of steps get them."""

import threading

from ..._rows.splitting import unsplit
from ..._runtime import patching


def install(model, replicated):
    """Have the batches of a model's steps counted.

    Arguments:
        model: a parallelized model.
        replicated: its ``ReplicatedCall``.
    """
    kinds = [CountedSteps] if hasattr(type(model), CountedSteps.method) else _FUNCTIONS
    for kind in kinds:
        kind(replicated).install(model)


def remove(model):
    """Stop counting the batches of a model's steps."""
    for kind in [CountedSteps, *_FUNCTIONS]:
        if kind.of(model) is not None:
            kind.of(model).remove(model)


def runs_programs(model):
    """Return whether a model's steps are compiled."""
    return not model.run_eagerly and model.jit_compile


class Running(threading.local):
    """Steps of Keras' loops that a thread is executing, innermost last.

    Attributes:
        steps: for each step the batch sizes that it has split.
    """

    def __init__(self):
        self.steps = []

    def note_split(self, rows):
        """Record that a batch of so many rows is split, now or in the program being traced."""
        if self.steps:
            self.steps[-1].add(rows)


class _Counting(patching.InstanceMethod):
    def __init__(self, replicated):
        super().__init__(replicated.devices)
        self.replicated = replicated

    def counted(self, model, step, kind, batches):
        """Return a function of state and data that runs a step, and counts its batches.

        Arguments:
            model: the model.
            step: the function of its step.
            kind: of the step: "train", for example.
            batches: a function that returns the batches within the data.
        """
        running = self.replicated.running
        split = self.replicated.split.setdefault(kind, set())

        def counted(state, data):
            running.steps.append(set())
            try:
                results = step(state, data)
            finally:
                split_now = running.steps.pop()
            if runs_programs(model):
                split.update(split_now)  # a program is traced once, also for functions made later
                split_now = split
            if not unsplit.here():
                for batch in batches(data):
                    self.replicated.count_step(batch, split_now, kind == "train")
            return results

        counted.counts = True
        return counted


class CountedSteps(_Counting):
    """Method by which Keras makes a loop's function of a step."""

    method = "_make_function"

    def invoke(self, model, step_function, *args, **kwargs):
        kind = getattr(step_function, "__name__", "").replace("_step", "")
        step = self.counted(model, step_function, kind, lambda data: [data])
        return self.plain(model)(step, *args, **kwargs)


class CountedFunction(_Counting):
    """Method by which Keras 3.6 makes such a function: of the batches of one execution."""

    def invoke(self, model, *args, **kwargs):
        result = self.plain(model)(*args, **kwargs)
        attribute = self.method[len("make_") :]
        function = getattr(model, attribute)
        if not hasattr(function, "counts"):
            kind = attribute.replace("_function", "")
            setattr(model, attribute, self.counted(model, function, kind, list))
        return result


_FUNCTIONS = [
    type("CountedFunction", (CountedFunction,), {"method": f"make_{kind}_function"})
    for kind in ("train", "test", "predict")
]
