"""The ``gpus=`` grammar, and which of this machine's GPUs are chosen."""

import os

from . import errors
from ._discovery import CUDA, GPU, HIP, busy, discover

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Dict, List


class Selection:
    """What ``gpus=`` asks for: a kind, and a count or ids.

    ``kind`` is "all", "count", "ids", "free" or "none"; ``count`` counts for "count" and
    "free" (None: all idle ones); ``ids`` holds integers and GPU or MIG names, as strings.
    """

    __slots__ = ("kind", "count", "ids")

    def __init__(self, kind, count=None, ids=()):
        self.kind = kind
        self.count = count
        self.ids = tuple(ids)

    def __eq__(self, other):
        return (self.kind, self.count, self.ids) == (other.kind, other.count, other.ids)

    def __str__(self):
        if self.kind == "free":
            return 'gpus="free{}"'.format(":{}".format(self.count) if self.count else "")
        value = {"all": None, "count": self.count, "ids": list(self.ids), "none": 0}
        return "gpus={!r}".format(value[self.kind])


# The grammar ----------------------------------------------------------------------------------


def parse_gpus(gpus):
    """Normalise ``gpus=`` to a ``Selection``.

    Raises:
        InvalidArgumentError: a ``ValueError`` that lists the forms.
    """
    if gpus is None:
        return Selection("all")
    if isinstance(gpus, bool):
        raise errors.invalid_gpus(gpus, "True and False name no GPU")
    if isinstance(gpus, str):
        return _parse_text(gpus)
    if isinstance(gpus, (list, tuple, range)):
        return _parse_ids(gpus, gpus)
    count = _integer(gpus)
    if count is None:
        raise errors.invalid_gpus(gpus, "it is a {}".format(type(gpus).__name__))
    return _parse_count(gpus, count)


def _integer(value):
    """The value of an integer of any type (numpy's, too), or None."""
    import operator

    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def _parse_count(gpus, count):
    if count == -1:
        return Selection("all")
    if count < 0:
        raise errors.invalid_gpus(gpus, "a count below -1 means nothing")
    return Selection("count", count) if count else Selection("none")


def _parse_text(gpus):
    text = gpus.strip()
    if text.lower() in ("cpu", "none"):
        return Selection("none")
    if text.lower() in ("all", "auto"):
        return Selection("all")
    kind, colon, count = text.partition(":")
    if kind.lower() == "free":
        if not colon:
            return Selection("free")
        if count.strip().isdecimal() and int(count):
            return Selection("free", int(count))
        raise errors.invalid_gpus(gpus, '"free:" takes a number of GPUs, 1 or more')
    if not text:
        raise errors.invalid_gpus(gpus, 'an empty text names no GPU; "cpu" means none')
    if text == "-1":
        return Selection("all")
    # A text lists ids, as CUDA_VISIBLE_DEVICES does: "2" is the GPU with id 2.
    return _parse_ids(gpus, text.split(","))


def _parse_ids(gpus, items):
    ids = []
    for item in items:
        wanted = _parse_id(item)
        if wanted is None:
            raise errors.invalid_gpus(gpus, "{!r} is neither an id nor a name".format(item))
        if wanted in ids:
            raise errors.invalid_gpus(gpus, "{!r} is named twice".format(wanted))
        ids.append(wanted)
    mig = [isinstance(wanted, str) and wanted.startswith("MIG-") for wanted in ids]
    if any(mig) and not all(mig):
        raise errors.invalid_gpus(gpus, "CUDA cannot mix MIG instances with whole GPUs")
    return Selection("ids", ids=ids) if ids else Selection("none")


def _parse_id(item):
    """An id as an integer, a name as a text; None for anything else."""
    if not isinstance(item, str):
        number = _integer(item)
        return number if number is not None and number >= 0 else None
    item = item.strip()
    if item.isdecimal():
        return int(item)
    return item if item.startswith(("GPU-", "MIG-")) else None


# What the machine has -------------------------------------------------------------------------


