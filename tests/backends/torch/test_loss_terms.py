"""torch: what a loss is made of, as ranks look at it."""

import torch

from compat._backends.torch import loss_terms


def test_a_term_that_a_loss_has_twice_is_one():
    term = torch.ones(4, 2, requires_grad=True).square().mean()
    assert len(loss_terms.loss_of([term + term]).terms) == 1
