"""Idle GPUs, ``gpus="free"``: which ones are, and how a job claims them for itself."""

import contextlib
import os

from .._runtime.process import process
from .._runtime.safe_files import NOFOLLOW, plain
from .discovery import GPU, busy


def claim_idle(visible, count, problems):
    """Positions of idle GPUs, those with most free memory, each claimed for this process.

    Where one cannot be claimed, which two jobs may then choose, ``problems`` gets a sentence.

    Idle: no process computes on it that the driver shows, less than a tenth of the memory is
    used (a desktop uses some) and less than a tenth of the time, and no other process that
    chose in this way has claimed it. Where the driver does not tell one of these, as under MIG,
    a GPU is not known to be idle: such ones are taken where there are too few others, and only
    one where no number was asked for.

    Returns:
        The positions; and for those not known to be idle, their entries and what is unknown.
    """
    computing = busy()
    candidates = []
    for position, (entry, gpu) in enumerate(visible):
        if not gpu.uuid:  # a MIG instance, or a GPU that only the framework lists
            gpu = GPU(uuid=entry.replace("/", "-"))
        is_ours = _claimed(gpu)
        missing = [] if is_ours else gpu.unknown()
        if not is_ours and (computing is None or gpu.index is None):
            missing.append("processes")
        used, total = gpu.memory_used or 0, gpu.memory_total or 0
        is_busy = (
            gpu.uuid in (computing or [])
            or (gpu.memory_total is not None and used * 10 > total)
            or (gpu.utilization or 0) >= 10
        )
        if is_ours or not is_busy:
            order = bool(missing), not is_ours, used - total, position
            candidates.append((order, gpu, (position, entry, missing)))
    taken = []  # type: list
    unclaimed = []
    for _, gpu, choice in sorted(candidates):
        _, entry, missing = choice
        wanted = count or (1 if missing else len(visible))
        if len(taken) >= wanted:
            break
        try:
            if _claim(gpu):
                taken.append(choice)
        except OSError as error:
            text = (
                f"GPU {entry} is idle but cannot be claimed: {_lock_path(gpu)} cannot be locked "
                f"({error.strerror or error}). Another job that asks for idle GPUs may take it, "
                "too. Choose GPUs by their ids, or have that file removed."
            )
            unclaimed.append((wanted, choice, text))
    # Those that cannot be locked come last, so that such a file cannot block a GPU for ever.
    for wanted, choice, text in unclaimed:
        if len(taken) < wanted:
            taken.append(choice)
            problems.append(text)
    taken.sort()
    return [choice[0] for choice in taken], [choice[1:] for choice in taken if choice[2]]


def _claimed(gpu):
    return gpu.uuid in process.claims or gpu.uuid in os.environ.get("COMPAT_CLAIMS", "").split(",")


def hand_over_claims():
    """Keep the claims for the program that this process becomes, and return what tells it so."""
    for lock in process.claims.values():
        os.set_inheritable(lock, True)
    return {"COMPAT_CLAIMS": ",".join(sorted(process.claims))} if process.claims else {}


def _lock_path(gpu):
    """Where its lock file lies: not in ``TMPDIR``, which schedulers set for each job."""
    return f"/tmp/keras-gpu-compat-{gpu.uuid}.lock"


def _claim(gpu):
    """Take this GPU's lock, so that two jobs started together do not pick the same one.

    Returns:
        Whether no other job has it.

    Raises:
        OSError: nothing can be locked there: what anybody may have put into /tmp is no lock.
    """
    if _claimed(gpu):
        return True
    try:
        import fcntl
    except ImportError as error:  # Windows
        raise OSError("this system has no such locks") from error
    lock = _open(_lock_path(gpu))
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            return False
        raise
    process.claims[gpu.uuid] = lock
    return True


def _open(path):
    with contextlib.suppress(FileExistsError):  # another job makes it meanwhile
        if not os.path.lexists(path):  # Linux refuses to "create" another user's file in /tmp
            lock = plain(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW)
            os.fchmod(lock, 0o644)  # whatever the umask: other users are to lock it, too
            return lock
    return plain(path, os.O_RDONLY | NOFOLLOW)
