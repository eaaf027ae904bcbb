"""MXNet's contexts by the names under which compat tells devices: what MXNet prints of them."""


def context_named(name):
    """The context that MXNet prints as ``name``, such as ``cpu(1)``."""
    import mxnet as mx

    kind, _, index = name.rstrip(")").partition("(")
    return mx.Context(kind, int(index))


def visible_gpus(mx):
    try:
        return mx.context.num_gpus()
    except mx.base.MXNetError:  # built with CUDA, and no driver there
        return 0
