"""torch: what traces or transforms a call computes what it does with the plain module."""

import functools
import warnings

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import compat

from .test_contract import devices  # noqa: F401  (a fixture)
from .test_merging import replicas, rows

pytestmark = [pytest.mark.row("torch nn.Module"), pytest.mark.usefixtures("devices")]
ROWS = 7
TRANSFORMED = (
    "Model 'Linear' is called in a function that vmap(), grad() or the like transforms, which "
    "hides the batch dimension. The model runs unsplit on cpu:0."
)


def network():
    torch.manual_seed(0)
    return torch.nn.Linear(4, 3).double()


def told(action):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", compat.CompatWarning)
        result = action()
    return result, [str(e.message) for e in caught if e.category is compat.CompatWarning]


def loss(model, parameters, x):
    return torch.func.functional_call(model, parameters, (x,)).square().mean()


def per_sample(model, x):
    parameters = {n: p.detach() for n, p in model.named_parameters()}
    gradient = torch.func.grad(functools.partial(loss, model))
    return torch.func.vmap(gradient, (None, 0))(parameters, x[:, None])["weight"]


TRANSFORMS = {
    "vmap": lambda m, x: torch.func.vmap(m)(x[:, None]),
    "grad": lambda m, x: torch.func.grad(functools.partial(loss, m))(dict(m.named_parameters()), x)[
        "weight"
    ],
    "jvp": lambda m, x: torch.func.jvp(m, (x,), (x,))[1],
    "jacrev": lambda m, x: torch.func.jacrev(m)(x),
    "hessian": lambda m, x: torch.func.hessian(lambda x: m(x).pow(3).sum())(x),
    "gradients of each sample": per_sample,
}


@pytest.mark.parametrize("name", sorted(TRANSFORMS))
def test_transformations_of_functions_run_unsplit(name):
    model = compat.parallelize(network())
    expected = TRANSFORMS[name](network(), rows(ROWS, 4))
    found, messages = told(lambda: TRANSFORMS[name](model, rows(ROWS, 4)))
    torch.testing.assert_close(expected, found, rtol=0, atol=1e-12)
    assert messages == [TRANSFORMED]
    _, messages = told(lambda: TRANSFORMS[name](model, rows(ROWS, 4)))
    assert messages == []
    assert replicas(lambda: model(rows(ROWS, 4))) == 3  # other calls are split


def test_calls_without_a_transformation_are_split():
    model = compat.parallelize(network())
    parameters = {n: p.detach() * 2 for n, p in model.named_parameters()}
    found, messages = told(lambda: torch.func.functional_call(model, parameters, (rows(ROWS, 4),)))
    torch.testing.assert_close(found, network()(rows(ROWS, 4)) * 2, rtol=0, atol=1e-12)
    assert messages == []
    assert replicas(lambda: torch.func.functional_call(model, parameters, (rows(ROWS, 4),))) == 3


TRACED = {
    "torch.export": lambda m, x: torch.export.export(m, (x,)).module()(x),
    "make_fx": lambda m, x: make_fx(m)(x)(x),
    "torch.jit.trace": lambda m, x: torch.jit.trace(m, x, check_trace=False)(x),
}


@pytest.mark.parametrize("name", sorted(TRACED))
def test_what_is_traced_is_the_plain_module(name):
    model = compat.parallelize(network())
    assert replicas(lambda: TRACED[name](model, rows(ROWS, 4))) == 0
    found, messages = told(lambda: TRACED[name](model, rows(ROWS, 4)))
    torch.testing.assert_close(found, network()(rows(ROWS, 4)), rtol=0, atol=1e-12)
    assert messages == []
    assert replicas(lambda: model(rows(ROWS, 4))) == 3


@pytest.mark.parametrize("made_within", [True, False])
def test_fake_tensors(made_within):
    model = compat.parallelize(torch.nn.Linear(4, 3))
    with FakeTensorMode(allow_non_fake_inputs=True):
        if made_within:
            model = compat.parallelize(torch.nn.Linear(4, 3))
        found, messages = told(lambda: model(torch.ones(ROWS, 4)))
    assert found.shape == (ROWS, 3) and messages == []
