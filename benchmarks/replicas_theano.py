"""A step on two simulated devices of Theano, and on one, each with one thread.

    python benchmarks/replicas_theano.py --work dense|deep

Theano's devices of one process on a CPU take turns, so that 1.0 is the most to hope for.
"""

import os

os.environ["KERAS_BACKEND"] = "theano"
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import works
from interleaved import measure, parser, publish

import compat

DEVICES = 2


def main():
    arguments = parser(__doc__).parse_args()

    compat.configure_gpu(simulate=DEVICES)
    import keras

    rows = DEVICES * works.WORKS[arguments.work][1]
    inputs, targets = works.data(arguments.work, rows * arguments.steps)

    def trainer(devices):
        model = compat.parallelize(works.build(keras, arguments.work), gpus=devices)
        model.compile("sgd", "mse")
        return lambda: model.fit(
            inputs, targets, batch_size=rows, epochs=1, shuffle=False, verbose=0
        )

    candidates = {"compat": trainer(DEVICES), "one device": trainer(1)}
    publish(measure(candidates, arguments.steps, arguments.rounds), work=arguments.work)


if __name__ == "__main__":
    main()
