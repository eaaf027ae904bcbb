"""Copies of a compiled function, with other shared variables."""

from typing import Any, Dict

import theano

from ..._runtime import patching


def can_be_copied(function: "Any") -> bool:
    """Return whether Theano's ``copy()`` supports a function.

    A copy in ``DebugMode``, which has another class of makers, would lose its shared variables;
    linkers that wrap others, such as that of ``MonitorMode``, do not keep what ``copy()`` needs.
    """
    return type(function.maker) is theano.compile.FunctionMaker and hasattr(
        function.fn, "storage_map"
    )


def copied(function: "Any", swap: "Dict[Any, Any]") -> "Any":
    """Return a copy of a function with other shared variables.

    Theano's copy() alone loses the order in which operations may overwrite what others read: it
    gives the copied graph no DestroyHandler. Gradients of recurrent layers would read values that
    have been overwritten.

    Arguments:
        function: the function.
        swap: the variables of the copy, by those that they replace.
    """
    maker = function.maker
    of_theano: "Any" = type(maker)
    inputs = [source.variable for source in maker.inputs]

    class Maker(of_theano):
        def __init__(self, *args, **options):
            options["fgraph"].attach_feature(theano.gof.DestroyHandler())
            super(Maker, self).__init__(*args, **options)

    patching.change_class(maker, Maker)  # of this one alone: other threads may be compiling
    try:
        return function.copy(swap={old: new for old, new in swap.items() if old in inputs})
    finally:
        patching.change_class(maker, of_theano)
