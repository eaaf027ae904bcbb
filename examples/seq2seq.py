"""Trains an encoder and a decoder, both LSTMs, to write numbers: "forty-two" becomes "42"."""

from __future__ import print_function

import numpy as np

import compat

compat.configure_gpu()

from keras.layers import LSTM, Dense, Input
from keras.models import Model
from keras.optimizers import Adam

try:
    from keras.utils import set_random_seed  # from Keras 2.7 on
except ImportError:
    from numpy.random import seed as set_random_seed

EPOCHS = 25
BATCH_SIZE = 34
LATENT_DIM = 32
set_random_seed(1337)  # for reproducibility

ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
input_texts = ONES + [
    tens + ("-" + ONES[ones] if ones else "") for tens in TENS for ones in range(10)
]
# A tab starts a target, a newline ends it.
target_texts = ["\t{}\n".format(number) for number in range(100)]

input_chars = sorted(set("".join(input_texts)))
target_chars = sorted(set("".join(target_texts)))
input_index = dict((char, i) for i, char in enumerate(input_chars))
target_index = dict((char, i) for i, char in enumerate(target_chars))
max_input = max(map(len, input_texts))
max_target = max(map(len, target_texts))

encoder_data = np.zeros((100, max_input, len(input_chars)), dtype="float32")
decoder_data = np.zeros((100, max_target, len(target_chars)), dtype="float32")
decoder_target = np.zeros((100, max_target, len(target_chars)), dtype="float32")
for i, (input_text, target_text) in enumerate(zip(input_texts, target_texts)):
    for t, char in enumerate(input_text):
        encoder_data[i, t, input_index[char]] = 1.0
    for t, char in enumerate(target_text):
        decoder_data[i, t, target_index[char]] = 1.0
        if t > 0:  # one step ahead of the decoder's input
            decoder_target[i, t - 1, target_index[char]] = 1.0

encoder_inputs = Input(shape=(max_input, len(input_chars)))
_, state_h, state_c = LSTM(LATENT_DIM, return_state=True)(encoder_inputs)
encoder_states = [state_h, state_c]
decoder_inputs = Input(shape=(max_target, len(target_chars)))
decoder_lstm = LSTM(LATENT_DIM, return_sequences=True, return_state=True)
decoder_outputs, _, _ = decoder_lstm(decoder_inputs, initial_state=encoder_states)
decoder_dense = Dense(len(target_chars), activation="softmax")
model = Model([encoder_inputs, decoder_inputs], decoder_dense(decoder_outputs))
model = compat.parallelize(model)
model.compile(optimizer=Adam(0.02, epsilon=1e-4), loss="categorical_crossentropy")

history = model.fit(
    [encoder_data, decoder_data],
    decoder_target,
    batch_size=BATCH_SIZE,
    epochs=EPOCHS,
    verbose=2,
)
before, loss = history.history["loss"][0], history.history["loss"][-1]

# To decode, the trained layers run as two models: the decoder one character after the other. It
# is fed all that it wrote so far, so that it needs no states.
for number in (7, 42):
    data = np.zeros((1, max_target, len(target_chars)), dtype="float32")
    written = "\t"
    while len(written) < max_target and not written.endswith("\n"):
        data[0, len(written) - 1, target_index[written[-1]]] = 1.0
        probabilities = model.predict([encoder_data[number : number + 1], data], verbose=0)
        written += target_chars[np.argmax(probabilities[0, len(written) - 1])]
    print("{}: {}".format(input_texts[number], written.strip()))
print(
    "{}: {:.4f} in the first epoch".format(
        "learned" if loss < 0.7 * before else "NOT learned", before
    )
)
print("final loss: {:.6f}".format(loss))
