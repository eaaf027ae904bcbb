"""The grammar of ``gpus=``, and the visible GPUs that it selects."""

import contextlib
import os
import types
from typing import Any, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Union

from .. import errors
from .._runtime.process import process
from .._runtime.safe_files import NOFOLLOW, plain
from .discovery import GPU, busy
from .numeric import whole_number

# Pairs of an entry of CUDA_VISIBLE_DEVICES, or an id in its place, and the GPU that it names.
Visible = Sequence[Tuple[str, GPU]]

GPUS_FORMS = """\
    None            every visible GPU
    2               two GPUs
    -1              every visible GPU
    [0, 2], "0,2"   these ids, counted inside CUDA_VISIBLE_DEVICES where it is set
    [2], "2"        the one GPU with this id
    ["GPU-8932f937"], "MIG-c7384736"
                    GPUs, or MIG instances, by name
    "free"          the idle GPUs
    "free:2"        two idle GPUs
    0, [], "cpu"    no GPU"""


_KINDS = {"cpu": "none", "none": "none", "all": "all", "auto": "all", "-1": "all", "free": "free"}


class Selection(types.SimpleNamespace):
    """A request of ``gpus=``: a kind, and a count or ids.

    ``kind`` is "all", "count", "ids", "free" or "none"; ``count`` counts for "count" and
    "free" (None: all idle ones); ``ids`` holds integers and GPU or MIG names, as strings.
    """

    def __init__(
        self, kind: str, count: "Optional[int]" = None, ids: "Iterable[Union[int, str]]" = ()
    ) -> None:
        super().__init__(kind=kind, count=count, ids=tuple(ids))

    def __str__(self) -> str:
        if self.kind == "free":
            return 'gpus="free{}"'.format(f":{self.count}" if self.count else "")
        value = {"all": None, "count": self.count, "ids": list(self.ids), "none": 0}
        return f"gpus={value[self.kind]!r}"


def parse_gpus(gpus: "Any") -> "Selection":
    """Normalise ``gpus=`` to a ``Selection``.

    Raises:
        InvalidArgumentError: a ``ValueError`` that lists the forms.
    """
    if gpus is None:
        return Selection("all")
    if isinstance(gpus, bool):
        raise invalid_gpus(gpus, "True and False name no GPU")
    if isinstance(gpus, str):
        return _parse_text(gpus)
    if isinstance(gpus, (list, tuple, range)):
        return _parse_ids(gpus, gpus)
    count = _integer(gpus)
    if count is None:
        raise invalid_gpus(gpus, f"it is a {type(gpus).__name__}")
    if count < -1:
        raise invalid_gpus(gpus, "a count below -1 means nothing")
    if count == -1:
        return Selection("all")
    return Selection("count", count) if count else Selection("none")


def _integer(value: "Any") -> "Optional[int]":
    """Return the value of an integer of any type, such as numpy's, or None."""
    import operator

    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _parse_text(gpus: str) -> "Selection":
    text = gpus.strip()
    if text.lower() in _KINDS:
        return Selection(_KINDS[text.lower()])
    kind, colon, count = text.partition(":")
    if colon and kind.lower() == "free":
        wanted = whole_number(count.strip())
        if wanted:
            return Selection("free", wanted)
        raise invalid_gpus(gpus, '"free:" takes a number of GPUs, 1 or more')
    if not text:
        raise invalid_gpus(gpus, 'an empty text names no GPU; "cpu" means none')
    # A text lists ids, as CUDA_VISIBLE_DEVICES does: "2" is the GPU with id 2.
    return _parse_ids(gpus, text.split(","))


def _parse_ids(gpus: "Any", items: "Iterable[Any]") -> "Selection":
    ids = []
    for item in items:
        wanted = _parse_id(item)
        if wanted is None:
            raise invalid_gpus(gpus, f"{item!r} is neither an id nor a name")
        if wanted in ids:
            raise invalid_gpus(gpus, f"{wanted!r} is named twice")
        ids.append(wanted)
    if any_mig(ids) and not all(any_mig([wanted]) for wanted in ids):
        raise invalid_gpus(gpus, "CUDA cannot mix MIG instances with whole GPUs")
    return Selection("ids", ids=ids) if ids else Selection("none")


def any_mig(ids: "Iterable[Union[int, str]]") -> bool:
    """Return whether one of the ids names a MIG instance."""
    return any(isinstance(wanted, str) and wanted.startswith("MIG-") for wanted in ids)


