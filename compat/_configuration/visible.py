"""Which GPUs the environment leaves visible: what CUDA and HIP read in their variables."""

from .discovery import CUDA, HIP
from .numeric import whole_number


def visible_entries(environ, machine=None):
    """The entries of ``CUDA_VISIBLE_DEVICES`` that CUDA uses, and what is wrong with the value.

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

    def wrong(entry, before):
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


def _remedy(variable, entries):
    """What to type for the entries that are right."""
    if not entries:
        return f"To use every GPU: unset {variable}"
    return "Corrected: export {}={}".format(variable, ",".join(entries))


def _valid_entry(entry, before):
    if entry.split() != [entry]:
        return False
    if before and not before[0].isdecimal():
        return entry.startswith(before[0][:4])
    return whole_number(entry) is not None or (not before and entry.startswith(("GPU-", "MIG-")))


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
    variable = next((each for each in (HIP, CUDA) if environ.get(each, "").strip()), None)
    if variable is None:
        return [str(index) for index in range(there)], None, []

    def wrong(entry, before):
        number = whole_number(entry)
        exists = entry.startswith("GPU-") or (number is not None and number < there)
        right = exists and entry not in before
        return None if right else "which is no id of a GPU that is visible here"

    entries, problems = _up_to("AMD's HIP", variable, environ[variable].strip(), wrong)
    return entries, variable, problems


def _up_to(reader, variable, value, wrong):
    """The entries of a value in front of the first wrong one, and a problem, in a list, with that.

    Arguments:
        reader: what reads the variable.
        wrong: tells of an entry, and those before it, what is wrong with it, or None.
    """
    entries = []  # type: list
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
