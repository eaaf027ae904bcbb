"""Batches counted where the functions that Keras makes of steps get them."""

from ..._rows import split_rows
from ..._runtime import patching


def install(model, sharded):
    """Have the batches of a model's steps counted.

    Arguments:
        sharded: the model's ``ShardedCall``.
    """
    kinds = [CountedSteps] if hasattr(type(model), CountedSteps.method) else _FUNCTIONS
    for kind in kinds:
        kind(sharded).install(model)


def remove(model):
    """Count them no more."""
    for kind in [CountedSteps, *_FUNCTIONS]:
        if kind.of(model) is not None:
            kind.of(model).remove(model)


class _Counting(patching.InstanceMethod):
    def __init__(self, sharded):
        super().__init__(sharded.devices)
        self.sharded = sharded

    def counted(self, step, training, batches):
        """A function of state and data that does a step, and counts its batches.

        Arguments:
            batches: returns the batches within the data.
        """

        def counted(state, data):
            with self.sharded.in_step:
                results = step(state, data)
            if not split_rows.runs_undivided():
                for batch in batches(data):
                    self.sharded.count_step(batch, training)
            return results

        counted.counts = True
        return counted


class CountedSteps(_Counting):
    """The method by which Keras makes a loop's function of a step."""

    method = "_make_function"

    def invoke(self, model, step_function, *args, **kwargs):
        training = getattr(step_function, "__name__", "") == "train_step"
        step = self.counted(step_function, training, lambda data: [data])
        return self.plain(model)(step, *args, **kwargs)


class CountedFunction(_Counting):
    """A method by which Keras 3.6 makes such a function: of the batches of one execution."""

    def invoke(self, model, *args, **kwargs):
        result = self.plain(model)(*args, **kwargs)
        attribute = self.method[len("make_") :]
        function = getattr(model, attribute)
        if not hasattr(function, "counts"):
            training = attribute == "train_function"
            setattr(model, attribute, self.counted(function, training, list))
        return result


_FUNCTIONS = [
    type("CountedFunction", (CountedFunction,), {"method": f"make_{kind}_function"})
    for kind in ("train", "test", "predict")
]
