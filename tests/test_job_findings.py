"""Jobs of ranks that gain nothing, or fail: all that ``compat run -n`` prints of them.

The backend of the scripts is tests/plugin.
"""

import json
import os
import re
import sys
import traceback

import pytest
from conftest import ROOT
from outcomes import ended

from compat._commands import job_findings, reported_script, saved_files
from compat._ranks.launch import messages, output, watching
from compat._ranks.launch.messages import Ended

BEGIN = (
    "compat run: numpy (--backend numpy was asked for), CPU, unless the framework lists GPUs\n"
    "compat run: 2 ranks on this machine\n"
)
APART = (
    "so the 2 ranks trained nothing together: each has run all of the script by itself."
)  # fmt: skip
PATH = os.pathsep.join([ROOT, os.path.join(ROOT, "tests", "plugin")])
FAILING = """\
import compat
compat.configure_gpu()
if compat.rank():
    import time; time.sleep(60)
"""
OF_LIST = (
    "NotAModelError: parallelize() takes a Keras model, a model of the backend's own kind, or a "
    "function that builds one; it was given 'builtins.list'.\n"
)


@pytest.fixture
def run(tmp_path):
    def run(text, *options):
        """Return the status, the output and the errors of a script of this text."""
        script = tmp_path / "train.py"
        script.write_text(text)
        command = [sys.executable, "-m", "compat", "run", "--backend=numpy", *options, script]
        return ended(command, {"PYTHONPATH": PATH})

    return run


def outcome(**others):
    """Return what the script of a rank leaves that has trained with the others."""
    left = {"host": "node1", "together": True, "refused": {}, "saved": [], "report": None}
    return dict(left, parallelizes_compiled=False, **others)


def apart(**others):
    return dict(outcome(), together=False, **others)


@pytest.mark.parametrize("configures", ["", "import compat; compat.configure_gpu()"])
def test_ranks_that_trained_nothing_together_are_reported_when_the_job_ends(run, configures):
    assert run(configures, "-n", "2") == (
        0,
        "",
        BEGIN + "compat run: no model was given to compat.parallelize(), " + APART + " With "
        "--parallelize, its Keras models train together.\n",
    )


@pytest.mark.parametrize(
    "text",
    [
        "import horovod",
        "import os; os.environ['TF_CONFIG'] = '{}'\n"
        "class MultiWorkerMirroredStrategy: pass\n"
        "strategy = MultiWorkerMirroredStrategy()",
    ],
    ids=["library", "strategy"],
)
def test_a_script_may_have_its_own_communication(run, tmp_path, text):
    (tmp_path / "horovod.py").write_text("")
    assert run(text, "-n", "2") == (0, "", BEGIN)


def test_ranks_with_a_report_are_told_so_once(run):
    status, _, err = run("", "-n", "2", "--report")
    assert (status, err) == (
        0,
        BEGIN + "compat run: what each device did\n"
        "rank  rows  in training  steps\n"
        "   0     0            0      0\n"
        "   1     0            0      0\n"
        "No batch was counted: no model was given to compat.parallelize(), so the ranks\n"
        "trained nothing together.\n",
    )


def test_what_was_given_or_compiled_is_told():
    (said,) = job_findings.findings(
        {0: apart(refused={"net": "UnsupportedError"}), 1: apart(refused={"b": "RankError"})},
        2,
        False,
        False,
    )
    failed = "compat.parallelize() failed for 'net' and 1 other (UnsupportedError), "
    assert said == failed + APART
    of_ranks = {rank: dict(apart(), parallelizes_compiled=True) for rank in range(2)}
    (said,) = job_findings.findings(of_ranks, 2, False, False)
    assert said == "no model was compiled or given to compat.parallelize(), " + APART
    assert not job_findings.findings({0: apart(), 1: outcome()}, 2, False, False)
    assert not job_findings.findings({0: apart()}, 2, False, False)  # nothing is known of rank 1


def test_files_that_ranks_have_overwritten_are_named():
    """Only those of one machine, whose folders others need not share; also where the job fails."""

    def said(*outcomes):
        return job_findings.findings(dict(enumerate(outcomes)), len(outcomes), False, False)

    text = (
        "ranks 0 and 1 both save to /a/net.h5: each overwrites what another one has saved, or "
        "finds the file locked. Save under compat.is_chief(). Keras models that were given to "
        "compat.parallelize() are saved by rank 0 alone."
    )
    first = outcome(saved=["/a/net.h5", "/b"])
    assert said(first, outcome(saved=["/a/net.h5"])) == [text]
    assert said(first, first, first) == [
        text.replace("0 and 1 both", "0, 1 and 2 all").replace(
            "net.h5:", "net.h5 and 1 other file:"
        )
    ]
    elsewhere = dict(outcome(saved=["/a/net.h5"]), host="node2")
    assert said(first, elsewhere) == said(first, outcome()) == []


