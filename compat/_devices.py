"""The ``gpus=`` grammar, and which GPUs this machine has, asked without any framework."""

import os

from . import errors


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
    if hasattr(gpus, "__index__"):
        return _parse_count(gpus)
    if isinstance(gpus, (list, tuple, range)):
        return _parse_ids(gpus, gpus)
    raise errors.invalid_gpus(gpus, "it is a {}".format(type(gpus).__name__))


def _parse_count(gpus):
    count = gpus.__index__()
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
        if count.isdigit() and int(count):
            return Selection("free", int(count))
        raise errors.invalid_gpus(gpus, '"free:" takes a number of GPUs, 1 or more')
    if not text:
        raise errors.invalid_gpus(gpus, "an empty text names no GPU; [] means none")
    if text == "-1":
        return Selection("all")
    # A text lists ids, as CUDA_VISIBLE_DEVICES does: "2" is the GPU with id 2.
    return _parse_ids(gpus, text.split(","))


def _parse_ids(gpus, items):
    ids = []
    for item in items:
        if isinstance(item, str):
            item = item.strip()
            if item.isdigit():
                item = int(item)
            elif not item.startswith(("GPU-", "MIG-")):
                raise errors.invalid_gpus(gpus, "{!r} is neither an id nor a name".format(item))
        elif isinstance(item, bool) or not hasattr(item, "__index__"):
            raise errors.invalid_gpus(gpus, "{!r} is neither an id nor a name".format(item))
        else:
            item = item.__index__()
            if item < 0:
                raise errors.invalid_gpus(gpus, "an id cannot be negative")
        if item in ids:
            raise errors.invalid_gpus(gpus, "{!r} is named twice".format(item))
        ids.append(item)
    return Selection("ids", ids=ids) if ids else Selection("none")


# What the machine has -------------------------------------------------------------------------


def visible_entries(environ):
    """The entries of ``CUDA_VISIBLE_DEVICES`` that CUDA would use, or None where it is not set.

    CUDA ignores everything from the first invalid entry on (CUDA programming guide,
    "CUDA Environment Variables"), and an empty value hides every GPU.
    """
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None
    entries = []
    for entry in value.split(","):
        entry = entry.strip()
        if not (entry.isdigit() or entry.startswith(("GPU-", "MIG-"))):
            break
        entries.append(entry)
    return entries


def discover():
    """The machine's GPUs, in PCI order, or None where nothing tells how many there are.

    Asks nvidia-smi; initialises no GPU and no framework.
    """
    import subprocess

    query = "index,uuid,name,memory.total,memory.used,utilization.gpu"
    try:
        listing = subprocess.check_output(
            ["nvidia-smi", "--query-gpu=" + query, "--format=csv,noheader,nounits"],
            stderr=subprocess.DEVNULL,
            timeout=20,
        ).decode("utf-8", "replace")
    except (OSError, subprocess.SubprocessError):
        return _discover_without_nvidia_smi()
    return [_parse_gpu(line) for line in listing.splitlines() if line.count(",") == 5]


def _parse_gpu(line):
    def number(text):  # "[N/A]" under MIG, and where the driver has no counter
        return int(text) if text.isdigit() else 0

    index, uuid, name, total, used, utilization = [field.strip() for field in line.split(",")]
    mebi = 2**20
    return GPU(
        int(index), uuid, name, number(total) * mebi, number(used) * mebi, number(utilization)
    )


def _discover_without_nvidia_smi():
    try:
        return [GPU(index) for index, _ in enumerate(os.listdir("/proc/driver/nvidia/gpus"))]
    except OSError:
        # WSL has GPUs and no /proc entry for them; elsewhere there is no driver, so no GPU.
        return None if os.path.exists("/dev/dxg") else []


# Choosing -------------------------------------------------------------------------------------


