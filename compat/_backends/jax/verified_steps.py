"""What devices execute, by JAX's profiler; and verification: a step done again on one device.

A step of Keras on JAX is a pure function of the state, which it hands from step to step itself.
Its random numbers do not depend on how it is sharded, so that they are compared as well.
"""

import collections
import contextlib
import functools
import glob
import itertools
import os
import re
import tempfile

import jax
import numpy as np

from ... import errors
from ..._runtime import patching
from ..._runtime.operation_times import Operation, converted
from ..._verification import keras_steps


class _JAXStep(keras_steps.KerasStep):
    def __init__(self, method, function, state, iterator):
        first = next(iterator)
        count = function.model.steps_per_execution
        super().__init__(method, function, [first, *itertools.islice(iterator, count - 1)])
        model = self.model
        groups = [("weight", model.trainable_variables), ("state", model.non_trainable_variables)]
        if self.kind == "train":
            groups.append(("slot", getattr(model.optimizer, "variables", ())))
        if self.kind != "predict":
            groups.append(("metric state", model.metrics_variables))
        # In the order of Keras' state.
        self.labels = [self.label_of(word, each) for word, group in groups for each in group]
        leaves, self.tree = jax.tree.flatten(state)
        self.values = dict(zip(self.labels, map(np.asarray, leaves)))
        # Of values that lie elsewhere JAX would compile a program of their own.
        self.shardings = dict(zip(self.labels, [leaf.sharding for leaf in leaves]))

    def as_array(self, value):
        return np.asarray(value)

    def read(self):
        return dict(self.values)

    def write(self, values):
        self.values.update((label, values[label]) for label in self.values if label in values)

    def give_up(self, values):
        """Keras has taken the values out of the variables for as long as it loops."""
        self.write(values)
        for label, variable in self._labelled.items():
            variable.assign(self.values[label])

    def is_random(self, label):
        return False

    def by_design(self, inference, changed):
        return None  # one program, with the statistics of the whole batch

    def _state(self, shardings):
        """The values as a program takes them, to which it gives their memory.

        Arguments:
            shardings: on which devices each is, by label; the others are on JAX's default device.
        """
        pairs = self.values.items()
        placed = [jax.device_put(np.array(value), shardings.get(label)) for label, value in pairs]
        return jax.tree.unflatten(self.tree, placed)

    def done(self, function):
        shardings = {} if function is self.function.undivided else self.shardings
        results, state = function(self._state(shardings), iter(self.data))
        self.values = dict(zip(self.labels, map(np.asarray, jax.tree.leaves(state))))
        return (results, state), self.named(results)

    def operations(self):
        function = self.method.made_anew(self.model)
        return products(executed(lambda: self.done(function)))

    def infer(self, inputs):
        def infer(weights, state, inputs):
            outputs, _, losses = self.model.stateless_call(
                weights, state, inputs, training=False, return_losses=True
            )
            return outputs, losses

        weights, state, *_ = self._state({})
        return jax.jit(infer)(weights, state, inputs)


class VerifiedJAXStep(keras_steps.Verified):
    """The method by which Keras makes the function of a step."""

    step = _JAXStep

    def made_anew(self, model):
        # jax.jit() keeps one program for each function, and Keras gives it the model's method: by
        # another object, or what was traced undivided would run in the place of the other.
        name = keras_steps.STEPS[self.kind]
        step = functools.partial(getattr(model, name))
        step.__name__ = name  # by which `CountedSteps` tells it
        with patching.replaced(model, **{name: step}):
            return super().made_anew(model)


# Where JAX ran the operations of a step ---------------------------------------------------------

_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%(\S+) = (.+?) ([\w-]+)\((.*)")


#: A matrix product or convolution of a compiled program, as one device executes it. Its name tells
#: where it comes from: "jit(train_step)/jvp(hidden)/dot_general", or is empty; the shapes are those
#: of the result and of the operands.
ProgramOperation = collections.namedtuple("ProgramOperation", "name shapes")


def operations(program):
    """By the name of each instruction of a program in XLA's text form: what it computes.

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

    return {name: inside(body, name) for body in everything.values() for name in body}


def executed(step):
    """Do a step whose program is new; by device, what JAX's profiler saw it execute.

    The profiler records which instruction ran on which device; what an instruction computes, the
    program tells that XLA compiled for this step.
    """
    client = jax.devices()[0].client
    before = client.live_executables()
    with recorded() as events:
        step()
    new = [e for e in client.live_executables() if all(e is not other for other in before)]
    programs = [executable.hlo_modules()[0] for executable in new]
    computed = {p.name: operations(p.to_string()) for p in programs if p.name.endswith("_step")}
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


# What each device executes, and when -------------------------------------------------------------


def profiled(devices):
    """What ``JAX.profiled()`` returns, for the configured devices."""
    return converted(recorded(), lambda events: _operations(events, devices))


@contextlib.contextmanager
def recorded():
    """Within, JAX's profiler records; gives a list, which afterwards has each event.

    With the names of plane, line and event, its start and duration, and its statistics.
    """
    events = []  # type: list
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # each call of a Python function
    with tempfile.TemporaryDirectory() as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=options)
        except RuntimeError as error:
            if "one profile" not in str(error).lower():
                raise
            raise errors.profiler_runs("jax") from error
        try:
            yield events
            jax.effects_barrier()
        finally:
            jax.profiler.stop_trace()
            for path in glob.glob(os.path.join(folder, "**", "*.xplane.pb"), recursive=True):
                profile = jax.profiler.ProfileData.from_file(path)
                for plane in profile.planes:
                    for line in plane.lines:
                        for e in line.events:
                            span = e.start_ns / 1e3, e.duration_ns / 1e3
                            events.append((plane.name, line.name, e.name, span, dict(e.stats)))


def _operations(events, devices):
    """Kernels of GPUs, which have planes of their own; of CPU devices the instructions of XLA."""
    for plane, line, name, span, statistics in events:
        gpu, place = re.match(r"/device:GPU:(\d+)", plane), None
        if gpu and line.startswith("Stream"):
            place = int(gpu.group(1))
        elif not gpu and "hlo_op" in statistics:
            place = statistics.get("device_ordinal")
        if place is not None and place < len(devices):
            yield Operation(devices[place], name, *span)
