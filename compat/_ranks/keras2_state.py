"""Variables that the updates of a Keras 2 model set, merged over all ranks.

Moving averages of Keras' own layers are merged by each backend; here are those of other layers.
How they are merged is decided by a trial (see ``state``) in front of the first step, which computes
the model's updates for some rows of the batch and trains nothing.
"""

import contextlib

import numpy as np

from .. import _keras
from . import arrays, merging, state


class UpdatedState:
    """The variables of one model that are neither trained nor of Keras' own layers.

    Arguments:
        engine: that of the ranks.
        model: the one that Keras has made a function for.
        compute: a function of the inputs of Keras' function that does a step's updates, and
            nothing else; None: Keras makes such a function.
    """

    def __init__(self, engine, model, compute=None):
        self.engine, self.model, self.compute = engine, model, compute
        self.variables = state.tried(model)
        self.merges = None

    @contextlib.contextmanager
    def merged(self, inputs):
        """Merge the variables after a step, which runs within, into one process's values.

        Arguments:
            inputs: those that Keras passes to the function of the step.
        """
        if self.variables and self.merges is None:
            self.merges = self._decided(inputs)
        if not any(merge.is_exchanged for merge in self.merges or ()):
            yield
            return
        read, write = _keras.reader_and_writer(self.model)
        before, rows = _copied(read(self.variables)), int(inputs[0].shape[0])
        yield
        after, place = _copied(read(self.variables)), self.engine.place
        parts = merging.parts(self.merges, merging.NUMPY, before, after, rows, place)
        numbers = arrays.flat([np.asarray(float(rows))] + parts, "float64")
        total, *sums = arrays.like([np.zeros(1)] + parts, self.engine.sum(numbers.tolist()))
        values = merging.merged(
            self.merges, merging.NUMPY, before, after, sums, place.size, 1 / float(total[0])
        )
        write(list(zip(self.variables, values)))

    def _decided(self, inputs):
        model, variables = self.model, self.variables
        read, write = _keras.reader_and_writer(model)
        rows = int(inputs[0].shape[0])

        def run(numbers, values):
            self.compute = self.compute or self._made(inputs)
            some = [
                array[list(numbers)] if np.shape(array)[:1] == (rows,) else array
                for array in inputs
            ]
            with _keras.kept(model, model.weights + self.engine.state_besides(model)):
                write(list(zip(variables, values)))
                self.compute(some)
                return _copied(read(variables))

        values = _copied(read(variables))
        names, dtypes = [v.name for v in variables], [value.dtype for value in values]
        step_state = state.StepState(self.engine, names, dtypes, range(len(names)))
        step_state.decide(rows, values, run)
        return step_state.merges

    def _made(self, inputs):
        """Return the function ``compute`` that Keras makes of the model's updates."""
        model, K = self.model, _keras.keras_of(self.model).backend
        phase = [K.learning_phase()] if isinstance(inputs[-1], (int, float)) else []
        count = len(model._feed_inputs)
        function = K.function(model._feed_inputs + phase, model.outputs, updates=model.updates)
        return lambda some: function(list(some[:count]) + [1] * len(phase))


def _copied(values):
    return [np.array(value) for value in values]
