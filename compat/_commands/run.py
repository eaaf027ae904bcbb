"""\
Run a script as it is on chosen GPUs: the variables that its backend reads are set before it
starts. What only a call inside the script can set, such as memory, is left to configure_gpu()
there, which keeps to these GPUs. Where there are fewer, a line says so.

With -n or --hosts it runs several times at once, as ranks that train together through the engine
of the backend. One that fails ends all; --max-restarts starts all again. Ctrl-C interrupts all,
which may save what they have; a second one ends them.

exit status: the script's own, or that of the rank that failed; 2 where it could not be started;
128 + N where signal N ended it (130: Ctrl-C)."""

import os
import shutil
import subprocess
import sys
import textwrap
from typing import Any, List

from .. import _ranks, errors
from .._configuration import detection, device_choice, gpu_selection
from .._configuration.settings import Settings
from .._ranks import nesting, waiting
from .._ranks.launch import messages, output, watching
from .._ranks.place import Place
from .._runtime import by_path, progress, reporting, safe_files
from ..backend import Backend
from . import (
    BACKEND,
    add_script,
    check_script,
    job_findings,
    name_of,
    number,
    reported_script,
    script_of,
)

USAGE = """\
compat run [options] script.py [its arguments]
       compat run [options] -m module [its arguments]"""
GPUS = """\
ids such as 0,2 (one number is an id, not a count), names, "free" or "free:2" for idle ones, "cpu"
for none (default: all visible ones)"""


def add_options(parser):
    text = "as so many ranks, each with one of the GPUs, that train together (1: alone)"
    ranks = number("processes, 1 or more", 1)
    parser.add_argument("-n", dest="ranks", type=ranks, metavar="N", help=text)
    text = "machines, reached by ssh, and how many ranks each may run: first:4,second:4"
    parser.add_argument("--hosts", help=text)
    parser.add_argument("--gpus", help=GPUS)
    parser.add_argument("--backend", metavar="NAME", help=BACKEND)
    text = "another interpreter, of any age; compat need not be installed there"
    parser.add_argument("--python", help=text)
    text = "how long a rank waits for the others (default: 600)"
    parser.add_argument("--timeout", metavar="SECONDS", help=text)
    text = "so many CPU devices stand in for GPUs, whatever configure_gpu() asks for"
    devices = number("devices, 1 or more", 1)
    parser.add_argument("--simulate", metavar="N", type=devices, help=text)
    text = "run every Keras model that the script compiles on all the devices, or on all ranks"
    parser.add_argument("--parallelize", action="store_true", help=text)
    text = "batch normalization uses the statistics of the whole batch, of all devices or ranks"
    parser.add_argument("--sync-batch-norm", action="store_true", help=text)
    text = "at the end, print what each device did, or each rank: was every one used?"
    parser.add_argument("--report", action="store_true", help=text)
    parser.add_argument("--report-json", metavar="FILE", help="the same, also as JSON in a file")
    text = "the same, also as a picture for a browser, in a file"
    parser.add_argument("--report-html", metavar="FILE", help=text)
    text = "the same, and what each device executed when, in a file for a browser's trace viewer"
    parser.add_argument("--timeline", metavar="FILE", help=text)
    text = "of ranks other than rank 0, show standard error only"
    parser.add_argument("--quiet", action="store_true", help=text)
    text = "append all that each rank prints to a file there, rank-0.log and so on"
    parser.add_argument("--log-dir", metavar="DIR", help=text)
    text = "start all ranks again when one fails, at most so many times (default: 0)"
    restarts = number("restarts, 0 or more", 0)
    parser.add_argument("--max-restarts", metavar="N", type=restarts, default=0, help=text)
    add_script(parser)


#: Options of ``compat run`` that many scripts have, too. Behind the script they are its own.
_OF_SCRIPTS = {"--help", "--hosts", "--gpus", "--backend", "--timeout", "--quiet"}


