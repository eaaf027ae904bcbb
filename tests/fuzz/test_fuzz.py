"""Random Keras programs do on several simulated devices what they do on one, or say they cannot.

    python -m pytest tests/fuzz --seed 1000 --count 500

A failure prints its program; ``--seed N --count 1`` runs it again. With ``--verify 1`` compat
compares the first steps with one device itself, and what it finds counts as loud.
"""

import random
import re

import comparing
import numpy as np
import pytest
import trial
from models import SUBJECTS, Program
from parts import lacks

import compat
from compat.testing import any_backend


@pytest.mark.row("random models")
def test_same_as_one_device_or_loud(keras, operations, pytestconfig, seed):
    program = Program(seed, lacks(keras), pytestconfig.getoption("subject"), operations)
    outcome = trial.attempt(program, keras)
    pytestconfig.fuzz_outcomes.append((program, outcome))
    print(program)
    expected = {comparing.SPLIT, comparing.UNSPLIT}
    if program.subject in trial.MAY_REFUSE:
        expected.add(comparing.REFUSED)
    if program.subject == "operation":
        expected.add(comparing.UNUSABLE)  # it takes a matrix, but not one of unknown rows
    if "nothing may depend on how many there are" in outcome.reason:
        expected.add(comparing.REFUSED)  # MXNet, where the graph itself has the batch's size
    assert outcome.kind in expected, outcome.reason


# The test itself --------------------------------------------------------------------------------


def test_seed_is_the_program():
    assert str(Program(7)) == str(Program(7)) != str(Program(8))


def test_every_part_is_drawn():
    programs = [Program(seed) for seed in range(400)]
    assert {program.subject for program in programs} == {None, *SUBJECTS} - {"operation"}
    text = "\n".join(map(str, programs))
    for part in (
        "LSTM", "GRU", "SimpleRNN", "Bidirectional", "Embedding", "mask_zero=True", "Masking",
        "Conv2D", "Conv1D", "Dot", "Multiply", "Concatenate", "Sequential", "Subclassed", "Adam",
        "go_backwards=True", "_regularizer=", "_constraint=", "sample_weight=", "class_weight=",
        "loss_weights=", "fit", "evaluate", "predict", "parallelize(gpus=8)", "rows=1)",
    ):  # fmt: skip
        assert part in text, part


@any_backend
def test_operations_are_the_frameworks(keras, operations, monkeypatch):
    """Most of those that are drawn compute across rows; the text is what the layer computes."""
    assert len(operations.all) > 100
    # Of those that take a matrix. Most others do not, which takes long to find out.
    few = "[.](cumsum|max|mean|prod|relu|reverse|softmax|sort|sum)$"
    some = [name for name in operations.all if re.search(few, name, re.IGNORECASE)]
    monkeypatch.setattr(operations, "all", some)
    draws = []
    while {kind for _, kind in draws} != {"rows", "whole"}:
        draws.append(operations.draw(random.Random(len(draws))))
    assert len(draws) <= 8
    text = str(Program(3, lacks(keras), "operation", operations))
    assert re.search(r"^t\d+ = Operation\(['\"].*['\"], '(rows|whole)'\)\(t\d+\)$", text, re.M), (
        text
    )


def test_program_leaves_out_what_a_keras_lacks():
    text = "\n".join(str(Program(seed, {"Dot", "stateful", "Adam"})) for seed in range(400))
    assert not any(part in text for part in ("Dot", "stateful", "Adam"))


@pytest.mark.parametrize("floatx", sorted(comparing.TOLERANCES))
def test_differences_are_seen(floatx):
    tolerance = comparing.TOLERANCES[floatx]
    start, end = np.zeros(3), np.ones(3)
    expected = [("weights", [start]), ("loss", [np.array([2.0])]), ("weights", [end])]
    comparing.compare(expected, expected, tolerance)
    for place, (what, (values,)) in enumerate(expected):
        for wrong in (values + 5 * tolerance, values[:0]):
            found = list(expected)
            found[place] = (what, [wrong])
            with pytest.raises(comparing.Different):
                comparing.compare(expected, found, tolerance)


@pytest.mark.parametrize(
    "error, kind",
    [
        (compat.UnsupportedError("no"), comparing.REFUSED),
        (compat.ResultsDifferError("no"), comparing.REFUSED),
        (ValueError("no"), comparing.CRASH),
    ],
)
def test_errors_on_several_devices_alone(error, kind):
    def run(parallel):
        if parallel:
            raise error
        return []

    assert comparing.verdict(run, 1e-9).kind == kind


@any_backend
def test_other_numbers_on_several_devices(keras, monkeypatch):
    def parallelize(model, gpus):
        method = model.fit
        model.fit = lambda x, y, **options: method(x, y, **dict(options, batch_size=2))
        method2 = model.train_on_batch
        model.train_on_batch = lambda x, y, **options: method2(x, y)

    monkeypatch.setattr(compat, "parallelize", parallelize)
    programs = [Program(seed, lacks(keras), None) for seed in range(1, 17)]
    # First those with a fit(), and of these the smaller ones.
    programs.sort(key=lambda each: ("model.fit" not in str(each), len(each.lines)))
    assert any(trial.attempt(program, keras).kind == comparing.SILENT for program in programs)