def visible_entries(environ, machine=None):
    """The entries of ``CUDA_VISIBLE_DEVICES`` that CUDA uses, and what is wrong with the value.

    CUDA ignores everything from the first invalid entry on (CUDA programming guide,
    "CUDA Environment Variables"); the first entry decides whether ids, GPU names or MIG names
    are valid, and one that is there twice leaves no GPU at all (both as in PyTorch's
    ``torch.cuda._parse_visible_devices``). It stops reading at a space, too (tensorflow#5066);
    that is mended here, since it is never meant.

    Arguments:
        environ: where the variable is read.
        machine: the machine's GPUs, from ``discover()``; None, or none: no entry is checked.

    Returns:
        The entries, or None where the variable is not set; and the problems, a sentence each.
    """
    problems = []
    order = environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if order != "PCI_BUS_ID" and (machine is None or len(machine) > 1):
        problems.append(errors.device_order(order))
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None, problems
    entries: "List[str]" = []
    for entry in [part.strip() for part in value.split(",")] if value.strip() else []:
        if entry == "-1":  # the documented way to end the list
            break
        if not _valid_entry(entry, entries):
            problems.append(errors.visible_devices_invalid(value, entry))
            break
        if machine and not _exists(entry, machine):
            problems.append(errors.visible_devices_absent(value, entry))
            break
        entries.append(entry)
    for entry in entries:
        if entries.count(entry) > 1:
            return [], problems + [errors.visible_devices_twice(value, entry)]
    if " " in value.strip():
        problems.append(errors.visible_devices_spaces(value, ",".join(entries)))
    return entries, problems


def _valid_entry(entry, before):
    if before and not before[0].isdecimal():
        return entry.startswith(before[0][:4])
    return entry.isdecimal() or (not before and entry.startswith(("GPU-", "MIG-")))


def _exists(entry, machine):
    if entry.startswith("MIG-GPU-"):  # MIG-<GPU UUID>/<GPU instance>/<compute instance>
        entry = entry[4:].split("/")[0]
    elif entry.startswith("MIG-"):  # a MIG UUID does not name its GPU
        return bool(machine)
    return any(gpu.matches(entry) for gpu in machine)


def hip_entries(environ, machine):
    """The GPUs that HIP, AMD's CUDA, shows a process, which variable says so, and problems.

    HIP reads CUDA_VISIBLE_DEVICES, too, where its own variable is empty. Both count inside
    ROCR_VISIBLE_DEVICES, which the runtime below reads ("GPU isolation techniques", ROCm's docs).
    """
    below = environ.get("ROCR_VISIBLE_DEVICES")
    there = len(machine) if below is None else min(len(machine), len(below.split(",")))
    for variable in (HIP, CUDA):
        value = environ.get(variable, "").strip()
        if not value:
            continue
        entries: "List[str]" = []
        for entry in [part.strip() for part in value.split(",")]:
            exists = entry.isdecimal() and int(entry) < there or entry.startswith("GPU-")
            if not exists or entry in entries:
                wrong = (
                    [] if entry == "-1" else [errors.hip_devices_invalid(variable, value, entry)]
                )
                return entries, variable, wrong
            entries.append(entry)
        return entries, variable, []
    return [str(index) for index in range(there)], None, []


# Choosing -------------------------------------------------------------------------------------


