"""The ``gpus=`` grammar, and which GPUs this machine has, asked without any framework."""

import os

from . import errors

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Dict, List


class GPU:
    """One GPU as the driver lists it."""

    __slots__ = ("index", "uuid", "name", "memory_total", "memory_used", "utilization")

    def __init__(self, index, uuid="", name="", memory_total=0, memory_used=0, utilization=0):
        self.index = index
        self.uuid = uuid
        self.name = name
        self.memory_total = memory_total  # bytes
        self.memory_used = memory_used  # bytes
        self.utilization = utilization  # percent

    def matches(self, entry):
        """Whether ``entry``, an id or the beginning of a UUID, names this GPU.

        Without nvidia-smi the UUID is not known: any name may be this GPU's.
        """
        if entry.isdecimal():
            return int(entry) == self.index
        return not self.uuid or self.uuid.startswith(entry)


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
        machine: the machine's GPUs, from ``discover()``; None: unknown.

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
        if machine is not None and not _exists(entry, machine):
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


_DRIVER = "/proc/driver/nvidia/gpus"
_WSL = "/dev/dxg"


def discover():
    """The machine's GPUs, in PCI order, or None where nothing tells how many there are.

    Asks nvidia-smi; initialises no GPU and no framework.
    """
    listing = _nvidia_smi("--query-gpu=index,uuid,name,memory.total,memory.used,utilization.gpu")
    if listing is None:
        return _discover_without_nvidia_smi()
    return [_parse_gpu(line) for line in listing if line.count(",") == 5]


def _nvidia_smi(query):
    """The lines that nvidia-smi answers, or None where it is missing or fails."""
    import subprocess

    for command in ("nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi"):
        try:
            listing = subprocess.check_output(
                [command, query, "--format=csv,noheader,nounits"],
                stderr=subprocess.DEVNULL,
                timeout=20,
            )
        except (OSError, subprocess.SubprocessError):
            continue
        return listing.decode("utf-8", "replace").splitlines()
    return None


def _parse_gpu(line):
    def number(text):  # "[N/A]" under MIG, and where the driver has no counter
        return int(text) if text.isdecimal() else 0

    index, uuid, name, total, used, utilization = [field.strip() for field in line.split(",")]
    mebi = 2**20
    return GPU(
        int(index), uuid, name, number(total) * mebi, number(used) * mebi, number(utilization)
    )


def _discover_without_nvidia_smi():
    try:
        return [GPU(index) for index, _ in enumerate(os.listdir(_DRIVER))]
    except OSError:
        # WSL has GPUs and no /proc entry for them; elsewhere there is no driver, so no GPU.
        return None if os.path.exists(_WSL) else []


# Choosing -------------------------------------------------------------------------------------


