"""torch: code of the documentation, run. tests/test_blocks.py lists what runs here."""

import json
import re

import numpy as np
import pages
import pytest

from compat.testing import slow
from compat.testing.ranks import RanksContract


def test_quick_start(tmp_path):
    assert pages.run("docs/quickstart.md", tmp_path, pages.ENVIRON, ["The script", "torch"]) == 2


@slow  # ranks that divide a DataLoader: test_torch_ranks.py
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


def test_moving_from_horovod(tmp_path):
    """On two ranks, which end with the same; as one process does: ``compat.testing.ranks``."""
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
    job = OnTorch().run(2, str(script), str(tmp_path))
    assert job.status == 0, job.err
    assert (tmp_path / "checkpoint.keras").exists() and (tmp_path / "model.keras").exists()
    both = [json.loads(each) for each in re.findall("HISTORY (.*)", job.out)]
    for history in both:
        assert history["learning_rate"] == pytest.approx([0.04 / 3, 0.05 / 3, 0.02, 0.02, 0.02])
        assert history["loss"] == pytest.approx(both[0]["loss"])
    first, second = (dict(np.load(str(tmp_path / "weights-{}.npz".format(r)))) for r in (0, 1))
    assert first
    for name, weight in first.items():
        np.testing.assert_array_equal(weight, second[name], err_msg=name)