class Devices:
    """The devices chosen for this process.

    ``gpus`` are entries for ``variable``: ids or names, as strings. ``positions`` are where
    those stand among the GPUs visible before; ``uuids`` are theirs, "" where unknown.
    ``simulated`` counts the CPU devices that stand in for GPUs. Neither: the CPU, ``declined``
    where no GPU was asked for; ``reason`` says why.

    Where neither driver nor command lists a GPU, the framework may still list some: Apple's, and
    AMD's where amd-smi and rocm-smi are missing. ``undecided`` then holds the selection, and
    ``settle()`` chooses once the framework has said how many there are.
    """

    __slots__ = (
        "gpus",
        "positions",
        "uuids",
        "simulated",
        "declined",
        "shortage",
        "problems",
        "variable",
        "reason",
        "undecided",
        "listed",
        "ranks",
        "bound",
    )

    def __init__(
        self,
        gpus=(),
        positions=(),
        uuids=(),
        simulated=0,
        declined=False,
        shortage=None,
        problems=(),
        variable=CUDA,
        reason="",
        undecided=None,
    ):
        self.gpus = tuple(gpus)
        self.positions = tuple(positions)
        self.uuids = tuple(uuids) or ("",) * len(self.gpus)
        self.simulated = simulated
        self.declined = declined
        self.shortage = shortage  # (asked, found), where fewer were found than asked for
        # What is wrong with CUDA_VISIBLE_DEVICES, or with the claims of idle GPUs.
        self.problems = list(problems)
        self.variable = variable  # what shows a process these GPUs
        self.reason = reason
        self.undecided = undecided
        self.listed = None  # how many the framework lists, once it was asked
        # Of an undecided rank: its place, to take one GPU of the selection, and whether a
        # scheduler has given it one.
        self.ranks = None
        self.bound = False

    def __len__(self):
        return self.simulated or len(self.gpus)

    def __eq__(self, other):
        return (self.gpus, self.simulated) == (other.gpus, other.simulated)

    def __str__(self):
        if self.simulated:
            return "{} simulated on the CPU".format(self.simulated)
        if self.gpus:
            return "GPU " + ",".join(self.gpus)
        if self.undecided is not None and self.listed is None:
            return "the GPUs that the framework lists"
        return "CPU"

    def outcome(self):
        """What became of what was asked, for a report."""
        if self.declined:
            return "CPU, as asked"
        if self.gpus and self.listed:
            return "{} of the {} that the framework lists".format(self, self.listed)
        if self.simulated or self.gpus or not self.reason:
            return str(self)
        return "CPU: " + self.reason

    def settle(self, listed, restricted=False):
        """Choose among the GPUs that the framework lists, if nothing else told which there are.

        Arguments:
            listed: how many it lists.
            restricted: whether it was told which to list, by ``wanted()``.
        """
        if self.undecided is None or self.listed is not None:
            return
        self.listed = listed
        if restricted:
            wanted = len(self.wanted() or range(listed))
            positions = list(range(min(listed, wanted)))
            short = _are(listed, "visible") if listed < wanted else None
        else:
            visible = [(str(position), None) for position in range(listed)]
            positions, short = _choose_among(self.undecided, visible, self.problems)
            if self.ranks is not None and positions:
                is_bound = self.bound and len(positions) == 1
                if not short and not is_bound and len(positions) < self.ranks.local_size:
                    short = "{} for {} ranks".format(
                        _are(len(positions), "there"), self.ranks.local_size
                    )
                positions = [positions[self.ranks.local_rank % len(positions)]]
        self.gpus = tuple(map(str, positions))
        self.positions = tuple(positions)
        self.uuids = ("",) * len(self.gpus)
        if listed:
            self.shortage = short and (str(self.undecided), short)
        else:
            self.reason += "; the framework lists none"

    def wanted(self):
        """The ids to ask a framework for that has to be told before it lists its GPUs.

        None: all of them.
        """
        selection = self.undecided
        if selection is None:
            return None
        ids = list(selection.ids or range(selection.count or 0))
        if self.ranks is not None:
            ids = [ids[self.ranks.local_rank % len(ids)] if ids else self.ranks.local_rank]
        return ids or None

    def trusting(self, environ):
        """The variables that show the GPUs asked for to a framework that nobody has asked yet."""
        ids = self.wanted()
        if ids is None:
            return {}
        value = ",".join(map(str, ids))
        return {variable: value for variable in (CUDA, HIP) if variable == CUDA or HIP in environ}

    def only(self, index, shortage):
        """One of these devices, for a rank that may have a shortage to tell of."""
        return Devices(
            self.gpus[index : index + 1],
            self.positions[index : index + 1],
            self.uuids[index : index + 1],
            shortage=shortage,
            problems=self.problems,
            variable=self.variable,
        )

    def index(self, name):
        """Which of these GPUs a name means, counted from 0, or None."""
        for index, (entry, uuid) in enumerate(zip(self.gpus, self.uuids)):
            if name == entry or uuid.startswith(name):
                return index
        return None

    def are_shown_by(self, environ):
        """Whether a process with that environment sees these GPUs, in this order, and no other."""
        if self.undecided is not None:  # they are chosen in the framework
            return False
        return environ.get(self.variable) == ",".join(self.gpus)

    def ordinals(self, environ):
        """The numbers of these GPUs in a process with that environment."""
        return range(len(self.gpus)) if self.are_shown_by(environ) else self.positions

    def memory_totals(self):
        """The memory of each of these GPUs, in bytes; 0 where the driver does not tell."""
        machine = discover() or []
        found = [_gpu_of(entry, machine) for entry in self.gpus]
        return [gpu and gpu.memory_total or 0 for gpu in found]

    def environ(self, environ):
        """The variables that show a process these GPUs and no other; none where undecided."""
        if self.undecided is not None:
            return {}
        if not self.gpus:
            return self._hiding(environ)
        shown = self.are_shown_by(environ)
        variables = {} if shown else {self.variable: ",".join(self.gpus)}
        if self.variable == CUDA and "CUDA_DEVICE_ORDER" not in environ:
            # CUDA's own order is fastest first; ids then disagree with nvidia-smi's
            # (tensorflow#32881).
            variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        return variables

    def _hiding(self, environ):
        hidden = environ.get(CUDA) in ("", "-1")
        variables = {} if hidden else {CUDA: "-1"}
        # HIP reads its own variable first; torch prefers the one of the runtime below.
        amd = self.variable == HIP or {HIP, "ROCR_VISIBLE_DEVICES"} & set(environ)
        if amd and environ.get(HIP) != "-1":
            variables[HIP] = "-1"
        return variables


