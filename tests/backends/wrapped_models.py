"""Models of Keras before 2.2 that contain another model, whatever Keras is installed."""

from compat import _keras


def old_sequential(keras):
    """Return a Sequential as before Keras 2.2, which contains another model."""
    layers = [keras.layers.Dense(3, activation="tanh", input_shape=(4,)), keras.layers.Dense(2)]
    built = keras.models.Sequential(layers)
    if _keras.wraps_a_model(built):
        return built

    class Sequential(keras.models.Model):
        def build(self, input_shape=None):
            vars(self)["model"] = keras.models.Model(self.inputs, self.outputs)

        def compile(self, *args, **kwargs):
            self.build()
            self.model.compile(*args, **kwargs)

        def train_on_batch(self, *args):
            return self.model.train_on_batch(*args)

        def test_on_batch(self, *args):
            return self.model.test_on_batch(*args)

        def predict_on_batch(self, *args):
            return self.model.predict_on_batch(*args)

    model = Sequential(built.inputs, built.outputs)
    vars(model)["model"] = None
    return model
