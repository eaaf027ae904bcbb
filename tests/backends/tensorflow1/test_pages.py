"""TensorFlow 1: code of the documentation, run. tests/test_blocks.py lists what runs here."""

import pages
import tensorflow  # noqa: F401  conftest.py has its options set


def test_a_script_of_2018(tmp_path):
    count = pages.run("docs/quickstart.md", tmp_path, pages.ENVIRON, ["A script of 2018"])
    assert count == 2
