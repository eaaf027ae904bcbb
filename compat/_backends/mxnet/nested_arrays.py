"""Arguments and results of Gluon blocks, nested as they may be, and the gradients of them."""

import contextlib

import mxnet as mx
import numpy as np

from ..._ranks.arrays import parts_of
from ..._rows import REPLICATED, Partial, Sharded, trial
from ..._runtime.patching import replaced
from .symbol_executors import clear_errors


def _leaves(value, kind):
    """All of a kind within lists, tuples and dictionaries."""
    return (part for part in parts_of(value) if isinstance(part, kind))


def _arrays(values):
    return _leaves(values, mx.nd.NDArray)


def _mapped(function, value, place=()):
    """The same with ``function(place, array)`` for each array; a place is a tuple of keys."""
    if isinstance(value, (list, tuple)):
        parts = [_mapped(function, each, place + (key,)) for key, each in enumerate(value)]
        return type(value)(parts)
    if isinstance(value, dict):
        return {key: _mapped(function, each, place + (key,)) for key, each in value.items()}
    return function(place, value) if isinstance(value, mx.nd.NDArray) else value


def _on(context, array):
    return getattr(array, "as_in_ctx", array.as_in_context)(context)  # mx.np has the short one


def _others(value):
    """What is no array, in its place."""
    return _mapped(lambda place, array: None, value)


def like(values, array):
    """An array of the kind, the type and the context of ``array``."""
    made = mx.nd.array(values, ctx=array.context, dtype=array.dtype)
    return made if type(array) is mx.nd.NDArray else made.as_np_ndarray()


# The replicas' results as one -------------------------------------------------------------------


def can_be_merged(placement):
    """Whether the value of the whole batch is put together here from the replicas' values."""
    if isinstance(placement, Sharded):
        return placement == Sharded(placement.axis, placement.inner)
    return placement in (REPLICATED, Partial("sum"), Partial("mean"))


def are_of(placements, results, sizes):
    """Whether results are what ``placements`` say, as far as their shapes tell."""
    arrays = [list(_arrays(result)) for result in results]
    for result, found in zip(results, arrays):
        if _others(result) != _others(results[0]) or len(found) != len(placements):
            return False
    for placement, parts in zip(placements, zip(*arrays)):
        axis = getattr(placement, "axis", None)
        each = {  # sizes, and along the rows the number of elements of each row
            tuple(n / (size or 1) if dim == axis else n for dim, n in enumerate(part.shape))
            for part, size in zip(parts, sizes)
        }
        if len(each) > 1 or any(n % 1 for n in each.pop()):
            return False
    return True


def merged(placements, results, sizes, context):
    """One result for the whole batch; of a replica whose shard is empty nothing is kept.

    It has all replicas' gradients: a trainer wants some from each.
    """
    parts = zip(*[list(_arrays(result)) for result in results])
    values = (
        _merged(placement, [_on(context, each) for each in part], sizes, context)
        for placement, part in zip(placements, parts)
    )
    return _mapped(lambda place, array: next(values), results[0])


def _merged(placement, parts, sizes, context):
    if placement == REPLICATED or len(parts) == 1:
        return parts[0]
    if isinstance(placement, Partial):
        total = float(sum(sizes)) if placement.how == "mean" else None
        weights = [size / total if total else float(size > 0) for size in sizes]
        return sum(part * weight for part, weight in zip(parts, weights))
    axis = placement.axis
    whole = concatenated(parts, axis)
    if all(sizes):
        return whole
    each = parts[0].shape[axis]  # every replica has computed one row
    kept = [n * each + k for n, size in enumerate(sizes) if size for k in range(each)]
    module = mx.np if _is_numpy(whole) else mx.nd
    return module.take(whole, module.array(kept, dtype="int32", ctx=context), axis=axis)


def concatenated(arrays, axis):
    if _is_numpy(arrays[0]):
        return mx.np.concatenate(arrays, axis=axis)
    return mx.nd.concat(*arrays, dim=axis)


def _is_numpy(array):
    return hasattr(mx, "np") and isinstance(array, mx.np.ndarray)


# Gradients of the user's own --------------------------------------------------------------------

# They may compute across rows on the way back, and an ``mx.autograd.Function`` in a Gluon block is
# seen by nobody. So the gradients of three rows together are compared with those of two of them and
# of the third, and with those of the three in another order.


def mixes_back(parameters, args, placements, context, compute):
    """Whether the gradients of a block mix rows, or cannot be tried.

    Arguments:
        parameters: the block's.
        args: what it is given.
        placements: how its results are put together.
        context: the one for that.
        compute: takes such arguments and numbers of rows, and returns what it gives for them.
    """
    trained = [p for p in parameters if p._data is not None and p.grad_req != "null"]
    found, upstream, random = [], [], np.random.RandomState(0)  # type: Any, Any, Any
    with mx.autograd.pause(), gradients_kept(trained):
        given = _mapped(lambda place, array: _marked(array), args)
        gradients = [gradient for parameter in trained for gradient in parameter.list_grad()]
        gradients += [array.grad for array in _arrays(given) if array.grad is not None]
        try:
            for parts in (trial.WHOLE,), trial.PARTS, (trial.WHOLE[::-1],):
                for gradient in gradients:
                    gradient[:] = 0
                with mx.autograd.record(train_mode=False):
                    results = [compute(given, part) for part in parts]
                    whole = merged(placements, results, list(map(len, parts)), context)
                    placed = zip(_arrays(whole), placements)
                    floats = [(array, where) for array, where in placed if _is_float(array)]
                    # What is detached would have no gradient; a marked 0 always has one.
                    heads = [array + _marked(array.detach() * 0) for array, _ in floats]
                upstream = upstream or [random.uniform(0.5, 1.5, head.shape) for head in heads]
                order = [row for part in parts for row in part]
                back = [
                    trial.chosen(each, placement, order) if isinstance(placement, Sharded) else each
                    for each, (_, placement) in zip(upstream, floats)
                ]
                if heads:
                    back = list(map(like, back, heads))
                    mx.autograd.backward(heads, back, train_mode=False)
                found.append([gradient.asnumpy() for gradient in gradients])
        except Exception:  # whatever a function of the user's does
            clear_errors()
            return True
    whole, *others = found
    return not all(all(map(trial.close, each, whole)) for each in others)


@contextlib.contextmanager
def gradients_kept(parameters):
    """Within, the gradients begin with zeros; afterwards they are what they were."""
    with contextlib.ExitStack() as afterwards:
        for parameter in parameters:
            for array, gradient in zip(parameter.list_data(), parameter.list_grad()):
                afterwards.callback(gradient.copy().copyto, gradient)
                # What tells a trainer of stale ones.
                afterwards.callback(setattr, array, "_fresh_grad", array._fresh_grad)
                gradient[:] = 0
        yield


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
