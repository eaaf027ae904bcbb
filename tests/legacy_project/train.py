import compat

configuration = compat.configure_gpu()  # before keras is imported

import numpy as np  # noqa: E402
from shapes.model import CLASSES, PIXELS, build  # noqa: E402


def data(samples=600, seed=0):
    random = np.random.RandomState(seed)
    drawings = random.uniform(size=(CLASSES, PIXELS)) > 0.5
    labels = random.randint(CLASSES, size=samples)
    images = drawings[labels] + random.normal(scale=0.8, size=(samples, PIXELS))
    return images.astype("float32"), np.eye(CLASSES, dtype="float32")[labels]


def compiled():
    model = compat.parallelize(build())
    model.compile(optimizer="sgd", loss="categorical_crossentropy", metrics=["accuracy"])
    return model


def train(epochs=3, batch_size=61):
    model = compiled()
    x, y = data()
    return model, model.fit(x, y, batch_size=batch_size, epochs=epochs, verbose=2)


if __name__ == "__main__":
    print(configuration)
    train()[0].save("shapes.h5")
