"""``compat env`` as text: what ``environment`` finds, laid out for people to read and to paste."""

import re
import sys
import textwrap
from typing import Any, Dict, List, Tuple

from .._configuration import discovery, settings
from .._ranks.engines.installed import Installed

#: Columns of the text, and of its headings.
WIDTH, _HEADINGS = 80, len("keras.json") + 2
_NO_BACKEND = {"name": "none", "reason": "see the problems"}


def text(found: Dict[str, Any]) -> str:
    """In two columns, at most ``WIDTH`` wide but for paths and the like, which are not broken."""
    return settings.report(sections(found, WIDTH - _HEADINGS))


def sections(found: Dict[str, Any], width: int = sys.maxsize) -> List[Tuple[str, List[str]]]:
    """Headings, and lines of at most this width, if they can be broken."""
    told = [
        ("compat", [found["compat"]]),
        ("python", ["{version} ({executable})".format(**found["python"])]),
        ("system", _system_lines(found["system"])),
        ("backend", ["{name} ({reason})".format(**found["backend"] or _NO_BACKEND)]),
        ("versions", [_pairs(found["versions"]) or "no framework, no Keras"]),
        ("packages", _package_lines(found["packages"])),
        ("variables", _variable_lines(found["variables"])),
        ("keras.json", [_keras_json_line(found["keras_json"])]),
        ("drivers", [_drivers_line(found["drivers"])]),
        ("GPUs", _gpu_lines(found)),
        ("visible", [found["visible"]["text"]]),
        ("ranks", [_rank_line(found)]),
        ("engines", [str(Installed(**engine)) for engine in found["engines"]] or ["none"]),
    ]
    problems = [line for each in found["problems"] for line in _problem_lines(each, width)]
    told = [(heading, _wrapped(lines, width)) for heading, lines in told]
    return told + [("problems", problems or ["none"])]


def _wrapped(lines, width):
    wrapper = textwrap.TextWrapper(
        width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    return [p for line in lines for part in wrapper.wrap(line) for p in _at_commas(part, width)]


def _at_commas(line, width):
    """A long list without spaces, as variables have it, on several lines."""
    parts = []
    while len(line) > width and line.find(",", 2) > 0:
        cut = line.rfind(",", 2, width)
        cut = (cut if cut > 0 else line.find(",", 2)) + 1
        if cut == len(line):
            break
        parts.append(line[:cut])
        line = "  " + line[cut:]
    return parts + [line]


def _problem_lines(problem, width):
    """A problem, and below it the command that mends it, as it can be pasted into a shell."""
    text, command = problem["problem"], problem["command"]
    if command and text.rstrip(".").endswith(command):
        text = text.rstrip(".")[: -len(command)].rstrip()
    lines = _wrapped(text.split("\n"), width)
    return lines + (_command_lines(command, width) if command else [])


def _command_lines(command, width):
    """Continued by backslashes, as a shell takes it; what is quoted stays in one piece."""
    lines = [""]
    for word in re.findall(r"""(?:'[^']*'|"[^"]*"|[^\s'"])+""", command):
        if lines[-1] and len(lines[-1] + word) + 3 > width:  # a space before, and the backslash
            lines[-1] += " \\"
            lines.append("      " + word)
        else:
            lines[-1] += (" " if lines[-1] else "    ") + word
    return lines


def _pairs(versions):
    return ", ".join("{} {}".format(*pair) for pair in versions.items())


def _system_lines(system):
    names = [system["platform"] + " " + system["machine"], system["distribution"], system["libc"]]
    memory = "memory unknown" if system["memory"] is None else _gib(system["memory"]) + " memory"
    if system["memory_limit"] is not None:
        memory += ", limited to " + _gib(system["memory_limit"])
    return [
        ", ".join(name for name in names if name),
        "{usable_cores} of {cores} CPU cores, {}".format(memory, **system),
    ]


def _gib(number):
    return f"{number / 2**30:.1f} GiB"


def _package_lines(packages):
    """NVIDIA's are many: those of one version of CUDA go on a line of their own."""
    by_kind: Dict[str, Dict[str, str]] = {}
    for name, version in packages.items():
        kind, match = "", re.match(r"nvidia-(.+?)(-cu\d+)?$", name)
        if match is not None and name != "nvidia-ml-py":
            kind, name = "nvidia-*" + (match.group(2) or ""), match.group(1)
        by_kind.setdefault(kind, {})[name] = version
    return [k + ": " * bool(k) + _pairs(by_kind[k]) for k in sorted(by_kind)] or ["none"]


def _variable_lines(variables):
    lines = ["{}={}".format(*pair) for pair in variables.items() if pair[1] is not None]
    absent = [name for name in variables if variables[name] is None]
    return lines + (["not set: " + ", ".join(absent)] if absent else [])


def _keras_json_line(keras_json):
    if not keras_json["readable"]:
        return "{path} (unreadable)".format(**keras_json)
    if not keras_json["exists"]:
        return "{path} (not there)".format(**keras_json)
    values = ", ".join("{}={}".format(*pair) for pair in sorted(keras_json["content"].items()))
    return "{}: {}".format(keras_json["path"], values)


def _drivers_line(drivers):
    names = {"nvidia": "NVIDIA", "cuda": "runs CUDA up to", "amdgpu": "amdgpu", "rocm": "ROCm"}
    return ", ".join(names[n] + " " + drivers[n] for n in names if drivers[n]) or "none found"


def _gpu_lines(found):
    why = found["why_no_gpus"]
    if found["gpus"] is None:
        return ["unknown: " + why]
    return [_gpu_line(gpu) for gpu in found["gpus"]] or ["none" + (why and ": " + why)]


def _gpu_line(gpu):
    if gpu["variable"] == discovery.HIP:
        return "{index}: of AMD, chosen by {variable}".format(**gpu)
    if not gpu["uuid"]:
        return "{index}: nvidia-smi is missing or fails, so nothing more is known".format(**gpu)
    used, total = (_told(gpu[name], 2**20) for name in ("memory_used", "memory_total"))
    text = "{index}: {name}, {} of {} MiB used, {} % busy, {uuid}"
    return text.format(used, total, _told(gpu["utilization"]), **gpu)


def _told(number, unit=1):
    return "?" if number is None else f"{number / unit:.0f}"


def _rank_line(found):
    place = found["ranks"]
    if place is None:
        return "none: this process is alone"
    if place["rank"] is None:
        return "unknown (see the problems)"
    if place["rank"] < 0:
        return "none: this process evaluates what ranks save ({launcher})".format(**place)
    text = "rank {rank} of {size}, {local_rank} of {local_size} on this machine ({launcher})"
    return text.format(**place)
