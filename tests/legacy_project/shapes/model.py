"""A network that tells ten shapes of 12 by 12 pixels apart."""

try:
    from keras.layers import Activation, Dense, Dropout
    from keras.models import Sequential
except ImportError:  # TensorFlow 2.0 to 2.5 bring tf.keras alone
    from tensorflow.keras.layers import Activation, Dense, Dropout
    from tensorflow.keras.models import Sequential

CLASSES = 10
PIXELS = 144


def build(hidden=64, dropout=0.0):
    model = Sequential()
    model.add(Dense(hidden, input_shape=(PIXELS,)))
    model.add(Activation("tanh"))
    if dropout:
        model.add(Dropout(dropout))
    model.add(Dense(CLASSES))
    model.add(Activation("softmax"))
    return model
