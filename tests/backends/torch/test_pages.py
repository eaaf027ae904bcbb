"""torch: code of the documentation, run. tests/test_blocks.py lists what runs here."""

import json
import re

import numpy as np
import pages
import pytest

from compat.testing import slow
from compat.testing.ranks import RanksContract

from .. import ranks


def test_quick_start(tmp_path):
    assert pages.run("docs/quickstart.md", tmp_path, pages.ENVIRON, ["The script", "torch"]) == 2


@slow  # ranks that divide a DataLoader: test_ranks.py
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


@slow
def test_moving_from_horovod(tmp_path):
    """Two ranks end as one process that has their batches and their learning rates."""
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
    histories = []
    for size in (1, 2):
        folder = tmp_path / str(size)
        folder.mkdir()
        job = OnTorch().run(size, str(script), str(folder))
        assert job.status == 0, job.err
        histories += map(json.loads, re.findall("HISTORY (.*)", job.out))
        assert (folder / "checkpoint.keras").exists() and (folder / "model.keras").exists()
    alone, *both = histories
    for history in both:
        assert history["learning_rate"] == pytest.approx([0.04 / 3, 0.05 / 3, 0.02, 0.02, 0.02])
        assert history["loss"] == pytest.approx(alone["loss"], abs=1e-5)
    names = "1/weights-0.npz", "2/weights-0.npz", "2/weights-1.npz"
    ranks.check_arrays(*(dict(np.load(str(tmp_path / name))) for name in names))