def choose(selection, simulate, environ, discover=discover):
    """Choose this process's devices.

    Arguments:
        selection: from ``parse_gpus``.
        simulate: the number of CPU devices that stand in for GPUs, or None.
        environ: where ``CUDA_VISIBLE_DEVICES`` is read.
        discover: tells the machine's GPUs (None: unknown).

    Returns:
        ``Devices``; its ``shortage`` says where fewer were found than asked for.

    Raises:
        InvalidArgumentError: ids or names that cannot be meant, seen from the GPUs there are.
    """
    if simulate:
        return _choose_simulated(selection, simulate)
    if selection.kind == "none":
        return Devices(declined=True)
    machine = discover()
    if machine and machine[0].variable == HIP:
        entries, said, problems = hip_entries(environ, machine)
        visible = [(entry, GPU(None, variable=HIP)) for entry in entries]
        return _chosen(selection, visible, problems, environ, said, HIP)
    entries, problems = visible_entries(environ, machine)
    said = None if entries is None else CUDA
    if machine == [] or (machine is None and entries is None and selection.kind == "all"):
        devices = _chosen(selection, [], problems, environ, said)
        devices.undecided = selection
        devices.reason = "no GPU was found" + _why(machine, environ)
        if getattr(machine, "failures", None) and not devices.shortage:
            devices.shortage = str(selection), "no GPU is visible: " + "; ".join(machine.failures)
        return devices
    if entries is None and (machine is None or (machine and _any_mig(selection))):
        # Nothing tells what is there: trust the request, the framework will answer.
        return _trusting(selection)
    if entries is None:
        entries = [str(gpu.index) for gpu in machine]
    visible = [(entry, _gpu_of(entry, machine or [])) for entry in entries]
    devices = _chosen(selection, visible, problems, environ, said)
    if not visible:
        number = "GPU" if len(machine or ()) == 1 else "GPUs"
        devices.reason = "{}={} hides the {} of this machine".format(CUDA, environ[CUDA], number)
    return devices


def _why(machine, environ):
    why = [machine.why()] if getattr(machine, "why", None) and machine.why() else []
    why += ["{}={}".format(CUDA, environ[CUDA])] if CUDA in environ else []
    return " ({})".format("; ".join(why)) if why else ""


def _chosen(selection, visible, problems, environ, said, variable=CUDA):
    """Of the visible GPUs, pairs of entry and GPU, those that were asked for.

    ``said``: the variable that says which are visible, or None.
    """
    positions, shortage = _choose_among(selection, visible, problems)
    if shortage:
        found = " ({}={})".format(said, environ[said]) if said else ""
        shortage = str(selection), shortage + found
    uuids = [gpu.uuid if gpu else "" for _, gpu in visible]
    return Devices(
        [visible[p][0] for p in positions],
        positions,
        [uuids[p] for p in positions],
        shortage=shortage,
        problems=problems,
        variable=variable,
        reason=shortage[1] if shortage else "",
    )


