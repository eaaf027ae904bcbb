"""The page of benchmarks: its tables are those of the results, and each has what it needs."""

import configparser
import json
import os

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(os.path.join(ROOT, "benchmarks"))
    return __import__("tables")


@pytest.fixture
def results(tables):
    with open(tables.RESULTS) as file:
        return json.load(file)


def test_the_page_has_the_results(tables, results):
    with open(tables.PAGE, encoding="utf-8") as file:
        page = file.read()
    assert tables.page_with(page, tables.sections(results)) == page


def test_the_section_of_short_fits_is_there_when_they_are_measured(tables, results):
    assert tables.fits(dict(results, rows={})) == ""
    one, four = tables.run.FITS[:2]
    measured = {one.name: {"wall": [1.2], "cpu": [1.1]}, four.name: {"wall": [0.9], "cpu": [1.0]}}
    text = tables.fits(dict(results, rows=measured))
    assert text.startswith("## Short fits on ranks\n")
    assert text.endswith(
        "| work | peer | `fit()` of 1 step | `fit()` of 4 steps |\n| --- | --- | --- | --- |\n"
        "| TF 2.15, Horovod, dense-128 | hvd.DistributedOptimizer | 1.20 "
        "| 0.90 |\n"
        "\nWhere compat is slower:\n\n- " + one.reason + "\n"
    )


def test_every_row_is_measured_and_says_why_it_misses_its_goal_or_is_slower(tables, results):
    fits = [row for row in tables.run.FITS if row.name in results["rows"]]
    rows = {row.name: (row, results["rows"][row.name]) for row in tables.run.ROWS + fits}
    assert set(rows) == set(results["rows"])
    assert set(tables.run.FIGURES) == set(results["figures"])
    for name, (row, measured) in rows.items():
        missed = not tables.is_met(row, measured) and not tables.is_bound(row, measured)
        assert row.reason or not missed and not tables.is_slower(measured), name


def test_every_first_fit_says_why_it_misses_its_goal(tables, results):
    fits = list(tables.of_first_fits(results))
    assert {work for _, work, _ in fits} == {"lstm", "small"}
    missed = [name for name, _, found in fits if tables.missed(found)]
    assert [name for name in missed if name not in tables.run.FIRST_REASONS] == []


def test_batch_normalization_is_measured_on_each_backend_and_costs_few_numbers(tables, results):
    _, *rows = tables.batch_norm(results)
    assert [row[0] for row in rows] == ["tensorflow1", "tensorflow2", "jax", "torch", "theano"]
    for row in rows:
        assert max(map(float, row[-1].split(" / "))) <= 6.25


def test_every_row_has_an_environment_and_a_script(tables):
    tox = configparser.ConfigParser()
    tox.read(os.path.join(ROOT, "tox.ini"), encoding="utf-8")
    environments = tox["tox"]["env_list"].split()
    commands = [(row.environment, row.command) for row in tables.run.ROWS + tables.run.FITS]
    for environment, command in commands + list(tables.run.FIGURES.values()):
        assert environment in environments
        assert tables.run.scripts(environment)
        (script,) = [word for word in command.split() if word.endswith(".py")]
        assert os.path.exists(os.path.join(ROOT, script)), script


def test_ratios_are_of_the_best_rounds(tables):
    def run(ours, theirs, **more):
        taken = {"compat": ours, "peer": theirs}
        return dict(more, seconds={name: {"wall": t, "cpu": t} for name, t in taken.items()})

    runs = [run([3.0], [2.0]), run([3.0, 1.0], [2.0, 4.0])]
    assert tables.run.ratios(runs) == {"wall": [0.5, 1.5], "cpu": [0.5, 1.5]}
    assert tables.run.ratios([run([3.0], [2.0], bound=1.0)])["bound"] == [0.5]


def test_the_model_of_clusters(tables, results):
    """Without overlap never faster than with it; more devices never better over the same links."""
    model = tables.cluster_model
    setups = list(model.setups(results["figures"]))
    for each in model.MODELS:
        for name in ("replicas", "ranks"):
            found = [model.efficiency(each, s) for s in setups if s.name.startswith(name)]
            assert all(0 < low <= high <= 1 for low, high in found)
            assert found == sorted(found, reverse=True)


def test_no_device_moves_more_than_was_promised(tables, results):
    """In training twice the weights each way, in the first batch of predict() the weights."""
    labels = tables.cluster_model.bytes_of_replicas(results["figures"])
    assert {label.partition(",")[0] for label in labels} == {
        "TensorFlow 1", "TensorFlow 2", "torch", "MXNet",
    }  # fmt: skip
    for by_devices in labels.values():
        assert set(by_devices) == {2, 4, 8, 16}
        for counts in by_devices.values():
            for kind, most in (("train", 2.1), ("predict, first", 1.1), ("predict, later", 0.05)):
                assert max(tables.shares(counts, kind)) <= most
