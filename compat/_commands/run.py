"""\
Run a script as it is on chosen GPUs: the variables that its backend reads are set before it
starts. What only a call inside the script can set, such as memory, is left to configure_gpu()
there, which keeps to these GPUs. Where there are fewer, a line says so.

With -n or --hosts it runs several times at once, as ranks that train together through the engine
of the backend. One that fails ends all; --max-restarts starts all again. Ctrl-C interrupts all,
which may save what they have; a second one ends them.

exit status: the script's own, or that of the rank that failed; 2 where it could not be started;
128 + N where signal N ended it (130: Ctrl-C)."""

from . import BACKEND, add_script, number, ranks, script_of, script_usage

HELP = "run a script on chosen GPUs"
USAGE = script_usage("run")
GPUS = """\
ids such as 0,2 (one number is an id, not a count), names, "free" or "free:2" for idle ones, "cpu"
for none (default: all visible ones)"""


def add_options(parser):
    told = "as so many ranks, each with one of the GPUs, that train together (1: alone)"
    parser.add_argument("-n", dest="ranks", type=ranks, metavar="N", help=told)
    told = "machines, reached by ssh, and how many ranks each may run: first:4,second:4"
    parser.add_argument("--hosts", help=told)
    parser.add_argument("--gpus", help=GPUS)
    parser.add_argument("--backend", metavar="NAME", help=BACKEND)
    told = "another interpreter, of any age; compat need not be installed there"
    parser.add_argument("--python", help=told)
    told = "how long a rank waits for the others (default: 600)"
    parser.add_argument("--timeout", metavar="SECONDS", help=told)
    told = "so many CPU devices stand in for GPUs, whatever configure_gpu() asks for"
    devices = number("devices, 1 or more", 1)
    parser.add_argument("--simulate", metavar="N", type=devices, help=told)
    told = "run every Keras model that the script compiles on all the devices, or on all ranks"
    parser.add_argument("--parallelize", action="store_true", help=told)
    told = "at the end, print what each device did, or each rank: was every one used?"
    parser.add_argument("--report", action="store_true", help=told)
    parser.add_argument("--report-json", metavar="FILE", help="the same, also as JSON in a file")
    told = "the same, also as a picture for a browser, in a file"
    parser.add_argument("--report-html", metavar="FILE", help=told)
    told = "the same, and what each device executed when, in a file for a browser's trace viewer"
    parser.add_argument("--timeline", metavar="FILE", help=told)
    told = "of ranks other than rank 0, show standard error only"
    parser.add_argument("--quiet", action="store_true", help=told)
    told = "append all that each rank prints to a file there, rank-0.log and so on"
    parser.add_argument("--log-dir", metavar="DIR", help=told)
    told = "start all ranks again when one fails, at most so many times (default: 0)"
    restarts = number("restarts, 0 or more", 0)
    parser.add_argument("--max-restarts", metavar="N", type=restarts, default=0, help=told)
    add_script(parser)


def execute(arguments):
    from . import run_script  # for start-up time

    script = script_of(arguments)
    if not script:
        arguments.parser.error("a script is needed, or -m and a module")
    return run_script.run(script, arguments)