def test_a_script_that_fails_before_parallelize_gets_no_advice(run):
    """The traceback begins in the script, alone and in a rank, and stands there once."""
    shown = (
        "Traceback (most recent call last):\n"
        '  File "{}train.py", line 5, in <module>\n'
        '    raise ValueError("no data")\n'
        "ValueError: no data\n"
    )
    text = FAILING + 'raise ValueError("no data")\n'
    status, out, err = run(text, "-n", "2")
    said = "compat run: rank 0 of 2 failed with exit status 1; the others were ended.\n"
    assert (status, out) == (1, "")
    assert re.sub('File ".*/', 'File "', err) == BEGIN + said + shown.format("")
    status, out, err = run(text, "--simulate", "2")
    line = "compat run: COMPAT_SIMULATE=2: CPU devices stand in for GPUs\n"
    begin = BEGIN[: BEGIN.index("\n") + 1] + line
    assert re.sub('File ".*/', 'File "', err) == begin + shown.format("")


def test_what_notes_where_models_are_saved_is_not_in_a_traceback():
    names, seen = {}, []
    exec(compile("def save(f): f()", saved_files.__file__, "exec"), names)

    def hook(kind, error, trace):
        seen.extend(frame.filename for frame in traceback.extract_tb(trace))

    try:
        names["save"](lambda: 1 / 0)
    except ZeroDivisionError as error:
        reported_script._without_own_frames(hook, None)(type(error), error, error.__traceback__)
    assert seen == [__file__] * 2


def test_a_report_says_that_parallelize_has_failed(run):
    text = FAILING + "compat.parallelize([1])\n"
    status, out, err = run(text, "-n", "2", "--report")
    assert (status, out) == (1, "")
    assert err.count("Traceback") == err.count(OF_LIST) == 1
    assert err.endswith(
        "compat.errors." + OF_LIST + "compat run: what each device did\n"
        "rank  device  rows  in training  steps\n"
        "   0  cpu:0      0            0      0\n"
        "No batch was counted: compat.parallelize() failed for 'list' (NotAModelError).\n"
        "No report came from rank 1: ended by a signal, or by its machine.\n"
    )


def test_the_same_traceback_of_several_ranks_is_shown_once(capsys, tmp_path):
    """But for the numbers of ranks; another one is shown as well. Logs have all of them."""
    folder = str(tmp_path / "logs")
    logs = output.Logs(folder, 3, ["train.py"])
    ranks = watching.WatchedRanks(3, output.Output(logs=logs))
    tracebacks = {
        rank: [
            "Traceback (most recent call last):",
            '  File "train.py", line {}, in <module>'.format(9 if rank == 2 else 5),
            "ValueError: bad data on rank {}".format(rank),
        ]
        for rank in range(3)
    }
    for rank, lines in tracebacks.items():
        for line in lines:
            for message in messages.encoded(rank, messages.ERR, line, messages.HELD):
                ranks.hear(message.rstrip(b"\n"))
    for rank in (1, 0, 2):
        end = json.dumps(Ended(rank, 1, tracebacks[rank]))
        for message in messages.encoded(rank, messages.END, end):
            ranks.hear(message.rstrip(b"\n"))
    assert capsys.readouterr().err == ""
    assert ranks.conclude(1) == 1
    assert capsys.readouterr().err == "\n".join(
        ["[2] " + line for line in tracebacks[2]]
        + [
            "compat run: rank 1 of 3 failed with exit status 1; the others were ended.",
            "compat run: rank 0 failed with the same error.",
        ]
        + tracebacks[1]
        + [""]
    )
    with open(os.path.join(folder, "rank-0.log")) as file:
        assert file.read().splitlines() == tracebacks[0]


def test_a_traceback_is_not_held_back_for_long(capsys):
    """A rank may have threads that do not end, and others may never come to an end."""
    ranks = watching.WatchedRanks(2)
    for message in messages.encoded(1, messages.ERR, "ValueError: bad", messages.HELD):
        ranks.hear(message.rstrip(b"\n"))
    ranks.show_held(watching.HELD)
    assert capsys.readouterr().err == ""
    ranks.show_held()
    assert capsys.readouterr().err == "[1] ValueError: bad\n"
