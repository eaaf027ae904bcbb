"""Copies of a compiled function."""

import types

from . import test_contract

profiles_not_printed = test_contract.profiles_not_printed


def test_a_function_is_copied_without_a_trace_in_theanos_class():
    """Other threads may be compiling."""
    import theano

    from compat._backends.theano import function_copies

    number = theano.shared(1.0)
    function = theano.function([], number + 1)
    makers, plain, make = [], type(function.maker), type(function.maker).__init__

    def copy(swap):
        makers.append((type(function.maker), plain.__init__))
        return swap

    copied = function_copies.copied(
        types.SimpleNamespace(maker=function.maker, copy=copy), {number: 2}
    )
    assert copied == {number: 2}
    ((within, init),) = makers
    assert issubclass(within, plain) and within is not plain
    assert init is make and type(function.maker) is plain
