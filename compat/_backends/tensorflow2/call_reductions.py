"""The reductions of a call: the operations whose results replicas reduce, or compute jointly.

A trace of the call shows which they are. Replicas make the same operations in the same order, in
the caller's graph, and do not know their number of rows either, so that an operation is found again
by its number.
"""

import contextlib
import functools
import threading
from typing import Any, Callable, Dict, Iterable, Iterator, List, Sequence, Tuple

import tensorflow as tf
from tensorflow.python.eager import context

from ..._rows import Count, Partial, Placement, Value
from ..._rows.replica_threads import DifferentReductions, current_turn
from ..._runtime import patching
from .._tensorflow.custom_gradients import has_custom_gradient
from .._tensorflow.reductions import can_be_reduced
from . import batch_functions, output_gradients
from .reductions import BatchReductions

#: Operations that are not counted. Replicas have copies of variables, and a graph has what it
#: captures once.
_UNCOUNTED = ("Const", "Placeholder", "ReadVariableOp", "_EagerConst")


class _Counting(threading.local):
    """State of one thread: whether operations are not counted, and whether replicas reduce."""

    is_paused = is_reducing = False


_thread = _Counting()


def can_count() -> bool:
    """Return whether TensorFlow lets others see, and replace, what is added to a graph."""
    return hasattr(context.context(), "op_callbacks")  # from 2.1 on


def watching(call: "Callable[..., Any]", note: "Callable[[str, Any], Any]") -> "Callable[..., Any]":
    """Return a function that notes the operations that it adds to the graph.

    Arguments:
        call: the function.
        note: a function of the type of an operation, and of the operation where it has results.
            It returns the tensors to take for these; or None.
    """

    def watched(*args, **kwargs):
        from tensorflow.python.framework import op_callbacks

        present = tf.compat.v1.get_default_graph()

        def added(kind, inputs, attributes, outputs, op_name=None, graph=None):
            if graph is not present or _thread.is_paused or kind in _UNCOUNTED:
                return None if outputs is None else list(outputs)
            if outputs is None:  # of another callback
                outputs = graph.get_operation_by_name(op_name).outputs
            results = note(kind, outputs[0].op if outputs else None)
            return list(outputs) if results is None else results

        # The last one of these functions decides.
        op_callbacks.add_op_callback(added)
        try:
            return call(*args, **kwargs)
        finally:
            op_callbacks.remove_op_callback(added)

    return watched


def uncounted(call: "Callable[..., Any]", *args: "Any", **kwargs: "Any") -> "Any":
    """Call a function that adds operations which are not noted."""
    before, _thread.is_paused = _thread.is_paused, True
    try:
        return call(*args, **kwargs)
    finally:
        _thread.is_paused = before


@contextlib.contextmanager
def not_counting(layers: "Iterable[Any]") -> "Iterator[None]":
    """Let layers add operations that are not noted: a trace has others of them than replicas."""
    with contextlib.ExitStack() as stack:
        for layer in layers:
            call = functools.partial(uncounted, layer.call)
            stack.enter_context(patching.replaced(layer, call=call))
        yield


class CallReductions:
    """The reductions of one kind of call.

    Arguments:
        operations: those that its trace has noted, in order, as ``watching`` notes them.

    Attributes:
        reduced: the names of tensors of the trace that replicas reduce -> how, ``Partial``.
        joint: the names of operations that they compute jointly.
    """

    def __init__(self, operations: "Sequence[Tuple[str, Any]]") -> None:
        self._kinds = [_kind(*operation) for operation in operations]
        self._numbers = {op.name: n for n, (_, op) in enumerate(operations) if op is not None}
        self.reduced: "Dict[str, Partial]" = {}
        self.joint: "List[str]" = []
        self._steps: "Dict[int, Callable[[BatchReductions, tf.Operation], Any]]" = {}

    def __bool__(self) -> bool:
        return bool(self.reduced or self.joint)

    def can_reduce(self, tensor: "tf.Tensor", placement: "Placement") -> bool:
        """Return whether replicas can reduce what each of them computes of its rows."""
        return tensor.op.name in self._numbers and can_be_reduced(tensor, placement)

    def can_compute(self, op: "tf.Operation", value: "Value") -> bool:
        """Return whether replicas can compute an operation jointly; see ``batch_functions``."""
        is_one = batch_functions.can_compute(op, value)
        return is_one and op.name in self._numbers and not has_custom_gradient(op)

    def are_taken(self, tensor: "tf.Tensor", placement: "Placement") -> bool:
        """Return whether a tensor of a placement is reduced, and note how."""
        if tensor.name not in self.reduced:
            return False
        del self.reduced[tensor.name]
        how = Partial("sum") if placement == Count() else placement
        if isinstance(how, Partial):
            self.reduced[tensor.name] = how
        return isinstance(how, Partial)

    def settle(self) -> None:
        """Note the numbers of operations in place of the names, which are those of the trace."""
        for name in self.joint:
            number = self._numbers[name]
            self._steps[number] = lambda reductions, op: [batch_functions.softmax(reductions, op)]
        for name, placement in self.reduced.items():
            op, _, place = name.rpartition(":")
            number = self._numbers[op]
            step = self._steps.get(number)
            self._steps[number] = functools.partial(_reduce, step, int(place), placement)
        output_gradients.have_tapes_ask()
        if _refuse_gradient not in output_gradients.listeners:
            output_gradients.listeners.append(_refuse_gradient)
        del self._kinds[max(self._steps) + 1 :]
        self._numbers.clear()

    def reducing(
        self, call: "Callable[..., Any]", reductions: BatchReductions
    ) -> "Callable[..., Any]":
        """Return the call of a replica, which reduces.

        Arguments:
            call: the plain call.
            reductions: those of all replicas.
        """

        def reducing_call(*args, **kwargs):
            seen = []

            def note(kind, op):
                number = len(seen)
                seen.append(kind)
                step = self._steps.get(number)
                if number < last and _kind(kind, op) != self._kinds[number]:
                    raise DifferentReductions
                return None if step is None else step(reductions, op)

            turn: "Any" = current_turn()
            last, _thread.is_reducing = len(self._kinds), True
            reductions.calling.add(turn.index)
            try:
                results = watching(call, note)(*args, **kwargs)
            finally:
                _thread.is_reducing = False
                reductions.calling.discard(turn.index)
            if len(seen) < last:
                raise DifferentReductions
            return results

        return reducing_call


def _kind(kind, op):
    """Return what an operation of a trace has in common with that of a replica."""
    outputs = () if op is None else op.outputs
    return (kind, *((output.dtype.name, output.shape.rank) for output in outputs))


def _refuse_gradient(sources):
    """Refuse a gradient within a call: its tape has recorded what was not reduced yet."""
    if _thread.is_reducing:
        raise DifferentReductions


def _reduce(before, place, placement, reductions, op):
    """Return the results of an operation, one of them reduced; ``before`` has reduced others."""
    results = list(op.outputs) if before is None else before(reductions, op)
    is_extreme = placement.how in ("max", "min") and results[place].dtype.is_floating
    if is_extreme:
        results[place] = batch_functions.extreme(reductions, placement, op)
    else:
        results[place] = reductions.reduce(placement, results[place])
    return results
