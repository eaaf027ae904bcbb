"""Trains a variational autoencoder on drawn ellipses; its loss is added by a layer.

Kingma and Welling, "Auto-Encoding Variational Bayes", 2013. The noise is an input, drawn by numpy,
so that every run draws the same.
"""

from __future__ import print_function

import numpy as np

import compat

compat.configure_gpu()

from keras.layers import Dense, Input, Lambda, Layer
from keras.models import Model
from keras.optimizers import RMSprop

try:
    from keras import ops as K  # Keras 3
except ImportError:
    from keras import backend as K
try:
    from keras.utils import set_random_seed  # from Keras 2.7 on
except ImportError:
    from numpy.random import seed as set_random_seed

SIZE = 12
LATENT_DIM = 2
EPOCHS = 5
BATCH_SIZE = 50
set_random_seed(1337)  # for reproducibility


def load_data(samples):
    """Images of a filled ellipse in the middle, of any width and height."""
    rows, columns = np.mgrid[:SIZE, :SIZE] - (SIZE - 1) / 2.0
    axes = np.random.uniform(1.5, SIZE / 2.0, size=(samples, 2, 1, 1))
    inside = (rows / axes[:, 0]) ** 2 + (columns / axes[:, 1]) ** 2
    return (inside <= 1.0).reshape(samples, SIZE * SIZE).astype("float32")


def sampling(args):
    z_mean, z_log_var, epsilon = args
    return z_mean + K.exp(0.5 * z_log_var) * epsilon


class VariationalLoss(Layer):
    """Passes on the decoded image, and adds the loss of having decoded it."""

    def call(self, inputs):
        image, decoded, z_mean, z_log_var = inputs
        reconstruction = K.sum(K.square(image - decoded), axis=-1)
        divergence = K.sum(1.0 + z_log_var - K.square(z_mean) - K.exp(z_log_var), axis=-1)
        loss = K.mean(reconstruction - 0.5 * divergence)
        try:
            self.add_loss(loss, inputs)
        except TypeError:  # TensorFlow 2 and Keras 3 know the inputs
            self.add_loss(loss)
        return 1.0 * decoded  # keras-mxnet fails where a layer returns its input itself

    def compute_output_shape(self, input_shape):
        return input_shape[1]


x_train = load_data(600)
noise = np.random.normal(size=(len(x_train), LATENT_DIM)).astype("float32")

image = Input(shape=(SIZE * SIZE,))
epsilon = Input(shape=(LATENT_DIM,))
h = Dense(32, activation="relu")(image)
z_mean = Dense(LATENT_DIM)(h)
z_log_var = Dense(LATENT_DIM)(h)
z = Lambda(sampling, output_shape=lambda shapes: shapes[0])([z_mean, z_log_var, epsilon])
decoder_h = Dense(32, activation="relu")
decoder_mean = Dense(SIZE * SIZE, activation="sigmoid")
decoded = decoder_mean(decoder_h(z))
model = Model([image, epsilon], VariationalLoss()([image, decoded, z_mean, z_log_var]))
model = compat.parallelize(model)
model.compile(optimizer=RMSprop(0.003), loss=None)

history = model.fit([x_train, noise], None, batch_size=BATCH_SIZE, epochs=EPOCHS, verbose=2)
before, loss = history.history["loss"][0], history.history["loss"][-1]

# A point of the latent space is an image.
point = Input(shape=(LATENT_DIM,))
generator = Model(point, decoder_mean(decoder_h(point)))
for row in generator.predict(np.zeros((1, LATENT_DIM))).reshape(SIZE, SIZE)[::2]:
    print("".join(" .:*#"[int(4.99 * pixel)] for pixel in row))
print(
    "{}: {:.4f} in the first epoch".format(
        "learned" if loss < 0.7 * before else "NOT learned", before
    )
)
print("final loss: {:.6f}".format(loss))
