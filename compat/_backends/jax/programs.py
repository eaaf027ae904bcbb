"""Programs that XLA compiles, and the operations in their text form."""

import collections
import contextlib
import re
from typing import Any, Dict, List, Tuple

import jax

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(\S+) = (.+?) ([\w-]+)\((.*)")


#: A matrix product or convolution of a compiled program, as one device executes it. Its name is
#: where it comes from, "jit(train_step)/jvp(hidden)/dot_general", or empty; the shapes are those of
#: the result and of the operands.
ProgramOperation = collections.namedtuple("ProgramOperation", "name shapes")


@contextlib.contextmanager
def compiled():
    """Record the programs that are compiled within a block.

    Yields:
        A list, to which each program is added, with its devices, at the end of the block.
    """
    client = jax.devices()[0].client
    before = client.live_executables()
    programs: "List[Tuple[Any, Any]]" = []
    yield programs
    for executable in client.live_executables():
        if all(executable is not other for other in before):
            programs.append((executable.hlo_modules()[0], executable.local_devices()))


def operations(program):
    """Return the products that each instruction of a program computes, by its name.

    Arguments:
        program: in XLA's text form.
    """
    everything: "Dict[str, Dict[str, Any]]" = {}  # by computation: its instructions by name
    for line in program.splitlines():
        header = re.match(r"(?:ENTRY )?%(\S+) \(.*\{$", line)
        if header:
            current = everything[header.group(1)] = {}
        instruction = _INSTRUCTION.match(line)
        if instruction:
            current[instruction.group(1)] = instruction.groups()[1:]

    def inside(computation, name):
        shape, kind, rest = computation[name]
        called = re.search(r"calls=%([\w.-]+)", rest)
        if called:
            body = everything[called.group(1)]
            return [operation for inner in body for operation in inside(body, inner)]
        if kind not in ("dot", "convolution"):
            return []
        operands = re.findall(r"%([\w.-]+)", rest.split(")")[0])
        shapes = [shape] + [computation[operand][0] for operand in operands]
        dimensions = [re.search(r"\[([\d,]*)\]", shape).group(1) for shape in shapes]
        sizes = [list(map(int, re.findall(r"\d+", numbers))) for numbers in dimensions]
        source = re.search(r'op_name="([^"]*)"', rest)
        return [ProgramOperation(source.group(1) if source else "", sizes)]

    fused = set(re.findall(r"calls=%([\w.-]+)", program))  # executed by their callers
    bodies = [body for name, body in everything.items() if name not in fused]
    return {name: inside(body, name) for body in bodies for name in body}
