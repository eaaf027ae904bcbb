"""User-defined gradients of Gluon blocks: a trial of whether they mix rows.

They may need the whole batch in the backward pass, and an ``mx.autograd.Function`` in a Gluon block
is in no graph. So the gradients of three rows together are compared with those of two of them and
of the third, and with those of the three in another order.
"""

import contextlib

import mxnet as mx
import numpy as np

from ..._rows import Sharded, trial
from ..._runtime.patching import replaced
from . import merging
from .arrays import leaves, like, mapped
from .synchronization import clear_errors


def gradients_mix_rows(parameters, args, placements, context, compute):
    """Return whether the gradients of a block mix rows, or cannot be tried.

    Arguments:
        parameters: the block's.
        args: its arguments.
        placements: of its results.
        context: where the results are merged.
        compute: a function of arguments and of the numbers of some rows that returns the block's
            result for these rows.
    """
    trained = [p for p in parameters if p._data is not None and p.grad_req != "null"]
    runs = []  # the gradients of the whole, of its parts, and of the whole in reverse order
    with mx.autograd.pause(), gradients_kept(trained):
        inputs = mapped(lambda place, array: _marked(array), args)
        gradients = [gradient for parameter in trained for gradient in parameter.list_grad()]
        gradients += [array.grad for array in leaves(inputs) if array.grad is not None]
        try:
            for parts in (trial.WHOLE,), trial.PARTS, (trial.WHOLE[::-1],):
                for gradient in gradients:
                    gradient[:] = 0
                order = [row for part in parts for row in part]
                heads, upstream, random = [], [], np.random.RandomState(0)
                with mx.autograd.record(train_mode=False):
                    results = [compute(inputs, part) for part in parts]
                    whole = merging.merged(placements, results, list(map(len, parts)), context)
                    for array, placement in zip(leaves(whole), placements):
                        if _is_float(array):
                            # What is detached would have no gradient; a marked 0 always has one.
                            heads.append(array + _marked(array.detach() * 0))
                            values = random.uniform(0.5, 1.5, array.shape)
                            if isinstance(placement, Sharded):
                                values = trial.chosen(values, placement, order)
                            upstream.append(like(values, array))
                if heads:
                    mx.autograd.backward(heads, upstream, train_mode=False)
                runs.append([gradient.asnumpy() for gradient in gradients])
        except Exception:  # whatever a user-defined function raises
            clear_errors()
            return True
    whole, *others = runs
    return not all(all(map(trial.close, gradients, whole)) for gradients in others)


@contextlib.contextmanager
def gradients_kept(parameters):
    """Set the gradients of parameters to zero within a block; restore them afterwards."""
    with contextlib.ExitStack() as afterwards:
        for parameter in parameters:
            for array, gradient in zip(parameter.list_data(), parameter.list_grad()):
                afterwards.callback(gradient.copy().copyto, gradient)
                # By which a trainer recognises stale gradients.
                afterwards.callback(setattr, array, "_fresh_grad", array._fresh_grad)
                gradient[:] = 0
        yield


@contextlib.contextmanager
def symbols_refused():
    """Have ``mx.autograd`` raise an error for symbols in place of arrays.

    It passes them to MXNet as arrays otherwise, which may end the process with a segmentation
    fault; and where nothing is recorded, a ``Function`` leaves its gradient out of their graph.
    """
    handles, call = mx.autograd.c_handle_array, mx.autograd.Function.__call__

    def of_arrays(arrays):
        if any(isinstance(array, mx.sym.Symbol) for array in arrays):
            raise TypeError("mx.autograd takes arrays, and no symbols")
        return handles(arrays)

    def checked(self, *inputs):
        of_arrays(inputs)
        return call(self, *inputs)

    of_function = replaced(mx.autograd.Function, __call__=checked)
    with replaced(mx.autograd, c_handle_array=of_arrays), of_function:
        yield


def _marked(array):
    """Return a copy of an array that gets a gradient, if it is of floats."""
    array = array.copy()
    if _is_float(array):
        array.attach_grad()
    return array


def _is_float(array):
    return "float" in str(array.dtype)