def choose_for_rank(selection, environ, ranks, discover=discover):
    """Choose the one device of a rank: the local rank's, among those that ``selection`` names.

    How many GPUs there are to be is the launcher's to say, so that a count names all. Idle GPUs
    are claimed by each rank for itself, unless the launcher has claimed some for all.
    """
    if selection.kind == "free" and "COMPAT_CLAIMS" not in environ:
        return choose(Selection("free", 1), None, environ, discover)
    if selection.kind == "count":
        selection = Selection("count", ranks.local_size)
    pool = choose(selection, None, environ, discover)
    is_bound = _is_bound(environ, ranks)
    if pool.undecided is not None:
        pool.ranks, pool.bound = ranks, is_bound
    if not pool.gpus:
        return pool
    shortage = pool.shortage
    if len(pool) == 1 and is_bound:
        return pool.only(0, None)
    if not shortage and len(pool) < ranks.local_size:
        asked = "a GPU for each of {} ranks".format(ranks.local_size)
        shortage = asked, "{}: {}".format(_are(len(pool), "there"), pool)
    return pool.only(ranks.local_rank % len(pool), shortage)


def _is_bound(environ, ranks):
    """Whether, if this rank sees one GPU, that was given to it alone: others see another one.

    So do SLURM (``--gpus-per-task``, ``--gpu-bind``), jsrun, and scripts that show each rank the
    GPU of its local rank.
    """
    if ranks.launcher == "srun":
        on_node = environ.get("SLURM_STEP_GPUS", "") or environ.get("SLURM_JOB_GPUS", "")
        number = environ.get("SLURM_GPUS_ON_NODE", "").strip()
        counts = [on_node.count(",") + 1] if on_node else []
        counts += [int(number)] if number.isdecimal() else []
        return any(count >= ranks.local_size for count in counts)
    if ranks.launcher == "jsrun":
        return True
    shown = [environ.get(name) for name in (CUDA, HIP, "ROCR_VISIBLE_DEVICES")]
    return str(ranks.local_rank) in shown


def _choose_simulated(selection, simulate):
    if selection.kind == "none":
        return Devices(simulated=1)
    if selection.kind in ("count", "free") and selection.count:
        if selection.count > simulate:
            raise errors.simulate_with_gpus(selection, simulate)
        return Devices(simulated=selection.count)
    if selection.kind == "ids":
        if any(not isinstance(i, int) or i >= simulate for i in selection.ids):
            raise errors.simulate_with_gpus(selection, simulate)
        return Devices(simulated=len(selection.ids))
    return Devices(simulated=simulate)


def _any_mig(selection):
    return any(isinstance(wanted, str) and wanted.startswith("MIG-") for wanted in selection.ids)


def _trusting(selection):
    ids = selection.ids or range(selection.count or 1)
    unknown = selection.kind in ("all", "free")
    shortage = (str(selection), "nothing tells which GPUs there are") if unknown else None
    return Devices(map(str, ids), range(len(ids)), shortage=shortage)


def _gpu_of(entry, machine):
    for gpu in machine:
        if gpu.uuid and gpu.matches(entry) or entry == str(gpu.index):
            return gpu
    return None


def _choose_among(selection, visible, problems):
    """Positions in ``visible``, pairs of entry and GPU; and what is short, or None.

    Appends to ``problems``.
    """
    if selection.kind == "all":
        return range(len(visible)), None
    if selection.kind == "count":
        short = _are(len(visible), "visible") if selection.count > len(visible) else None
        return range(min(selection.count, len(visible))), short
    if selection.kind == "ids":
        positions, missing = _positions(selection.ids, visible)
        there = _are(len(visible), "visible")
        short = "there is no {}: {}".format(" or ".join(missing), there) if missing else None
        return positions, short
    positions, unsure = _idle(visible, selection.count, problems)
    found = []
    if len(positions) < (selection.count or 1):
        idle = _are(len(positions) - len(unsure), "idle")
        found.append("{} of {} visible".format(idle, len(visible)))
    if unsure:
        found.append(_unsure(unsure))
    return positions, ", and ".join(found) or None


def _unsure(unsure):
    """Which GPUs were taken that may be busy: pairs of entry and what is unknown."""
    names = ["GPU " + entry if entry.isdecimal() else entry for entry, _ in unsure]
    unknown = sorted(set(name for _, names in unsure for name in names))
    # The driver tells of a GPU as a whole, and not how busy it is.
    mig = "processes" not in unknown and not any(entry.startswith("MIG-") for entry, _ in unsure)
    return "nothing tells whether {} {} idle (unknown: {}{})".format(
        " and ".join(names),
        "is" if len(names) == 1 else "are",
        ", ".join(unknown),
        "" if not mig else '; under MIG, name an instance: gpus="MIG-..."',
    )


