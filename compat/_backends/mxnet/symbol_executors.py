"""MXNet's symbols computed: executors of them, trials, and the running statistics they keep."""

import contextlib
import warnings

import mxnet as mx
import numpy as np

from ..._rows import trial

# Operations whose states are moving averages of means over the rows of a batch.
MEANS = ("BatchNorm", "BatchNorm_v1", "_contrib_SyncBatchNorm", "IdentityAttachKLSparseReg")

_UNUSED = "compat_unused"  # a variable that has a gradient, and that nothing depends on


def clear_errors():
    """Have MXNet's engine raise what is left of an error here, and not when others are waited for.

    What it computes in the background fails there, and some later read raises it once more.
    """
    with contextlib.suppress(mx.base.MXNetError):
        mx.nd.waitall()


def inferred(infer, symbol, known):
    """What a method of a symbol infers from what is known of its arguments, by name.

    Raises:
        UserWarning: it does not follow; MXNet only warns of that.
    """
    names = symbol.list_arguments()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Cannot decide")
        return infer(**{name: value for name, value in known.items() if name in names})


def bound(symbol, context, shapes, types, held, differentiated=(), sparse=()):
    """An executor of a symbol, with new arrays for what is not held.

    Arguments:
        shapes: of what will be fed, by name.
        types: of what is not held, by name.
        held: arrays of weights and states by name; new states are kept there, too.
        differentiated: the names of what gets a gradient, and is in the symbol.
        sparse: of those whose gradient has some rows only.
    """
    if not differentiated:
        # Bound without any gradient, MXNet 1.9 runs oneDNN's fused convolutions on cpu(0),
        # which go on with the weights of their first batch (SgMKLDNNConvOperator).
        unused = mx.sym.make_loss(mx.sym.var(_UNUSED, shape=(1,), dtype="float32"))
        symbol, differentiated = mx.sym.Group([symbol, unused]), [_UNUSED]
    names, states = symbol.list_arguments(), symbol.list_auxiliary_states()
    types = dict({name: held[name].dtype for name in names if name in held}, **types)
    shapes, _, state_shapes = inferred(symbol.infer_shape, symbol, shapes)
    types, _, _ = inferred(symbol.infer_type, symbol, types)
    args = {
        name: held[name] if name in held else mx.nd.zeros(shape, context, dtype)
        for name, shape, dtype in zip(names, shapes, types)
    }
    auxiliary = {
        name: held.setdefault(name, mx.nd.zeros(shape, context))
        for name, shape in zip(states, state_shapes)
    }
    kinds = dict.fromkeys(sparse, "row_sparse")
    gradients = {
        name: mx.nd.zeros(args[name].shape, context, args[name].dtype, kinds.get(name))
        for name in differentiated
        if name in args
    }
    return symbol.bind(context, args, args_grad=gradients, aux_states=auxiliary)


def tried(symbol, given, fed, context, types, held):
    """The placements of a symbol's outputs, by a trial in inference.

    Arguments:
        given: the placements of what is fed and has rows, by name.
        fed: arrays of some rows, by name.
        types: as for ``bound``.
        held: as for ``bound``; what it lacks is drawn at random.
    """
    count, states = len(symbol.list_outputs()), symbol.list_auxiliary_states()

    def compute(rows):
        part = {
            # From the first row on again where there are fewer.
            name: np.take(array, rows, given[name].axis, mode="wrap") if name in given else array
            for name, array in fed.items()
        }
        known = {name: a.copy() if name in states else a for name, a in held.items()}
        shapes = {name: array.shape for name, array in part.items()}
        executor, random = bound(symbol, context, shapes, types, known), np.random.RandomState(0)
        for low, arrays in ((-0.5, executor.arg_dict), (0.5, executor.aux_dict)):
            for name, array in arrays.items():
                if name in part:
                    array[:] = part[name]
                elif name not in held:
                    array[:] = random.uniform(low, low + 1, array.shape)
        return [array.asnumpy() for array in executor.forward(is_train=False)[:count]]

    return trial.tried(compute)


# Running statistics, as of BatchNorm ------------------------------------------------------------


def wait_for_updates():
    """Wait for all that is being computed.

    The backward pass of BatchNorm writes the running statistics unbeknown to MXNet's engine, so
    that a read may come before it: in 5 of 60 steps of a small model it did.
    """
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
