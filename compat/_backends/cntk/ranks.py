"""CNTK as one of several ranks: its own distributed learner sums gradients, over MPI.

Keras makes the function that trains by a method of the model, with a trainer of CNTK's in it. That
gets another one here, whose loss is the rank's share of the batch times Keras' and whose learner
is CNTK's data-parallel one around the user's: the sum that it makes of all ranks' gradients is
their mean. Before each step, and besides, ranks speak through compat's own MPI.
"""

import contextlib

import numpy as np

from ..._ranks import arrays, keras2, state


class MakeCNTKTrainFunction(keras2.MakeFunction):
    factor = None  # CNTK's constant in the loss

    def run(self, function, inputs):
        share, inputs = self.share(function, inputs)
        self.factor.value = np.asarray(share, "float32")
        seen = _samples(function)
        # Ranks that wait here, too, answer each other when their time is over.
        with self.engine.watched("for the others' gradients", absent=self.engine.absent):
            result = function.made(inputs)
        # By what CNTK counts: of a learner that exchanges gradients the rows of all ranks.
        if _samples(function) - seen > keras2.rows_of(inputs):
            self.engine.count("gradients")
        averages = _averages(function.model)
        if averages:  # which become their mean over all ranks
            values = [variable.value for variable in averages]
            flat = arrays.flat(values, "float32") * np.float32(share)
            means = arrays.like(values, self.engine.sum_array(flat))
            for variable, mean in zip(averages, means):
                variable.value = mean
        return result

    @staticmethod
    def written(made, updates, weights):
        trained = set() if made.trainer is None else {p.uid for p in made.trainer.model.parameters}
        return [weight for weight in weights if weight.uid in trained]

    @contextlib.contextmanager
    def making(self, model):
        """Within, the function gets a trainer of all ranks."""
        import cntk
        from keras import backend as K

        make = K.function

        def function(inputs, outputs, updates=(), **options):
            made = make(inputs, outputs, updates, **options)
            self.factor = cntk.constant(0.0)
            if made.trainer is None:  # nothing is to be trained
                return made
            learners = made.trainer.parameter_learners
            made.trainer = cntk.Trainer(
                cntk.combine(made.trainer_output),  # what is not the loss it does not sum up
                (made.loss * self.factor,),
                [cntk.train.distributed.data_parallel_distributed_learner(*learners)],
            )
            return made

        with self.replaced(model, K, function=function):
            yield


def _samples(function):
    """Return how many rows the function's trainer has trained on."""
    trainer = function.made.trainer
    return 0 if trainer is None else trainer.total_number_of_samples_seen


def _averages(model):
    """Moving averages and the like: the weights that the model's own updates set."""
    tried = {variable.uid for variable in state.tried(model)}  # see keras2_state
    weights = {w.uid: w for w in model.non_trainable_weights if w.uid not in tried}
    updated = [
        (update[0] if isinstance(update, tuple) else update.root_function.inputs[0]).uid
        for update in model.updates
    ]
    return [weights[uid] for uid in dict.fromkeys(updated) if uid in weights]
