"""Replicas in one process, under Keras 3 on torch, against one device.

    python benchmarks/replicas_torch.py [--work conv] [--devices 2] [--rounds 10] [--steps 4]

Simulated devices of torch compute one after the other on one CPU, with one thread, as the one
device does: what is measured is what splitting a batch costs. Both train the same model on the
same batches.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ["KERAS_BACKEND"] = "torch"
os.environ.setdefault("COMPAT_VERIFY", "0")

import interleaved
import works

import compat


def main():
    parser = interleaved.parser(__doc__, "conv")
    parser.add_argument("--devices", type=int, default=2)
    arguments = parser.parse_args()

    compat.configure_gpu(simulate=arguments.devices)
    import keras
    import torch

    torch.set_num_threads(1)
    rows = works.WORKS[arguments.work][1] * arguments.devices
    inputs, targets = works.data(arguments.work, rows)

    def steps(model):
        model.compile(keras.optimizers.SGD(0.001), "mse")

        def run():
            for _ in range(arguments.steps):
                model.train_on_batch(inputs, targets)

        return run

    found = interleaved.measure(
        {
            "compat": steps(compat.parallelize(works.build(keras, arguments.work))),
            "one device": steps(works.build(keras, arguments.work)),
        },
        arguments.steps,
        arguments.rounds,
    )
    interleaved.publish(found, rows=rows, devices=arguments.devices)


if __name__ == "__main__":
    main()
