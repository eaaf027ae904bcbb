"""Steps of loops of the user's own: calls of a model, and gradients by its weights, watched.

``type(model).__call__`` is where such a step begins, and ``tf.GradientTape.gradient`` where it
trains, whatever runs in between. Within a ``tf.function`` nothing is computed yet when the model
is called: what is checked is the first execution of that function.
"""

import functools
import weakref

import tensorflow as tf

from ..._rows.splitting import unsplit
from ..._runtime import patching, work
from . import between_outputs, op_callbacks, replicas
from .graph import only_traced, recording

_watches = {}  # type: dict  # by id of the model, its ``_Watch``

#: After so many operations without the function that is waited for, it is not waited for longer.
LIMIT = 100000


class _Watch:
    def __init__(self, model, check):
        self.model, self.check = weakref.ref(model, functools.partial(_forget, id(model))), check
        self.start = replicas.reached[0]


def _forget(key, reference):
    if key in _watches and _watches[key].model is reference:
        del _watches[key]


def watch(model, check):
    """Have calls of a model checked; None: no more."""
    _watches.pop(id(model), None)
    if check is None:
        return
    _watches[id(model)] = _Watch(model, check)
    kind = type(model)
    if "_compat_call" not in vars(kind) and patching.find(kind, "__call__") is None:
        plain = kind.__call__

        @functools.wraps(plain)
        def __call__(self, *args, **kwargs):
            return called(self, functools.partial(plain, self), args, kwargs)

        __call__.autograph_info__ = {}  # as in ReplicatedCall
        patching.WatchingPatch(kind, "__call__", __call__)
    between_outputs.have_tapes_ask()
    if _note_gradient not in between_outputs.listeners:
        between_outputs.listeners.append(_note_gradient)


def called(model, call, args, kwargs):
    """Call a model, and check that if it is the first call of its kind."""
    found = _watches.get(id(model))
    if found is None or unsplit.here() or work.uncounted:
        return call(*args, **kwargs)
    kind = "train" if recording() else "predict"
    if not found.check.is_due(kind):
        return call(*args, **kwargs)
    if tf.executing_eagerly():
        with found.check.step(kind):
            return call(*args, **kwargs)
    if not only_traced(model):
        _check_function(found.check.step(kind, waits=True))
    return call(*args, **kwargs)


def _check_function(step):
    """Check the first execution of the function that is being traced."""
    graph = tf.compat.v1.get_default_graph()
    while getattr(getattr(graph, "outer_graph", None), "name", None):
        graph = graph.outer_graph
    left, name = iter(range(LIMIT)), graph.name  # the graph may be taken apart
    step.__enter__()

    def note(kind, outputs):
        is_it = op_callbacks.is_function(kind) and name in kind
        if is_it or next(left, None) is None:
            op_callbacks.ignore(note)
            # What is never executed, as where a function is only saved, is not checked.
            end = (None, None, None) if is_it else (GeneratorExit, GeneratorExit(), None)
            step.__exit__(*end)

    op_callbacks.listen(note)


def _note_gradient(sources):
    """Note that a tape is asked for gradients: of a model's weights, where none was called."""
    if unsplit.here() or work.uncounted or not _watches:
        return
    asked = {id(source) for source in sources}
    for found in list(_watches.values()):
        model = found.model()
        if replicas.reached[0] != found.start or not found.check.is_due("train", True):
            continue
        # Those that are made when a model is first called are nobody's before.
        is_built = getattr(model, "built", True)
        weights = getattr(model, "trainable_variables", ()) if is_built else ()
        if asked.intersection(id(v if isinstance(v, tf.Variable) else v.value) for v in weights):
            found.check.missed("train")
