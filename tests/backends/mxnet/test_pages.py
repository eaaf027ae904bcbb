"""MXNet: code of the documentation, run. tests/test_blocks.py lists what runs here."""

import pages


def test_moving_from_make_parallel_and_lists_of_contexts(tmp_path):
    count = pages.run(
        "docs/migration-from-others.md",
        tmp_path,
        pages.ENVIRON,
        ["make_parallel", "keras-mxnet contexts"],
    )
    assert count == 2