def _parse_id(item: "Any") -> "Union[None, int, str]":
    """Return an id as an integer, a name as a text; None for anything else."""
    if not isinstance(item, str):
        number = _integer(item)
        return number if number is not None and number >= 0 else None
    item = item.strip()
    number = whole_number(item)
    if number is not None:
        return number
    # A separator inside would make two entries of CUDA_VISIBLE_DEVICES of it.
    is_name = item.startswith(("GPU-", "MIG-")) and item.split() == [item] and "," not in item
    return item if is_name else None


# Choosing -------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """Visible GPUs that match a selection.

    Attributes:
        positions: among the visible ones.
        shortage: requested GPUs that are missing, a clause; None: none is.
        problems: with the claims of idle GPUs, a sentence each.
    """

    positions: "Sequence[int]"
    shortage: "Optional[str]" = None
    problems: "Sequence[str]" = ()


def choose_among(selection: "Selection", visible: "Visible") -> "Choice":
    """Return the ``Choice`` among visible GPUs, pairs of entry and ``GPU``."""
    if selection.kind == "all":
        return Choice(range(len(visible)))
    if selection.kind == "count":
        short = are(len(visible), "visible") if selection.count > len(visible) else None
        return Choice(range(min(selection.count, len(visible))), short)
    if selection.kind == "ids":
        positions, missing = _positions(selection.ids, visible)
        there = are(len(visible), "visible")
        short = "there is no {}: {}".format(" or ".join(missing), there) if missing else None
        return Choice(positions, short)
    idle, problems = claim_idle(visible, selection.count)
    unsure = [(gpu.entry, gpu.unknown) for gpu in idle if gpu.unknown]
    shortages = []
    if len(idle) < (selection.count or 1):
        found = are(len(idle) - len(unsure), "idle")
        shortages.append(f"{found} of {len(visible)} visible")
    if unsure:
        shortages.append(_unsure(unsure))
    return Choice([gpu.position for gpu in idle], ", and ".join(shortages) or None, problems)


def _unsure(unsure: "Sequence[Tuple[str, Sequence[str]]]") -> str:
    """Return the warning that GPUs were taken that may be busy: pairs of entry and unknowns."""
    names = ["GPU " + entry if entry.isdecimal() else entry for entry, _ in unsure]
    unknown = sorted(set(name for _, names in unsure for name in names))
    # The driver lists a GPU as a whole, and not how busy it is.
    mig = "processes" not in unknown and not any(entry.startswith("MIG-") for entry, _ in unsure)
    return "nothing tells whether {} {} idle (unknown: {}{})".format(
        " and ".join(names),
        "is" if len(names) == 1 else "are",
        ", ".join(unknown),
        "" if not mig else '; under MIG, name an instance: gpus="MIG-..."',
    )


def are(number: int, state: str) -> str:
    """Return a clause on a number of GPUs: "2 GPUs are visible"."""
    if number < 2:
        return "{} GPU is {}".format(number or "no", state)
    return f"{number} GPUs are {state}"


def _positions(
    ids: "Sequence[Union[int, str]]", visible: "Visible"
) -> "Tuple[List[int], List[str]]":
    positions, missing = [], []
    for wanted in ids:
        matches = [
            position
            for position, (entry, gpu) in enumerate(visible)
            if wanted in (position, entry) or gpu.uuid.startswith(str(wanted))
        ]
        if len(matches) > 1:
            raise invalid_gpus(list(ids), f"{wanted!r} begins several names")
        if not matches:
            missing.append(f"GPU {wanted}" if isinstance(wanted, int) else wanted)
        elif matches[0] in positions:
            raise invalid_gpus(list(ids), f"{wanted!r} is named twice")
        positions += matches
    return positions, missing


def invalid_gpus(gpus: "Any", problem: str) -> "errors.InvalidArgumentError":
    """Return the error that ``gpus=`` is not understood."""
    error = errors.InvalidArgumentError(
        f"gpus={gpus!r} is not understood: {problem}. Use one of:\n{GPUS_FORMS}"
    )
    error.problem = problem
    return error


# Idle GPUs, ``gpus="free"`` ----------------------------------------------------------------------


class IdleGPU(NamedTuple):
    """A visible GPU that is idle, as far as the driver reports it.

    Attributes:
        position: among the visible GPUs.
        entry: its id or its name there.
        gpu: as the driver lists it.
        unknown: what the driver does not report of how busy it is; empty: it is idle.
        is_claimed: whether this process has claimed it already.
    """

    position: int
    entry: str
    gpu: "GPU"
    unknown: "Sequence[str]"
    is_claimed: bool

    @property
    def order(self) -> "Tuple[bool, bool, int, int]":
        """Order in which GPUs are taken: known to be idle, claimed, with most free memory."""
        free = (self.gpu.memory_total or 0) - (self.gpu.memory_used or 0)
        return bool(self.unknown), not self.is_claimed, -free, self.position


def claim_idle(visible: "Visible", count: "Optional[int]") -> "Tuple[List[IdleGPU], List[str]]":
    """Claim idle GPUs for this process, those with most free memory first.

    Where the driver does not report whether a GPU is idle, as under MIG, it is taken where there
    are too few others, and only one where no number was asked for.

    Arguments:
        visible: pairs of entry and ``GPU``.
        count: how many; None: all that are idle.

    Returns:
        The ``IdleGPU``s, by position; and a sentence for each of them that cannot be claimed, so
        that two jobs may choose it.
    """

    def is_wanted(candidate: "IdleGPU") -> bool:
        return len(taken) < (count or (1 if candidate.unknown else len(visible)))

    taken: "List[IdleGPU]" = []
    unlockable, problems = [], []
    for candidate in sorted(_idle_among(visible), key=lambda candidate: candidate.order):
        if not is_wanted(candidate):
            break
        try:
            if _claim(candidate.gpu):
                taken.append(candidate)
        except OSError as error:
            unlockable.append((candidate, error.strerror or error))
    # Those that cannot be locked come last, so that such a file cannot block a GPU for ever.
    for candidate, problem in unlockable:
        if is_wanted(candidate):
            taken.append(candidate)
            problems.append(
                f"GPU {candidate.entry} is idle but cannot be claimed: "
                f"{_lock_path(candidate.gpu)} cannot be locked ({problem}). Another job that asks "
                "for idle GPUs may take it, too. Choose GPUs by their ids, or have that file "
                "removed."
            )
    return sorted(taken, key=lambda candidate: candidate.position), problems


def _idle_among(visible: "Visible") -> "Iterator[IdleGPU]":
    """Yield the visible GPUs that no other job uses, as ``IdleGPU``s.

    Idle: no process computes on it that the driver shows, less than a tenth of the memory is
    used (a desktop uses some) and less than a tenth of the time. One that this process has claimed
    stays idle for it.
    """
    computing = busy()
    for position, (entry, gpu) in enumerate(visible):
        if not gpu.uuid:  # a MIG instance, or a GPU that only the framework lists
            gpu = GPU(uuid=entry.replace("/", "-"))
        if _claimed(gpu):
            yield IdleGPU(position, entry, gpu, [], True)
            continue
        unknown = gpu.unknown()
        if computing is None or gpu.index is None:
            unknown.append("processes")
        is_busy = (
            gpu.uuid in (computing or [])
            or (gpu.memory_total is not None and (gpu.memory_used or 0) * 10 > gpu.memory_total)
            or (gpu.utilization or 0) >= 10
        )
        if not is_busy:
            yield IdleGPU(position, entry, gpu, unknown, False)


def _claimed(gpu: "GPU") -> bool:
    return gpu.uuid in process.claims or gpu.uuid in os.environ.get("COMPAT_CLAIMS", "").split(",")


def hand_over_claims() -> "Dict[str, str]":
    """Keep the claims for the program that this process executes; return a variable for it."""
    for lock in process.claims.values():
        os.set_inheritable(lock, True)
    return {"COMPAT_CLAIMS": ",".join(sorted(process.claims))} if process.claims else {}


def _lock_path(gpu: "GPU") -> str:
    """Return the path of a GPU's lock file: not in ``TMPDIR``, which is set for each job."""
    return f"/tmp/keras-gpu-compat-{gpu.uuid}.lock"


def _claim(gpu: "GPU") -> bool:
    """Take this GPU's lock, so that two jobs started together do not pick the same one.

    Returns:
        Whether no other job has it.

    Raises:
        OSError: it cannot be locked, or another user has put something else in its place.
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


def _open(path: str) -> int:
    with contextlib.suppress(FileExistsError):  # another job makes it meanwhile
        if not os.path.lexists(path):  # Linux refuses to "create" another user's file in /tmp
            lock = plain(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | NOFOLLOW)
            os.fchmod(lock, 0o644)  # whatever the umask: other users are to lock it, too
            return lock
    return plain(path, os.O_RDONLY | NOFOLLOW)
