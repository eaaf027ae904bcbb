"""The GPUs of this machine, and those that the environment leaves visible, without a framework."""

import contextlib
import os
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from .numeric import whole_number

CUDA = "CUDA_VISIBLE_DEVICES"
HIP = "HIP_VISIBLE_DEVICES"  # of AMD's GPUs


class GPU(NamedTuple):
    """One GPU as the driver lists it; numbers that it does not report are None."""

    index: "Optional[int]" = None  # type: ignore[assignment]  # tuples have such a method
    uuid: str = ""
    name: str = ""
    memory_total: "Optional[int]" = None  # bytes
    memory_used: "Optional[int]" = None  # bytes
    utilization: "Optional[int]" = None  # percent
    variable: str = CUDA  # that makes this GPU visible to a process

    def unknown(self) -> "List[str]":
        """Return which signs of activity the driver does not report of this GPU."""
        memory = self.memory_total is None or self.memory_used is None
        return ["memory"] * memory + ["utilization"] * (self.utilization is None)

    def matches(self, entry: str) -> bool:
        """Return whether ``entry``, an id or the beginning of a UUID, names this GPU.

        Without nvidia-smi the UUID is unknown, so any name may be this GPU's.
        """
        number = whole_number(entry)
        if number is not None:
            return number == self.index
        return not self.uuid or self.uuid.startswith(entry)


_DRIVER = "/proc/driver/nvidia/gpus"
_DRIVER_VERSION = "/proc/driver/nvidia/version"
_AMDGPU_VERSION = "/sys/module/amdgpu/version"  # there where the driver is not the kernel's own
_ROCM_VERSION = "/opt/rocm/.info/version"
_WSL = "/dev/dxg"


