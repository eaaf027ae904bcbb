"""Ranks of torch against its own ``DistributedDataParallel``, in the same processes.

    python -m compat run -n 2 benchmarks/ranks_torch.py [--work dense] [--rounds 10] [--steps 4]

Each rank has one thread for its operations, so that it keeps to one core. Both train the same
module on the same rows, by the same loop; so does a plain one, the bound, that exchanges nothing.
With ``--keras fit`` or ``--keras on-batch`` they are models of Keras; the peer's calls its layers
through ``DistributedDataParallel``, as Keras' guide to torch has it.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("COMPAT_VERIFY", "0")

import interleaved
import works

import compat


def build(torch, work):
    """Return the model of ``works.build``, of torch's layers."""
    nn = torch.nn
    torch.manual_seed(0)

    def stack(*units):
        parts = []
        for before, after in zip(units, units[1:]):
            parts += [nn.Linear(before, after), nn.ReLU()]
        return parts

    if work == "dense":
        units = works.size(500)
        parts = stack(*map(works.size, (2000, 2000, 2000, 1000)), units)
    elif work == "deep":
        parts, units = stack(*[128] * 101), 128
    else:
        parts, units = [], 128
        for before, after, *pool in (3, 32), (32, 32, nn.MaxPool2d(2)), (32, 64):
            parts += [nn.Conv2d(before, after, 3), nn.ReLU()] + pool
        parts += [nn.Flatten()] + stack(64 * 12 * 12, 128)
    return nn.Sequential(*parts + [nn.Linear(units, 1)])


def of_keras(torch, arguments):
    """Return functions that train models of Keras: compat's, the peer's, and a plain one."""
    import keras

    class Distributed(keras.Model):
        """What a subclass of Keras' would track as a layer is out of its sight, in a tuple."""

        def __init__(self, model):
            super().__init__()
            self.model = model
            self.parallel = (torch.nn.parallel.DistributedDataParallel(model),)

        def call(self, inputs, training=None):  # which Keras passes on to each layer
            return self.parallel[0](inputs, training=training)

    rows = works.WORKS[arguments.work][1]
    inputs, targets = works.data(arguments.work, rows * arguments.steps)

    def training(model):
        model.compile(keras.optimizers.SGD(0.001), "mse")
        if arguments.keras == "fit":
            return lambda: model.fit(inputs, targets, batch_size=rows, shuffle=False, verbose=0)
        batch = inputs[:rows], targets[:rows]
        return lambda: [model.train_on_batch(*batch) for _ in range(arguments.steps)]

    return {
        "compat": training(compat.parallelize(works.build(keras, arguments.work))),
        "DistributedDataParallel": training(Distributed(works.build(keras, arguments.work))),
        "alone": training(works.build(keras, arguments.work)),
    }


def of_torch(torch, arguments):
    """Return functions that train modules of torch: compat's, the peer's, and a plain one."""
    batch = works.WORKS[arguments.work][1]
    inputs, targets = works.data(arguments.work, batch * compat.size())
    if arguments.work == "conv":
        inputs = inputs.transpose(0, 3, 1, 2).copy()  # torch's convolutions have channels first
    inputs, targets = map(torch.tensor, compat.shard((inputs, targets)))

    def steps(model, parameters):
        optimizer = torch.optim.SGD(parameters, 0.001)

        def run():
            for _ in range(arguments.steps):
                optimizer.zero_grad()
                torch.nn.functional.mse_loss(model(inputs), targets).backward()
                optimizer.step()

        return run

    ours = compat.parallelize(build(torch, arguments.work))
    theirs = torch.nn.parallel.DistributedDataParallel(build(torch, arguments.work))
    plain = build(torch, arguments.work)
    return {
        "compat": steps(ours, ours.parameters()),
        "DistributedDataParallel": steps(theirs, theirs.parameters()),
        "alone": steps(plain, plain.parameters()),
    }


def main():
    options = interleaved.parser(__doc__)
    options.add_argument("--keras", choices=("fit", "on-batch"))
    arguments = options.parse_args()

    compat.configure_gpu(gpus="cpu", backend="torch")
    import torch

    torch.set_num_threads(1)
    candidates = (of_keras if arguments.keras else of_torch)(torch, arguments)
    found = interleaved.measure(candidates, arguments.steps, arguments.rounds, arguments.fits)
    bound = min(found.pop("alone")["wall"])
    if compat.rank() == 0:
        batch = works.WORKS[arguments.work][1]
        interleaved.publish(found, bound, rows=batch, ranks=compat.size())


if __name__ == "__main__":
    main()
