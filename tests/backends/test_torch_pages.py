"""torch: code of the documentation, run. tests/test_blocks.py lists what runs here."""

import functools
import json
import os
import re
import runpy
import sys

import numpy as np
import pages
import pytest

import compat
from compat.testing import DEVICES
from compat.testing.ranks import RanksContract

from . import ranks


def test_quick_start(tmp_path):
    assert pages.run("docs/quickstart.md", tmp_path, pages.ENVIRON, ["The script", "torch"]) == 2


def test_moving_from_accelerate(tmp_path):
    count = pages.run(
        "docs/migration-from-others.md",
        tmp_path,
        pages.ENVIRON,
        ["accelerate, DataParallel and DistributedDataParallel"],
    )
    assert count == 2
    assert (tmp_path / "model.pt").exists()


class OnTorch(RanksContract):
    backend = "torch"


def test_moving_from_horovod(tmp_path, monkeypatch):
    """Two ranks end as one process with their batches and learning rates, on three devices."""
    program = pages.fragment(
        "docs/migration-from-others.md", "import compat\n\ncompat.configure_gpu()\n\nimport keras\n"
    )
    changes = {
        "compat.configure_gpu()": "import os, sys\nos.chdir(sys.argv[1])\ncompat.configure_gpu()",
        "import numpy as np": "import numpy as np\nkeras.utils.set_random_seed(compat.rank())",
        "100 * compat.size()": "200",
        "(compat.size() - 1)": "1",
        "scaled_learning_rate(0.01)": "scaled_learning_rate(0.02 / compat.size())",
        "model.fit(x, y, batch_size=100": "rows = compat.local_batch_size(200)\n"
        "history = model.fit(x, y, shuffle=False, batch_size=rows",
    }
    for before, after in changes.items():
        assert program.count(before) == 1, before
        program = program.replace(before, after)
    program += "import json\nprint('HISTORY', json.dumps(history.history))\n"
    script = tmp_path / "train.py"
    script.write_text(program + "np.savez('weights-%d' % compat.rank(), *model.get_weights())\n")
    for name in ("1", "2"):
        (tmp_path / name).mkdir()
    job = OnTorch().run(2, str(script), str(tmp_path / "2"))
    assert job.status == 0, job.err
    both = list(map(json.loads, re.findall("HISTORY (.*)", job.out)))
    monkeypatch.chdir(tmp_path)  # and back from where the program goes
    configure = functools.partial(compat.configure_gpu, simulate=DEVICES)
    monkeypatch.setattr(compat, "configure_gpu", configure)
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path / "1")])
    alone = runpy.run_path(str(script))["history"].history
    for name in ("1", "2"):
        assert {"checkpoint.keras", "model.keras"} <= set(os.listdir(str(tmp_path / name)))
    assert len(both) == 2
    for history in both:
        assert history["learning_rate"] == pytest.approx([0.04 / 3, 0.05 / 3, 0.02, 0.02, 0.02])
        assert history["loss"] == pytest.approx(alone["loss"], abs=1e-5)
    names = "1/weights-0.npz", "2/weights-0.npz", "2/weights-1.npz"
    ranks.check_arrays(*(dict(np.load(str(tmp_path / name))) for name in names))
