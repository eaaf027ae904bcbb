"""The grammars of arguments, and of the variables of launchers and of CUDA, on random texts.

    COMPAT_TEST_CASES=10000 python -m pytest tests/test_grammars.py

Half of the texts mean something: they are written from a value, in a random one of the spellings,
and reading them has to give that value. The others are made of pieces of such texts and of what
people mistype. A failure names the number of its case.
"""

import json
import os
import random
import re
import time
import warnings

import pytest

import compat
from compat import _ranks, errors
from compat._configuration import device_choice, discovery, settings
from compat._configuration.discovery import visible_entries
from compat._configuration.gpu_selection import Selection, parse_gpus
from compat._configuration.settings import Memory, parse_memory
from compat._ranks import launchers, rendezvous, waiting
from compat._ranks.place import Place
from compat._ranks.tf_config import evaluator_in

CASES = int(os.environ.get("COMPAT_TEST_CASES", "300"))

# Longer than Python converts to an integer (sys.set_int_max_str_digits, since 3.10.7).
LONG = "9" * 5000
PIECES = [
    "0", "1", "2", "03", "-1", "-", "+1", "1.5", "1e3", "1e999", "nan", "inf", "1_0", "\u0663",
    "\xb2", LONG, ",", ",", ":", ".", "@", " ", "\t", "\n", "\0", ";", "/", "#", "cpu", "none",
    "all", "auto", "free", "GPU-", "GPU-a1", "MIG-", "MIG-c7", "MIG-GPU-a1/1/0", "gpu", "cuda:0",
    "grow", "growth", "GiB", "MiB", "kb", "B", "b", "%", "first", "second", "localhost",
    "127.0.0.1", "10.0.0.4", "::1", "\xe9", "GPU-a1,GPU-b2", "$(id)", "%s", "{}", "{0}", "\\",
]  # fmt: skip
OTHERS = [
    True, False, -2, -1, 0, 1, 2, 10**30, 0.5, -0.5, 2.0, float("nan"), float("inf"), b"0", {}, {0},
    object, (), [], [[]], [None], [0.0], [True], ["0", 0], range(2), range(0, 4, 2), 1j,
]  # fmt: skip


def cases(salt):
    for number in range(CASES):
        yield number, random.Random("{} {}".format(salt, number))


def noise(draw):
    return "".join(draw.choice(PIECES) for _ in range(draw.randint(0, 5)))


def spaced(draw, text):
    return draw.choice(["", " ", "\t"]) + text + draw.choice(["", " ", "\n"])


def cased(draw, text):
    return "".join(draw.choice([c.lower(), c.upper()]) for c in text)


def read(parse, given, shown):
    """Return the result of a grammar, or None if it refuses and names its input."""
    try:
        return parse(given)
    except compat.InvalidArgumentError as error:
        assert shown in error.args[0]  # as a text it has no more than 2,000 characters


# gpus= ----------------------------------------------------------------------------------------


def names(draw, kind):
    return [
        kind + "".join(draw.choice("0123456789abcdef-") for _ in range(12)) + str(n)
        for n in range(draw.randint(1, 4))
    ]


def some_ids(draw):
    if draw.random() < 0.5:
        return draw.sample(range(16), draw.randint(1, 8))
    return names(draw, draw.choice(["GPU-", "MIG-"]))


def written_gpus(draw):
    """Draw a value of ``gpus=``, and return it with the selection that it means."""
    kind = draw.choice(["all", "count", "ids", "free", "none"])
    if kind == "all":
        return draw.choice([None, -1, "-1", spaced(draw, cased(draw, "all"))]), Selection("all")
    if kind == "none":
        return draw.choice([0, [], (), spaced(draw, cased(draw, "cpu"))]), Selection("none")
    count = draw.randint(1, 999)
    if kind == "count":
        return count, Selection("count", count)
    if kind == "free":
        if draw.random() < 0.2:
            return spaced(draw, cased(draw, "free")), Selection("free")
        return spaced(draw, "{}:{}".format(cased(draw, "free"), count)), Selection("free", count)
    ids = some_ids(draw)
    text = ",".join(spaced(draw, str(wanted)) for wanted in ids)
    return draw.choice([ids, tuple(ids), text, list(map(str, ids))]), Selection("ids", ids=ids)


def test_gpus_are_what_was_written():
    for number, draw in cases("gpus"):
        given, meant = written_gpus(draw)
        assert parse_gpus(given) == meant, (number, given)


