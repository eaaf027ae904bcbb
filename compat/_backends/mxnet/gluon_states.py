"""What Gluon blocks keep from batch to batch beside their weights, for the MXNet backend."""

import contextlib

import mxnet as mx

from ... import _rows, errors
from .running_statistics import MEANS


def states_of(block, operations):
    """The parameters that a block sets by itself, as far as they are made.

    Arguments:
        operations: of those known to be written by operations of MXNet, the operation by name.

    Returns:
        Running statistics, which are means over rows; and those of which only the user's own
        block knows what they are.
    """
    layers = mx.gluon.nn.basic_layers
    batch_norm = getattr(layers, "_BatchNorm", layers.BatchNorm)  # the former from MXNet 1.7 on
    parts = {}  # type: dict  # by parameter: the block within that has it
    for part in blocks(block):
        for parameter in list(part.params.values()) + list(part._reg_params.values()):
            is_state = parameter.grad_req == "null" and parameter._data is not None
            if is_state and not isinstance(parameter, mx.gluon.Constant):
                parts.setdefault(parameter, part)
    means, others = [], []
    for parameter, part in parts.items():
        if operations.get(parameter.name) in MEANS or isinstance(part, batch_norm):
            means.append(parameter)
        elif parameter.name in operations or not type(part).__module__.startswith("mxnet.gluon"):
            others.append(parameter)
    return means, others


class OwnStates:
    """States that a user's block sets in its ``forward``.

    Each replica begins with the same values, also where ``set_data()`` of the one before has set
    those of all contexts. If all end with the same (a step counter) that is the new value. If
    not, it depends on the rows, and only the user knows whether as a sum or as a mean.
    """

    def __init__(self, parameters):
        self.parameters = parameters
        self.before = [parameter.list_data()[0].copy() for parameter in self.parameters]
        self.after = [[] for _ in self.parameters]  # type: list

    def reset(self):
        with mx.autograd.pause():
            for parameter, before in zip(self.parameters, self.before):
                _set(parameter, before)

    @contextlib.contextmanager
    def replica(self, context):
        self.reset()
        yield
        for parameter, values in zip(self.parameters, self.after):
            values.append(parameter.data(context).copy())

    def unite(self):
        """Set what all replicas have set; or return what sets different values, by the rows."""
        with mx.autograd.pause():
            for parameter, values in zip(self.parameters, self.after):
                if not _equal(values):
                    return _rows.Across(f"that sets the parameter {parameter.name!r}")
                _set(parameter, values[0])
        return None


def blocks(block):
    """A block and all that are within."""
    yield block
    for child in block._children.values():
        yield from blocks(child)


def own_attributes(block):
    """What a block has set on itself, such as a counter, to be put back."""
    from ..._verification import reachable  # not at start-up

    own = [part for part in blocks(block) if not type(part).__module__.startswith("mxnet.")]
    # Gluon's own begin with "_": what is compiled stays.
    return reachable.Attributes(own, lambda name, value: not name.startswith("_"))


def check_equal(block, parameters):
    """See that no replica has set a state of its own since, in its backward pass."""
    for parameter in parameters:
        if not _equal(parameter.list_data()):
            raise errors.UnsupportedError(
                f"The replicas of the block {block.name!r} set its parameter {parameter.name!r} to "
                "different values, each from its own rows, and whether these are to be added up or "
                "averaged only the block knows. Set it outside of the block, from results for the "
                "whole batch; or run the block on one device: parallelize(block, gpus=1)."
            )


def _set(parameter, value):
    for array in parameter.list_data():
        value.copyto(array)


def _equal(arrays):
    first, *others = [array.asnumpy() for array in arrays]
    return all((other == first).all() for other in others)
