"""torch: gradients by values of a call on which others of its values depend."""

import copy

import pytest
import torch

import compat

from .test_contract import devices  # noqa: F401  (a fixture)
from .test_merging import replicas, rows, same_gradients

pytestmark = [pytest.mark.row("torch nn.Module"), pytest.mark.usefixtures("devices")]
ROWS = 7
UNUSED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set "
    "allow_unused=True if this is the desired behavior."
)


class Generator(torch.nn.Module):
    """As StyleGAN's: it returns images, and the styles that they were made from."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.mapping, self.synthesis = torch.nn.Linear(4, 3), torch.nn.Linear(3, 6)

    def forward(self, z):
        styles = self.mapping(z).tanh()
        return self.synthesis(styles).sigmoid(), styles


def path_length(model, z):
    images, styles = model(z)
    noise = torch.ones_like(images) / 3
    (gradient,) = torch.autograd.grad((images * noise).sum(), styles, create_graph=True)
    loss = (gradient.square().sum(1).sqrt() - 0.1).square().mean() + images.mean()
    loss.backward()
    return gradient


def retained(model, z):
    images, styles = model(z)
    styles.retain_grad()
    (images.sum() + styles.square().sum()).backward()
    return styles.grad


def observed(model, z):
    """Grad-CAM: of one row alone, too."""
    seen = []
    images, styles = model(z)
    handle = styles.register_hook(lambda gradient: seen.append(gradient.clone()))
    images.sum().backward(retain_graph=True)
    images[1, 2].backward(retain_graph=True)
    handle.remove()
    images.sum().backward()
    assert len(seen) == 2
    return torch.stack(seen)


def of_both(model, z):
    z = z.clone().requires_grad_()
    images, styles = model(z)
    gradients = torch.autograd.grad(
        [images, styles], [styles, z], [torch.ones_like(images), styles.detach()], retain_graph=True
    )
    vectors = torch.eye(ROWS * 6, dtype=z.dtype)[:3].reshape(3, ROWS, 6)
    (batched,) = torch.autograd.grad(images, styles, vectors, is_grads_batched=True)
    return torch.cat([each.flatten() for each in (*gradients, batched)])


def of_a_hook(model, z):
    """Activations that a hook keeps, by which the result is differentiated."""
    kept = {}
    handle = model.mapping.register_forward_hook(lambda m, i, o: kept.update(a=o))
    images, _ = model(z)
    handle.remove()
    return torch.autograd.grad(images[:, 0].sum(), kept["a"])[0]


def retained_by_a_hook(model, z):
    kept = {}

    def keep(module, given, output):
        if output.requires_grad:
            output.retain_grad()
        kept["a"] = output

    handle = model.mapping.register_forward_hook(keep)
    model(z)[0].sum().backward()
    handle.remove()
    return kept["a"].grad


@pytest.mark.parametrize("count", [ROWS, 2])
@pytest.mark.parametrize(
    "use", [path_length, retained, observed, of_both, of_a_hook, retained_by_a_hook]
)
def test_gradients_of_one_output_by_another(use, count):
    if use is of_both and count != ROWS:
        count = ROWS
    plain = Generator().double()
    parallel = compat.parallelize(copy.deepcopy(plain))
    for step in range(2):
        found = []
        for model in (plain, parallel):
            model.zero_grad()
            found.append(use(model, rows(count, 4) + step))
        torch.testing.assert_close(*found, rtol=0, atol=1e-12)
        same_gradients(plain, parallel)
    assert replicas(lambda: parallel(rows(count, 4))) == 3


def test_what_is_not_used_is_an_error_or_none_as_in_torch():
    model = compat.parallelize(Generator().double())
    images, styles = model(rows(ROWS, 4))
    loss = model.mapping.weight.sum()
    with pytest.raises(RuntimeError) as caught:
        torch.autograd.grad(loss, styles, retain_graph=True)
    assert str(caught.value) == UNUSED
    assert torch.autograd.grad(loss, styles, retain_graph=True, allow_unused=True) == (None,)
    (zeros,) = torch.autograd.grad(loss, styles, materialize_grads=True, allow_unused=True)
    assert zeros.shape == styles.shape and not zeros.any()


def test_a_hook_that_changes_the_gradient_is_an_error():
    images, styles = compat.parallelize(Generator().double())(rows(ROWS, 4))
    styles.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(compat.UnsupportedError) as caught:
        images.sum().backward()
    assert str(caught.value) == (
        "A hook changes the gradient by a value that a parallelized model has returned, and from "
        "which others of its values were computed: parts of that gradient have gone back already. "
        "Register the hook inside the model, or run the model on one device: parallelize(model, "
        "gpus=1)."
    )


def test_a_total_that_others_depend_on_is_an_error():
    class Losses(Generator):
        def forward(self, z):
            loss = self.mapping(z).square().mean()
            return loss, loss * 2

    first, second = compat.parallelize(Losses().double())(rows(ROWS, 4))
    with pytest.raises(compat.UnsupportedError) as caught:
        torch.autograd.grad(second, first)
    assert str(caught.value) == (
        "A gradient is taken by a value that a parallelized model has returned, and from which "
        "others of its values were computed. compat can do that for values that have rows of the "
        "batch in one dimension, and this is a total over them. Take it inside the model, or run "
        "the model on one device: parallelize(model, gpus=1)."
    )


# Hooks on what comes back -------------------------------------------------------------------------


def by_hook_in_forward(model):
    def forward(z):
        hidden = model.mapping(z)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: model.seen.append(gradient))
        return model.synthesis(hidden), hidden

    type(model).forward = lambda self, z: forward(z)


def by_hook_of_module(model):
    model.mapping.register_full_backward_hook(lambda m, given, back: model.seen.append(back[0]))


@pytest.mark.parametrize("register", [by_hook_in_forward, by_hook_of_module])
def test_gradients_that_hooks_keep_are_those_of_the_whole_batch(register):
    """The backward pass of each device comes to them, after the call: so the model runs unsplit."""
    found = []
    for parallel in (False, True):
        model = type("Mine", (Generator,), {})().double()
        model.seen = []
        register(model)
        if parallel:
            compat.parallelize(model)
            with pytest.warns(compat.CompatWarning, match="has a custom gradient"):
                model(rows(ROWS, 4))
        for step in range(2):
            model(rows(ROWS, 4) + step)[0].square().sum().backward()
        found.append(model.seen)
    assert [len(each) for each in found] == [2, 2]
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-12)
