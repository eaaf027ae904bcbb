"""Jobs in which one rank fails, and what ``compat run`` is to make of them."""

import collections
import os
import signal
import sys
import time

# The rank that has the fault; on two machines it is on the second.
FAULTY = 1


def _raise():
    raise ValueError("this rank's data is bad")


FAULTS = {
    "raise": _raise,
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "exit": lambda: sys.exit(0),
    "sleep": lambda: time.sleep(1000),
    "short": lambda: None,
}

# A job in which a rank has one of these faults.
#     elsewhere: whether that rank is on another machine.
#     said: what ``compat run`` says of that rank, after its number.
#     last: a pattern of the last line of its report, or None.
FailingJob = collections.namedtuple("FailingJob", "fault size elsewhere said status last")


def name_of(job):
    return job.fault + " on another machine" * job.elsewhere


_FAILED = "failed with exit status 1; the others were ended."
_WAITED = r"compat.errors.RankLostError: Rank 0 of 2 waited .* \(\w+.py, line \d+\), but .*"
_SHORT = (
    "compat.errors.RankError: Rank 1 of 2 ran out of batches after 3 batches, but rank 0 had "
    r"more. Give every rank the same number: compat.shard\(\) does."
)
# The first job mostly waits. A rank that is killed leaves two, one of them on its machine, since
# engines tell its neighbours apart from others.
FAILING_JOBS = [
    FailingJob("sleep", 2, False, "did not come to the others, which waited for it", 1, _WAITED),
    FailingJob("kill", 3, True, "was killed by signal 9; the others were ended.", 128 + 9, None),
    FailingJob("raise", 2, True, _FAILED, 1, "ValueError: this rank's data is bad"),
    FailingJob(
        "exit", 2, False, "ended (exit status 0) while others were still training", 1, _WAITED
    ),
    FailingJob("short", 2, False, _FAILED, 1, _SHORT),
]
