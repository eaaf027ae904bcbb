"""OpenMPI's libraries: missing, and there."""

import os
import sys

from compat._backends.cntk import openmpi
from compat._configuration import registry


def test_missing_openmpi_is_diagnosed_without_importing_cntk(run, monkeypatch):
    """In a process whose loader does not find OpenMPI: ``compat env``, and the error."""
    out = run(
        """
        import sys
        from compat import __main__
        assert __main__.main(["env"]) == 1
        assert "cntk" not in sys.modules
        import compat
        try:
            compat.configure_gpu()
        except ImportError as error:
            assert type(error) is compat.BrokenInstallError
            print("error:", error)
        """,
        LD_LIBRARY_PATH="",
    )
    text = (
        "cntk is installed, but importing it fails without OpenMPI's libmpi.so.12 and "
        "libmpi_cxx.so.1. On Debian and Ubuntu: apt-get install libopenmpi3 && ln -s "
    )
    assert "problems " + text in " ".join(out.replace(" \\\n", " ").split())
    assert "error: " + text in out


def test_openmpi_that_is_there_is_no_problem():
    assert registry.load("cntk").problems(os.environ) == []
    assert "cntk" in sys.modules or openmpi.without_openmpi(os.environ) is None
