"""Trains a generative adversarial network on drawn squares: two models, trained in turn.

Goodfellow et al., "Generative Adversarial Networks", 2014.
"""

from __future__ import print_function

import numpy as np

import compat

compat.configure_gpu()

from keras.layers import Dense, Input, LeakyReLU
from keras.models import Model, Sequential
from keras.optimizers import Adam

try:
    from keras.utils import set_random_seed  # from Keras 2.7 on
except ImportError:
    from numpy.random import seed as set_random_seed

SIZE = 8
LATENT_DIM = 4
ITERATIONS = 60
BATCH_SIZE = 32
set_random_seed(1337)  # for reproducibility


def load_data(samples):
    """Images of a bright square in the middle, of any size; from -1 to 1, as tanh is."""
    rows, columns = np.abs(np.mgrid[:SIZE, :SIZE] - (SIZE - 1) / 2.0)
    sides = np.random.uniform(1.0, SIZE / 2.0, size=(samples, 1, 1))
    squares = 2.0 * (np.maximum(rows, columns) < sides) - 1.0
    return squares.reshape(samples, SIZE * SIZE).astype("float32")


def noise(rows):
    return np.random.normal(size=(rows, LATENT_DIM)).astype("float32")


x_train = load_data(400)

generator = Sequential()
generator.add(Dense(32, input_shape=(LATENT_DIM,)))
generator.add(LeakyReLU(0.2))
generator.add(Dense(SIZE * SIZE, activation="tanh"))

discriminator = Sequential()
discriminator.add(Dense(32, input_shape=(SIZE * SIZE,)))
discriminator.add(LeakyReLU(0.2))
discriminator.add(Dense(1, activation="sigmoid"))
discriminator = compat.parallelize(discriminator)
discriminator.compile(loss="binary_crossentropy", optimizer=Adam(0.01, 0.5))

# The generator learns through the discriminator, which then stays as it is.
discriminator.trainable = False
z = Input(shape=(LATENT_DIM,))
model = Model(z, discriminator(generator(z)))
model = compat.parallelize(model)
model.compile(loss="binary_crossentropy", optimizer=Adam(0.01, 0.5))


def distance():
    """How far the mean of generated images is from that of real ones."""
    return np.abs(generator.predict(fixed_noise).mean(0) - x_train.mean(0)).mean()


fixed_noise = noise(100)
before = distance()
ones, zeros = np.ones((BATCH_SIZE, 1)), np.zeros((BATCH_SIZE, 1))
for iteration in range(ITERATIONS):
    real = x_train[np.random.randint(len(x_train), size=BATCH_SIZE)]
    fake = generator.predict_on_batch(noise(BATCH_SIZE))
    discriminator.trainable = True
    d_loss = discriminator.train_on_batch(real, ones)
    d_loss += discriminator.train_on_batch(np.array(fake), zeros)
    discriminator.trainable = False
    loss = model.train_on_batch(noise(BATCH_SIZE), ones)
    if (iteration + 1) % 10 == 0:
        print("{}: d_loss {:.4f} g_loss {:.4f}".format(iteration + 1, float(d_loss), float(loss)))

after = distance()
print("distance of the mean images: {:.4f}".format(after))
print("{}: {:.4f} before".format("learned" if after < 0.7 * before else "NOT learned", before))
print("final loss: {:.6f}".format(float(loss)))
