"""Checks of steps in custom training loops: calls of a model, and gradients by its weights.

Such a step begins at ``type(model).__call__``, and trains at ``tf.GradientTape.gradient``, whatever
runs in between. Within a ``tf.function`` nothing is computed yet when the model is called: there
the first execution of that function is checked.
"""

import functools
import weakref
from typing import Any, Callable, Dict, Sequence

import tensorflow as tf

from ..._rows.splitting import unsplit
from ..._runtime import patching, work
from . import op_callbacks, output_gradients, replicas
from .graph import only_traced, recording

_watches: "Dict[int, _Watch]" = {}  # by id of the model

#: How many operations to wait for the first execution of a function.
LIMIT = 100000


class _Watch:
    """A model whose steps are checked.

    Arguments:
        model: the model, to which it keeps a weak reference.
        check: a ``UsageCheck``.
    """

    def __init__(self, model: "Any", check: "Any") -> None:
        self.model, self.check = weakref.ref(model, functools.partial(_forget, id(model))), check
        self.start = replicas.reached[0]


def _forget(key, reference):
    if key in _watches and _watches[key].model is reference:
        del _watches[key]


def watch(model: "Any", check: "Any") -> None:
    """Check calls of a model by a ``UsageCheck``; with None, stop that."""
    _watches.pop(id(model), None)
    if check is None:
        return
    _watches[id(model)] = _Watch(model, check)
    kind = type(model)
    if "_compat_call" not in vars(kind) and patching.find(kind, "__call__") is None:
        patching.WatchingPatch(kind, "__call__", _watching(kind.__call__))
    output_gradients.have_tapes_ask()
    if _note_gradient not in output_gradients.listeners:
        output_gradients.listeners.append(_note_gradient)


def _watching(plain):
    @functools.wraps(plain)
    def __call__(self, *args, **kwargs):
        return called(self, functools.partial(plain, self), args, kwargs)

    __call__.autograph_info__ = {}  # as in ReplicatedCall
    return __call__


def called(
    model: "Any", call: "Callable[..., Any]", args: "Sequence[Any]", kwargs: "Dict[str, Any]"
) -> "Any":
    """Call a model, and check the call if it is the first one of its kind."""
    watch = _watches.get(id(model))
    if watch is None or unsplit.here() or work.uncounted:
        return call(*args, **kwargs)
    kind = "train" if recording() else "predict"
    if not watch.check.is_due(kind):
        return call(*args, **kwargs)
    if tf.executing_eagerly():
        with watch.check.step(kind):
            return call(*args, **kwargs)
    if not only_traced(model):
        _check_function(watch.check.step(kind, waits=True))
    return call(*args, **kwargs)


def _check_function(step):
    """Check the first execution of the function that is being traced."""
    graph = tf.compat.v1.get_default_graph()
    while getattr(getattr(graph, "outer_graph", None), "name", None):
        graph = graph.outer_graph
    left, name = iter(range(LIMIT)), graph.name  # the graph may be dismantled
    step.__enter__()

    def note(kind, outputs):
        is_it = op_callbacks.is_function(kind) and name in kind
        if is_it or next(left, None) is None:
            op_callbacks.ignore(note)
            # A function that is never executed, but saved, is not checked.
            end = (None, None, None) if is_it else (GeneratorExit, GeneratorExit(), None)
            step.__exit__(*end)

    op_callbacks.listen(note)


def _note_gradient(sources):
    """Report a gradient by the weights of a model of which no call was reached."""
    if unsplit.here() or work.uncounted or not _watches:
        return
    keys = {id(source) for source in sources}
    for watch in list(_watches.values()):
        model = watch.model()
        if replicas.reached[0] != watch.start or not watch.check.is_due("train", True):
            continue
        # A model that is not built has no weights yet.
        is_built = getattr(model, "built", True)
        weights = getattr(model, "trainable_variables", ()) if is_built else ()
        if keys.intersection(id(v if isinstance(v, tf.Variable) else v.value) for v in weights):
            watch.check.missed("train")
