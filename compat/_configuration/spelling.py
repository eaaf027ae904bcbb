"""What was meant by a name that compat does not know. Loaded only where one is refused."""

import difflib
import re

# Names of other libraries and other versions for arguments of configure_gpu(), without underscores.
_GPUS = """
    gpu gpuid gpuids gpucount gpulist ngpu ngpus nogpus numgpu numgpus numberofgpus device devices
    deviceid deviceids ndevices numdevices visibledevices visibledevicelist cudavisibledevices
    cudadevice cudadevices ctx context contexts
"""
_GROW = """
    growth grow allowgrowth gpuallowgrowth memorygrowth gpumemorygrowth allowmemorygrowth
    setmemorygrowth enablememorygrowth memorygrow
"""
_FRACTION = """
    fraction gpufraction memfraction memoryfraction gpumemoryfraction gpumemfraction
    perprocessgpumemoryfraction perprocessmemoryfraction preallocate
"""
_LIMIT = "limit memorylimit gpumemorylimit memorysize maxmemory gpumemory memorymb memlimit"
_FLOATX = "float floattype dtype precision"
_BACKEND = "framework kerasbackend engine library"
_SIMULATE = """
    simulated simulation simulategpus fakegpus fakedevices virtualgpus virtualdevices logicaldevices
    numcpudevices cpudevices
"""


def plain(name):
    return name.lower().replace("_", "").replace("-", "")


def closest(name, known):
    """The one of these names that this is a misspelling of, or None."""
    by_plain = {plain(each): each for each in known}
    found = difflib.get_close_matches(plain(name), list(by_plain), 1, 0.75)
    return by_plain[found[0]] if found else None


def backend(name, known):
    """The one of these backends that is meant by a short name or a misspelling, or None."""
    letters = re.compile(".*".join(map(re.escape, plain(name))))
    longer = sorted(filter(letters.match, known), key=len)
    is_one = longer and all(each.startswith(longer[0]) for each in longer)
    return longer[0] if is_one else closest(name, known)


def meant(name, value, known):
    """What to write in place of ``name=value`` in ``configure_gpu()``, or None where nothing tells.

    Arguments:
        known: its arguments, and the options of backends.
    """
    short = plain(name)
    if short in _GROW.split():
        return 'memory="grow"'
    if short in _FRACTION.split():
        right = isinstance(value, float) and 0 < value <= 1
        return f"memory={value if right else 0.5}"
    if short in _LIMIT.split():
        size = value if isinstance(value, int) and value > 1 else 4096
        return f'memory="{size}MiB"'
    if short in ("strategy", "distributionstrategy", "distribute"):
        return "parallelize(model, strategy=...)"
    names = {"gpus": _GPUS, "floatx": _FLOATX, "backend": _BACKEND, "simulate": _SIMULATE}
    found = [right for right, others in names.items() if short in others.split()]
    right_name = found[0] if found else closest(name, known)
    if right_name is None:
        return None
    text = repr(value)
    return "{}={}".format(right_name, text if len(text) <= 40 and "\n" not in text else "...")
