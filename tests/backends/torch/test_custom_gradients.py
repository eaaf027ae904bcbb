"""torch: gradients of one's own, which may compute across rows whatever their forward pass does."""

import pytest
import torch

import compat

from .test_contract import devices  # noqa: F401  (a fixture)
from .test_merging import ROWS, agree, computing, rows

pytestmark = [pytest.mark.row("torch nn.Module"), pytest.mark.usefixtures("devices")]

#: What becomes of what comes back, and whether it mixes rows.
BACK = {
    "reversed": (lambda gradient: -0.5 * gradient, False),
    "clipped": (lambda gradient: gradient.clamp(-0.01, 0.01), False),
    "of length 1": (lambda gradient: gradient / (gradient.norm() + 1e-3), True),
    "centred": (lambda gradient: gradient - gradient.mean(0), True),
}


def own_function(back):
    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return back(gradient)

    return Own


def with_function_of_a_weight(back):
    own = own_function(back)
    return lambda net, x: net.second(x @ own.apply(net.first.weight).t())


def with_hook(back):
    def forward(net, x):
        hidden = net.first(x)
        if hidden.requires_grad:
            hidden.register_hook(back)
        return net.second(hidden)

    return forward


def with_hook_of_a_module(back):
    def forward(net, x):
        if not net.second._backward_hooks:
            net.second.register_full_backward_hook(lambda module, given, _: (back(given[0]),))
        return net.second(net.first(x))

    return forward


def checkpointed(back):
    """Return a forward pass by torch's checkpoint(), which recomputes values in backward."""
    from torch.utils.checkpoint import checkpoint

    return lambda net, x: net.second(checkpoint(net.first, x, use_reentrant=True))


def module(make, back):
    forward = make(back)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.first = torch.nn.Linear(6, 6)
            self.second = torch.nn.Linear(6, 6)

        def forward(self, x):
            return forward(self, x.requires_grad_() if make is checkpointed else x)

    return Net()


def line_of(text):
    """Where this file has a text, as a warning names it."""
    with open(__file__) as file:
        number = next(n for n, line in enumerate(file, 1) if text in line)
    return "test_custom_gradients.py, line {}".format(number)


#: The operation that a warning names.
NAMED = {
    with_function_of_a_weight: "Own",
    with_hook: "register_hook ({})".format(line_of("hidden.register_" + "hook")),
    with_hook_of_a_module: "BackwardHookFunction",
}


@pytest.mark.parametrize("back", sorted(BACK))
@pytest.mark.parametrize("make", sorted(NAMED, key=str), ids=lambda make: make.__name__)
def test_gradients_that_mix_rows_run_unsplit(make, back):
    function, mixes = BACK[back]
    if make is with_function_of_a_weight:  # to which a sum over the rows comes back
        mixes = back in ("clipped", "of length 1")
    text = (
        "The operation {} of 'Net' has a custom gradient that needs, or may need, the whole batch, "
        "but each device sees only its shard. The model runs unsplit on cpu:0.".format(NAMED[make])
    )
    agree(module(make, function), rows(13, 6), whole=[text] if mixes else [])


def test_checkpoints_of_torch_are_no_gradients_of_ones_own():
    agree(module(checkpointed, None), rows(13, 6))


def test_a_gradient_is_tried_where_the_first_call_had_none():
    net = module(with_hook, BACK["of length 1"][0]).double()
    with torch.no_grad():
        compat.parallelize(net)(rows(13, 6))
    with pytest.warns(compat.CompatWarning, match="a custom gradient"):
        net(rows(13, 6)).sum().backward()


def test_gradients_of_rows_that_belong_together_by_chance():
    """The first two rows have one class, whose mean gradient they get; the third has another."""
    labels = torch.arange(ROWS) % 3 // 2

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, classes):
            ctx.classes = classes
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            means = [gradient[ctx.classes == each].mean(0) for each in ctx.classes]
            return torch.stack(means), None

    module = computing(lambda m, y, classes: Own.apply(y, classes))
    why = "has a custom gradient that needs, or may need, the whole batch"
    with pytest.warns(compat.CompatWarning, match=why):
        compat.parallelize(module)(rows(ROWS, 4).float(), labels)