class Devices:
    """The devices chosen for this process.

    ``gpus`` are entries for ``CUDA_VISIBLE_DEVICES``: ids or names, as strings. ``positions``
    are where those stand among the GPUs visible before; ``uuids`` are theirs, "" where unknown.
    ``simulated`` counts the CPU devices that stand in for GPUs. Neither: the CPU, ``declined``
    where no GPU was asked for.
    """

    __slots__ = ("gpus", "positions", "uuids", "simulated", "declined", "shortage", "problems")

    def __init__(
        self,
        gpus=(),
        positions=(),
        uuids=(),
        simulated=0,
        declined=False,
        shortage=None,
        problems=(),
    ):
        self.gpus = tuple(gpus)
        self.positions = tuple(positions)
        self.uuids = tuple(uuids) or ("",) * len(self.gpus)
        self.simulated = simulated
        self.declined = declined
        self.shortage = shortage  # (asked, found), where fewer were found than asked for
        # What is wrong with CUDA_VISIBLE_DEVICES, or with the claims of idle GPUs.
        self.problems = list(problems)

    def __len__(self):
        return self.simulated or len(self.gpus)

    def __eq__(self, other):
        return (self.gpus, self.simulated) == (other.gpus, other.simulated)

    def __str__(self):
        if self.simulated:
            return "{} simulated on the CPU".format(self.simulated)
        if self.gpus:
            return "GPU " + ",".join(self.gpus)
        return "CPU"

    def only(self, index, shortage):
        """One of these devices, for a rank that may have a shortage to tell of."""
        return Devices(
            self.gpus[index : index + 1],
            self.positions[index : index + 1],
            self.uuids[index : index + 1],
            shortage=shortage,
            problems=self.problems,
        )

    def index(self, name):
        """Which of these GPUs a name means, counted from 0, or None."""
        for index, (entry, uuid) in enumerate(zip(self.gpus, self.uuids)):
            if name == entry or uuid.startswith(name):
                return index
        return None

    def are_shown_by(self, environ):
        """Whether a process with that environment sees these GPUs, in this order, and no other."""
        return environ.get("CUDA_VISIBLE_DEVICES") == ",".join(self.gpus)

    def ordinals(self, environ):
        """The numbers of these GPUs in a process with that environment."""
        return range(len(self.gpus)) if self.are_shown_by(environ) else self.positions

    def memory_totals(self):
        """The memory of each of these GPUs, in bytes; 0 where the driver does not tell."""
        machine = discover() or []
        found = [_gpu_of(entry, machine) for entry in self.gpus]
        return [gpu.memory_total if gpu else 0 for gpu in found]

    def environ(self, environ):
        """The CUDA variables that show a process these GPUs and no other."""
        if not self.gpus:
            hidden = environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")
            return {} if hidden else {"CUDA_VISIBLE_DEVICES": "-1"}
        shown = self.are_shown_by(environ)
        variables = {} if shown else {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}
        if "CUDA_DEVICE_ORDER" not in environ:
            # CUDA's own order is fastest first; ids then disagree with nvidia-smi's
            # (tensorflow#32881).
            variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
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
    entries, problems = visible_entries(environ, machine)
    if entries is None and (machine is None or (machine and _any_mig(selection))):
        # Nothing tells what is there: trust the request, the framework will answer.
        return _trusting(selection)
    found = (
        ""
        if entries is None
        else " (CUDA_VISIBLE_DEVICES={})".format(environ["CUDA_VISIBLE_DEVICES"])
    )
    if entries is None:
        entries = [str(gpu.index) for gpu in machine]
    visible = [(entry, _gpu_of(entry, machine or [])) for entry in entries]
    positions, shortage = _choose_among(selection, visible, problems)
    if shortage:
        shortage = str(selection), shortage + found
    uuids = [gpu.uuid if gpu else "" for _, gpu in visible]
    return Devices(
        [entries[p] for p in positions],
        positions,
        [uuids[p] for p in positions],
        shortage=shortage,
        problems=problems,
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
    if not pool.gpus:
        return pool
    shortage = pool.shortage
    if len(pool) == 1 and _is_bound(environ, ranks, pool.gpus[0]):
        return pool.only(0, None)
    if not shortage and len(pool) < ranks.local_size:
        asked = "a GPU for each of {} ranks".format(ranks.local_size)
        shortage = asked, "{}: {}".format(_are(len(pool), "there"), pool)
    return pool.only(ranks.local_rank % len(pool), shortage)


def _is_bound(environ, ranks, gpu):
    """Whether the one GPU that this rank sees was given to it alone: others see another one.

    So do SLURM (``--gpus-per-task``, ``--gpu-bind``), jsrun, and scripts that show each rank the
    GPU of its local rank.
    """
    if ranks.launcher == "srun":
        on_node = environ.get("SLURM_STEP_GPUS", "") or environ.get("SLURM_JOB_GPUS", "")
        counts = [on_node.count(",") + 1] if on_node else []
        counts += [int(environ[name]) for name in ("SLURM_GPUS_ON_NODE",) if name in environ]
        return any(count >= ranks.local_size for count in counts)
    if ranks.launcher == "jsrun":
        return True
    return environ.get("CUDA_VISIBLE_DEVICES") == gpu == str(ranks.local_rank)


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
    if any(gpu and not gpu.uuid for _, gpu in visible):
        return [], "without nvidia-smi nothing tells which GPUs are idle"
    positions = _idle(visible, selection.count, problems)
    if len(positions) >= (selection.count or 1):
        return positions, None
    return positions, "{} of {} visible".format(_are(len(positions), "idle"), len(visible))


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

    Idle: no process computes on it that nvidia-smi shows, less than a tenth of the memory is
    used (a desktop uses some) and less than a tenth of the time, and no other process that
    chose in this way has claimed it. A GPU that nothing is known of is not idle.
    """
    busy = _nvidia_smi("--query-compute-apps=gpu_uuid") or []
    idle = [
        (not _claimed(gpu), gpu.memory_used - gpu.memory_total, position, gpu)
        for position, (_, gpu) in enumerate(visible)
        if gpu
        and (
            _claimed(gpu)
            or gpu.uuid not in busy
            and gpu.memory_used * 10 <= gpu.memory_total
            and gpu.utilization < 10
        )
    ]
    claimed: "List[int]" = []
    unclaimed = []
    for _, _, position, gpu in sorted(idle, key=lambda item: item[:3]):
        if len(claimed) == (count or len(visible)):
            break
        try:
            if _claim(gpu):
                claimed.append(position)
        except OSError as error:
            unclaimed.append((position, errors.unclaimed_gpu(gpu.index, _lock_path(gpu), error)))
    # Those that cannot be locked come last: nobody can keep them from others for ever so.
    short = (count or len(visible)) - len(claimed)
    problems += [problem for _, problem in unclaimed[:short]]
    return sorted(claimed + [position for position, _ in unclaimed[:short]])


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
