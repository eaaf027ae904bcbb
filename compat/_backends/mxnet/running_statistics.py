"""Running statistics, as of BatchNorm, of several replicas, for the MXNet backend."""

from ... import errors

# Operations whose states are moving averages of means over the rows of a batch.
MEANS = ("BatchNorm", "BatchNorm_v1", "_contrib_SyncBatchNorm", "IdentityAttachKLSparseReg")


def check(states, model):
    """Refuse states of operations other than these: only of means it is known how they unite.

    Arguments:
        states: the operation that writes each, by the state's name.
        model: its name, for the error.
    """
    for state, operation in sorted(states.items()):
        if operation not in MEANS:
            raise errors.UnsupportedError(
                "The operation {} of {!r} has the state {!r}, which several devices would each "
                "change by their own rows. How these go together is known of BatchNorm's averages "
                "only. parallelize(model, gpus=1) runs it on one device.".format(
                    operation, model, state
                )
            )


def wait_for_updates():
    """Wait for all that is being computed.

    The backward pass of BatchNorm writes the running statistics unbeknown to MXNet's engine, so
    that a read may come before it: in 5 of 60 steps of a small model it did.
    """
    import mxnet as mx

    mx.nd.waitall()


def unite(statistics, sizes):
    """Give the replicas one value each: the mean, weighted by shard size.

    What is the same in all replicas stays exactly so.

    Arguments:
        statistics: for each statistic, a list of the replicas' arrays, which are set.
        sizes: the numbers of rows that the replicas computed.
    """
    if statistics:
        wait_for_updates()
    for arrays in statistics:
        first = arrays[0]
        first += sum(
            (array.as_in_context(first.context) - first) * (float(size) / sum(sizes))
            for array, size in zip(arrays, sizes)
        )
        for array in arrays[1:]:
            first.copyto(array)