def test_no_gpus_but_those_of_the_grammar():
    for number, draw in cases("gpus, noise"):
        given = draw.choice([noise(draw), draw.choice(OTHERS), [noise(draw), noise(draw)]])
        selection = read(parse_gpus, given, "gpus={!r} is not understood".format(given))
        if selection is None:
            continue
        again = eval(str(selection)[len("gpus=") :], {})  # how reports show it: what can be typed
        assert parse_gpus(again) == selection, (number, given)
        assert len(set(selection.ids)) == len(selection.ids), (number, given)
        for wanted in selection.ids:
            text = str(wanted)
            assert re.match(r"(\d+|(GPU|MIG)-[^\s,]*)\Z", text), (number, given)


# memory= --------------------------------------------------------------------------------------

UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


def test_memory_is_what_was_written():
    for number, draw in cases("memory"):
        unit = draw.choice(sorted(UNITS))
        count = draw.randint(1, 4096)
        fraction = draw.randint(1, 1000) / 1000.0
        text = "{}{}{}".format(count, draw.choice(["", " "]), cased(draw, unit))
        for given, meant in [
            (spaced(draw, text), Memory(size=count * UNITS[unit])),
            (fraction, Memory(fraction=fraction)),
            (spaced(draw, cased(draw, "grow")), Memory(grow=True)),
        ]:
            assert parse_memory(given) == meant, (number, given)
        megabytes = Memory(size=count * 2**20)  # how reports show it
        assert parse_memory(str(megabytes).split(" per ")[0]) == megabytes, number


def test_no_memory_but_that_of_the_grammar():
    for number, draw in cases("memory, noise"):
        given = draw.choice([noise(draw), draw.choice(["", "1", "2."]) + noise(draw)])
        given = draw.choice([given, draw.choice(OTHERS)])
        memory = read(parse_memory, given, "memory={!r} is not understood".format(given))
        if memory is not None:
            asked = [memory.grow, memory.fraction is not None, memory.size is not None]
            assert asked.count(True) == 1, (number, given)
            assert memory.grow or (0 < (memory.fraction or memory.size) < float("inf"))
            assert memory.size is None or re.search(r"\d\.?\s*[kmg]?i?b", given.lower()), given
            assert str(memory)


# --hosts --------------------------------------------------------------------------------------


def written_hosts(draw):
    size = draw.randint(1, 6)
    hosts = [
        (
            draw.choice(["", "ann@", "j.doe-2@"])
            + draw.choice(["node{}", "gpu-{}.example.org", "g{}.a.", "10.0.0.{}", "_x{}"]).format(
                n
            ),
            draw.randint(1, 9),
        )
        for n in range(size)
    ]
    text = ",".join(
        spaced(draw, name if slots == 1 and draw.random() < 0.5 else "{}:{}".format(name, slots))
        for name, slots in hosts
    )
    return text, hosts


def test_hosts_are_what_was_written():
    for number, draw in cases("hosts"):
        text, hosts = written_hosts(draw)
        assert _ranks.parse_hosts(text) == hosts, (number, text)
        room = sum(slots for _, slots in hosts)
        for wanted in (None, draw.randint(1, room)):
            size, filled = _ranks.fill_hosts(text, wanted)
            assert size == (wanted or room)
            found = _ranks.parse_hosts(filled)
            # The first machines, each full but the last.
            assert sum(slots for _, slots in found) == size
            assert found[:-1] == hosts[: len(found) - 1], (number, text)
            assert found[-1][0] == hosts[len(found) - 1][0]
            assert found[-1][1] <= hosts[len(found) - 1][1]
            assert _ranks.fill_hosts(filled, size) == (size, filled)
        with pytest.raises(compat.InvalidArgumentError) as error:
            _ranks.fill_hosts(text, room + 1)
        assert "--hosts {} has room for {}.".format(text, room) in str(error.value)


def test_no_hosts_but_those_of_the_grammar():
    for number, draw in cases("hosts, noise"):
        text = draw.choice([noise(draw), written_hosts(draw)[0] + noise(draw)])
        for parse in (_ranks.parse_hosts, lambda text: _ranks.fill_hosts(text, None)):
            read(parse, text, "--hosts {}".format(text))
        hosts = read(_ranks.parse_hosts, text, text)
        if hosts is not None:
            again = ",".join("{}:{}".format(*host) for host in hosts)
            assert _ranks.parse_hosts(again) == hosts, (number, text)
            # ssh and shells get them: nothing that either would take for something else.
            assert not re.search(r"[\s;$(){}'\"\\/#%]|(^|,)-", again), (number, text)


