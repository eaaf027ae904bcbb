"""What MXNet computes in the background: waiting for its errors, and for the states it writes."""

import contextlib

import mxnet as mx


def clear_errors():
    """Have MXNet's engine raise what is left of an error here, and not when others are waited for.

    What it computes in the background fails there, and some later read raises it once more.
    """
    with contextlib.suppress(mx.base.MXNetError):
        mx.nd.waitall()


def wait_for_updates():
    """Wait for all that is being computed.

    The backward pass of BatchNorm writes the running statistics unbeknown to MXNet's engine, so
    that a read may come before it: in 5 of 60 steps of a small model it did.
    """
    mx.nd.waitall()