def prepare(options, environ):
    """Return what a script is to be started with.

    Arguments:
        options: those of the command line. ``gpus``: in the forms of ``configure_gpu(gpus=)``, as a
            text; None for all visible ones. ``backend``: its name; None for the one that Keras
            would use. ``python``: another interpreter, by its path or name; compat need not be
            installed there, and ``backend`` or ``KERAS_BACKEND`` must tell the backend. ``ranks``:
            as how many ranks. Several see all the GPUs, and each takes its own; one sees its own
            only. None: the script alone, with all of them. ``hosts``: the machines that run them,
            where GPUs are looked for only there; None: this one.
        environ: the environment as it is.

    Returns:
        The backend, the interpreter, the script's environment, and lines that tell what was
        chosen.

    Raises:
        InvalidArgumentError: ``gpus`` is not understood, or means idle ones of other machines.
        PythonNotFoundError: there is no such interpreter.
        NotInstalledError, AmbiguousBackendError: as ``configure_gpu()``.
    """
    gpus, python, hosts = options.gpus, options.python, options.hosts
    try:
        selection = gpu_selection.parse_gpus(gpus)
    except errors.InvalidArgumentError as error:
        raise errors.InvalidArgumentError(
            f"--gpus {gpus} is not understood: {error.problem}. Use one of:\n{errors.GPUS_OPTIONS}"
        ) from None
    if python is None:
        interpreter = sys.executable
        chosen, reason = detection.choose(options.backend, environ, typed=True)
        variables = dict(detection.keras_variable(chosen, environ))
    else:
        interpreter = shutil.which(os.path.expanduser(python))
        if interpreter is None:
            raise errors.PythonNotFoundError(
                f"--python={python}: there is no such program. Give the path of an interpreter, "
                "or a name that is on the PATH, such as python2.7."
            )
        chosen, reason = detection.foreseen(options.backend, environ, interpreter)
        variables = {"KERAS_BACKEND": chosen.framework}
    if hosts is None:
        where, ours, notes = _of_this_machine(chosen, selection, options, environ)
        variables.update(ours)
    else:
        where, notes = "on " + hosts, []
        if selection.kind == "free":
            raise errors.InvalidArgumentError(
                f"--gpus {gpus} with --hosts: idle GPUs cannot be found on other machines from "
                "here. Use ids that are meant on each of them, such as --gpus 0,1, or leave "
                "--gpus out."
            )
        if gpus is not None:
            variables["COMPAT_GPUS"] = gpus
    started = dict(environ)
    lines = [f"{chosen.name} ({reason}), {where}"]
    for name, value in sorted(variables.items()):
        if value is None:
            started.pop(name, None)
            lines.append("without " + name)
        elif value != environ.get(name):
            started[name] = value
            lines.append(f"{name}={value}")
    return chosen, interpreter, started, lines + notes


def _of_this_machine(chosen, selection, options, environ):
    """Return the devices that are chosen here, as a text.

    The variables that choose them; and notes.
    """
    gpus, ranks = options.gpus, options.ranks
    if ranks == 1:
        place = Place(0, 1, 0, 1, "compat run")
        devices = device_choice.choose_for_rank(selection, environ, place)
    else:
        devices = device_choice.choose(selection, None, environ)
    settings = Settings(devices)
    notes = list(devices.problems) + chosen.overruled(settings, environ)
    if devices.shortage and options.simulate is None:
        request = "every GPU" if gpus is None else "--gpus " + gpus
        notes.append(errors.fewer((request, devices.shortage[1]), str(devices), strict=False))
        if gpus and gpus.isdecimal():
            notes.append(
                f"--gpus {gpus} means the GPU with id {gpus}; ids count from 0. Several are named "
                "one by one, such as --gpus 0,1, and --gpus cpu means none."
            )
    alone = ranks in (None, 1)
    variables = chosen.environ(settings, environ) if alone else devices.environ(environ)
    return str(devices), dict(variables, **devices.trusting(environ)), notes


