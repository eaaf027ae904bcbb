"""Copies of a compiled function, of other shared variables."""

import theano

from ..._runtime import patching


def can_be_copied(function):
    """Return whether Theano's ``copy()`` gives functions like this one.

    That of ``DebugMode``, which has a maker of its own, would be without its shared variables;
    linkers that wrap others, as ``MonitorMode`` has, do not keep what it needs.
    """
    return type(function.maker) is theano.compile.FunctionMaker and hasattr(
        function.fn, "storage_map"
    )


def copied(function, swap):
    """Return a function like this one, of other shared variables, for those in ``swap``.

    Theano's copy() alone loses the order in which operations may overwrite what others read: it
    gives the copied graph no DestroyHandler. Gradients of recurrent layers read what had been
    overwritten.
    """
    maker = function.maker
    of_theano, held = type(maker), [given.variable for given in maker.inputs]

    class Maker(of_theano):
        def __init__(self, *args, **options):
            options["fgraph"].attach_feature(theano.gof.DestroyHandler())
            super(Maker, self).__init__(*args, **options)

    patching.change_class(maker, Maker)  # of this one alone: other threads may be compiling
    try:
        return function.copy(swap={old: new for old, new in swap.items() if old in held})
    finally:
        patching.change_class(maker, of_theano)
