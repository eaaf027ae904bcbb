"""Arrays of Gluon blocks: arguments and results, nested as they may be; parameters and states."""

import contextlib

import mxnet as mx
import numpy as np

from ... import errors
from ..._ranks.arrays import parts_of
from ..._rows import REPLICATED, Partial, Sharded, trial
from ..._runtime.patching import replaced
from .propagation import MEANS, clear_errors


def leaves(value, kind=mx.nd.NDArray):
    """All arrays, or all of another kind, within lists, tuples and dictionaries."""
    return (part for part in parts_of(value) if isinstance(part, kind))


def mapped(function, value, place=()):
    """The same with ``function(place, array)`` for each array; a place is a tuple of keys."""
    if isinstance(value, (list, tuple)):
        parts = [mapped(function, each, place + (key,)) for key, each in enumerate(value)]
        return type(value)(parts)
    if isinstance(value, dict):
        return {key: mapped(function, each, place + (key,)) for key, each in value.items()}
    return function(place, value) if isinstance(value, mx.nd.NDArray) else value


def on_context(context, array):
    return getattr(array, "as_in_ctx", array.as_in_context)(context)  # mx.np has the short one


def context_of(array):
    return array.ctx if is_numpy(array) else array.context


def without_arrays(value):
    """What is no array, in its place."""
    return mapped(lambda place, array: None, value)


def like(values, array):
    """An array of the kind, the type and the context of ``array``."""
    made = mx.nd.array(values, ctx=context_of(array), dtype=array.dtype)
    return made if type(array) is mx.nd.NDArray else made.as_np_ndarray()


# The replicas' results as one -------------------------------------------------------------------


def can_be_merged(placement):
    """Whether the value of the whole batch is put together here from the replicas' values."""
    if isinstance(placement, Sharded):
        return placement == Sharded(placement.axis, placement.inner)
    return placement in (REPLICATED, Partial("sum"), Partial("mean"))


def are_of(placements, results, sizes):
    """Whether results are what ``placements`` say, as far as their shapes tell."""
    arrays = [list(leaves(result)) for result in results]
    for result, found in zip(results, arrays):
        if without_arrays(result) != without_arrays(results[0]) or len(found) != len(placements):
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
    """One result for the whole batch, from those of replicas with so many rows."""
    parts = zip(*map(leaves, results))
    values = (
        _merged(placement, [on_context(context, each) for each in part], sizes)
        for placement, part in zip(placements, parts)
    )
    return mapped(lambda place, array: next(values), results[0])


def _merged(placement, parts, sizes):
    if placement == REPLICATED or len(parts) == 1:
        return parts[0]
    if isinstance(placement, Partial):
        is_mean = placement.how == "mean"
        weights = [size / float(sum(sizes)) if is_mean else 1.0 for size in sizes]
        return sum(part * weight for part, weight in zip(parts, weights))
    return concatenated(parts, placement.axis)


def concatenated(arrays, axis):
    if is_numpy(arrays[0]):
        return mx.np.concatenate(arrays, axis=axis)
    return mx.nd.concat(*arrays, dim=axis)


def is_numpy(array):
    """Whether an array is one of ``mx.np``."""
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
    found = []
    with mx.autograd.pause(), gradients_kept(trained):
        given = mapped(lambda place, array: _marked(array), args)
        gradients = [gradient for parameter in trained for gradient in parameter.list_grad()]
        gradients += [array.grad for array in leaves(given) if array.grad is not None]
        try:
            for parts in (trial.WHOLE,), trial.PARTS, (trial.WHOLE[::-1],):
                for gradient in gradients:
                    gradient[:] = 0
                order = [row for part in parts for row in part]
                heads, upstream, random = [], [], np.random.RandomState(0)
                with mx.autograd.record(train_mode=False):
                    results = [compute(given, part) for part in parts]
                    whole = merged(placements, results, list(map(len, parts)), context)
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


def parameters_of(block):
    """All parameters of a block and of those within, each once."""
    return list(dict.fromkeys(p for part in blocks(block) for p in part.params.values()))


# Contexts ---------------------------------------------------------------------------------------


