"""torch: code of the documentation, run. tests/test_blocks.py lists what runs here."""

import pages


def test_quick_start(tmp_path):
    assert pages.run("docs/quickstart.md", tmp_path, pages.ENVIRON, ["The script", "torch"]) == 2


def test_moving_from_horovod_and_accelerate(tmp_path):
    count = pages.run(
        "docs/migration-from-others.md",
        tmp_path,
        pages.ENVIRON,
        ["Horovod", "accelerate, DataParallel and DistributedDataParallel"],
    )
    assert count == 3
    assert (tmp_path / "model.keras").exists() and (tmp_path / "model.pt").exists()