def _are(number, what):
    if number < 2:
        return "{} GPU is {}".format(number or "no", what)
    return "{} GPUs are {}".format(number, what)


def _positions(ids, visible):
    positions, missing = [], []
    for wanted in ids:
        if isinstance(wanted, int):
            found = [wanted] if wanted < len(visible) else []
        else:
            found = [
                position
                for position, (entry, gpu) in enumerate(visible)
                if entry == wanted or (gpu and gpu.uuid.startswith(wanted))
            ]
        if len(found) > 1:
            raise errors.invalid_gpus(list(ids), "{!r} begins several names".format(wanted))
        if not found:
            missing.append("GPU {}".format(wanted) if isinstance(wanted, int) else wanted)
        elif found[0] in positions:
            raise errors.invalid_gpus(list(ids), "{!r} is named twice".format(wanted))
        positions += found
    return positions, missing


# Idle GPUs ------------------------------------------------------------------------------------


def _idle(visible, count, problems):
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
    known: "List[Any]" = []
    unknown: "List[Any]" = []
    for position, (entry, gpu) in enumerate(visible):
        if gpu is None or not gpu.uuid:  # a MIG instance, or a GPU that only the framework lists
            gpu = GPU(None, entry.replace("/", "-"))
        missing = gpu.unknown() + (["processes"] if computing is None or gpu.index is None else [])
        free = (gpu.memory_total or 0) - (gpu.memory_used or 0)
        item = -free, position, gpu, entry, missing
        if _claimed(gpu):
            known.append((False,) + item)
        elif not _is_busy(gpu, computing or []):
            (unknown if missing else known).append((True,) + item)
    claimed: "List[int]" = []
    unsure = []
    unclaimed = []
    candidates = sorted(known, key=lambda i: i[:3]), sorted(unknown, key=lambda i: i[:3])
    for which, items in enumerate(candidates):
        wanted = count or (1 if which else len(visible))
        for _, _, position, gpu, entry, missing in items:
            if len(claimed) >= wanted:
                break
            try:
                is_ours = _claim(gpu)
            except OSError as error:
                text = errors.unclaimed_gpu(entry, _lock_path(gpu), error)
                unclaimed.append((wanted, position, entry, missing, text))
                continue
            if is_ours:
                claimed.append(position)
                if which:
                    unsure.append((position, entry, missing))
    # Those that cannot be locked come last: nobody can keep them from others for ever so.
    for wanted, position, entry, missing, text in unclaimed:
        if len(claimed) < wanted:
            claimed.append(position)
            problems.append(text)
            if missing:
                unsure.append((position, entry, missing))
    return sorted(claimed), [pair for _, *pair in sorted(unsure)]


def _is_busy(gpu, computing):
    """Whether something that the driver tells says so."""
    used, total, utilization = gpu.memory_used, gpu.memory_total, gpu.utilization
    return (
        gpu.uuid in computing
        or (used is not None and total is not None and used * 10 > total)
        or (utilization is not None and utilization >= 10)
    )


# Open lock files, by GPU; the system drops the locks when the process ends.
_claims: "Dict[str, int]" = {}


def _claimed(gpu):
    return gpu.uuid in _claims or gpu.uuid in os.environ.get("COMPAT_CLAIMS", "").split(",")


def hand_over_claims():
    """Keep the claims for the program that this process becomes, and return what tells it so."""
    for lock in _claims.values():
        os.set_inheritable(lock, True)
    return {"COMPAT_CLAIMS": ",".join(sorted(_claims))} if _claims else {}


def _lock_path(gpu):
    """Where its lock file lies: not in ``TMPDIR``, which schedulers set for each job."""
    return "/tmp/keras-gpu-compat-{}.lock".format(gpu.uuid)


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
    except BlockingIOError:
        os.close(lock)
        return False
    except OSError:
        os.close(lock)
        raise
    _claims[gpu.uuid] = lock
    return True


def _open(path):
    from ._files import plain

    try:
        # Without O_CREAT, since Linux lets nobody "create" another user's file in /tmp.
        return plain(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        pass
    try:
        lock = plain(path, os.O_RDONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
    except FileExistsError:  # another job has made it meanwhile
        return plain(path, os.O_RDONLY | os.O_NOFOLLOW)
    os.fchmod(lock, 0o644)  # whatever the umask: other users are to lock it, too
    return lock