def move(block, context):
    """Bring parameters, and the trainers that have them, to this context where they are not.

    Those on several contexts stay: their script splits its batches by itself.
    """
    for parameter in parameters_of(block):
        if len(_contexts_of(parameter)) == 1 and _contexts_of(parameter) != [context]:
            parameter.reset_ctx(context)
    move_trainers(block, context)


def move_trainers(block, context):
    """Bring the trainers that have a block's parameters to this context where they are not."""
    for trainer in {parameter._trainer for parameter in parameters_of(block)} - {None}:
        if trainer._contexts != [context]:
            _move_trainer(trainer)


def _contexts_of(parameter):
    is_made = parameter._data is not None or parameter._deferred_init
    return parameter.list_ctx() if is_made else []


def contexts_of(block):
    """The contexts of a block's parameters, as far as these are made."""
    # Of contexts that are equal there are many objects, which are slow to compare.
    found = {}  # type: dict
    for parameter in parameters_of(block):
        for each in _contexts_of(parameter):
            found.setdefault((each.device_typeid, each.device_id), each)
    return [found[key] for key in sorted(found)]


def _move_trainer(trainer):
    """Let a trainer follow its parameters, with the optimizer's state and step counts."""
    try:
        contexts = trainer._check_contexts()
    except (AssertionError, RuntimeError):
        return  # it has another block's parameters, too, which are elsewhere as yet, or not there
    if trainer._contexts == contexts:
        return
    updater = _updaters(trainer)[0]
    # Copies: what is copied when it is used has another context's update in it.
    states = updater.get_states() if updater.states else None
    trainer._reset_kvstore()
    trainer._contexts = contexts
    optimizer = trainer._optimizer
    trainer._updaters = [mx.optimizer.get_updater(optimizer) for _ in contexts]
    # Steps are counted per device id: Adam would begin anew on another one.
    counts = optimizer._all_index_update_counts
    ids = {context.device_id for context in contexts} | set(counts)
    counts.update((i, dict(optimizer._index_update_count)) for i in ids)
    if states is not None:
        trainer._init_kvstore()
        for updater in _updaters(trainer):
            updater.set_states(states)


def _updaters(trainer):
    on_kvstore = trainer._kvstore and trainer._update_on_kvstore
    return [trainer._kvstore._updater] if on_kvstore else trainer._updaters


# States -----------------------------------------------------------------------------------------


def states_of(block, operations):
    """The parameters that a block sets by itself, as far as they are made.

    Arguments:
        operations: of those known to be written by operations of MXNet, the operation by name.

    Returns:
        Running statistics, which are means over rows; and those of which only the user's own
        block knows what they are.
    """
    layers = mx.gluon.nn.basic_layers
    batch_norm = getattr(layers, "_BatchNorm", layers.BatchNorm)  # the former from MXNet 1.7 on
    parts = {}  # type: dict  # by parameter: the block within that has it
    for part in blocks(block):
        for parameter in list(part.params.values()) + list(part._reg_params.values()):
            is_state = parameter.grad_req == "null" and parameter._data is not None
            if is_state and not isinstance(parameter, mx.gluon.Constant):
                parts.setdefault(parameter, part)
    means, others = [], []
    for parameter, part in parts.items():
        if operations.get(parameter.name) in MEANS or isinstance(part, batch_norm):
            means.append(parameter)
        elif parameter.name in operations or not type(part).__module__.startswith("mxnet.gluon"):
            others.append(parameter)
    return means, others


def blocks(block):
    """A block and all that are within."""
    yield block
    for child in block._children.values():
        yield from blocks(child)


def check_equal(block, differing):
    """See that no replica has set a state of its own since, in its backward pass."""
    for parameter in differing:
        raise errors.UnsupportedError(
            f"The replicas of the block {block.name!r} set its parameter {parameter.name!r} to "
            "different values, each from its own rows, and whether these are to be added up or "
            "averaged only the block knows. Set it outside of the block, from results for the "
            "whole batch; or run the block on one device: parallelize(block, gpus=1)."
        )


def are_equal(arrays):
    """Whether some arrays have the same numbers."""
    first, *others = [array.asnumpy() for array in arrays]
    return all((other == first).all() for other in others)
