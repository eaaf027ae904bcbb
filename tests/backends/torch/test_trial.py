"""torch: what a few rows have by chance, and what a model makes of it."""

import ctypes
import warnings

import numpy
import pytest
import torch

import compat

from .test_contract import devices  # noqa: F401  (a fixture)
from .test_merging import ROWS, agree, computing, pair, rows, same, turns

pytestmark = [pytest.mark.row("torch nn.Module"), pytest.mark.usefixtures("devices")]


PATHS = {
    "other totals": lambda m, y: y.mean() if turns(y) else y.sum(),
    "other functions": lambda m, y: y.mean().exp() if turns(y) else y.mean().sqrt(),
    "more results": lambda m, y: (y,) if turns(y) else (y, y),
}


@pytest.mark.parametrize("name", sorted(PATHS))
def test_what_chooses_its_path_by_the_rows_runs_unsplit(name):
    plain, module = pair(PATHS[name])
    with pytest.warns(compat.CompatWarning, match="The model runs unsplit on cpu:0"):
        found = module(rows(ROWS, 4))
    torch.manual_seed(0)
    same(plain(rows(ROWS, 4)), found, 1e-12)


#: What depends on how many of the batch's values are like this.
NUMBERS = {
    "distinct": lambda y, seen: y * len(seen.round().unique()),
    "which": lambda y, seen: y + torch.unique(seen.round(), return_inverse=True)[1],
    "found": lambda y, seen: y * len((seen[:, 0] > 0.3).nonzero()),
    "rare": lambda y, seen: y * (1 + seen[seen > 1.2].numel()),
    "selected": lambda y, seen: y * (1 + seen.masked_select(seen > 1.2).shape[0]),
    "a mean by their number": lambda y, seen: y[seen > 1].sum() / max(1, len(y[seen > 1])),
    "for numpy": lambda y, seen: y * len(numpy.unique(seen.round().numpy())),
    "for Python": lambda y, seen: y * max(seen[:, 0].tolist()),
    "rows": lambda y, _: y - y.mean(0) if len(y) > 5 else y,
    "rows but one": lambda y, _: y - y.mean(0) if y.shape[0] - 1 > 5 else y,
    "elements": lambda y, _: y - y.mean(0) if y.numel() > 25 else y,
    "each row": lambda y, _: torch.stack([row * place for place, row in enumerate(y)]),
}


@pytest.mark.parametrize("name", list(NUMBERS))
def test_what_depends_on_a_number_of_values(name):
    """A few rows have the same number by chance, and a later batch another one."""
    plain, module = pair(lambda m, y: NUMBERS[name](y, y.detach()))
    for count in (ROWS, 3, 12, ROWS, 7):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", compat.CompatWarning)
            same(plain(rows(count, 4)), module(rows(count, 4)), 1e-12)


def class_means(array, classes):
    return numpy.stack([array[classes == each].mean(0) for each in classes])


#: What the first three rows have by chance: two of them are of one class, or all are sorted.
BY_CHANCE = {
    "of one class": lambda array: class_means(array, numpy.arange(len(array)) % 3 // 2),
    "sorted": lambda array: numpy.sort(array, 0),
}


@pytest.mark.parametrize("name", sorted(BY_CHANCE))
def test_what_three_rows_have_by_chance_is_not_that_of_all(name):
    """In an extension, whose functions are not seen. It gets all values on each device."""

    def extension(tensor):
        pointer = ctypes.cast(tensor.data_ptr(), ctypes.POINTER(ctypes.c_double))
        array = numpy.ctypeslib.as_array(pointer, tuple(map(int, tensor.shape)))
        return torch.from_numpy(BY_CHANCE[name](array))

    plain, module = pair(lambda m, y, values: (y, extension(values)))
    values = rows(ROWS, 2)
    values[:3] = torch.arange(3)[:, None]
    same(plain(rows(ROWS, 4), values), module(rows(ROWS, 4), values), 1e-12)


def test_a_model_that_takes_sorted_rows_alone_is_split():
    def forward(m, y, lengths):
        if (lengths[1:] > lengths[:-1]).any():
            raise ValueError("Sort the rows by their lengths.")
        return y * lengths[:, None]

    agree(computing(forward), rows(ROWS, 4), torch.arange(ROWS).flip(0))


def test_rows_that_mix_from_a_later_step_on():
    """By a counter, or by the number of rows; state is that of one device, too."""

    def by_steps(m, y):
        m.steps = getattr(m, "steps", 0) + 1
        return y - y.flip(0) if m.steps > 2 else y

    def by_rows(m, y):
        return y - y.flip(0) if y.shape[0] == 12 else y

    for function in (by_steps, by_rows):
        plain, module = pair(function)
        for step, count in enumerate((ROWS, 11, 12, ROWS)):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", compat.CompatWarning)
                same(plain(rows(count, 4)), module(rows(count, 4)), 1e-12)
            assert len(caught) == (step == 2)


def test_a_choice_that_makes_no_difference_is_taken():
    """As where masks are left out if they hide nothing, in some parts of the batch."""

    def forward(m, y, mask):
        return (
            y.relu()
            if bool(mask.all())
            else (y * mask[:, None]).relu() + (y * ~mask[:, None]).relu()
        )

    mask = torch.arange(ROWS) != 2
    agree(computing(forward), rows(ROWS, 4), mask)


def test_an_argument_that_is_changed_in_place_changes_once():
    def forward(m, y, other):
        other += 1
        return y * other

    plain, module = pair(forward)
    other = rows(ROWS, 5)
    expected, changed = plain(rows(ROWS, 4), other), other.clone()
    other -= 1
    with warnings.catch_warnings():
        warnings.simplefilter("error", compat.CompatWarning)
        same(expected, module(rows(ROWS, 4), other), 1e-12)
    same(changed, other, 1e-12)
