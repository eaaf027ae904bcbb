"""CNTK as one of several ranks: its distributed learner sums gradients, over MPI.

Keras makes the training function by a method of the model, with a trainer of CNTK in it. Here that
is replaced by a trainer whose loss is Keras' times the rank's fraction of the batch, and whose
learner is CNTK's data-parallel one around the user's: its sum of all ranks' gradients is their
mean. For all else, such as an agreement before each step, ranks communicate by compat's MPI engine.
"""

import contextlib

import numpy as np

from ..._ranks import arrays, keras2, state


class MakeCNTKTrainFunction(keras2.MakeFunction):
    """Method by which Keras makes the function that trains."""

    factor = None  # CNTK's constant in the loss: this rank's fraction of the batch

    def run(self, function, inputs):
        """Run a step with this rank's shard, and average the state that it sets."""
        share, inputs = self.share(function, inputs)
        self.factor.value = np.asarray(share, "float32")
        samples_before = _samples(function)
        # Ranks that wait here respond to each other when they time out.
        with self.engine.watched("for the others' gradients", absent=self.engine.absent):
            result = function.made(inputs)
        # With a learner that exchanges gradients, CNTK counts the samples of all ranks.
        if _samples(function) - samples_before > keras2.rows_of(inputs):
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
        """Return the weights that a function trains."""
        trained = set() if made.trainer is None else {p.uid for p in made.trainer.model.parameters}
        return [weight for weight in weights if weight.uid in trained]

    @contextlib.contextmanager
    def making(self, model):
        """Give the function that is made within a block a trainer of all ranks."""
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
                cntk.combine(made.trainer_output),  # it sums up the loss alone
                (made.loss * self.factor,),
                [cntk.train.distributed.data_parallel_distributed_learner(*learners)],
            )
            return made

        with self.replaced(model, K, function=function):
            yield


def _samples(function):
    """Return the number of samples that a function's trainer has trained on."""
    trainer = function.made.trainer
    return 0 if trainer is None else trainer.total_number_of_samples_seen


def _averages(model):
    """Return the weights that the model's updates set, such as moving averages."""
    tried = {variable.uid for variable in state.tried(model)}  # see keras2_state
    weights = {w.uid: w for w in model.non_trainable_weights if w.uid not in tried}
    updated = [
        (update[0] if isinstance(update, tuple) else update.root_function.inputs[0]).uid
        for update in model.updates
    ]
    return [weights[uid] for uid in dict.fromkeys(updated) if uid in weights]
