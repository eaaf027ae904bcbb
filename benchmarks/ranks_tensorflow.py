"""A step of two ranks of TensorFlow 2 with compat, and with what they use without it.

    python -m compat run -n 2 benchmarks/ranks_tensorflow.py --peer horovod|strategy --work dense

Both train in the same ranks, in turn: the peer is ``hvd.DistributedOptimizer``, or ``fit()`` of a
model made in the scope of MultiWorkerMirroredStrategy. The bound is plain Keras in each rank, which
exchanges nothing. Each rank has one thread for operations. With ``--on-batch`` all train by
``train_on_batch()``; the strategy's model, which has none, by a ``tf.function`` of its step.
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
    options.add_argument("--on-batch", action="store_true")
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
        given = None
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

    arrays = {"x": inputs, "y": targets, "batch_size": rows, "shuffle": False}

    def training(model, given):
        if not arguments.on_batch:
            return lambda: model.fit(verbose=0, **given)

        def step(*batch):
            return model.train_on_batch(*batch)

        if given is not arrays:

            @tf.function
            def step(*batch):
                return strategy.run(model.train_step, [batch])

        batch = inputs[:rows], targets[:rows]
        return lambda: [step(*batch) for _ in range(arguments.steps)]

    candidates = {
        "compat": training(model, arrays),
        name: training(peer, given or arrays),
        "alone": training(plain, arrays),
    }
    found = measure(candidates, arguments.steps, arguments.rounds, arguments.fits)
    bound = min(found.pop("alone")["wall"])
    if compat.is_chief():
        publish(found, bound, work=arguments.work)


if __name__ == "__main__":
    main()
