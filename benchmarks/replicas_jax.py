"""A step on two simulated devices of JAX with compat, and with Keras 3's own DataParallel.

python benchmarks/replicas_jax.py --work dense|conv|lstm|deep
"""

import os

os.environ["KERAS_BACKEND"] = "jax"

import works
from interleaved import measure, parser, publish

import compat

DEVICES = 2


def main():
    arguments = parser(__doc__).parse_args()

    compat.configure_gpu(simulate=DEVICES)
    import keras

    model = compat.parallelize(works.build(keras, arguments.work))
    model.compile("sgd", "mse")
    distribution = keras.distribution.DataParallel(devices=keras.distribution.list_devices())
    with distribution.scope():
        peer = works.build(keras, arguments.work)
        peer.compile("sgd", "mse")
    rows = DEVICES * works.WORKS[arguments.work][1]
    inputs, targets = works.data(arguments.work, rows * arguments.steps)

    def ours():
        model.fit(inputs, targets, batch_size=rows, shuffle=False, verbose=0)

    def theirs():
        with distribution.scope():
            peer.fit(inputs, targets, batch_size=rows, shuffle=False, verbose=0)

    found = measure({"compat": ours, "DataParallel": theirs}, arguments.steps, arguments.rounds)
    publish(found, work=arguments.work)


if __name__ == "__main__":
    main()