# CUDA_VISIBLE_DEVICES ---------------------------------------------------------------------------


def a_machine(draw):
    if draw.random() < 0.2:
        return None
    size = draw.randint(1, 8)
    return [discovery.GPU(n, "GPU-{}{:07d}".format("abcdef01"[n], n), "x") for n in range(size)]


def a_value(draw, machine):
    size = len(machine or "12345678")
    kind = draw.choice(["unset", "ids", "names", "noise"])
    if kind == "unset":
        return None
    if kind == "noise":
        return noise(draw).replace("\0", "")
    chosen = draw.sample(range(size), draw.randint(0, size))
    if kind == "names" and machine:
        return ",".join(machine[n].uuid for n in chosen)
    return ",".join(map(str, chosen))


def test_visible_entries_are_read_as_they_are_corrected():
    for number, draw in cases("visible"):
        machine = a_machine(draw)
        value = a_value(draw, machine)
        environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        entries, problems = visible_entries(environ, machine)
        assert (entries is None) == (value is None)
        for problem in problems:
            assert 'CUDA_VISIBLE_DEVICES="{}"'.format(value) in problem, (number, value)
        if entries is None:
            continue
        if not problems and "-1" not in value:
            assert ",".join(entries) == value.strip(), (number, value)
        again = ",".join(entries)
        assert visible_entries({"CUDA_VISIBLE_DEVICES": again}, machine) == (entries, [])


def test_a_selection_selects_itself_again():
    for number, draw in cases("choose"):
        machine = a_machine(draw)
        value = a_value(draw, machine)
        environ = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
        before = dict(environ)
        selection = Selection("count", draw.randint(1, 9))
        if draw.random() < 0.5:
            ids = some_ids(draw) + (some_ids(draw) if draw.random() < 0.2 else [])
            ids = [wanted for wanted in ids if not str(wanted).startswith("MIG-")]
            if machine and draw.random() < 0.5:
                ids = [machine[n].uuid for n in draw.sample(range(len(machine)), 1)]
            selection = parse_gpus(sorted(set(ids), key=str))
        if draw.random() < 0.2:
            selection = Selection("all")

        def choose(selection, environ):
            return device_choice.choose(selection, None, environ, lambda: machine)  # noqa: B023

        try:
            devices = choose(selection, environ)
        except compat.InvalidArgumentError as error:
            assert str(list(selection.ids)) in str(error), (number, selection, value)
            continue
        finally:
            assert environ == before
        if devices.undecided is not None:
            continue
        environ.update(devices.environ(environ))
        if devices.gpus:
            # CUDA shows a process these GPUs, all of them, in this order.
            shown = environ["CUDA_VISIBLE_DEVICES"]
            assert visible_entries(environ, machine) == (list(devices.gpus), []), (number, shown)
            assert devices.are_shown_by(environ)
        again = choose(Selection("all"), environ)
        assert again == devices, (number, str(selection), value)
        assert again.environ(environ) == {}, (number, environ)


# Variables of launchers -------------------------------------------------------------------------

