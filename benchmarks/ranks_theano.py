"""A step of two ranks of Theano, and the same batch in one process, each with one thread.

    python -m compat run -n 2 benchmarks/ranks_theano.py --work dense

The ranks train in turn with rank 0 alone, which has the whole batch, while the other one waits.
"""

import os

os.environ["KERAS_BACKEND"] = "theano"
os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import works
from interleaved import measure, parser, publish

import compat


def main():
    arguments = parser(__doc__).parse_args()

    compat.configure_gpu(gpus="cpu")
    import keras

    rows = compat.size() * works.WORKS[arguments.work][1]
    inputs, targets = works.data(arguments.work, rows * arguments.steps)
    mine = compat.shard((inputs, targets), rows)

    def compiled(model):
        model.compile("sgd", "mse")
        return model

    ranks = compiled(compat.parallelize(works.build(keras, arguments.work)))
    alone = compiled(works.build(keras, arguments.work))

    def ours():
        batch_size = compat.local_batch_size(rows)
        ranks.fit(mine[0], mine[1], batch_size=batch_size, epochs=1, shuffle=False, verbose=0)

    def theirs():
        if compat.is_chief():
            alone.fit(inputs, targets, batch_size=rows, epochs=1, shuffle=False, verbose=0)
        compat.barrier()

    found = measure({"compat": ours, "one process": theirs}, arguments.steps, arguments.rounds)
    if compat.is_chief():
        publish(found, work=arguments.work)


if __name__ == "__main__":
    main()
