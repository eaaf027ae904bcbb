"""The scripts in examples/: what compat adds to them is a few lines, which a tool can take out."""

import os
import re

import pytest

ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
FOLDER = os.path.join(ROOT, "examples")
SCRIPTS = sorted(set(os.listdir(FOLDER)) - {"train.py", "README.md", "__pycache__"})


def read(name):
    with open(os.path.join(FOLDER, name), encoding="utf-8") as file:
        return file.read()


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_lines_of_compat(script):
    lines = [line for line in read(script).splitlines() if "compat" in line]
    assert lines[:2] == ["import compat", "compat.configure_gpu()"]
    names = [re.match(r"(\w+) = compat\.parallelize\(\1\)$", line).group(1) for line in lines[2:]]
    assert names == (["discriminator", "model"] if script == "gan.py" else ["model"])
    without = "".join(line for line in read(script).splitlines(True) if "compat" not in line)
    compile(without, script, "exec")


def test_train_uses_what_users_may_use():
    text = read("train.py")
    used = set(re.findall(r"\bcompat\.(\w+)", text))
    assert used == {"configure_gpu", "parallelize", "report", "size"}
    assert "from compat" not in text


def test_readme_describes_each():
    assert len(SCRIPTS) == 8
    described = re.findall(r"^\*\*\[(\w+\.py)\]\(\1\)\*\*", read("README.md"), re.MULTILINE)
    assert sorted(described) == SCRIPTS
