"""The grammars of ``gpus=``, ``memory=``, ``--hosts`` and CUDA_VISIBLE_DEVICES, on random texts.

    COMPAT_TEST_CASES=10000 python -m pytest tests/test_grammars.py

Half of the texts mean something: they are written from a value, in a random one of the spellings,
and reading them has to give that value. The others are made of pieces of such texts and of what
people mistype. A failure names the number of its case.
"""

import os
import random
import re

import pytest

import compat
from compat import _devices, _discovery, _ranks
from compat._selection import Selection, parse_gpus
from compat._settings import Memory, parse_memory
from compat._visible import visible_entries

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
    """What a grammar makes of it; None if it refuses, saying what it was given."""
    try:
        return parse(given)
    except compat.InvalidArgumentError as error:
        assert shown in str(error)


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
    """A value of ``gpus=``, and the selection that it means."""
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
            + draw.choice(["node{}", "gpu-{}.example.org", "10.0.0.{}", "_x{}"]).format(n),
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
    return [_discovery.GPU(n, "GPU-{}{:07d}".format("abcdef01"[n], n), "x") for n in range(size)]


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
            return _devices.choose(selection, None, environ, lambda: machine)  # noqa: B023

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