def execute(options: Any) -> int:
    """Become the script, or start it as several ranks.

    Alone its output, its signals and its exit status are its own. Of several ranks the output
    has the rank in front, and one that fails ends all.

    Returns:
        The exit status of several ranks: that of the one that failed.

    Raises:
        InvalidArgumentError: an option is not understood or needs ranks, there is no such script,
            or a file cannot be written.
        RankError: another launcher has started several processes that would start ranks.
        UnsupportedError: the backend has no ranks, or cannot record a timeline.
        as ``prepare()``.
    """
    script = script_of(options)
    if not script:
        options.parser.error("a script is needed, or -m and a module")
    _fill_hosts(options)
    ranks, hosts = options.ranks, options.hosts
    files = _files_of(options)
    report_json, report_html, timeline = files
    report = options.report or any(files)
    _check_there_are_ranks(options)
    # Another interpreter may be one in a container, with files of its own.
    check_script(script, options.python is not None or os.path.exists(script[0]))
    requested, of_others = _requested(options)
    chosen, interpreter, environ, lines = prepare(options, requested)
    if timeline is not None and type(chosen).profiled is Backend.profiled:
        chosen.profiled()  # an error: it has none
    if options.simulate is not None:
        lines.append(f"COMPAT_SIMULATE={options.simulate}: CPU devices stand in for GPUs")
    if options.sync_batch_norm:
        lines.append("COMPAT_SYNC_BATCH_NORM=1: batch normalization is that of the whole batch")
    if of_others:
        lines.append(f"without {', '.join(of_others)}: the place of a process in another job")
    launcher: List[str] = []
    if ranks == 1:
        lines.append("1 rank: the script alone")
    elif ranks:
        if report or options.python is None:
            environ[messages.OUTCOME_VARIABLE] = "1"  # of each rank, on whichever machine
        launcher = chosen.launcher(_ranks.Job(ranks, interpreter, environ, hosts))
        lines.append(f"{ranks} ranks{_shown(launcher, hosts)}")
    other = by_path.shadow(os.path.dirname(os.path.realpath(script[0])), environ)
    if other:
        lines.append(errors.shadowed(name_of(script), other))
    for line in lines + _misplaced(script, options.parser):
        output.say("compat run: " + line)
    environ.update(gpu_selection.hand_over_claims())
    program = _program(options, chosen, interpreter, environ, files, bool(other))
    if not launcher:
        if options.simulate is not None and progress.is_wanted():
            output.say(f"compat run: starting {name_of(script)}; imports may take some seconds")
        os.execve(interpreter, program, environ)
    command = launcher + by_path.command("_ranks.launch.rank_process") + program
    logs = None if options.log_dir is None else output.Logs(options.log_dir, ranks, script)
    status, outcomes = watching.launch(
        command, environ, ranks, hosts is not None, options.quiet, logs, options.max_restarts
    )
    for line in job_findings.findings(outcomes, ranks, report, status != 0):
        output.say("compat run: " + line)
    if report:
        absent = sorted(set(range(ranks)) - set(outcomes))
        joined = reporting.joined([outcome["report"] for outcome in outcomes.values()], absent)
        reported_script.show(joined, report_json, report_html)
    return status


def _program(options, chosen, interpreter, environ, files, is_shadowed):
    """Return the command of the script, in ``reported_script`` where something is done around it.

    Arguments:
        options: those of the command line.
        chosen: the backend.
        interpreter: the path of the script's.
        environ: its environment.
        files: as ``_files_of`` returns them.
        is_shadowed: whether the script has another module named compat, which it would not find
            in ``reported_script``.
    """
    script, report = script_of(options), options.report or any(files)
    is_rank = options.ranks not in (None, 1)
    is_watched = options.simulate is not None or is_rank and not is_shadowed
    if options.parallelize or report:
        if options.python is not None:
            option = "--parallelize" if options.parallelize else "--report"
            _check_version(interpreter, environ, option)
    elif not is_watched or options.python is not None:
        return [interpreter] + script
    program = by_path.command("_commands.reported_script")[1:]
    program += ["report" * report, chosen.name * options.parallelize]
    return [interpreter] + program + [path or "" for path in files] + script


def _shown(launcher, hosts):
    """Return how ranks are started, as the end of a line; of compat's own launcher only where."""
    own = by_path.command("_ranks.launch.starter")
    for place in range(len(launcher)):
        if launcher[place : place + len(own)] == own:
            variables = [each for each in launcher[:place] if "=" in each]
            return " on " + ", ".join([hosts or "this machine"] + variables)
    # mpirun passes on the variables that are named to it.
    return ": " + textwrap.shorten(" ".join(launcher), 400, placeholder=" ...")


