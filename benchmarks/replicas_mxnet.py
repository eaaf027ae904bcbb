"""A step on two simulated devices of MXNet with compat, and by keras-mxnet's own contexts.

    python benchmarks/replicas_mxnet.py --peer contexts|one --work dense|conv|deep

``--peer one`` is one device, whose CPU seconds two devices should not exceed.
"""

import os

os.environ["KERAS_BACKEND"] = "mxnet"
os.environ["OMP_NUM_THREADS"] = "1"

import works
from interleaved import measure, parser, publish

import compat

DEVICES = 2


def main():
    options = parser(__doc__)
    options.add_argument("--peer", choices=("contexts", "one"), default="contexts")
    arguments = options.parse_args()

    compat.configure_gpu(simulate=DEVICES)
    import keras

    model = compat.parallelize(works.build(keras, arguments.work))
    model.compile("sgd", "mse")
    peer = works.build(keras, arguments.work)
    if arguments.peer == "one":
        name, contexts = "one device", ["cpu(0)"]
    else:
        name, contexts = "keras-mxnet's contexts", ["cpu({})".format(n) for n in range(DEVICES)]
    peer.compile("sgd", "mse", context=contexts)
    rows = DEVICES * works.WORKS[arguments.work][1]
    inputs, targets = works.data(arguments.work, rows * arguments.steps)

    def trainer(each):
        return lambda: each.fit(
            inputs, targets, batch_size=rows, epochs=1, shuffle=False, verbose=0
        )

    found = measure(
        {"compat": trainer(model), name: trainer(peer)}, arguments.steps, arguments.rounds
    )
    publish(found, work=arguments.work)


if __name__ == "__main__":
    main()
