"""torch: modules written as people write them, on three devices as on one."""

import pytest
import torch

from .test_torch import devices  # noqa: F401  (a fixture)
from .test_torch_merge import agree, rows

pytestmark = [pytest.mark.row("torch nn.Module"), pytest.mark.usefixtures("devices")]
ROWS = 13


def test_codebook_with_moving_averages():
    """As in the VQ-VAE: buffers that sum over the rows, and perplexity."""
    nn, F = torch.nn, torch.nn.functional

    class Quantizer(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = nn.Linear(4, 4)
            self.register_buffer("codes", torch.randn(5, 4))
            self.register_buffer("size", torch.zeros(5))
            self.register_buffer("sums", self.codes.clone())

        def forward(self, x):
            z = self.layer(x)
            distances = (z**2).sum(1, keepdim=True) - 2 * z @ self.codes.t()
            distances = distances + (self.codes**2).sum(1)
            chosen = F.one_hot(distances.argmin(1), 5).type(z.dtype)
            near = chosen @ self.codes
            self.size = 0.9 * self.size + 0.1 * chosen.sum(0)
            total = self.size.sum()
            smoothed = (self.size + 1e-5) / (total + 5e-5) * total
            self.sums = 0.9 * self.sums + 0.1 * (chosen.t() @ z.detach())
            self.codes = self.sums / smoothed.unsqueeze(1)
            mean = chosen.mean(0)
            perplexity = torch.exp(-torch.sum(mean * torch.log(mean + 1e-10)))
            return z + (near - z).detach(), F.mse_loss(near.detach(), z), perplexity

    agree(Quantizer(), rows(ROWS, 4), steps=3)


def test_mixture_of_experts():
    """Rows are gathered by a mask for each expert; the auxiliary loss is an attribute."""
    nn = torch.nn

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.gate = nn.Linear(4, 3)
            self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])

        def forward(self, x):
            weights = self.gate(x).softmax(-1)
            chosen, out = weights.argmax(-1), torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                mine = chosen == number
                out[mine] = expert(x[mine]) * weights[mine, number].unsqueeze(-1)
            load = nn.functional.one_hot(chosen, 3).to(x.dtype).mean(0)
            self.balance = 3 * (load * weights.mean(0)).sum()
            return out, self.balance

    module, (_, balance) = agree(Mixture(), rows(ROWS, 4))
    torch.testing.assert_close(module.balance.detach(), balance.detach())


def test_transformer_of_the_tutorial():
    """Time first, positions in a buffer, the mask in an attribute."""
    nn = torch.nn

    class Tutorial(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.register_buffer("positions", torch.randn(50, 1, 4))
            self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.0), 1)
            self.mask = None

        def forward(self, source):
            if self.mask is None or self.mask.size(0) != len(source):
                mask = nn.Transformer.generate_square_subsequent_mask(len(source))
                self.mask = mask.to(source.dtype)
            x = source + self.positions[: source.size(0)]
            return torch.log_softmax(self.layers(x, self.mask), -1)

    agree(Tutorial(), rows(7, ROWS, 4), atol=1e-10)
    agree(Tutorial(), rows(7, 7, 4), atol=1e-10)