class Listing(List[GPU]):
    """GPUs in PCI order, and failed attempts to list them, which explain why there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.missing: "List[str]" = []  # commands that are not installed
        self.answers: "List[str]" = []  # of those that list no GPU, a phrase each
        self.failures: "List[str]" = []  # of commands that are installed and do not work

    def why(self) -> str:
        """Return why there are no GPUs, in half a sentence."""
        names = self.missing
        missing = " and ".join([", ".join(names[:-1])] * (len(names) > 1) + names[-1:])
        reasons = (
            [missing + (" are" if len(names) > 1 else " is") + " not installed"] if names else []
        )
        return "; ".join(reasons + self.failures + self.answers)


def discover() -> "Optional[Listing]":
    """Return the machine's GPUs, in PCI order, or None where their number is unknown.

    Queries nvidia-smi, else the driver's folder; then, where there is none of NVIDIA's, AMD's
    commands. Initialises no GPU and no framework.
    """
    listing = Listing()
    query = "--query-gpu=index,uuid,name,memory.total,memory.used,utilization.gpu"
    lines = _nvidia_smi(query, listing)
    gpus = None
    if lines is not None:
        gpus = [_parse_gpu(line) for line in lines if line.count(",") == 5]
    if gpus == []:
        listing.answers.append("nvidia-smi lists none")
    if gpus is None and os.access(_DRIVER, os.R_OK):
        gpus = [GPU(index) for index, _ in enumerate(os.listdir(_DRIVER))]
    elif gpus is None:
        listing.answers.append("no NVIDIA driver is loaded")
        # WSL has GPUs and no /proc entry for them; elsewhere there is no driver, so no GPU.
        if os.path.exists(_WSL):
            return None
    listing += gpus or _from_amd(listing)
    return listing


def busy() -> "Optional[List[str]]":
    """Return the UUIDs of GPUs on which a process computes, or None where that is unknown."""
    return _nvidia_smi("--query-compute-apps=gpu_uuid", Listing())


def _nvidia_smi(query: "Optional[str]", listing: "Listing") -> "Optional[List[str]]":
    """Return the lines that nvidia-smi answers, or None where it is missing or fails.

    Arguments:
        query: an option; None: the table that it prints without any.
        listing: gets the reason where there is no answer.
    """
    arguments = [query, "--format=csv,noheader,nounits"] if query else []
    for name in ("nvidia-smi", "/usr/lib/wsl/lib/nvidia-smi"):
        answer = _answer([name] + arguments, listing)
        if answer is not None:
            return answer.splitlines()
    return None


def _answer(command: "List[str]", listing: "Listing") -> "Optional[str]":
    """Return what a command prints, or None where it is missing or fails.

    The reason for that is added to ``listing``.
    """
    import subprocess

    try:
        ended = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, timeout=20)
    except OSError:
        if "/" not in command[0]:
            listing.missing.append(command[0])
        return None
    except subprocess.TimeoutExpired:
        listing.failures.append(f"{command[0]} does not answer")
        return None
    answer = ended.stdout.decode("utf-8", "replace")
    if not ended.returncode:
        return answer
    first_line = (
        (answer + ended.stderr.decode("utf-8", "replace")).strip().split("\n")[0].rstrip(". ")
    )
    if first_line == "No devices were found":
        return ""
    status = "exit status {}{}".format(ended.returncode, first_line and ": " + first_line)
    listing.failures.append(f"{command[0]} fails ({status})")
    return None


def _parse_gpu(line: str) -> "GPU":
    def number(
        text: str, unit: int = 1
    ) -> "Optional[int]":  # "[N/A]" under MIG, and where the driver has no counter
        return int(text) * unit if text.isdecimal() else None

    index, uuid, name, total, used, utilization = [field.strip() for field in line.split(",")]
    mebi = 2**20
    return GPU(int(index), uuid, name, number(total, mebi), number(used, mebi), number(utilization))


def drivers() -> "Dict[str, Optional[str]]":
    """Return the versions of the loaded drivers, and of the platforms that they support.

    Returns:
        A dictionary: "nvidia", the driver; "cuda", the newest CUDA that it runs; "amdgpu", AMD's
        driver; "rocm", the installed ROCm. None each where it is unknown.
    """
    table = "\n".join(_nvidia_smi(None, Listing()) or [])
    # Newer ones call it the KMD's (kernel mode driver's), and CUDA's the UMD's.
    queried = _match(r"(?:Driver|KMD) Version\s*: *([0-9.]+)", table)
    loaded = _match(r"Kernel Module.*?\s([0-9]+\.[0-9.]+)\s", content(_DRIVER_VERSION))
    return {
        "nvidia": queried or loaded,
        "cuda": _match(r"CUDA (?:UMD )?Version\s*: *([0-9.]+)", table),
        "amdgpu": content(_AMDGPU_VERSION).strip() or None,
        "rocm": content(_ROCM_VERSION).strip() or None,
    }


def _match(pattern: str, text: str) -> "Optional[str]":
    import re

    match = re.search(pattern, text)
    return match.group(1) if match else None


def content(path: str) -> str:
    """Return the content of a small system file; empty where there is no such file."""
    with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="replace") as file:
        return file.read()
    return ""


def _from_amd(listing: "Listing") -> "List[GPU]":
    """Return AMD's GPUs, as its newer command lists them, or its older one."""
    for command in (["amd-smi", "list", "--json"], ["rocm-smi", "--showid", "--json"]):
        answer = _answer(command, listing)
        cards = None if answer is None else _json(answer)
        if answer is not None and cards is None:
            listing.failures.append(f"{command[0]} answers no JSON")
        if isinstance(cards, dict):  # of rocm-smi {"card0": {...}}, of later versions of amd-smi
            cards = cards.get("gpu_data", [key for key in cards if key.startswith("card")])
        if cards:
            return [GPU(index, variable=HIP) for index, _ in enumerate(cards)]
    return []


def _json(text: str) -> "Any":
    """Return the JSON value in a command's output, which may have warnings around it, or None."""
    import json

    lines = text.splitlines()
    for number, line in enumerate(lines):
        if line.startswith(("[", "{")):
            with contextlib.suppress(ValueError):
                return json.JSONDecoder().raw_decode("\n".join(lines[number:]))[0]
    return None


def usable_cores() -> int:
    """Return how many of the machine's cores this process may use."""
    usable = getattr(os, "sched_getaffinity", None)  # on Linux alone
    return len(usable(0)) if usable else os.cpu_count() or 1


# Variables of CUDA and HIP ------------------------------------------------------


