"""Choice of GPUs of this machine, or of simulated devices, without querying a framework."""

import copy
from typing import Callable, Dict, Iterable, List, Mapping, Optional, Sequence, Tuple, Union

from .. import errors
from .discovery import CUDA, GPU, HIP, Listing, discover, hip_entries, visible_entries
from .gpu_selection import Selection, any_mig, are, choose_among, invalid_gpus
from .numeric import whole_number

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .._ranks.place import Place


class Devices:
    """The devices chosen for this process: GPUs, simulated ones, or neither: the CPU.

    Arguments:
        gpus: entries for ``variable``: ids or names, as strings.
        positions: where those stand among the GPUs visible before, from 0.
        uuids: their UUIDs, "" where unknown.
        simulated: how many CPU devices stand in for GPUs.
        declined: whether the CPU was requested.
        shortage: the request and the devices found, where these are fewer; else None.
        problems: with CUDA_VISIBLE_DEVICES, or with the claims of idle GPUs, a sentence each.
        variable: the environment variable that shows a process these GPUs.
        reason: why there are no GPUs, a phrase.

    Where neither driver nor command lists a GPU, the framework may still list some: Apple's, and
    AMD's where amd-smi and rocm-smi are missing. ``undecided`` then holds the selection, and
    ``settle()`` chooses once the framework has reported how many there are.
    """

    undecided: "Optional[Selection]" = None  # see above
    listed: "Optional[int]" = None  # how many the framework lists, once queried
    # Of an undecided rank: its place, by which it takes one GPU of the selection, and whether a
    # scheduler has assigned it one.
    place: "Optional[Place]" = None
    bound = False

    def __init__(
        self,
        gpus: "Iterable[str]" = (),
        positions: "Iterable[int]" = (),
        uuids: "Iterable[str]" = (),
        simulated: int = 0,
        declined: bool = False,
        shortage: "Optional[Tuple[str, str]]" = None,
        problems: "Iterable[str]" = (),
        variable: str = CUDA,
        reason: str = "",
    ) -> None:
        self.gpus = tuple(gpus)
        self.positions = tuple(positions)
        self.uuids = tuple(uuids) or ("",) * len(self.gpus)
        self.simulated = simulated
        self.declined = declined
        self.shortage: "Optional[Tuple[str, str]]" = shortage
        self.problems = list(map(errors.shortened, problems))
        self.variable = variable
        self.reason = reason

    def __len__(self) -> int:
        return self.simulated or len(self.gpus)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Devices):
            return NotImplemented
        return (self.gpus, self.simulated) == (other.gpus, other.simulated)

    def __str__(self) -> str:
        if self.simulated:
            return f"{self.simulated} simulated on the CPU"
        if self.gpus:
            return "GPU " + ",".join(self.gpus)
        if self.undecided is not None and self.listed is None:
            return "CPU, unless the framework lists GPUs"
        return "CPU"

    def outcome(self) -> str:
        """Return the outcome of the request, for a report."""
        if self.declined:
            return "CPU, as asked"
        if self.gpus and self.listed:
            return f"{self} of the {self.listed} that the framework lists"
        if self.simulated or self.gpus or not self.reason:
            return str(self)
        return "CPU: " + self.reason

    def settle(self, listed: int, restricted: bool = False) -> None:
        """Choose among the GPUs that the framework lists, if the choice was left to that.

        Arguments:
            listed: how many it lists.
            restricted: whether it was configured to list those of ``wanted()`` alone.
        """
        if self.undecided is None or self.listed is not None:
            return
        self.listed = listed
        selection = self.undecided
        if restricted:
            selection = Selection("count", len(self.wanted() or range(listed)))
        visible = [(str(position), GPU()) for position in range(listed)]
        positions, short, problems = choose_among(selection, visible)
        self.problems += problems
        if self.place is not None and positions and not restricted:
            is_bound = self.bound and len(positions) == 1
            if not short and not is_bound and len(positions) < self.place.local_size:
                short = f"{are(len(positions), 'there')} for {self.place.local_size} ranks"
            positions = [positions[self.place.local_rank % len(positions)]]
        self.gpus = tuple(map(str, positions))
        self.positions = tuple(positions)
        self.uuids = ("",) * len(self.gpus)
        if listed:
            self.shortage = (_request(self.undecided, self.place), short) if short else None
        else:
            self.reason += "; the framework lists none"

    def wanted(self) -> "Optional[List[Union[int, str]]]":
        """Return the ids to request of a framework that is configured before it lists its GPUs.

        None: all of them.
        """
        selection = self.undecided
        if selection is None:
            return None
        ids = list(selection.ids or range(selection.count or 0))
        if self.place is not None:
            ids = [ids[self.place.local_rank % len(ids)] if ids else self.place.local_rank]
        return ids or None

    def trusting(self, environ: "Mapping[str, str]") -> "Dict[str, str]":
        """Return variables that make the chosen GPUs visible to a framework not queried yet."""
        ids = self.wanted()
        if ids is None:
            return {}
        value = ",".join(map(str, ids))
        return {variable: value for variable in (CUDA, HIP) if variable == CUDA or HIP in environ}

    def only(self, index: int, shortage: "Optional[Tuple[str, str]]") -> "Devices":
        """Return one of these devices, for a rank, with the shortage that it is to report."""
        one = copy.copy(self)
        chosen = slice(index, index + 1)
        one.gpus, one.positions = self.gpus[chosen], self.positions[chosen]
        one.uuids = self.uuids[chosen]
        one.shortage = shortage
        return one

    def index(self, name: str) -> "Optional[int]":
        """Return the index of the GPU that a name means, from 0, or None."""
        named = enumerate(zip(self.gpus, self.uuids))
        return next((i for i, (gpu, uuid) in named if name == gpu or uuid.startswith(name)), None)

    def are_shown_by(self, environ: "Mapping[str, str]") -> bool:
        """Return whether exactly these GPUs are visible in that environment, in this order."""
        in_framework = self.undecided is not None  # they are chosen there
        return not in_framework and environ.get(self.variable) == ",".join(self.gpus)

    def ordinals(self, environ: "Mapping[str, str]") -> "Sequence[int]":
        """Return the device numbers of these GPUs in a process with that environment."""
        return range(len(self.gpus)) if self.are_shown_by(environ) else self.positions

    def memory_totals(self) -> "List[int]":
        """Return the memory of each of these GPUs, in bytes; 0 where it is unknown."""
        machine: "Sequence[GPU]" = (discover() or []) if self.gpus else []
        return [_gpu_of(entry, machine).memory_total or 0 for entry in self.gpus]

    def environ(self, environ: "Mapping[str, str]") -> "Dict[str, Optional[str]]":
        """Return the variables that make these GPUs, and no others, visible to a process.

        Empty where undecided.
        """
        if self.undecided is not None:
            return {}
        variables: "Dict[str, Optional[str]]" = {}
        if not self.gpus:
            if environ.get(CUDA) not in ("", "-1"):
                variables[CUDA] = "-1"
            # HIP reads its own variable first; torch prefers the one of the runtime below.
            amd = self.variable == HIP or {HIP, "ROCR_VISIBLE_DEVICES"} & set(environ)
            if amd and environ.get(HIP) != "-1":
                variables[HIP] = "-1"
            return variables
        if not self.are_shown_by(environ):
            variables[self.variable] = ",".join(self.gpus)
        if self.variable == CUDA and "CUDA_DEVICE_ORDER" not in environ:
            # CUDA's own order is fastest first; ids then disagree with nvidia-smi's
            # (tensorflow#32881).
            variables["CUDA_DEVICE_ORDER"] = "PCI_BUS_ID"
        return variables


