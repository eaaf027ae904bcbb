"""``mx.mon.Monitor`` of a ``Module`` on several contexts: it sees what one context has."""

import numpy as np
import pytest

import compat
from compat._runtime.patching import replaced
from compat.testing import span

from ..messages import told
from . import gluon_models, test_module
from .gluon_models import data, difference
from .test_module import bound, optimised, parameters, step, weights

mx = gluon_models.mx  # the fixture
pytestmark = pytest.mark.row("MXNet Module")

SHOWN = "(?!softmax_backward)"  # nobody writes the gradient of the labels


@span
@pytest.mark.parametrize("kvstore", ["local", None])
def test_a_monitor_is_shown_whole_batches(mx, kvstore):
    """From fit(), from the start, and in the middle of training."""
    found = []
    for parallel in (False, True):
        seen = []
        with told() as texts:
            for steps in (0, 2):
                module = bound(mx, 12, parallel)
                optimised(module, "adam", kvstore)
                for rows in (12, 5)[:steps]:
                    step(mx, module, rows)
                monitor = mx.mon.Monitor(1, pattern=SHOWN, sort=True)
                module.install_monitor(monitor)
                for _ in range(2):
                    monitor.tic()
                    step(mx, module, (12, 5)[steps // 2])
                    seen += monitor.toc()
                found.append(weights(module))
        inputs, labels = data(24)
        with told() as of_fit:
            module, monitor = (
                mx.mod.Module(test_module.symbol(mx)),
                mx.mon.Monitor(1, pattern=SHOWN, sort=True),
            )
            if parallel:
                compat.parallelize(module)

            def shows(seen=seen, monitor=monitor):
                seen += monitor.toc()

            with replaced(monitor, toc_print=shows):
                module.fit(
                    mx.io.NDArrayIter(inputs, labels, 8), monitor=monitor, num_epoch=2,
                    arg_params=parameters(mx), kvstore=kvstore,
                )  # fmt: skip
        found.append(weights(module))
        found.append([np.array([float(text.split()[0]) for _, _, text in seen])])
        found.append([name for _, name, _ in seen])
    plain, parallel = found[:5], found[5:]
    assert len(plain[-1]) > 100
    assert plain[-1] == parallel[-1]
    for one, several in zip(plain[:-1], parallel[:-1]):
        assert difference(one, several) < 1e-5
    said = (
        "Model 'Module' has a Monitor, which would see each batch in shards, one from each device. "
        "The Module runs unsplit on cpu(0)."
    )
    assert (texts, of_fit) == ([said] * 2, [said])