def visible_entries(
    environ: "Mapping[str, str]", machine: "Optional[Sequence[GPU]]" = None
) -> "Tuple[Optional[List[str]], List[str]]":
    """Return the entries of ``CUDA_VISIBLE_DEVICES`` that CUDA uses, and the value's problems.

    CUDA ignores everything from the first invalid entry on (CUDA programming guide,
    "CUDA Environment Variables"); the first entry decides whether ids, GPU names or MIG names
    are valid, and one that is there twice leaves no GPU at all (both as in PyTorch's
    ``torch.cuda._parse_visible_devices``). It stops reading at a space, too (tensorflow#5066);
    here it reads on, since that is never meant.

    Arguments:
        environ: where the variable is read.
        machine: the machine's GPUs, from ``discover()``; None, or none: no entry is checked.

    Returns:
        The entries, or None where the variable is not set; and the problems, a sentence each.
    """
    problems = []
    order = environ.get("CUDA_DEVICE_ORDER", "PCI_BUS_ID")
    if order != "PCI_BUS_ID" and (machine is None or len(machine) > 1):
        problems.append(
            f"CUDA_DEVICE_ORDER={order}: ids may mean other GPUs than in nvidia-smi's listing. "
            "For the same ones: export CUDA_DEVICE_ORDER=PCI_BUS_ID"
        )
    value = environ.get("CUDA_VISIBLE_DEVICES")
    if value is None:
        return None, problems

    def wrong(entry: str, before: "Sequence[str]") -> "Optional[str]":
        if not _valid_entry(entry, before):
            return "which is no id, no GPU name and no MIG name like those before it"
        exists = not machine or _exists(entry, machine)
        return None if exists else "since this machine has no such GPU"

    entries, ignored = _up_to("CUDA", CUDA, value, wrong)
    problems += ignored
    once = list(dict.fromkeys(entries))
    for entry, only in zip(entries, once + [None]):
        if entry != only:
            return [], problems + [
                f'CUDA_VISIBLE_DEVICES="{value}": CUDA shows no GPU at all, since "{entry}" is '
                f"there twice. {_remedy(CUDA, once)}"
            ]
    if " " in value.strip():
        problems.append(
            'CUDA_VISIBLE_DEVICES="{}" contains a space, where CUDA stops reading; compat '
            'reads it as "{}". {}'.format(value, ",".join(entries), _remedy(CUDA, entries))
        )
    return entries, problems


def _remedy(variable: str, entries: "Sequence[str]") -> str:
    """Return the command that sets the valid entries alone, a sentence."""
    if not entries:
        return f"To use every GPU: unset {variable}"
    return "Corrected: export {}={}".format(variable, ",".join(entries))


def _valid_entry(entry: str, before: "Sequence[str]") -> bool:
    if entry.split() != [entry]:
        return False
    if before and not before[0].isdecimal():
        return entry.startswith(before[0][:4])
    return whole_number(entry) is not None or (not before and entry.startswith(("GPU-", "MIG-")))


def _exists(entry: str, machine: "Sequence[GPU]") -> bool:
    if entry.startswith("MIG-GPU-"):  # MIG-<GPU UUID>/<GPU instance>/<compute instance>
        entry = entry[4:].split("/")[0]
    elif entry.startswith("MIG-"):  # a MIG UUID does not name its GPU
        return bool(machine)
    return any(gpu.matches(entry) for gpu in machine)


def hip_entries(
    environ: "Mapping[str, str]", machine: "Sequence[GPU]"
) -> "Tuple[List[str], Optional[str], List[str]]":
    """Return the GPUs that are visible under HIP, the variable that restricts them, and problems.

    HIP reads CUDA_VISIBLE_DEVICES, too, where its own variable is empty. Both count inside
    ROCR_VISIBLE_DEVICES, which the runtime below reads ("GPU isolation techniques", ROCm's docs).
    """
    below = environ.get("ROCR_VISIBLE_DEVICES")
    there = len(machine) if below is None else min(len(machine), len(below.split(",")))
    variable = next((name for name in (HIP, CUDA) if environ.get(name, "").strip()), None)
    if variable is None:
        return [str(index) for index in range(there)], None, []

    def wrong(entry: str, before: "Sequence[str]") -> "Optional[str]":
        number = whole_number(entry)
        exists = entry.startswith("GPU-") or (number is not None and number < there)
        right = exists and entry not in before
        return None if right else "which is no id of a GPU that is visible here"

    entries, problems = _up_to("AMD's HIP", variable, environ[variable].strip(), wrong)
    return entries, variable, problems


def _up_to(
    reader: str, variable: str, value: str, wrong: "Callable[[str, Sequence[str]], Optional[str]]"
) -> "Tuple[List[str], List[str]]":
    """Return the entries of a value before the first wrong one, and a list of its problem.

    Arguments:
        reader: the library that reads the variable.
        variable: its name.
        value: its value.
        wrong: returns the problem with an entry, by those before it, or None.
    """
    entries: "List[str]" = []
    for entry in [part.strip() for part in value.split(",")] if value.strip() else []:
        if entry == "-1":  # the documented way to end the list
            break
        problem = wrong(entry, entries)
        if problem is not None:
            return entries, [
                f'{variable}="{value}": {reader} ignores "{entry}" and what follows it, {problem}. '
                + _remedy(variable, entries)
            ]
        entries.append(entry)
    return entries, []
