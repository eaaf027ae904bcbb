"""Waiting for MXNet's engine: for errors of its threads, and for the states that it writes."""

import contextlib

import mxnet as mx


def clear_errors():
    """Wait for MXNet's engine, and suppress a pending error.

    An operation fails in a thread of the engine, and some later read raises the error once more.
    """
    with contextlib.suppress(mx.base.MXNetError):
        mx.nd.waitall()


def wait_for_updates():
    """Wait until all operations have been executed.

    MXNet's engine does not know that the backward pass of BatchNorm writes the running statistics,
    so that a read may come before the write: it did in 5 of 60 steps of a small model.
    """
    mx.nd.waitall()


def wait_for_copies(arrays):
    """Wait until running statistics have been copied along the chain to these last arrays.

    A backward pass that does not depend on the copying may write the arrays that it reads.
    """
    for array in arrays:
        array.wait_to_read()
