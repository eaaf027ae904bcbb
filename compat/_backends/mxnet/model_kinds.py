"""Kinds of native models, by the names of their classes: mxnet is not imported."""


def is_block(model):
    """Return whether a model is a block of Gluon."""
    return _is_a(model, "mxnet.gluon.", "Block")


def is_module(model):
    """Return whether a model is a ``Module`` of any kind."""
    return _is_a(model, "mxnet.module.", "BaseModule")


def _is_a(model, prefix, name):
    return any(c.__name__ == name and c.__module__.startswith(prefix) for c in type(model).__mro__)
