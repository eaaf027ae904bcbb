"""torch: what is asked of a call of one of torch's functions."""

import pytest
import torch

from compat import _rows
from compat._backends.torch import expressions, graph


@pytest.mark.parametrize(
    "name, is_in_place",
    [
        ("add_", True), ("__iadd__", True), ("__setitem__", True), ("add", False),
        ("__invert__", False), ("__index__", False), ("__int__", False), ("requires_grad_", False),
    ],
)  # fmt: skip
def test_functions_that_change_their_argument(name, is_in_place):
    assert graph.is_in_place(name) == is_in_place


def test_names_of_functions_and_of_properties():
    assert graph.name_of(torch.Tensor.sum) == "sum"
    assert graph.name_of(torch.Tensor.shape.__get__) == "shape"


def test_tensors_of_a_call():
    one, two, three = torch.zeros(3, 2)
    assert list(map(id, graph.call_tensors([one, {"x": (two,)}, slice(three, 5), "y"]))) == list(
        map(id, (one, two, three))
    )


def test_a_tensor_without_a_placement_is_the_same_on_all_replicas():
    tensor = torch.zeros(3)
    assert graph.placement_of(tensor) == _rows.REPLICATED
    graph.tag(tensor, expressions.Total(_rows.Partial("sum")))
    assert graph.placement_of(tensor) == _rows.REPLICATED
    graph.tag(tensor, _rows.Sharded(0))
    assert graph.placement_of(tensor) == _rows.Sharded(0)
    call = graph.Call(torch.add, (tensor, torch.zeros(4, 3)), {}, 3)
    assert [(each.placement, list(each.shape)) for each in call.values] == [
        (_rows.Sharded(0), [None]),
        (_rows.REPLICATED, [4, 3]),
    ]
