"""Gradients of the user's own, which may compute across rows on the way back.

An ``mx.autograd.Function`` in a Gluon block is seen by nobody, and ``Custom`` in a graph may be
anything. So the gradients of three rows together are compared with those of two of them and of the
third.
"""

import contextlib

import mxnet as mx

from ... import _rows
from ..._runtime.patching import replaced
from .nested_arrays import _arrays, _mapped, merged
from .symbol_executors import clear_errors


def mix(parameters, args, placements, context, compute):
    """Whether the gradients of a block, or of an operation, mix rows, or cannot be tried.

    Arguments:
        parameters: the block's.
        args: what it is given.
        placements: how its results are put together.
        context: the one for that.
        compute: takes such arguments and numbers of rows, and returns what it gives for them.
    """
    trained = [p for p in parameters if p._data is not None and p.grad_req != "null"]
    found, upstream = [], None  # type: Any, Any
    with mx.autograd.pause(), gradients_kept(trained):
        given = _mapped(lambda place, array: _marked(array), args)
        gradients = [gradient for parameter in trained for gradient in parameter.list_grad()]
        gradients += [array.grad for array in _arrays(given) if array.grad is not None]
        try:
            for parts in (_rows.trial.WHOLE,), _rows.trial.PARTS:
                for gradient in gradients:
                    gradient[:] = 0
                with mx.autograd.record(train_mode=False):
                    results = [compute(given, part) for part in parts]
                    whole = merged(placements, results, list(map(len, parts)), context)
                    # What is detached would have no gradient; a marked 0 always has one.
                    heads = [a + _marked(a.detach() * 0) for a in _arrays(whole) if _is_float(a)]
                upstream = upstream or [head.detach() + 0.5 for head in heads]
                if heads:
                    mx.autograd.backward(heads, upstream, train_mode=False)
                found.append([gradient.asnumpy() for gradient in gradients])
        except Exception:  # whatever a function of the user's does
            clear_errors()
            return True
    return not all(map(_rows.trial.close, *found))


@contextlib.contextmanager
def gradients_kept(parameters):
    """Within, the gradients begin with zeros; afterwards they are what they were."""
    arrays = [array for parameter in parameters for array in parameter.list_data()]
    gradients = [gradient for parameter in parameters for gradient in parameter.list_grad()]
    before = [gradient.copy() for gradient in gradients]
    fresh = [array._fresh_grad for array in arrays]  # what tells a trainer of stale ones
    for gradient in gradients:
        gradient[:] = 0
    try:
        yield
    finally:
        for gradient, value in zip(gradients, before):
            value.copyto(gradient)
        for array, value in zip(arrays, fresh):
            array._fresh_grad = value


@contextlib.contextmanager
def symbols_refused():
    """Within, ``mx.autograd`` raises an error where it is given symbols in place of arrays.

    By itself it passes them to MXNet as arrays, which may end the process with a segmentation
    fault; and where nothing is recorded, a ``Function`` leaves its gradient out of their graph.
    """
    handles, call = mx.autograd.c_handle_array, mx.autograd.Function.__call__

    def of_arrays(arrays):
        if any(isinstance(each, mx.sym.Symbol) for each in arrays):
            raise TypeError("mx.autograd takes arrays, and no symbols")
        return handles(arrays)

    def checked(self, *inputs):
        of_arrays(inputs)
        return call(self, *inputs)

    of_function = replaced(mx.autograd.Function, __call__=checked)
    with replaced(mx.autograd, c_handle_array=of_arrays), of_function:
        yield


def _marked(array):
    """A copy of an array that gets a gradient, if numbers like these do."""
    array = array.copy()
    if _is_float(array):
        array.attach_grad()
    return array


def _is_float(array):
    return "float" in str(array.dtype)
