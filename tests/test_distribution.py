"""The source distribution, built as pip builds it, and the documentation in it."""

import os
import re
import shutil
import subprocess
import sys
import tarfile

import installed_wheel
import pytest
import support_table

import compat

ROOT = support_table.ROOT
LINK = r"\]\((?!\w+:)([^)]+)\)"  # to another file of the project, or within a file
# What setuptools writes, and what tools leave in the tree.
WRITTEN = {"PKG-INFO"}
LEFT = {".git", ".mypy_cache", ".pytest_cache", ".ruff_cache", ".tox", ".venv", "__pycache__"}


def files():
    """Return the project's files: those that git tracks; in a source distribution, those there."""
    if os.path.exists(os.path.join(ROOT, ".git")):
        listed = subprocess.check_output(["git", "ls-files"], cwd=ROOT).decode().splitlines()
        return {path for path in listed if os.path.exists(os.path.join(ROOT, path))}
    found = set()
    for folder, folders, names in os.walk(ROOT):
        folders[:] = [each for each in folders if each not in LEFT and ".egg-info" not in each]
        found.update(os.path.relpath(os.path.join(folder, name), ROOT) for name in names)
    return found - WRITTEN


@pytest.fixture(scope="module")
def sdist(tmp_path_factory):
    """Return the files of a source distribution made of a copy of the tree: names and contents."""
    tree, made = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("made")
    for path in files():
        target = tree / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.join(ROOT, path), str(target))
    build = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.check_output([sys.executable, "-c", build, str(made)], cwd=str(tree))
    (archive,) = made.iterdir()
    with tarfile.open(str(archive)) as tar:
        return {
            member.name.partition("/")[2]: tar.extractfile(member).read()
            for member in tar.getmembers()
            if member.isfile()
        }


def test_source_distribution_has_all_files_of_the_project(sdist):
    packed = {name for name in sdist if ".egg-info" not in name} - WRITTEN
    assert packed == files()


def test_a_wheel_with_files_of_an_older_build_is_found():
    built = {"compat/__init__.py": b"new"}
    installed_wheel.compare(built, dict(built))
    with pytest.raises(SystemExit, match="differ in compat/__init__.py, compat/gone.py$"):
        installed_wheel.compare(built, {"compat/__init__.py": b"old", "compat/gone.py": b""})


def test_citation_names_this_version():
    with open(os.path.join(ROOT, "CITATION.cff")) as file:
        assert "\nversion: {}\n".format(compat.__version__) in file.read()


def test_description_for_an_index_has_no_link_that_leads_nowhere(sdist):
    """The README's links to other files, which an index of packages does not have."""
    description = sdist["PKG-INFO"].decode("utf-8")
    assert "# keras-gpu-compat\n" in description
    readme = sdist["README.md"].decode("utf-8")
    linked = {to for to in re.findall(LINK, readme) if to[0] != "#"}
    assert linked and all(to in description for to in linked)
    assert re.findall(LINK, description) == []


def headings(path):
    """Return the anchors of a document's headings."""
    with open(path, encoding="utf-8") as file:
        found = re.findall("^#+ (.*)$", file.read(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", text).lower().replace(" ", "-") for text in found}


def test_links_between_the_documents_lead_to_files_and_headings():
    for document in (path for path in files() if path.endswith(".md")):
        with open(os.path.join(ROOT, document), encoding="utf-8") as file:
            links = re.findall(LINK, file.read())
        for link in links:
            path, _, anchor = link.partition("#")
            path = os.path.join(os.path.dirname(document), path) if path else document
            assert os.path.exists(os.path.join(ROOT, path)), (document, link)
            assert not anchor or anchor in headings(os.path.join(ROOT, path)), (document, link)


def test_documents_name_files_and_modules_that_exist():
    """All but the reference: see test_site.py."""
    for document in files() - {os.path.join("docs", "api.md")}:
        if not document.endswith(".md"):
            continue
        with open(os.path.join(ROOT, document), encoding="utf-8") as file:
            text = file.read()
        paths = re.findall(
            r"(?<![\w/.])(?:\.ci|benchmarks|compat|docs|examples|tests)/[\w./-]+", text
        )
        modules = re.findall(r"(?<![\w/.])compat\.(?:testing|_\w+)(?:\.[a-z_0-9]+)*", text)
        named = {path.rstrip(".") for path in paths if "NAME" not in path}
        for each in named | {module.replace(".", "/") for module in modules}:
            found = [os.path.join(ROOT, each + ending) for ending in ("", ".py")]
            assert any(map(os.path.exists, found)), (document, each)
