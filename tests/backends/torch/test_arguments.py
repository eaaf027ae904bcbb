"""torch: which arguments are data, and what runs a module in a way of its own."""

import copy
import re

import pytest
import torch

import compat

from .test_contract import devices, placement  # noqa: F401  (a fixture)
from .test_merging import (
    FAILS,
    UNKNOWN,
    agree,
    computing,
    rows,
    same,
    same_gradients,
)
from .test_verification import verified_module

pytestmark = [pytest.mark.row("torch nn.Module"), pytest.mark.usefixtures("devices")]
ROWS = 8


TABLES = {
    "index": lambda m, y, i, table: y + table[i],
    "embedding": lambda m, y, i, table: y + torch.nn.functional.embedding(i, table),
    "linear": lambda m, y, i, table: torch.nn.functional.linear(y, table),
    "position": lambda m, y, i, table: y[:, None].expand(-1, ROWS, -1) + table,
    "mean": lambda m, y, i, table: y + table.mean(0),
    "memory": lambda m, y, i, table: (y @ table.T).softmax(1) @ table,
}


@pytest.mark.parametrize("few", [1, 2])
@pytest.mark.parametrize("name", list(TABLES))
def test_a_table_with_as_many_rows_as_the_batch(name, few):
    """Where the indices are small, nothing fails but the numbers."""
    table = rows(ROWS, 5)
    numbers = torch.arange(ROWS).flip(0) // few % ROWS
    module, _ = agree(computing(TABLES[name]), rows(ROWS, 4), numbers, table)
    plain = computing(TABLES[name]).double()
    for count in (5, ROWS):
        given = rows(count, 4), numbers[:count], table
        same(plain(*given), module(*given), 1e-12)


def test_a_batch_that_comes_to_have_as_many_rows_as_a_table():
    module = computing(TABLES["index"]).double()
    plain, module = module, compat.parallelize(copy.deepcopy(module))
    for count in (13, 13, ROWS, ROWS):
        given = rows(count, 4), torch.arange(count) % 3, rows(ROWS, 5)
        same(plain(*given), module(*given), 1e-12)


def test_tensors_with_other_numbers_of_rows_are_passed_whole():
    agree(computing(TABLES["memory"]), rows(6, 4), None, rows(11, 5))


@pytest.mark.parametrize(
    "module, shape, subject",
    [
        (torch.nn.Sequential(torch.nn.Linear(4, 3)), (4,), "The operation linear in 0 (Linear) "),
        (torch.nn.Sequential(torch.nn.Conv2d(3, 2, 3)), (3, 6, 6), "The operation conv2d in 0 "),
        (torch.nn.LSTM(4, 6), (7, 4), "Model 'LSTM' "),
    ],
)
def test_what_has_no_batch_dimension_runs_unsplit(module, shape, subject):
    """A policy on one state, a picture or a sequence by itself: torch's layers take them."""
    module, x = module.double(), rows(*shape)
    expected = module(x)
    told = "^{}.*{}".format(re.escape(subject), re.escape(FAILS))
    with pytest.warns(compat.CompatWarning, match=told):
        same(expected, compat.parallelize(module)(x), 1e-12)


def test_tables_with_sparse_gradients_run_unsplit():
    table = torch.nn.Embedding(10, 4, sparse=True)
    told = "The operation that makes sparse gradients of 'Sequential' {} The model runs "
    agree(
        torch.nn.Sequential(table, torch.nn.Flatten()),
        torch.arange(39).view(13, 3) % 7,
        whole=[told.format(UNKNOWN) + "unsplit on cpu:0."],
    )


def test_a_mask_of_times():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True)
    causal = torch.nn.Transformer.generate_square_subsequent_mask(ROWS).double()
    encoder = torch.nn.TransformerEncoder(layer, 1)
    agree(encoder, rows(ROWS, ROWS, 4), atol=1e-10, mask=causal)


@pytest.mark.parametrize(
    "layout, within, verify",
    [
        ("to_dense", False, 0),
        ("to_dense", True, 2),
        ("to_sparse", True, 0),
        ("to_sparse", False, 2),
        ("to_sparse_csr", True, 0),
        ("to_sparse_csr", False, 2),
    ],
)
def test_an_adjacency_of_as_many_rows_runs_unsplit(layout, within, verify):
    """A graph network is given it with its nodes, or has it in a buffer."""

    class Convolution(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.linear = torch.nn.Linear(4, 5)
            self.register_buffer("known", adjacent if within else None)

        def forward(self, x, adjacent=None):
            return (self.known if within else adjacent) @ self.linear(x)

    adjacent = getattr(rows(ROWS, ROWS).relu(), layout)()
    given = (rows(ROWS, 4),) if within else (rows(ROWS, 4), adjacent)
    plain, parallel = Convolution().double(), compat.parallelize(Convolution().double())
    if verify:
        verified_module(parallel, verify)
    with pytest.warns(compat.CompatWarning, match=re.escape(FAILS)) as told:
        for _ in range(3):
            for module in (plain, parallel):
                module.zero_grad()
                module(*given).square().sum().backward()
    assert [w.category for w in told].count(compat.CompatWarning) == 1
    same_gradients(plain, parallel)


def test_what_holds_its_tensors_unseen_runs_on_one_device():
    class Batch:
        x = rows(ROWS, 4)

    class Outer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(4, 5)

        def forward(self, batch):
            return self.layer(batch.x)

    module = Outer().double()
    expected = module(Batch())
    compat.parallelize(module)
    with pytest.warns(compat.CompatWarning) as warned:
        found = module(Batch())
    assert [str(warning.message) for warning in warned] == [
        "Outer was given no tensor that torch.utils._pytree finds, so that there is nothing to "
        "split: it runs unsplit, on one device."
    ]
    same(expected, found, 0)
