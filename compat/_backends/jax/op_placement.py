"""Where JAX ran the operations of a step: from its profiler, and from the program XLA compiled."""

import collections
import re

from . import timeline

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(\S+) = (.+?) ([\w-]+)\((.*)")


#: A matrix product or convolution of a compiled program, as one device executes it. Its name tells
#: where it comes from: "jit(train_step)/jvp(hidden)/dot_general", or is empty; the shapes are those
#: of the result and of the operands.
ProgramOperation = collections.namedtuple("ProgramOperation", "name shapes")


def _computations(program):
    """The computations of a program in XLA's text form: instructions by name, in each."""
    found = {}  # type: dict
    for line in program.splitlines():
        header = re.match(r"(?:ENTRY )?%(\S+) \(.*\{$", line)
        if header:
            current = found[header.group(1)] = {}
        instruction = _INSTRUCTION.match(line)
        if instruction:
            current[instruction.group(1)] = instruction.groups()[1:]
    return found


def operations(program):
    """By each instruction's name: the products and convolutions it computes, fused or not."""
    everything = _computations(program)

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

    return {name: inside(body, name) for body in everything.values() for name in body}


def executed(jax, step):
    """Do a step whose program is new; by device, what JAX's profiler saw it execute.

    The profiler records which instruction ran on which device; what an instruction computes, the
    program tells that XLA compiled for this step.
    """
    client = jax.devices()[0].client
    before = client.live_executables()
    with timeline.recorded() as events:
        step()
    new = [e for e in client.live_executables() if all(e is not other for other in before)]
    programs = {e.hlo_modules()[0].name: e.hlo_modules()[0].to_string() for e in new}
    computed = {name: operations(text) for name, text in programs.items() if name.endswith("_step")}
    found = {}  # type: dict
    for *_, record in events:
        if record.get("hlo_module") in computed and "hlo_op" in record:
            device = "{}:{}".format(jax.devices()[0].platform, record["device_ordinal"])
            ran = computed[record["hlo_module"]][record["hlo_op"]]
            found.setdefault(device, []).extend(ran)
    return found


def products(found):
    """Matrix products and convolutions by device, forward and backward."""
    counts = {}
    for device, ran in found.items():
        backward = sum("transpose(jvp(" in each.name for each in ran)
        forward = sum("jvp(" in each.name and "transpose(" not in each.name for each in ran)
        counts[device] = forward, backward
    return counts
