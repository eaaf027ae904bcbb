"""Operations that XLA partitions wrongly without the fixes."""

from compat.testing import span


def test_sorts_within_uneven_batches(run):
    """XLA's partitioner would end the process; JAX has kept what was differentiated before."""
    printed = run(
        """
        import compat
        compat.configure_gpu(simulate=3, verify=0)
        import keras, numpy as np
        from keras import ops

        class Sorted(keras.layers.Layer):
            def call(self, x):
                median = ops.median(x, axis=0)
                return ops.sort(x, axis=0) + ops.sort(x, axis=1) * median

        class Loop(keras.Sequential):
            def train_step(self, state, data):
                x, y, *_ = data
                return super().train_step(state, (x, ops.sort(y, axis=0)))

        def loss(targets, outputs):
            return ops.mean(ops.top_k(ops.transpose((outputs - targets) ** 2), 2)[0])

        def trained(parallel):
            keras.utils.set_random_seed(0)
            layers = [keras.layers.Dense(5), Sorted(), keras.layers.Dense(2)]
            model = Loop([keras.layers.Input((4,))] + layers)
            if parallel:
                compat.parallelize(model)
            model.compile(keras.optimizers.SGD(0.1), loss)
            random = np.random.RandomState(0)
            for rows in (10, 2):
                model.train_on_batch(random.rand(rows, 4), random.rand(rows, 2))
            return model.get_weights() + [model.predict(random.rand(8, 4), verbose=0)]

        for one, several in zip(trained(False), trained(True)):
            print(np.allclose(one, several, atol=1e-6))
        """
    )
    assert printed.splitlines() == ["True"] * 5


@span
def test_slices_past_the_end_of_uneven_batches(run):
    """XLA moves them back to the last rows, which is where gradients and updates go."""
    printed = run(
        """
        import compat
        compat.configure_gpu(simulate=4, verify=0)
        import jax, keras, numpy as np

        class PastTheEnd(keras.layers.Layer):
            def call(self, x):
                x = jax.lax.dynamic_update_slice(x, x[:1] * 3.0, (7, 0))
                return x + x[6]

        def trained(parallel):
            keras.utils.set_random_seed(0)
            layers = [keras.layers.Dense(5), PastTheEnd(), keras.layers.Dense(2)]
            model = keras.Sequential([keras.layers.Input((4,))] + layers)
            if parallel:
                compat.parallelize(model)
            model.compile(keras.optimizers.SGD(0.02), "mse")
            random = np.random.RandomState(0)
            for rows in (2, 5, 8, 7, 3):
                model.train_on_batch(random.rand(rows, 4), random.rand(rows, 2))
            return model.get_weights() + [model.predict(random.rand(6, 4), verbose=0)]

        for one, several in zip(trained(False), trained(True)):
            print(np.allclose(one, several, atol=1e-6))
        """
    )
    assert printed.splitlines() == ["True"] * 5