def _files_of(options):
    """Return the files of a report and of a timeline, which can be written; None: no file."""
    files = []
    for option in ("--report-json", "--report-html", "--timeline"):
        path = getattr(options, option[2:].replace("-", "_"))
        try:
            if path is not None:
                safe_files.check_writable(path)
        except OSError as error:
            raise errors.not_writable(f"{option} {path}", error) from error
        files.append(path and os.path.abspath(path))  # the script may change its folder
    timeline = files[-1]
    if timeline and options.ranks not in (None, 1) and not safe_files.is_replaced(timeline):
        raise errors.InvalidArgumentError(
            f"--timeline {timeline}: each rank writes a file of its own, with its number in the "
            "name, and this is not a regular file. Name one."
        )
    return files


def _fill_hosts(options):
    """Settle how many ranks there are, and where; refuse to start ranks within ranks."""
    if options.hosts is not None:
        options.ranks, options.hosts = _ranks.fill_hosts(options.hosts, options.ranks)
        if options.ranks == 1:
            raise errors.InvalidArgumentError(
                f"--hosts {options.hosts} makes one rank, which has nobody to train with. Give the "
                "machines room for 2 or more, such as --hosts first:4,second:4, or run the script "
                "on that machine, without --hosts."
            )
    if options.ranks not in (None, 1):
        request = f"-n {options.ranks}" if options.hosts is None else f"--hosts {options.hosts}"
        nesting.refuse(os.environ, request)


def _requested(options):
    """Return the environment with the options' variables, and names that ranks do not get."""
    environ = dict(os.environ)
    if options.timeout is not None:
        environ["COMPAT_TIMEOUT"] = options.timeout
    if options.simulate is not None:
        environ["COMPAT_SIMULATE"] = str(options.simulate)
    if options.sync_batch_norm:
        environ["COMPAT_SYNC_BATCH_NORM"] = "1"
    if options.ranks not in (None, 1):
        environ.pop("COMPAT_ALONE", None)  # several are asked for just now
        environ["COMPAT_RESTART"] = "0"  # launchers hand over variables that are set already
    waiting.timeout(environ, "COMPAT_TIMEOUT" if options.timeout is None else "--timeout")
    return (environ, []) if options.ranks is None else nesting.set_aside(environ)


def _misplaced(script, parser):
    """Return lines about options that were probably meant for ``compat run``, with its parser."""
    named = dict.fromkeys(argument.partition("=")[0] for argument in script[1:])
    return [
        f"{option} comes after the script's name, so the script gets it; compat run's own "
        f"{option} comes before that name"
        for option in named
        if option.startswith("--") and option in parser._option_string_actions.keys() - _OF_SCRIPTS
    ]


def _check_there_are_ranks(options):
    """Refuse options that only ranks have. (--quiet is not one: a script alone is its rank 0.)"""
    values = {"--log-dir": options.log_dir is not None, "--max-restarts": options.max_restarts}
    for option in values:
        if values[option] and options.ranks in (None, 1):
            raise errors.InvalidArgumentError(
                f"{option} is for a script that runs as several ranks, and this one runs alone. "
                f"Add -n with 2 or more, or --hosts, or leave {option} out."
            )


def _check_version(interpreter, environ, option):
    """Refuse an interpreter that is too old for compat, which is to run inside of it."""
    program = "import sys; sys.stdout.write('.'.join(map(str, sys.version_info[:3])))"
    result = subprocess.run([interpreter, "-c", program], env=environ, stdout=subprocess.PIPE)
    version = result.stdout.decode()
    if result.returncode or tuple(map(int, version.split(".")[:2])) < (3, 6):
        version = version or "of no known version"
        raise errors.UnsupportedError(
            f"{option} runs inside the script's interpreter, which must be Python 3.6 or later; "
            f"{interpreter} is Python {version}. Leave {option} out, or use a newer one."
        )
