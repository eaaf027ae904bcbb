"""A notebook, in a real kernel: what cells show, also those that are run again or interrupted.

The backend is tests/plugin, whose devices are threads. Where nbclient and ipykernel are not
installed, conftest.py leaves this file out.
"""

import gc
import os
import re
import sys
import warnings

import nbformat
import pytest
from conftest import ROOT
from jupyter_client import KernelManager
from nbclient import NotebookClient

BEGIN = """\
import numpy as np
import compat
from compat_numpy import backend
from compat_numpy.networks import Network
compat.register(backend)
inputs, targets = np.ones((61, 8)), np.ones((61, 4))
network = Network(8, 16, 4)
compat.configure_gpu(backend="numpy", simulate=3)"""


class Notebook:
    """Cells are run one after the other, as a person runs them."""

    def __init__(self, client):
        self.client = client

    def run(self, source):
        """Run a cell, and return its last output by type, or the text of its error."""
        cells = self.client.nb.cells
        cells.append(nbformat.v4.new_code_cell(source))
        (*_, last) = self.client.execute_cell(cells[-1], len(cells) - 1).outputs
        if last.output_type == "error":
            return "{}: {}".format(last.ename, last.evalue)
        return last.text if last.output_type == "stream" else last.data


@pytest.fixture
def notebook(monkeypatch, tmp_path):
    path = os.pathsep.join([ROOT, os.path.join(ROOT, "tests", "plugin")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("COMPAT_VERIFY", "0")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    manager = KernelManager()
    manager.kernel_spec.argv[0] = sys.executable
    client = NotebookClient(nbformat.v4.new_notebook(), km=manager, timeout=120, allow_errors=True)
    held = Notebook(client)
    with client.setup_kernel():
        yield held
    # Sockets that are left to the collector warn of that, in whatever test comes then.
    held.client = client = manager = None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        gc.collect()


def test_cells_that_are_run_again(notebook, tmp_path):
    first = notebook.run(BEGIN)
    assert first["text/plain"] == "<Configuration numpy on cpu:0, cpu:1, cpu:2>"
    assert "<table>" in first["text/html"]
    assert notebook.run(BEGIN.splitlines()[-1]) == first
    assert notebook.run("compat.configure_gpu(simulate=2, backend='numpy')") == (
        "AlreadyConfiguredError: configure_gpu() was called before in this process, with other "
        "settings.\n"
        "first:  numpy, devices: 3 simulated on the CPU\n"
        "second: numpy, devices: 2 simulated on the CPU\n"
        "Devices are fixed once per process: make both calls the same, or drop one. In this "
        "notebook: restart the kernel, and run the cell with configure_gpu() first."
    )
    train = (
        "network = compat.parallelize(network)\n"
        "network.train_on_batch(inputs, targets)\n"
        "compat.report()"
    )
    assert notebook.run(train)["text/plain"] == "<Report All 3 devices worked: 20 to 21 rows each.>"
    shown = notebook.run(train)
    assert shown["text/plain"] == "<Report All 3 devices worked: 40 to 42 rows each.>"
    assert re.findall(">([\\d,]+ rows)<", shown["text/html"]) == ["40 rows", "40 rows", "42 rows"]

    # The button that interrupts the kernel sends this signal.
    assert (
        notebook.run(
            "import os, signal, threading\n"
            "threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGINT]).start()\n"
            "with compat.timeline({!r}) as timeline:\n"
            "    while True:\n"
            "        network.train_on_batch(inputs, targets)".format(
                str(tmp_path / "timeline.json")
            )
        )
        == "KeyboardInterrupt: "
    )
    shown = notebook.run("timeline")
    assert re.findall(">(cpu:\\d)</text>", shown["text/html"]) == ["cpu:0", "cpu:1", "cpu:2"]
    shown = notebook.run(train)
    assert re.match("<Report All 3 devices worked: [\\d,]+ to [\\d,]+ rows", shown["text/plain"])
    assert shown["text/html"].count("busy ") == 3

    shown = notebook.run("os.environ['COMPAT_TIMEOUT'] = 'x'\ncompat.environment()")
    assert "COMPAT_TIMEOUT=x" in shown["text/html"]
