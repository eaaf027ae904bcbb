"""A step of two ranks of TensorFlow 2 with compat, and with what they use without it.

    python -m compat run -n 2 benchmarks/ranks_tensorflow.py --peer horovod|strategy --work dense

Both train in the same ranks, in turn: the peer is ``hvd.DistributedOptimizer``, or ``fit()`` of a
model made in the scope of MultiWorkerMirroredStrategy. The bound is plain Keras in each rank, which
exchanges nothing. Each rank has one thread for operations.
"""

import importlib
import os

os.environ.setdefault("TF_NUM_INTRAOP_THREADS", "1")
os.environ.setdefault("TF_NUM_INTEROP_THREADS", "2")

import works
from interleaved import measure, parser, publish

import compat


def main():
    options = parser(__doc__)
    options.add_argument("--peer", choices=("horovod", "strategy"), required=True)
    arguments = options.parse_args()

    compat.configure_gpu()
    keras = importlib.import_module(os.environ.get("COMPAT_TEST_KERAS", "tensorflow.keras"))
    model = compat.parallelize(lambda: works.build(keras, arguments.work))
    rows = works.WORKS[arguments.work][1]
    inputs, targets = works.data(arguments.work, rows * arguments.steps)
    optimizer = getattr(keras.optimizers, "legacy", keras.optimizers).SGD
    model.compile(optimizer(0.01), "mse")
    if arguments.peer == "horovod":
        import horovod.tensorflow.keras as hvd

        name = "hvd.DistributedOptimizer"
        peer = works.build(keras, arguments.work)
        peer.compile(hvd.DistributedOptimizer(optimizer(0.01)), "mse")
        given = {"x": inputs, "y": targets, "batch_size": rows, "shuffle": False}
    else:
        import tensorflow as tf

        name = "MultiWorkerMirroredStrategy"
        (engine,) = compat._runtime.process.process.engines.values()
        strategy = engine.strategy
        with strategy.scope():
            peer = works.build(keras, arguments.work)
            peer.compile(optimizer(0.01), "mse")
        mine = tf.data.Dataset.from_tensor_slices((inputs, targets)).batch(rows)
        # Of a dataset that it is given itself, the strategy would split each batch.
        given = {"x": strategy.distribute_datasets_from_function(lambda context: mine)}
        given["steps_per_epoch"] = arguments.steps

    plain = works.build(keras, arguments.work)
    plain.compile(optimizer(0.01), "mse")

    def alone():
        plain.fit(inputs, targets, batch_size=rows, shuffle=False, verbose=0)

    def ours():
        model.fit(inputs, targets, batch_size=rows, shuffle=False, verbose=0)

    def theirs():
        peer.fit(verbose=0, **given)

    candidates = {"compat": ours, name: theirs, "alone": alone}
    found = measure(candidates, arguments.steps, arguments.rounds)
    bound = min(found.pop("alone")["wall"])
    if compat.is_chief():
        publish(found, bound, work=arguments.work)


if __name__ == "__main__":
    main()
