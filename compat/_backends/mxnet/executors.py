"""Executors: graphs bound to a context and to arrays."""

import mxnet as mx

from .graph import inferred

_UNUSED = "compat_unused"  # a variable with a gradient on which nothing depends


def bound(symbol, context, shapes, types, held, differentiated=(), sparse=()):
    """Return an executor of a symbol, with new arrays for variables that are not held.

    The arguments are those of ``arrays_for``.
    """
    if not differentiated:
        # Bound without any gradient, MXNet 1.9 runs oneDNN's fused convolutions on cpu(0),
        # which go on with the weights of their first batch (SgMKLDNNConvOperator).
        unused = mx.sym.make_loss(mx.sym.var(_UNUSED, shape=(1,), dtype="float32"))
        symbol, differentiated = mx.sym.Group([symbol, unused]), [_UNUSED]
    arrays = arrays_for(symbol, context, shapes, types, held, differentiated, sparse)
    args, gradients, states = arrays
    return symbol.bind(context, args, args_grad=gradients, aux_states=states)


def arrays_for(symbol, context, shapes, types, held, differentiated=(), sparse=()):
    """Return the arguments, gradients and auxiliary states of an executor, by name.

    Arguments:
        symbol: the graph.
        context: where it runs.
        shapes: of inputs, by name.
        types: of variables that are not held, by name.
        held: arrays of weights and states by name; new states are added.
        differentiated: the names of variables that get a gradient, as far as the symbol has them.
        sparse: the names of those whose gradient is row-sparse.
    """
    names, states = symbol.list_arguments(), symbol.list_auxiliary_states()
    types = dict({name: held[name].dtype for name in names if name in held}, **types)
    shapes, _, state_shapes = inferred(symbol.infer_shape, symbol, shapes)
    types, _, state_types = inferred(symbol.infer_type, symbol, types)
    args = {
        name: held[name] if name in held else mx.nd.zeros(shape, context, dtype)
        for name, shape, dtype in zip(names, shapes, types)
    }
    auxiliary = {
        name: held.setdefault(name, mx.nd.zeros(shape, context, dtype))
        for name, shape, dtype in zip(states, state_shapes, state_types)
    }
    kinds = dict.fromkeys(sparse, "row_sparse")
    gradients = {
        name: mx.nd.zeros(args[name].shape, context, args[name].dtype, kinds.get(name))
        for name in differentiated
        if name in args
    }
    return args, gradients, auxiliary
