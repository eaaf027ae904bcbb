"""Compiled programs, as XLA describes them."""

import collections
import contextlib
import re

import jax

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(\S+) = (.+?) ([\w-]+)\((.*)")


#: A matrix product or convolution of a compiled program, as one device executes it. Its name tells
#: where it comes from: "jit(train_step)/jvp(hidden)/dot_general", or is empty; the shapes are those
#: of the result and of the operands.
ProgramOperation = collections.namedtuple("ProgramOperation", "name shapes")


@contextlib.contextmanager
def compiled():
    """Note the programs that are compiled within a block.

    Returns:
        A context manager that gives a list, which has each of them, with its devices, when the
        block ends.
    """
    client = jax.devices()[0].client
    before = client.live_executables()
    found = []  # type: list
    yield found
    for executable in client.live_executables():
        if all(executable is not other for other in before):
            found.append((executable.hlo_modules()[0], executable.local_devices()))


def operations(program):
    """Return what each instruction of a program in XLA's text form computes, by its name.

    That is the products and convolutions, fused or not.
    """
    everything = {}  # type: dict  # instructions by name, in each computation
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
        dimensions = [re.search(r"\[([\d,]*)\]", each).group(1) for each in shapes]
        sizes = [list(map(int, re.findall(r"\d+", each))) for each in dimensions]
        source = re.search(r'op_name="([^"]*)"', rest)
        return [ProgramOperation(source.group(1) if source else "", sizes)]

    fused = set(re.findall(r"calls=%([\w.-]+)", program))  # which what calls them executes
    bodies = [body for name, body in everything.items() if name not in fused]
    return {name: inside(body, name) for body in bodies for name in body}
