"""Theano as one of several ranks: an operation in the graph of a step makes means, over MPI.

Keras makes the function that trains by a method of the model. Within, the gradients that its
optimizer is given are those of all ranks: one operation takes all of them, and state such as
moving averages as the step would set it, and returns their means. So whatever the optimizer does
with gradients (it clips them, for example) it does with the means, and it is the user's own.
"""

import contextlib

from ... import _keras
from ..._ranks import arrays, keras2, state


class MakeTheanoTrainFunction(keras2.MakeFunction):
    step_share = 0.0  # of the step that runs

    def run(self, function, inputs):
        self.step_share, inputs = self.share(function, inputs)
        return function.made(inputs)

    @contextlib.contextmanager
    def making(self, model):
        """Within, gradients, and the model's state after a step, are means over all ranks."""
        from keras import backend as K
        from theano.gradient import disconnected_grad

        from .graph import computed_by  # imports theano

        differentiate, make, update = K.gradients, K.function, model.optimizer.get_updates
        of_rows = _keras.states(model, "get_value") + state.tried(model)  # see keras2_state
        updates = [(v, new) for v, new in model.updates if v not in of_rows and "float" in v.dtype]
        # The values that a step gives to moving averages and the like.
        averages = [new for _, new in updates if "float" in new.dtype]
        means = {}  # by what they are means of
        known = {}  # type: dict  # by a loss of all ranks, gradients of this rank's by variable
        last = K.constant(0.0)  # of the operation before, which ranks must not run after

        def mean(_, *values):
            kind = "float64" if any(value.dtype == "float64" for value in values) else "float32"
            flat = arrays.flat(values, kind)
            flat *= self.step_share
            means = arrays.like(values, self.engine.sum_array(flat))
            self.engine.count("gradients")
            return means

        def exchange(asked):
            """Have an operation compute the means of these, and of state, that none does yet."""
            nonlocal last
            asked = [each for each in dict.fromkeys(asked + averages) if each not in means]
            if asked:
                values = [variable.transfer("cpu") for variable in asked]
                made = computed_by(mean, [last] + values, values, lambda node, shapes: shapes[1:])
                means.update(zip(asked, made))
                last = made[0]

        def get_updates(loss, params):
            """The optimizer sees the mean of the loss, too, whose gradients are those of it."""
            found = differentiate(loss, params)
            exchange([loss] + found)
            here = loss - disconnected_grad(loss)  # is 0
            of_all = disconnected_grad(means[loss]) + here
            known[of_all] = dict(zip(params, found))
            return update(loss=of_all, params=params)

        def gradients(loss, variables):
            found = [known.get(loss, {}).get(variable) for variable in variables]
            if None in found:
                found = differentiate(loss, variables)
                exchange(found)
            return [means[gradient] for gradient in found]

        def function(inputs, outputs, updates=(), **options):
            updates = [(variable, means.get(new, new)) for variable, new in updates]
            return make(inputs, outputs, updates, **options)

        optimizer = model.optimizer
        with self.replaced(model, K, gradients=gradients, function=function):
            with self.replaced(model, optimizer, get_updates=get_updates):
                yield
