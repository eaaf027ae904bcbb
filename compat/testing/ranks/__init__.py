"""The tests that the ranks of any backend must pass, as ``compat run -n N`` starts them.

A backend's test file is mostly one subclass::

    from compat.testing.ranks import RanksContract

    class TestMyBackendRanks(RanksContract):
        backend = "mybackend"

Run it as ``compat.testing``'s. All that trains and compares runs in one job for each number of
ranks: two on this machine and three on two machines, each ended by a fault. Each other fault is a
job of its own. Most of the time goes into starting processes that import a framework, so that no
job has more ranks than it needs.

``NativeRanksContract`` is the same for models of the framework's own kind.
"""

from .contract import NativeRanksContract, RanksContract
from .jobs import FAILING_JOBS
from .programs import POLICIES

__all__ = ["FAILING_JOBS", "POLICIES", "NativeRanksContract", "RanksContract"]
