"""Lists that must agree: backends, their tests, extras, tox environments, documentation, CI."""

import ast
import configparser
import glob
import os
import re

import support_table

from compat._configuration import pip_extras, registry

ROOT = support_table.ROOT


def _path(*path):
    return os.path.join(ROOT, *path)


def read(*path):
    with open(_path(*path), encoding="utf-8") as file:
        return file.read()


def extras():
    setup = configparser.ConfigParser()
    setup.read(os.path.join(ROOT, "setup.cfg"), encoding="utf-8")
    return set(setup["options.extras_require"])


def environment_extras():
    parts = {name.split("-")[1] for name, _ in support_table.environments()}
    return parts - {"core"}


def test_every_backend_has_a_folder_of_tests_and_no_other_one_is_there():
    folder = os.path.join(ROOT, "tests", "backends")
    tests = {name for name in os.listdir(folder) if name.startswith("test_")}
    assert tests == {"test_benchmarks.py", "test_examples.py"}  # of every backend
    contracts = glob.glob(os.path.join(folder, "*", "test_contract.py"))
    assert sorted(path.split(os.sep)[-2] for path in contracts) == registry.names()


def test_every_extra_has_an_environment_and_no_environment_is_without():
    assert environment_extras() == extras()


def test_advice_on_extras_knows_their_pythons():
    """As the table in docs/install.md says, and on which the matrix installs them."""
    backend_extras = extras()
    assert set(pip_extras.PYTHONS) == backend_extras
    page = read("docs", "install.md")
    table = re.findall(r"^\| (`.*\[.*?) \| .* \| (3[\d., to]*) \|$", page, re.M)
    said = {name: pythons for names, pythons in table for name in re.findall(r"\[(\w+)", names)}
    said.update(mxnet16="3.6", mxnet15="3.6")
    assert {name: pip_extras.pythons(name) for name in backend_extras} == {
        name: "Python " + pythons.replace(", ", " or ") for name, pythons in said.items()
    }
    for name, python in support_table.environments():
        if not name.endswith("-core"):
            oldest, newest = pip_extras.PYTHONS[name.split("-")[1]]
            assert oldest <= tuple(map(int, python.split("."))) <= newest, name


def test_pins_are_for_the_pythons_that_environments_test():
    tested = {}
    for name, python in support_table.environments():
        for extra in set(name.split("-")[1:]) & extras():
            tested.setdefault(extra, set()).add(tuple(map(int, python.split("."))))
    assert {extra: set(pythons) for extra, pythons in pip_extras.TESTED.items()} == tested
    assert all(list(pythons) == sorted(pythons) for pythons in pip_extras.TESTED.values())
    first = {name: next(iter(brought)) for name, brought in pip_extras.EXTRAS.items()}
    assert first == {backend.name: backend.extra for backend in registry.backends()}


def test_every_backend_has_a_page_which_the_readme_links():
    pages = {"docs/backends/{}.md".format(name) for name in registry.names()}
    assert pages == set(re.findall(r"\((docs/backends/[^)]*)\)", read("README.md")))
    assert pages == {"docs/backends/" + name for name in os.listdir(_path("docs", "backends"))}


def test_documents_say_how_long_the_tests_take():
    minutes = "{} minutes".format(support_table.PROMISED_MINUTES)
    assert "up to " + minutes in read("README.md") and minutes in read("CONTRIBUTING.md")


def test_readme_stays_short():
    assert len(read("README.md").splitlines()) < 200


def test_torch_is_installed_once():
    """The deps of tox.ini come before the extra; without a pin accelerate brings the newest."""
    pins = [re.findall(r"torch==[\w.]+", read(name)) for name in ("tox.ini", "setup.cfg")]
    assert pins[0] == pins[1] and len(pins[0]) == 1


def test_every_backend_has_an_extra():
    assert {backend.extra for backend in registry.backends()} <= extras()


def test_core_is_tested_on_the_oldest_and_the_newest_python():
    pythons = [python for _, python in support_table.environments()]
    core = [p for name, p in support_table.environments() if name.endswith("-core")]
    by_number = sorted(set(pythons), key=lambda python: int(python[2:]))
    assert sorted(core, key=pythons.index) == [by_number[0], by_number[-1]]


def test_ci_runs_the_command_of_the_readme():
    command = re.search("```\n(.*tox run-parallel.*)\n```", read("README.md")).group(1)
    assert read(".ci", "run").rstrip().splitlines()[-1] == command


def test_generated_matrix_runs_three_backends():
    (names,) = re.findall(r"generated_matrix\.py .* ([\w,]+)$", read("tox.ini"), re.M)
    assert len({pip_extras.BACKENDS[extra] for extra in names.split(",")}) == 3


def test_support_table_has_every_environment():
    rows, _ = support_table.page_rows()
    assert [row[0] for row in rows] == [name for name, _ in support_table.environments()]


def test_each_backend_runs_the_whole_contract():
    """TensorFlow 2 also runs on both Keras 2 and Keras 3."""
    rows, _ = support_table.page_rows()
    contracts, kerases = {}, {}
    for _, _, backend, _, keras, contract, _ in rows:
        if contract != "none":  # the core, and what is tested without the contract
            contracts.setdefault(backend, set()).add(contract)
            kerases.setdefault(backend, set()).add("3" if re.match(r"keras 3\.", keras) else "2")
    assert set(contracts) == set(registry.names())
    assert kerases["tensorflow2"] == {"2", "3"}
    for backend, run in contracts.items():
        assert "whole" in run and run <= {"whole", "span"}, backend


def _rows_of_examples():
    """Those whose names are made of the examples' titles."""
    source = read(os.path.join(ROOT, "tests", "backends", "test_examples.py"))
    (titles,) = [
        ast.literal_eval(statement.value)
        for statement in ast.parse(source).body
        if isinstance(statement, ast.Assign) and getattr(statement.targets[0], "id", "") == "TITLES"
    ]
    names = re.findall(r'"(example: [^"]*)"', source)
    assert len(names) == 2  # on several devices, on one
    return {name.format(title) for name in names for title in titles.values()}


def test_feature_table_has_every_row_that_tests_name():
    """And each row names environments that the matrix has."""
    marked = _rows_of_examples()
    sources = [
        os.path.join(folder, file)
        for room in ("tests", os.path.join("compat", "testing"))
        for folder, _, files in os.walk(os.path.join(ROOT, room))
        for file in files
        if file.endswith(".py") and file != "test_support_table.py"
    ]
    for source in sources:
        found = re.findall(r"""mark\.row\((["'])(.+?)\1\)""", read(source))
        marked.update(name for _, name in found)
    _, cells = support_table.page_rows()
    assert {name for name, _ in cells} == marked
    known = {name for name, _ in support_table.environments()}
    for name, environments in cells:
        assert set(environments.split(", ")) <= known, name


def test_support_table_has_the_pinned_versions():
    """All but the version of tf.keras, which TensorFlow brings along."""
    pins = set(re.findall(r"([\w-]+==\d+(?:\.\d+)*)", read("setup.cfg") + read("tox.ini")))
    table = support_table.page_tables().partition("\n\n")[0]
    named = re.findall(r"(?<![\w.-])([\w-]+) (\d[\w.]*)", table)
    assert named
    for name, version in named:
        distributions = [name, name + "-cpu"]  # TensorFlow has both
        assert pins & {"==".join((each, version)) for each in distributions}, (name, version)


def test_pre_commit_and_tox_run_the_same_tools():
    pins = re.findall(r"\[(\w+==[\d.]+)\]", read(".pre-commit-config.yaml"))
    assert pins and set(pins) <= set(read("tox.ini").split())
