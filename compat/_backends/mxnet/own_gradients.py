"""Gradients of the user's own in Gluon blocks, which may compute across rows on the way back.

An ``mx.autograd.Function`` is seen by nobody, so the gradients of three rows together are compared
with those of two of them and of the third.
"""

import contextlib

import mxnet as mx

from ... import _rows
from ..._runtime.patching import replaced
from . import symbol_graph
from .nested_arrays import _arrays, _mapped


def mix(parameters, args, placements, compute):
    """Whether the gradients of a block mix rows, or cannot be tried.

    Arguments:
        parameters: the block's.
        args: what it is given.
        placements: how its results are put together.
        compute: takes such arguments, parts of the rows and ``placements``, and returns the result
            of the parts, recorded.
    """
    with mx.autograd.pause():
        first = [
            (parameter.list_data()[0], parameter.list_grad()[0])
            for parameter in parameters
            if parameter._data and parameter.grad_req != "null"
        ]
        before = [(gradient.copy(), value._fresh_grad) for value, gradient in first]
        given = _mapped(lambda place, array: _marked(array), args)
        gradients = [gradient for _, gradient in first]
        gradients += [array.grad for array in _arrays(given) if array.grad is not None]
        found, upstream, kept = [], None, None  # type: Any, Any, Any
        try:
            for parts in (_rows.trial.WHOLE,), _rows.trial.PARTS:
                heads = list(_arrays(compute(given, parts, placements)))
                if kept is None:
                    kept = [_has_gradient(*each) for each in zip(placements, heads)]
                heads = [head for head, is_kept in zip(heads, kept) if is_kept]
                if not heads:
                    return False
                upstream = upstream or [head.detach() + 0.5 for head in heads]
                for gradient in gradients:
                    gradient[:] = 0
                mx.autograd.backward(heads, upstream, train_mode=False)
                found.append([gradient.asnumpy() for gradient in gradients])
        except Exception:  # whatever a function of the user's does
            symbol_graph.clear_errors()
            return True
        finally:
            for (value, gradient), (old, is_fresh) in zip(first, before):
                gradient[:] = old
                value._fresh_grad = is_fresh
        return not all(map(_rows.trial.close, *found))


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

    with replaced(mx.autograd, c_handle_array=of_arrays):
        with replaced(mx.autograd.Function, __call__=checked):
            yield


def _marked(array):
    """A copy of an array that gets a gradient, if numbers like these do."""
    array = array.copy()
    if "float" in str(array.dtype):
        array.attach_grad()
    return array


def _has_gradient(placement, array):
    """Whether something in an array's graph gets a gradient; what is detached has none."""
    if isinstance(placement, _rows.Replicated) or "float" not in str(array.dtype):
        return False
    try:
        mx.autograd.backward([array], retain_graph=True, train_mode=False)
    except mx.base.MXNetError:
        symbol_graph.clear_errors()
        return False
    return True