# What launchers set, to which some of the other values below come.
WHOLE = [
    dict(zip(names.split(), ["1", "2", "1", "2"])) for _, names in launchers.LAUNCHERS
] + [
    {
        "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_LOCALID": "0",
        "SLURM_NODEID": "1", "SLURM_STEP_TASKS_PER_NODE": "2(x2)", "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[07-08]",
    },
    {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0"},
    {"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "a:1"},
    {
        "KERAS_DISTRIBUTION_PROCESS_ID": "1", "KERAS_DISTRIBUTION_NUM_PROCESSES": "2",
        "KERAS_DISTRIBUTION_JOB_ADDRESSES": "a:1,b:1",
    },
    {"COORDINATOR_ADDRESS": "a", "COORDINATOR_PORT": "1", "PROCESS_ID": "1", "NUM_PROCESSES": "2"},
    {"SM_HOSTS": '["a", "b"]', "SM_CURRENT_HOST": "b"},
]  # fmt: skip
OTHER_NAMES = (
    "SLURM_STEP_GPUS SLURM_GPUS_ON_NODE MASTER_ADDR MASTER_PORT NODE_RANK NPROC_PER_NODE "
    "PET_NPROC_PER_NODE PET_NNODES TORCHELASTIC_USE_AGENT_STORE PMIX_NAMESPACE PALS_APID "
    "OMPI_MCA_orte_hnp_uri MPIRUN_ID COMPAT_ALONE COMPAT_RENDEZVOUS COMPAT_TIMEOUT "
    "COMPAT_SIMULATE COMPAT_VERIFY CUDA_VISIBLE_DEVICES CUDA_DEVICE_ORDER HIP_VISIBLE_DEVICES "
    "ROCR_VISIBLE_DEVICES TF_CONFIG CLUSTER_SPEC SM_HOSTS"
).split()
VALUES = [
    "0", "1", "2", "3", "4", "8", "-1", "", " ", "1.5", "1e400", "NaN", "inf", "True", LONG,
    "-" + LONG, "1" * 4000, "\u0663", "\xb2", "\udcff", "0,1", "0," * 30000, "2(x3),1", "1:4",
    "2(x999999999)", "2(x", "2(x)", "(x2)", "a:1,b:2", "node1:29500", "node[01-04]", "[::1]:1",
    "localhost", "node1", "a" * 100000, "{", "[" * 60000, '{"a":' * 20000, "null", "[]", "{}",
    "[1, 2]", '["a", "b"]', '"ab"', ",".join(map(str, range(20000))),
]  # fmt: skip
JSON = [
    None, True, -1, 0, 1, 2, 1.5, float("nan"), float("inf"), 10**400, "", "0", "1", "x", "a:1",
    "chief", "worker", "workerpool0", "workerpool1", "workerpool2", [], {}, [[]], [None], ["a:1"],
    ["a:1", "b:1"], ["h:1"] * 20000, {"0": "a:1", "1": "b:1"}, {"1": "a:1"}, {"\xb2": "a"},
]  # fmt: skip


def a_cluster(draw):
    """Draw a description of a cluster, mostly a correct one."""
    kinds = draw.choice([["chief", "worker"], ["workerpool0", "workerpool1"]])
    task = {"type": draw.choice(kinds), "index": 0}
    cluster = {kind: ["{}:1".format(kind)] for kind in kinds}
    config = {"cluster": cluster, "task": task}
    for part in draw.sample([config, cluster, cluster, task], draw.randint(0, 2)):
        part[draw.choice(sorted(part) + ["ps", "evaluator", "workerpool2"])] = draw.choice(JSON)
    return {"TF_CONFIG" if kinds[0] == "chief" else "CLUSTER_SPEC": json.dumps(config)}


def an_environment(draw):
    """Draw some launcher's variables, mostly correct ones, and unrelated ones."""
    environ = dict(draw.choice([draw.choice(WHOLE), a_cluster(draw)]))
    names = draw.sample(sorted(environ), draw.choice([0, 0, 1, 1, 2]) % (len(environ) + 1))
    for name in names + draw.sample(OTHER_NAMES, draw.randint(0, 3)):
        environ[name] = draw.choice(VALUES)
    return environ


def outcomes(environ):
    """Return the result of each call for an environment: a value, or an error of compat."""

    def chosen():
        place = launchers.launched(environ)
        if place is None:
            return device_choice.choose(Selection("all"), None, environ, lambda: [])
        devices = device_choice.choose_for_rank(Selection("all"), environ, place, lambda: [])
        return devices.problems + [rendezvous.find_rendezvous(place, environ)]

    for call in (
        launchers.launched, evaluator_in, waiting.timeout, settings.simulated_from_outside,
        lambda environ: settings.parse_verify(None, environ, 0), lambda environ: chosen(),
        lambda environ: visible_entries(environ, [discovery.GPU(0, "GPU-a1", "x")]),
    ):  # fmt: skip
        try:
            yield call(environ)
        except compat.CompatError as error:
            yield error


def test_environments_are_read_or_refused():
    """Soon, and in a message that nobody has to scroll back for."""
    for number, draw in cases("environments"):
        environ = an_environment(draw)
        before = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for outcome in outcomes(environ):
                if isinstance(outcome, compat.CompatError):
                    assert 40 < len(str(outcome)) < 2000, (number, environ)
                if isinstance(outcome, Place):
                    assert 0 <= outcome.rank < outcome.size or outcome.rank == -1, number
                    assert 0 <= outcome.local_rank < outcome.local_size <= max(1, outcome.size)
        assert time.process_time() - before < 1, (number, environ)


def test_a_long_value_leaves_a_message_short():
    error = compat.RankError("begin " + LONG + " end")
    cut = "begin {} ... (3110 characters left out) ... {} end".format("9" * 944, "9" * 946)
    assert (str(error), errors.shortened("9" * 1900)) == (cut, "9" * 1900)