# Choosing -------------------------------------------------------------------------------------


def choose(
    selection: "Selection",
    simulate: "Optional[int]",
    environ: "Mapping[str, str]",
    discover: "Callable[[], Optional[Sequence[GPU]]]" = discover,
) -> "Devices":
    """Choose this process's devices.

    Arguments:
        selection: from ``parse_gpus``.
        simulate: the number of CPU devices that stand in for GPUs, or None.
        environ: where ``CUDA_VISIBLE_DEVICES`` is read.
        discover: returns the machine's GPUs (None: unknown).

    Returns:
        ``Devices``, with a ``shortage`` where fewer were found than requested.

    Raises:
        InvalidArgumentError: ids or names that no GPU of this machine can have.
    """
    if simulate:
        return _choose_simulated(selection, simulate)
    if selection.kind == "none":
        return Devices(declined=True)
    machine = discover()
    if machine and machine[0].variable == HIP:
        shown, visibility_variable, problems = hip_entries(environ, machine)
        visible = [(entry, GPU(variable=HIP)) for entry in shown]
        return _chosen(selection, visible, problems, environ, visibility_variable, HIP)
    entries, problems = visible_entries(environ, machine)
    visibility_variable = None if entries is None else CUDA
    if machine == [] or (machine is None and entries is None and selection.kind == "all"):
        devices = _chosen(selection, [], problems, environ, visibility_variable)
        devices.undecided = selection
        devices.reason = "no GPU was found" + _why(machine, environ)
        if isinstance(machine, Listing) and machine.failures and not devices.shortage:
            devices.shortage = str(selection), "no GPU is visible: " + "; ".join(machine.failures)
        return devices
    if entries is None and (machine is None or (machine and any_mig(selection.ids))):
        # The GPUs are unknown: trust the request, which the framework will check.
        return _trusting(selection)
    if entries is None:
        entries = [str(gpu.index) for gpu in machine or []]
    visible = [(entry, _gpu_of(entry, machine or [])) for entry in entries]
    devices = _chosen(selection, visible, problems, environ, visibility_variable)
    if not visible:
        number = "GPU" if len(machine or ()) == 1 else "GPUs"
        devices.reason = f"{CUDA}={environ[CUDA]} hides the {number} of this machine"
    return devices


def _why(machine: "Optional[Sequence[GPU]]", environ: "Mapping[str, str]") -> str:
    why = [machine.why()] if isinstance(machine, Listing) and machine.why() else []
    why += [f"{CUDA}={environ[CUDA]}"] if CUDA in environ else []
    return errors.shortened(" ({})".format("; ".join(why))) if why else ""


