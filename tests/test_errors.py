"""The texts that several places raise, whole; the others are compared where a test raises them."""

import inspect

import pytest

import compat
from compat import errors
from compat._ranks.place import Place

# Function, its arguments, the exception's class (None: the text of a warning), the whole text.
RANKS = Place(1, 3, 1, 3, "torchrun")

TEXTS = [
    (
        errors.no_backend,
        (["mxnet", "tensorflow", "theano"], "tensorflow", "3.8"),
        errors.NotInstalledError,
        "No backend is installed in this Python. Install one of mxnet, tensorflow, theano with "
        'its pins, for example: pip install "keras-gpu-compat[tensorflow]".',
    ),
    (
        errors.no_backend,
        ([], None, "3.14"),
        errors.NotInstalledError,
        "No backend is installed in this Python, and no extra of keras-gpu-compat installs on "
        "Python 3.14. Use another Python, or install a framework and a Keras that runs on it "
        "yourself.",
    ),
    (
        errors.broken_install,
        ("mxnet", "libgfortran.so.3: cannot open shared object file"),
        errors.BrokenInstallError,
        "mxnet is installed, but importing it fails: libgfortran.so.3: cannot open shared object "
        "file. Run `python -c 'import mxnet'` to see all of it.",
    ),
    (
        errors.too_late,
        (
            "theano",
            "device was fixed when theano was imported (by keras.backend.theano_backend)",
            "Call it before the first `import theano` or `import keras`.",
        ),
        errors.TooLateError,
        "configure_gpu() came too late for theano: device was fixed when theano was imported (by "
        "keras.backend.theano_backend).\n"
        "Call it before the first `import theano` or `import keras`.",
    ),
    (
        errors.device_failed,
        ("theano", "cuda0", "pygpu is not installed", "Install pygpu."),
        errors.DeviceFailedError,
        "theano did not bring up cuda0: pygpu is not installed.\nInstall pygpu.",
    ),
    (
        errors.unsupported,
        ("theano", "run one model on several devices", "Use one device: gpus=1."),
        errors.UnsupportedError,
        "theano cannot run one model on several devices. Use one device: gpus=1.",
    ),
    (
        errors.builds_no_model,
        ("build", None),
        errors.NotAModelError,
        "parallelize() was given the function build, which returned 'builtins.NoneType', not a "
        "model.",
    ),
    (
        errors.shadowed,
        ("train.py", "/home/a/compat.py"),
        None,
        "`import compat` in train.py finds /home/a/compat.py, not this package. To use "
        "compat.configure_gpu() there, rename that one, also where it is imported: "
        "mv /home/a/compat.py /home/a/my_compat.py",
    ),
    (
        errors.shadowed,
        ("train.py", "/home/a b/compat/__init__.py"),
        None,
        "`import compat` in train.py finds /home/a b/compat/__init__.py, not this package. To use "
        "compat.configure_gpu() there, rename that one, also where it is imported: "
        "mv '/home/a b/compat' '/home/a b/my_compat'",
    ),
    # Texts of single backends.
    (
        errors.invalid_number_option,
        ("cpu_worker_threads", "two"),
        errors.InvalidArgumentError,
        "cpu_worker_threads='two' is not understood. Use a number, 1 or more.",
    ),
    (
        errors.too_few_rows,
        (2, 3),
        errors.InvalidArgumentError,
        "2 rows are too few for 3 ranks. Give shard() one row per rank or more.",
    ),
    (
        errors.rank_lost,
        (RANKS, "for the others' gradients", [0, 2], "Connection closed by peer"),
        errors.RankLostError,
        "Rank 1 of 3 waited for the others' gradients (test_errors.py, line LINE), but ranks 0 and "
        "2 failed, ended or did not come: Connection closed by peer. Look at what ranks 0 and 2 "
        "printed. (COMPAT_TIMEOUT, or compat run --timeout, sets how many seconds ranks "
        "wait.)",
    ),
    (
        errors.user_of_host,
        ("ann@a:2,b:2", "mpirun"),
        errors.InvalidArgumentError,
        "--hosts ann@a:2,b:2: mpirun takes no user@ in front of a machine. Name the user in "
        "~/.ssh/config, as User under the machine's Host.",
    ),
    (
        errors.no_ranks,
        ("cntk",),
        errors.UnsupportedError,
        "cntk cannot train as one of several ranks yet. Start the script without a launcher "
        "(compat run without -n); parallelize() then uses the devices of one process.",
    ),
    (
        errors.not_writable,
        ("--timeline x/t.json", OSError(2, "No such file or directory")),
        errors.InvalidArgumentError,
        "--timeline x/t.json cannot be written: No such file or directory. Name a file in a folder "
        "that is there and that you may write to; nothing was started.",
    ),
    (
        errors.profiler_runs,
        ("torch",),
        errors.InvalidArgumentError,
        "timeline() records with the profiler of torch, which is recording already, for something "
        "else. End that before the block.",
    ),
    (
        errors.no_script,
        ("train.py",),
        errors.InvalidArgumentError,
        "there is no file train.py. Give the path of a script, or -m and the name of a module; "
        "what follows are its own arguments.",
    ),
    (
        errors.ranks_differ,
        (RANKS, "dense"),
        errors.RankError,
        "Model 'dense' has other weights on rank 1 than on rank 0: their number or their shapes "
        "differ. Build the same model, and compile it with the same optimizer, on every rank.",
    ),
]


@pytest.mark.parametrize(
    "function, arguments, kind, text", TEXTS, ids=[row[0].__name__ for row in TEXTS]
)
def test_text(function, arguments, kind, text):
    made, line = function(*arguments), inspect.currentframe().f_lineno
    text = text.replace("LINE", str(line))
    if kind is None:
        assert made == text
    else:
        assert type(made) is kind
        assert str(made) == text


def test_every_text_is_in_the_table():
    functions = {
        function
        for name, function in inspect.getmembers(errors, inspect.isfunction)
        if not name.startswith("_")
    }
    others = {errors.class_of, errors.fewer, errors.in_notebook, errors.numbered_ranks}
    others |= {errors.shortened, errors.users_line, errors.warn}
    assert functions == {row[0] for row in TEXTS} | others


BUILT_IN = {
    "InvalidArgumentError": ValueError,
    "UnknownOptionError": TypeError,
    "UnsupportedError": NotImplementedError,
    "NotInstalledError": ImportError,
    "PythonNotFoundError": OSError,
    "BrokenInstallError": ImportError,
    "AmbiguousBackendError": RuntimeError,
    "TooLateError": RuntimeError,
    "AlreadyConfiguredError": RuntimeError,
    "DevicesNotFoundError": RuntimeError,
    "DeviceFailedError": RuntimeError,
    "NotAModelError": TypeError,
    "RankError": RuntimeError,
    "RankLostError": RuntimeError,
    "ResultsDifferError": ArithmeticError,
    "ConfigurationFileError": OSError,
    "ModelFileError": OSError,
}


def test_every_error_is_public_and_the_built_in_that_a_caller_would_catch():
    classes = {
        name: kind
        for name, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, Exception) and kind is not errors.CompatError
    }
    warning = classes.pop("CompatWarning")
    assert issubclass(warning, UserWarning)
    assert set(classes) == set(BUILT_IN)
    for name, kind in classes.items():
        assert issubclass(kind, errors.CompatError) and issubclass(kind, BUILT_IN[name])
    for name in ["CompatError", "CompatWarning"] + list(classes):
        assert getattr(compat, name) is getattr(errors, name)
        assert name in compat.__all__
