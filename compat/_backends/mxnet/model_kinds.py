"""Kinds of native models, by the names of their classes: mxnet is not imported."""


def is_block(model):
    """Return whether a model is a block of Gluon."""
    return _is_a(model, "mxnet.gluon.", "Block")


def is_module(model):
    """Return whether a model is a ``Module`` of any kind."""
    return _is_a(model, "mxnet.module.", "BaseModule")


def blocks_within(block):
    """Return a block of Gluon, and those within it, at any depth."""
    return [block] + [b for child in block._children.values() for b in blocks_within(child)]


def nodes_within(module):
    """Return names of the operations in a module's symbol, each with an object of its class.

    Arguments:
        module: a ``Module``; one of another kind, which makes its symbol later, has none.
    """
    import json  # not at start-up

    symbol = getattr(module, "_symbol", None)
    nodes = [] if symbol is None else json.loads(symbol.tojson())["nodes"]
    return [(node["name"], type(node["op"].replace("_contrib_", ""), (), {})()) for node in nodes]


def _is_a(model, prefix, name):
    return any(c.__name__ == name and c.__module__.startswith(prefix) for c in type(model).__mro__)
