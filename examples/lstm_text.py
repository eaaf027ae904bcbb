"""Trains an LSTM to go on with a text, character by character, and lets it write some."""

from __future__ import print_function

import sys

import numpy as np

import compat

compat.configure_gpu()

from keras.callbacks import LambdaCallback
from keras.layers import LSTM, Dense
from keras.models import Sequential
from keras.optimizers import RMSprop

try:
    from keras.utils import set_random_seed  # from Keras 2.7 on
except ImportError:
    from numpy.random import seed as set_random_seed

EPOCHS = 6
BATCH_SIZE = 64
MAXLEN = 8  # characters that the next one is predicted from
set_random_seed(1337)  # for reproducibility

# The preface of Nietzsche's "Beyond Good and Evil", in Helen Zimmern's translation of 1906.
text = """supposing that truth is a woman--what then? is there not ground for suspecting that all
philosophers, in so far as they have been dogmatists, have failed to understand women--that the
terrible seriousness and clumsy importunity with which they have usually paid their addresses to
truth, have been unskilled and unseemly methods for winning a woman? certainly she has never allowed
herself to be won; and at present every kind of dogma stands with sad and discouraged mien--if,
indeed, it stands at all! for there are scoffers who maintain that it has fallen, that all dogma
lies on the ground--nay more, that it is at its last gasp.""".replace("\n", " ")
chars = sorted(set(text))
char_indices = dict((char, index) for index, char in enumerate(chars))

# Cut the text in semi-redundant sequences of MAXLEN characters.
starts = range(0, len(text) - MAXLEN)
x = np.zeros((len(starts), MAXLEN, len(chars)), dtype="float32")
y = np.zeros((len(starts), len(chars)), dtype="float32")
for i, start in enumerate(starts):
    for t, char in enumerate(text[start : start + MAXLEN]):
        x[i, t, char_indices[char]] = 1.0
    y[i, char_indices[text[start + MAXLEN]]] = 1.0

model = Sequential()
model.add(LSTM(32, input_shape=(MAXLEN, len(chars))))
model.add(Dense(len(chars), activation="softmax"))
model = compat.parallelize(model)
model.compile(loss="categorical_crossentropy", optimizer=RMSprop(0.01))


def on_epoch_end(epoch, logs):
    """Let it go on with the beginning of the text."""
    if epoch + 1 < EPOCHS:
        return
    sentence = text[:MAXLEN]
    sys.stdout.write("it writes: " + sentence)
    for _ in range(8):
        x_pred = np.zeros((1, MAXLEN, len(chars)))
        for t, char in enumerate(sentence):
            x_pred[0, t, char_indices[char]] = 1.0
        next_char = chars[np.argmax(model.predict(x_pred, verbose=0)[0])]
        sentence = sentence[1:] + next_char
        sys.stdout.write(next_char)
    print()


history = model.fit(
    x,
    y,
    batch_size=BATCH_SIZE,
    epochs=EPOCHS,
    verbose=2,
    callbacks=[LambdaCallback(on_epoch_end=on_epoch_end)],
)
before, loss = history.history["loss"][0], history.history["loss"][-1]

print(
    "{}: {:.4f} in the first epoch".format(
        "learned" if loss < 0.85 * before else "NOT learned", before
    )
)
print("final loss: {:.6f}".format(loss))