class Devices:
    """The devices chosen for this process.

    ``gpus`` are entries for ``CUDA_VISIBLE_DEVICES``: ids or names, as strings. ``positions``
    are where those stand among the GPUs visible before. ``simulated`` counts the CPU devices
    that stand in for GPUs. Neither: the CPU.
    """

    __slots__ = ("gpus", "positions", "simulated", "shortage")

    def __init__(self, gpus=(), positions=(), simulated=0, shortage=None):
        self.gpus = tuple(gpus)
        self.positions = tuple(positions)
        self.simulated = simulated
        self.shortage = shortage  # (asked, found), where fewer were found than asked for

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

    def environ(self, environ):
        """The CUDA variables that show a process these GPUs and no other."""
        visible = ",".join(self.gpus) or "-1"
        variables = {}
        if environ.get("CUDA_VISIBLE_DEVICES") != visible:
            variables["CUDA_VISIBLE_DEVICES"] = visible
        if self.gpus and "CUDA_DEVICE_ORDER" not in environ:
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
    """
    if simulate:
        return _choose_simulated(selection, simulate)
    if selection.kind == "none":
        return Devices()
    machine = discover()
    entries = visible_entries(environ)
    if entries is None:
        if machine is None:  # nothing tells: trust the request, the framework will answer
            return _trusting(selection)
        entries = [str(gpu.index) for gpu in machine]
    elif machine is not None:
        entries = [entry for entry in entries if _exists(entry, machine)]
    return _choose_among(selection, entries, machine or [])


def _choose_simulated(selection, simulate):
    if selection.kind == "none":
        return Devices(simulated=1)
    if selection.kind in ("count", "free") and selection.count:
        if selection.count > simulate:
            raise errors.simulate_with_gpus(selection.count, simulate)
        return Devices(simulated=selection.count)
    if selection.kind == "ids":
        if any(not isinstance(i, int) or i >= simulate for i in selection.ids):
            raise errors.simulate_with_gpus(list(selection.ids), simulate)
        return Devices(simulated=len(selection.ids))
    return Devices(simulated=simulate)


def _trusting(selection):
    if selection.kind == "count":
        ids = range(selection.count)
    elif selection.kind == "ids":
        ids = selection.ids
    else:
        return Devices(shortage=("gpus=all", "nothing tells which GPUs this machine has"))
    return Devices([str(i) for i in ids], range(len(ids)))


def _exists(entry, machine):
    if entry.isdigit():
        return int(entry) < len(machine)
    if entry.startswith("MIG-GPU-"):  # MIG-<GPU-UUID>/<GPU instance>/<compute instance>
        entry = entry[4:].split("/")[0]
    elif entry.startswith("MIG-"):  # a MIG UUID does not name its GPU
        return bool(machine)
    return any(not gpu.uuid or gpu.uuid.startswith(entry) for gpu in machine)


def _gpu_of(entry, machine):
    for gpu in machine:
        if entry == str(gpu.index) or (gpu.uuid and gpu.uuid.startswith(entry)):
            return gpu
    return None


def _choose_among(selection, entries, machine):
    found = "{} visible".format(_count(len(entries)))
    if selection.kind == "all":
        positions = range(len(entries))
        shortage = None
    elif selection.kind == "count":
        positions = range(min(selection.count, len(entries)))
        shortage = (_count(selection.count), found) if selection.count > len(entries) else None
    elif selection.kind == "free":
        positions = _idle(entries, machine, selection.count)
        wanted = selection.count or 1
        shortage = (
            ("{} idle".format(_count(wanted)), "{} idle".format(_count(len(positions))))
            if len(positions) < wanted
            else None
        )
    else:
        positions, missing = _positions(selection.ids, entries, machine)
        shortage = ("GPU " + ",".join(missing), found) if missing else None
    return Devices([entries[p] for p in positions], positions, shortage=shortage)


def _count(number):
    return "no GPU is" if not number else "1 GPU is" if number == 1 else "%d GPUs are" % number


def _positions(ids, entries, machine):
    positions, missing = [], []
    for wanted in ids:
        position = None
        if isinstance(wanted, int):
            position = wanted if wanted < len(entries) else None
        else:
            for index, entry in enumerate(entries):
                gpu = _gpu_of(entry, machine)
                if entry == wanted or (gpu and gpu.uuid.startswith(wanted)):
                    position = index
        if position is None:
            missing.append(str(wanted))
        else:
            positions.append(position)
    return positions, missing


def _idle(entries, machine, count):
    """Positions of idle GPUs, most free memory first, each claimed for this process.

    Idle: under 5 % of the memory used and under 10 % busy, and not claimed by another process
    that chose its GPUs in this way.
    """
    known = [(position, _gpu_of(entry, machine)) for position, entry in enumerate(entries)]
    idle = [
        (gpu.memory_used - gpu.memory_total, position, gpu)
        for position, gpu in known
        if gpu and gpu.memory_used * 20 <= gpu.memory_total and gpu.utilization < 10
    ]
    claimed = []
    for _, position, gpu in sorted(idle, key=lambda item: item[:2]):
        if len(claimed) == (count or len(entries)):
            break
        if _claim(gpu):
            claimed.append(position)
    return claimed


_claims = []  # open lock files; the system drops the locks when the process ends


def _claim(gpu):
    """Take this GPU's lock, so that two jobs started together do not pick the same one."""
    import tempfile

    try:
        import fcntl
    except ImportError:  # no such locks on Windows
        return True
    path = os.path.join(
        tempfile.gettempdir(), "keras-gpu-compat-{}.lock".format(gpu.uuid or gpu.index)
    )
    try:
        lock = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError:  # another user's file: it cannot be locked, nor is it needed to train
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return False
    _claims.append(lock)
    return True