def _chosen(
    selection: "Selection",
    visible: "Sequence[Tuple[str, GPU]]",
    problems: "Sequence[str]",
    environ: "Mapping[str, str]",
    visibility_variable: "Optional[str]",
    variable: str = CUDA,
) -> "Devices":
    """Return the requested ones of the visible GPUs.

    Arguments:
        selection: the request.
        visible: pairs of entry and GPU.
        problems: found so far.
        environ: the environment variables.
        visibility_variable: the one that restricts which are visible, or None.
        variable: the one that makes the chosen ones visible.
    """
    positions, short, of_claims = choose_among(selection, visible)
    shortage = None
    if short:
        restriction = (
            f" ({visibility_variable}={environ[visibility_variable]})"
            if visibility_variable
            else ""
        )
        shortage = str(selection), errors.shortened(short + restriction)
    chosen = [visible[position] for position in positions]
    return Devices(
        [entry for entry, _ in chosen],
        positions,
        [gpu.uuid for _, gpu in chosen],
        shortage=shortage,
        problems=[*problems, *of_claims],
        variable=variable,
        reason=shortage[1] if shortage else "",
    )


def choose_for_rank(
    selection: "Selection",
    environ: "Mapping[str, str]",
    place: "Place",
    discover: "Callable[[], Optional[Sequence[GPU]]]" = discover,
) -> "Devices":
    """Choose the one device of a rank: the local rank's, among those that ``selection`` names.

    The launcher decides how many GPUs there are, so a count means all of them. Each rank claims
    idle GPUs for itself, unless the launcher has claimed some for all.
    """
    if selection.kind == "free" and "COMPAT_CLAIMS" not in environ:
        return choose(Selection("free", 1), None, environ, discover)
    if selection.kind == "count":
        selection = Selection("count", place.local_size)
    pool = choose(selection, None, environ, discover)
    is_bound = _is_bound(environ, place)
    if pool.undecided is not None:
        pool.place, pool.bound = place, is_bound
    if pool.shortage:
        pool.shortage = _request(selection, place), pool.shortage[1]
    if not pool.gpus:
        return pool
    shortage = pool.shortage
    if len(pool) == 1 and is_bound:
        return pool.only(0, None)
    if not shortage and len(pool) < place.local_size:
        clause = "{}: {}".format(are(len(pool), "there"), pool)
        shortage = _request(Selection("count", place.local_size), place), clause
    return pool.only(place.local_rank % len(pool), shortage)


def _request(selection: "Selection", place: "Optional[Place]") -> str:
    """Return the request of a shortage; of ranks a count is theirs, not that of the script."""
    if place is not None and place.local_size > 1 and selection.kind == "count":
        return f"a GPU for each of {place.local_size} ranks"
    return str(selection)


def _is_bound(environ: "Mapping[str, str]", place: "Place") -> bool:
    """Return whether a single visible GPU is this rank's alone, so that other ranks see others.

    It is under SLURM (``--gpus-per-task``, ``--gpu-bind``), jsrun, and in scripts that make the
    GPU of its local rank visible to each rank.
    """
    if place.launcher == "srun":
        on_node = environ.get("SLURM_STEP_GPUS", "") or environ.get("SLURM_JOB_GPUS", "")
        number = whole_number(environ.get("SLURM_GPUS_ON_NODE", "").strip()) or 0
        return max(number, len(on_node.split(",")) if on_node else 0) >= place.local_size
    if place.launcher == "jsrun":
        return True
    shown = [environ.get(name) for name in (CUDA, HIP, "ROCR_VISIBLE_DEVICES")]
    return str(place.local_rank) in shown


def _choose_simulated(selection: "Selection", simulate: int) -> "Devices":
    if selection.kind == "none":
        return Devices(simulated=1)
    ids = selection.ids or range(selection.count or simulate)
    if any(not isinstance(i, int) or i >= simulate for i in ids):
        raise errors.InvalidArgumentError(
            f"{selection} asks for a device that simulate={simulate} does not have. Simulated "
            f"devices are numbered from 0; ask for at most {simulate}, or leave gpus out."
        )
    return Devices(simulated=len(ids))


def _trusting(selection: "Selection") -> "Devices":
    ids = selection.ids or range(selection.count or 1)
    if len(set(map(type, ids))) > 1:
        mixed = "CUDA cannot mix ids and names, and nothing tells which GPUs there are"
        raise invalid_gpus(list(ids), mixed)
    unknown = selection.kind in ("all", "free")
    shortage = (str(selection), "nothing tells which GPUs there are") if unknown else None
    return Devices(map(str, ids), range(len(ids)), shortage=shortage)


def _gpu_of(entry: str, machine: "Sequence[GPU]") -> "GPU":
    """Return the GPU that an entry names; where the driver lists none, one without attributes."""
    named = (g for g in machine if g.uuid and g.matches(entry) or entry == str(g.index))
    return next(named, GPU())
