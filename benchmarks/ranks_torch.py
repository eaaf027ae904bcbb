"""Ranks of torch against its own ``DistributedDataParallel``, in the same processes.

    python -m compat run -n 2 benchmarks/ranks_torch.py [--work dense] [--rounds 10] [--steps 4]

Each rank has one thread for its operations, so that it keeps to one core. Both train the same
module on the same rows, by the same loop; so does a plain one, the bound, that exchanges nothing.
"""

import os

os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("COMPAT_VERIFY", "0")

import interleaved
import works

import compat


def build(torch, work):
    """The model of ``works.build``, of torch's own layers."""
    nn = torch.nn
    torch.manual_seed(0)

    def stack(*units):
        parts = []
        for before, after in zip(units, units[1:]):
            parts += [nn.Linear(before, after), nn.ReLU()]
        return parts

    if work == "dense":
        parts, units = stack(2000, 2000, 2000, 1000, 500), 500
    elif work == "deep":
        parts, units = stack(*[128] * 101), 128
    else:
        parts, units = [], 128
        for before, after, *pool in (3, 32), (32, 32, nn.MaxPool2d(2)), (32, 64):
            parts += [nn.Conv2d(before, after, 3), nn.ReLU()] + pool
        parts += [nn.Flatten()] + stack(64 * 12 * 12, 128)
    return nn.Sequential(*parts + [nn.Linear(units, 1)])


def main():
    arguments = interleaved.parser(__doc__).parse_args()

    compat.configure_gpu(gpus="cpu", backend="torch")
    import torch

    torch.set_num_threads(1)
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
    found = interleaved.measure(
        {
            "compat": steps(ours, ours.parameters()),
            "DistributedDataParallel": steps(theirs, theirs.parameters()),
            "alone": steps(plain, plain.parameters()),
        },
        arguments.steps,
        arguments.rounds,
    )
    bound = min(found.pop("alone")["wall"])
    if compat.rank() == 0:
        size = sum(parameter.numel() for parameter in ours.parameters())
        interleaved.publish(found, bound, rows=batch, ranks=compat.size(), parameters=size)


if __name__ == "__main__":
    main()
