"""Every exception class of compat and every message text.

Each text says what was asked, what was found and what to do. Each class is a
``CompatError`` and the built-in exception a caller would catch. The functions below build
the exceptions, so that a text stands once and its test (``tests/test_errors.py``) knows it whole.
"""


class CompatError(Exception):
    """Base class of every error that compat raises by itself."""

    # By this TensorFlow's autograph knows that it may raise this class again, with its own
    # lines in the text; others become a StagingError.
    __init__ = Exception.__init__


class InvalidArgumentError(CompatError, ValueError):
    """An argument has a form or a value that compat does not know."""

    problem = ""  # what is wrong with the value alone, for the text about a command's option


class UnknownOptionError(CompatError, TypeError):
    """A keyword option that no backend knows."""


class UnsupportedError(CompatError, NotImplementedError):
    """The backend cannot do what was asked."""


class NotInstalledError(CompatError, ImportError):
    """The framework that was asked for is not installed."""


class PythonNotFoundError(CompatError, OSError):
    """The interpreter that was asked for is not there."""


class BrokenInstallError(CompatError, ImportError):
    """The framework is installed, but importing it fails."""


class AmbiguousBackendError(CompatError, RuntimeError):
    """Several backends fit, and compat does not guess."""


class TooLateError(CompatError, RuntimeError):
    """The framework has already fixed what was to be set."""


class AlreadyConfiguredError(CompatError, RuntimeError):
    """A second ``configure_gpu()`` contradicts the first."""


class DevicesNotFoundError(CompatError, RuntimeError):
    """Fewer devices than asked for, under ``strict=True``."""


class DeviceFailedError(CompatError, RuntimeError):
    """A device that was asked for did not come up in the framework."""


class NotAModelError(CompatError, TypeError):
    """``parallelize()`` was given something that is not a model of an installed Keras."""


class ResultsDifferError(CompatError, ArithmeticError):
    """A model on several devices does not do what it does on one."""


class RankError(CompatError, RuntimeError):
    """Several processes that were started to train together cannot."""


class RankLostError(RankError):
    """Another rank failed, ended, or does not answer; this one cannot go on without it."""


class ConfigurationFileError(CompatError, OSError):
    """A configuration file cannot be read or written."""


class CompatWarning(UserWarning):
    """Work goes on, but not as it was asked."""


def _class_of(value):
    return type(value).__module__ + "." + type(value).__name__


# Arguments ------------------------------------------------------------------------------------

GPUS_FORMS = """\
    None            every visible GPU
    2               two GPUs
    -1              every visible GPU
    [0, 2], "0,2"   these ids, counted inside CUDA_VISIBLE_DEVICES where it is set
    [2], "2"        the one GPU with this id
    ["GPU-8932f937"], "MIG-c7384736"
                    GPUs, or MIG instances, by name
    "free"          the idle GPUs
    "free:2"        two idle GPUs
    0, [], "cpu"    no GPU"""


GPUS_OPTIONS = """\
    --gpus 0,2      these ids, counted inside CUDA_VISIBLE_DEVICES where it is set
    --gpus 2        the one GPU with this id
    --gpus GPU-8932f937
                    GPUs, or MIG instances, by name
    --gpus free     the idle GPUs
    --gpus free:2   two idle GPUs
    --gpus cpu      no GPU
    --gpus all      every visible GPU, as without --gpus"""


def invalid_gpus(gpus, problem):
    error = InvalidArgumentError(
        "gpus={!r} is not understood: {}. Use one of:\n{}".format(gpus, problem, GPUS_FORMS)
    )
    error.problem = problem
    return error


def invalid_gpus_option(gpus, problem):
    return InvalidArgumentError(
        "--gpus {} is not understood: {}. Use one of:\n{}".format(gpus, problem, GPUS_OPTIONS)
    )


def gpus_option_is_an_id(gpus):
    """The text of a warning."""
    return (
        "--gpus {0} means the GPU with id {0}; ids count from 0. Several are named one by one, "
        "such as --gpus 0,1, and --gpus cpu means none.".format(gpus)
    )


def invalid_memory(memory, problem):
    return InvalidArgumentError(
        'memory={!r} is not understood: {}. Use "grow" (take memory as it is needed), a fraction '
        'of each GPU such as 0.5, a size per GPU such as "4GiB" or "512MiB", or None (the '
        "backend's default).".format(memory, problem)
    )


def invalid_floatx(floatx):
    return InvalidArgumentError(
        'floatx={!r} is not understood. Use "float16", "float32", "float64", or None (what Keras '
        "is set to).".format(floatx)
    )


def invalid_verify(verify):
    return InvalidArgumentError(
        "verify={!r} (or the variable COMPAT_VERIFY) is not a number of steps to verify. "
        "Give 0 for none, or 1 or more, for example verify=1.".format(verify)
    )


def results_differ(model, kind, devices, label, difference, limit, cause):
    return ResultsDifferError(
        "The first thing that differs when model {!r} does a {} step on {} devices and on one is "
        "{}: by {:.3g}, where rounding explains at most {:.1g}. {} The model is as it was before "
        "the step. Change the model, or run it on one device: parallelize(model, gpus=1); "
        "verify=0 goes on without looking.".format(
            model, kind, devices, label, difference, limit, cause
        )
    )


def invalid_simulate(simulate):
    return InvalidArgumentError(
        "simulate={!r} is not understood. Use the number of CPU devices that shall stand in for "
        "GPUs, 1 or more, or None (no simulation).".format(simulate)
    )


def simulate_with_gpus(selection, simulate):
    return InvalidArgumentError(
        "{} asks for a device that simulate={} does not have. Simulated devices are "
        "numbered from 0; ask for at most {}, or leave gpus out.".format(
            selection, simulate, simulate
        )
    )


def unknown_option(option, meant, arguments, known):
    """``meant``: what to write instead, or None; ``known``: the options of single backends."""
    return UnknownOptionError(
        "configure_gpu() has no argument {!r}, and no backend has an option of that name.{} Its "
        "arguments: {}. Options of single backends: {}.".format(
            option,
            " Did you mean {}?".format(meant) if meant else "",
            ", ".join(arguments),
            ", ".join(known) or "none",
        )
    )


def option_of_others(option, backend):
    """The text of a warning."""
    return "The option {!r} is for other backends: {} ignores it.".format(option, backend)


def nothing_to_persist(backend):
    """The text of a warning."""
    return "persist=True writes nothing: {} reads no configuration file.".format(backend)


def invalid_strategy(strategy):
    return InvalidArgumentError(
        "strategy={!r} is not understood. Use None (the model's replicas run in this process, "
        'split by compat) or "mirrored" (TensorFlow 2\'s MirroredStrategy, for a function that '
        "builds the model).".format(strategy)
    )


def strategy_needs_function(strategy, value):
    return NotAModelError(
        "strategy={!r} takes a function that builds the model, since its variables must be made "
        "under the strategy; it was given {!r}. Put the lines that build the model into a "
        "function, and pass that.".format(strategy, _class_of(value))
    )


def invalid_device(which, devices):
    return InvalidArgumentError(
        "device({!r}) is not understood. Use a number, counted among the configured devices from "
        '0, one of their names ({}), or "cpu".'.format(which, ", ".join(devices))
    )


def invalid_backend(value, problem):
    return InvalidArgumentError(
        "register() cannot take {!r}: {}. Pass an instance of a subclass of compat.Backend that "
        "has a name of its own.".format(getattr(value, "name", None) or _class_of(value), problem)
    )


def broken_plugin(name, reference, problem):
    return BrokenInstallError(
        "An installed package names {} as the backend {!r} in its entry points, but that gives no "
        "backend: {}. Mend or uninstall that package.".format(reference, name, problem)
    )


# Choosing the backend -------------------------------------------------------------------------


def unknown_backend(reason, known):
    return InvalidArgumentError(
        "{}, but compat does not know that backend. Known backends: {}.".format(
            reason, ", ".join(known)
        )
    )


def ambiguous_backend(fitting, typed=False):
    """``typed``: for a command, not for a call."""
    if typed:
        remedy = "Pass --backend, such as --backend {}, or set KERAS_BACKEND.".format(fitting[0])
    else:
        remedy = "Pass backend=..., set KERAS_BACKEND, or import keras first."
    return AmbiguousBackendError(
        "Several backends are installed and nothing says which one this script uses: {}. {}".format(
            ", ".join(fitting), remedy
        )
    )


def no_backend(extras, example, python):
    """``extras`` are those that install on this Python."""
    if not extras:
        return NotInstalledError(
            "No backend is installed in this Python, and no extra of keras-gpu-compat installs on "
            "Python {}. Use another Python, or install a framework and a Keras that runs on it "
            "yourself.".format(python)
        )
    return NotInstalledError(
        "No backend is installed in this Python. Install one of {} with its pins, for example: "
        'pip install "keras-gpu-compat[{}]".'.format(", ".join(extras), example)
    )


def not_installed(framework, reason, extra, others, typed=False):
    """``typed``: for a command, not for a call."""
    return NotInstalledError(
        "{} is not installed, but {}. {}, or install it: pip install "
        '"keras-gpu-compat[{}]".'.format(framework, reason, _other_backend(others, typed), extra)
    )


def _other_backend(others, typed):
    use = "Use --backend {}" if typed else "Use backend={!r}"
    return use.format(others[0]) if others else "Choose another backend"


def not_installable(framework, reason, extra, others, pythons, python, typed=False):
    """``typed``: for a command, not for a call."""
    choice = _other_backend(others, typed)
    return NotInstalledError(
        "{} is not installed, but {}. {}, or run the script on {}, where pip install "
        '"keras-gpu-compat[{}]" brings it: this is Python {}.'.format(
            framework, reason, choice, pythons, extra, python
        )
    )


def python_not_found(python):
    return PythonNotFoundError(
        "--python={}: there is no such program. Give the path of an interpreter, or a name that "
        "is on the PATH, such as python2.7.".format(python)
    )


def backend_of_python_unknown(python):
    return AmbiguousBackendError(
        "compat does not look into {}, and nothing says which backend the script uses there. Pass "
        "--backend, such as --backend=theano, or set KERAS_BACKEND.".format(python)
    )


def unsupported_version(framework, version, known):
    return UnsupportedError(
        "{} {} is installed, which no backend of compat accepts. Known backends: {}.".format(
            framework, version, ", ".join(known)
        )
    )


def broken_install(framework, problem):
    return BrokenInstallError(
        "{} is installed, but importing it fails: {}. Run `python -c 'import {}'` to see all of "
        "it.".format(framework, problem, framework)
    )


def no_keras(backend, extra):
    return NotInstalledError(
        "No Keras that runs on {} is installed, or KERAS_BACKEND and keras.json choose another "
        'backend for it. Install one: pip install "keras-gpu-compat[{}]".'.format(backend, extra)
    )


def keras_json_unreadable(path, problem):
    return ConfigurationFileError(
        "{} cannot be read: {}. Keras would ignore it without a word: mend or remove the file, or "
        "set KERAS_BACKEND.".format(path, problem)
    )


def keras_elsewhere(running, backend):
    """The text of a warning."""
    return (
        "keras is imported and runs on {}, but {} was configured: models of this keras will not "
        "use it. Call configure_gpu() before keras is imported.".format(running, backend)
    )


def keras_backend_ignored(value, keras):
    return (
        "KERAS_BACKEND={} is ignored: {} runs on TensorFlow only. Unset it, or install another "
        "Keras.".format(value, keras)
    )


def two_kerases():
    return (
        "keras and keras-mxnet are both installed; they overwrite each other's files. Uninstall "
        "both, then install one."
    )


# CUDA_VISIBLE_DEVICES, texts of warnings ------------------------------------------------------


def visible_devices_spaces(value, read):
    return (
        'CUDA_VISIBLE_DEVICES="{}" contains a space, where CUDA stops reading; compat reads it as '
        '"{}".'.format(value, read)
    )


def visible_devices_invalid(value, entry):
    return (
        'CUDA_VISIBLE_DEVICES="{}": CUDA ignores "{}" and what follows it, which is no id, no GPU '
        "name and no MIG name like those before it.".format(value, entry)
    )


def visible_devices_absent(value, entry):
    return (
        'CUDA_VISIBLE_DEVICES="{}": CUDA ignores "{}" and what follows it, since this machine has '
        "no such GPU.".format(value, entry)
    )


def visible_devices_twice(value, entry):
    return 'CUDA_VISIBLE_DEVICES="{}": CUDA shows no GPU at all, since "{}" is there twice.'.format(
        value, entry
    )


def hip_devices_invalid(variable, value, entry):
    return (
        '{}="{}": AMD\'s HIP ignores "{}" and what follows it, which is no id of a GPU that is '
        "visible here.".format(variable, value, entry)
    )


def device_order(value):
    return (
        "CUDA_DEVICE_ORDER={}: ids may mean other GPUs than in nvidia-smi's listing. Set "
        "CUDA_DEVICE_ORDER=PCI_BUS_ID.".format(value)
    )


# Idle GPUs, the text of a warning -------------------------------------------------------------


def unclaimed_gpu(index, path, problem):
    return (
        "GPU {} is idle but cannot be claimed: {} cannot be locked ({}). Another job that asks "
        "for idle GPUs may take it, too. Choose GPUs by their ids, or have that file "
        "removed.".format(index, path, getattr(problem, "strerror", None) or problem)
    )


# Configuring ----------------------------------------------------------------------------------


def too_late(framework, problem, remedy):
    return TooLateError(
        "configure_gpu() came too late for {}: {}.\n{}".format(framework, problem, remedy)
    )


def already_configured(first, second):
    return AlreadyConfiguredError(
        "configure_gpu() was called before in this process, with other settings.\n"
        "first:  {}\nsecond: {}\n"
        "Devices are fixed once per process: make both calls the same, or drop one.".format(
            first, second
        )
    )


def parallelized_before(model, before, now):
    """The text of a warning."""
    return (
        "parallelize() put the model {!r} on {} before configure_gpu() was called, and there it "
        "stays; configured now: {}. Call configure_gpu() at the top of the script, or "
        "parallelize() the model again after it.".format(model, ", ".join(before), ", ".join(now))
    )


def fewer_devices(asked, found, going_on):
    """The text of a warning, and of the error under ``strict=True``."""
    return "{} was asked for, but {}. {}.".format(asked, found, going_on)


def devices_not_found(asked, found):
    return DevicesNotFoundError(
        fewer_devices(
            asked, found, "Ask for fewer, or drop strict=True to go on with what there is"
        )
    )


def device_failed(framework, device, problem, remedy):
    return DeviceFailedError(
        "{} did not bring up {}: {}.\n{}".format(framework, device, problem, remedy)
    )


def unsupported(backend, what, remedy):
    return UnsupportedError("{} cannot {}. {}".format(backend, what, remedy))


# Parallelizing --------------------------------------------------------------------------------


def not_a_model(value):
    return NotAModelError(
        "parallelize() takes a Keras model, a model of the backend's own kind, or a function that "
        "builds one; it was given {!r}.".format(_class_of(value))
    )


def builds_no_model(function, value):
    return NotAModelError(
        "parallelize() was given the function {}, which returned {!r}, not a model.".format(
            function, _class_of(value)
        )
    )


def time_comes_first(layer):
    return UnsupportedError(
        "The RNN layer {} takes time as its first dimension, which parallelize() would split for "
        'the batch. Build it with layout="NTC".'.format(layer)
    )


def no_rows_in_result(shapes, sizes):
    return UnsupportedError(
        "A block on several devices must return arrays with a row for each of the batch; its "
        "replicas were given {} rows and returned {}. Compute totals and means outside of the "
        "block that is parallelized.".format(
            ", ".join(str(size or 1) for size in sizes), ", ".join(map(str, shapes))
        )
    )


def rows_cannot_be_cut(model, problem):
    return UnsupportedError(
        "{!r} cannot be computed on a part of a batch: {}.\n"
        "parallelize() cuts each batch by rows: every input needs one row for each sample, and "
        "nothing may depend on how many there are. parallelize(model, gpus=1) runs it whole, on "
        "one device.".format(model, problem.strip().rstrip("."))
    )


def state_of_replicas(operation, model, state):
    return UnsupportedError(
        "The operation {} of {!r} has the state {!r}, which several devices would each change by "
        "their own rows. How these go together is known of BatchNorm's averages only. "
        "parallelize(model, gpus=1) runs it on one device.".format(operation, model, state)
    )


def across_rows(operation, model, device):
    """The text of a warning."""
    return (
        "The operation {} of {!r} computes across the rows of a batch, of which each device has a "
        "part. It, and all that follows from it, runs on {} with the whole batch.".format(
            operation, model, device
        )
    )


def not_a_plain_module(kind):
    return UnsupportedError(
        "parallelize() runs an mx.mod.Module on several devices, not a {}. Give context=[...] to "
        "the {} itself.".format(kind, kind)
    )


def module_has_an_optimizer():
    return UnsupportedError(
        "This Module has an optimizer already, and MXNet numbers its state by device. Call "
        "parallelize() before fit() or init_optimizer()."
    )


def loss_depends_on_the_batch(what):
    return UnsupportedError(
        "A Module on several devices must not divide its loss by the batch, since each device "
        "sees a shard of it: {}. Leave the division to the optimizer's rescale_grad, which is "
        "1/batch size.".format(what)
    )


def device_with_replicas(model):
    return UnsupportedError(
        "Parts of the model {} were placed by compat.device(), which parallelize() on several "
        "devices would undo. Use one of the two.".format(model)
    )


def state_on_two_devices(name):
    return UnsupportedError(
        "{} is used on several devices, and MXNet would keep only what one of them computes of it. "
        "Call the layer inside one compat.device() only.".format(name)
    )


def nothing_to_compare(asked, devices):
    return DevicesNotFoundError(
        "{} devices are needed for the comparison, but the framework shows {}.".format(
            asked, devices
        )
    )


def wrong_backend(model_backend, configured):
    return InvalidArgumentError(
        "The model runs on {}, but configure_gpu() set up {}. Build the model with the Keras that "
        "was configured, or pass backend={!r} to configure_gpu().".format(
            model_backend, configured, model_backend
        )
    )


# Ranks ----------------------------------------------------------------------------------------


def invalid_ranks(launcher, names, values):
    pairs = ", ".join("{}={}".format(*pair) for pair in zip(names, values))
    return RankError(
        "The environment of {} contradicts itself: {}. Ranks count from 0 and are fewer than the "
        "size. Start the script with its launcher again, or set COMPAT_ALONE=1 to train "
        "alone.".format(launcher, pairs)
    )


def not_a_rank(name, text):
    return RankError(
        "{}={} tells no place among ranks that compat understands. Set COMPAT_RANK, COMPAT_SIZE, "
        "COMPAT_LOCAL_RANK and COMPAT_LOCAL_SIZE instead, or COMPAT_ALONE=1 to train "
        "alone.".format(name, text)
    )


def place_unknown(name, text):
    return RankError(
        "{}={} says that several processes train together, but nothing tells which of them this "
        "is: each would train alone. Start the script with a launcher that does (compat run -n N, "
        "torchrun, mpirun, srun), set COMPAT_RANK, COMPAT_SIZE, COMPAT_LOCAL_RANK and "
        "COMPAT_LOCAL_SIZE, or set COMPAT_ALONE=1 to train alone.".format(name, text)
    )


def processes_without_torchrun(name, processes):
    return RankError(
        "{}={} asks for {} processes on each machine, but this one was started without torchrun, "
        "which would start them: RANK and WORLD_SIZE do not count them alike. Start the script "
        "with torchrun, or set {}=1 for one process on each machine, or COMPAT_ALONE=1 to train "
        "alone.".format(name, processes, processes, name)
    )


def sparse_cluster(text):
    return RankError(
        "TF_CONFIG={} names only some of the workers, so that nothing tells how many there are. "
        "Name all of them (in a TFJob, without enableDynamicWorker), or set COMPAT_ALONE=1 to "
        "train alone.".format(text)
    )


def invalid_meeting_point(name, address):
    return RankError(
        "{} {} {!r}: that is no host and port at which ranks can meet. Use the host name or "
        "address of rank 0's machine and a free port there, such as node1:29500.".format(
            name, "are" if " and " in name else "is", address
        )
    )


def meeting_point_taken(ranks, host, port, problem):
    return RankError(
        "This process is {}, and ranks are to meet here at {}:{}, where it cannot listen: {}. Set "
        "MASTER_ADDR and MASTER_PORT to another host or port, the same for all ranks.".format(
            ranks, host, port, problem
        )
    )


def invalid_tf_config(text, problem):
    return RankError(
        'TF_CONFIG={} is not understood: {}. Use JSON such as {{"cluster": {{"worker": '
        '["host1:2222", "host2:2222"]}}, "task": {{"type": "worker", "index": 0}}}}, or '
        "set COMPAT_ALONE=1 to train alone.".format(text, problem)
    )


def parameter_servers(text, name="TF_CONFIG"):
    return RankError(
        "{}={} names parameter servers, which compat does not use: ranks train in step. Give all "
        "machines as workers, or set COMPAT_ALONE=1 to train alone.".format(name, text)
    )


def not_built_in_rank(ranks):
    return RankError(
        "This process is {}, but TensorFlow started before it could join the others: a model, a "
        "variable or a tensor was made. Give compat.parallelize() a function that builds the "
        "model, as the first thing after configure_gpu(); it joins them, and then calls "
        "it.".format(ranks)
    )


def workers_without_eager_execution(ranks):
    return unsupported(
        "tensorflow2",
        "train as {} after tf.compat.v1.disable_v2_behavior() or disable_eager_execution()".format(
            ranks
        ),
        "Remove that call, or start the script with horovodrun.",
    )


def invalid_timeout(name, value):
    return InvalidArgumentError(
        "{}={} is not understood. Use a number of seconds above 0: how long a rank waits for the "
        "others.".format(name, value)
    )


def no_ranks(backend):
    return unsupported(
        backend,
        "train as one of several ranks yet",
        "Start the script without a launcher (compat run without -n); parallelize() then uses the "
        "devices of one process.",
    )


def strategy_in_rank(strategy, ranks):
    return unsupported(
        "compat",
        "use strategy={!r} in {}".format(strategy, ranks),
        "Leave strategy out, or start the script without a launcher.",
    )


def batch_too_small(batch_size, size):
    return InvalidArgumentError(
        "A batch of {} rows is too small for {} ranks. Use {} rows or more.".format(
            batch_size, size, size
        )
    )


def no_rows():
    return InvalidArgumentError("There is no array to take rows of in what shard() was given.")


def parts_differ(lengths):
    return InvalidArgumentError(
        "The arrays given to shard() have different numbers of rows: {}. Give it arrays that "
        "belong together, row by row.".format(", ".join(map(str, lengths)))
    )


def not_rows(value):
    return InvalidArgumentError(
        "shard() takes arrays, tuples, lists and dictionaries of arrays, and tf.data datasets; "
        "there is a {} in what it was given. Let it read every size()-th item from rank() "
        "on.".format(_class_of(value))
    )


def too_few_rows(rows, size):
    return InvalidArgumentError(
        "{} rows are too few for {} ranks. Give shard() one row per rank or more.".format(
            rows, size
        )
    )


def rows_left_out(left_out, rows, size):
    """The text of a warning."""
    return (
        "The last {} of {} rows are left out: they are too few for one on each of {} ranks.".format(
            left_out, rows, size
        )
    )


def ranks_disagree(ranks, engine, size):
    return RankError(
        "{} started this process as one of {}, but {} sees {}: each would train alone. Start it "
        "with the launcher of {}, or with compat run -n {}.".format(
            ranks.launcher, ranks.size, engine, size, engine, ranks.size
        )
    )


def no_mpi4py(ranks):
    return NotInstalledError(
        "{} needs mpi4py, which is not installed here, to train with the others. Install it for "
        "the MPI of the launcher: pip install mpi4py, which compiles it where there is no wheel "
        "(on Debian and Ubuntu that needs apt-get install libopenmpi-dev openmpi-bin).".format(
            str(ranks).capitalize()
        )
    )


def no_mpirun():
    return NotInstalledError(
        "Ranks of Theano and CNTK are started by mpirun, which is not on PATH. Install the MPI "
        "that mpi4py was compiled with: on Debian and Ubuntu, apt-get install openmpi-bin."
    )


def no_horovod(framework):
    return NotInstalledError(
        "Ranks of {0} train together through Horovod, which is not installed. Build it where {0} "
        "is: HOROVOD_WITH_GLOO=1 HOROVOD_WITH_{1}=1 pip install --no-build-isolation "
        "--no-cache-dir horovod==0.28.1 (that needs a C++ compiler, setuptools<60 and cmake<4). "
        "Or start the script without a launcher (compat run without -n).".format(
            framework, framework.upper()
        )
    )


def no_meeting_point(ranks, engine):
    return RankError(
        "This process is {}, but nothing tells {} where ranks meet. Set MASTER_ADDR to the host "
        "name or address of rank 0's machine and MASTER_PORT to a free port there, the same for "
        "all ranks; or start the script with compat run -n {}.".format(ranks, engine, ranks.size)
    )


def _ranks(numbers):
    """Ranks by their numbers, as a phrase."""
    texts = [str(number) for number in numbers]
    if len(texts) < 2:
        return "rank " + "".join(texts)
    return "ranks {} and {}".format(", ".join(texts[:-1]), texts[-1])


def rank_lost(ranks, waited, absent, problem):
    lost = _ranks(absent) if absent else "another rank"
    return RankLostError(
        "Rank {} of {} waited {}, but {} failed, ended or did not come: {}. Look at what {} "
        "printed. (COMPAT_TIMEOUT, or compat run --timeout, sets how many seconds ranks "
        "wait.)".format(
            ranks.rank,
            ranks.size,
            waited,
            lost,
            problem,
            lost,
        )
    )


def out_of_step(ranks, ended, steps):
    return RankLostError(
        "Rank {} of {} has more batches, but {} ran out of them after {}. Give every rank the "
        "same number: compat.shard() does.".format(
            ranks.rank, ranks.size, _ranks(ended), _batches(steps)
        )
    )


def out_of_batches(ranks, ended, steps):
    going_on = [rank for rank in range(ranks.size) if rank not in ended]
    return RankError(
        "Rank {} of {} ran out of batches after {}, but {} had more. Give every rank the same "
        "number: compat.shard() does.".format(
            ranks.rank, ranks.size, _batches(steps), _ranks(going_on)
        )
    )


def _batches(steps):
    return "1 batch" if steps == 1 else "{} batches".format(steps)


def rank_ended(ended, size):
    """What ``compat run`` says of the rank for which a job failed."""
    if not ended.status:
        how = "ended (exit status 0) while others were still training"
    elif ended.terminated:
        how = "did not come to the others, which waited for it"
    elif ended.status > 128:
        how = "was killed by signal {}".format(ended.status - 128)
    else:
        how = "failed with exit status {}".format(ended.status)
    return "rank {} of {} {}; the others were ended.".format(ended.rank, size, how)


def interrupted(seconds):
    """What ``compat run`` says at Ctrl-C."""
    return (
        "compat run: interrupted. The ranks are, too, and have up to {:.0f} seconds to end; Ctrl-C "
        "again ends them at once.".format(seconds)
    )


def told_to_end(signal):
    """What ``compat run`` says of another signal, or a second one."""
    return "compat run: told to end by {}; the ranks are ended.".format(signal)


def launcher_failed(status, silent):
    """What ``compat run`` says where no rank told that it failed."""
    heard = "nothing was heard of the end of " + _ranks(silent) if silent else "no rank failed"
    return "compat run: the launcher ended with exit status {}; {}.".format(status, heard)


def invalid_number_of_ranks(number):
    return InvalidArgumentError(
        "-n {} is not understood. Use the number of processes to start, 1 or more.".format(number)
    )


def one_rank_on_hosts(hosts):
    return InvalidArgumentError(
        "--hosts {} makes one rank, which has nobody to train with. Give the machines room for 2 "
        "or more, such as --hosts first:4,second:4, or run the script on that machine, without "
        "--hosts.".format(hosts)
    )


def no_script(path):
    return InvalidArgumentError(
        "there is no file {}. Give the path of a script, or -m and the name of a module; what "
        "follows are its own arguments.".format(path)
    )


def invalid_hosts(hosts):
    return InvalidArgumentError(
        "--hosts {} is not understood. Use machines, by the names that all of them know, and how "
        "many ranks each is to run: --hosts first:4,second:4.".format(hosts)
    )


def invalid_host_name(hosts, host):
    kind = " looks like an IPv6 address, and launchers take none" if host.count(":") > 1 else ""
    return InvalidArgumentError(
        "--hosts {}: {!r}{}. Use a name of letters, digits, '.', '-' and '_' that does not begin "
        "with '-', or an IPv4 address; user@name logs in as another user.".format(
            hosts, host, kind or " is not the name of a machine"
        )
    )


def user_of_host(hosts, launcher):
    return InvalidArgumentError(
        "--hosts {}: {} takes no user@ in front of a machine. Name the user in ~/.ssh/config, "
        "as User under the machine's Host.".format(hosts, launcher)
    )


def no_room_on_hosts(ranks, hosts, room):
    return InvalidArgumentError(
        "-n {}: --hosts {} has room for {}. Use fewer ranks, or give the machines more: "
        "--hosts first:4,second:4.".format(ranks, hosts, room)
    )


def free_gpus_on_hosts(gpus):
    return InvalidArgumentError(
        "--gpus {} with --hosts: idle GPUs cannot be found on other machines from here. Use ids "
        "that are meant on each of them, such as --gpus 0,1, or leave --gpus out.".format(gpus)
    )


def not_one_update(model, updates):
    return unsupported(
        "jax",
        "train model {!r} as one of several ranks: its train_step calls optimizer.stateless_apply "
        "{} times".format(model, updates),
        "Have it do so once.",
    )


def own_loop_in_rank(model, ranks):
    return unsupported(
        "jax",
        "train model {!r} in a loop of the script's own in {}: gradients of such a loop are "
        "never the model's".format(model, ranks),
        "Use fit() or train_on_batch(), or start the script without a launcher.",
    )


def ranks_differ(ranks, model):
    return RankError(
        "Model {!r} has other weights on rank {} than on rank 0: their number or their shapes "
        "differ. Build the same model, and compile it with the same optimizer, on every "
        "rank.".format(model, ranks.rank)
    )


# Names of old scripts -------------------------------------------------------------------------


def too_few_gpus(name, gpus):
    """In the words of keras/utils/multi_gpu_utils.py, which users search for."""
    return InvalidArgumentError(
        "For multi-gpu usage to be effective, call `multi_gpu_model` with `{} >= 2`. "
        "Received: `gpus={}`".format(name, gpus)
    )


def gpus_not_available(gpus, expected, available):
    """In the words of keras/utils/multi_gpu_utils.py, which users search for."""
    return InvalidArgumentError(
        "To call `multi_gpu_model` with `gpus={}`, we expect the following devices to be "
        "available: {}. However this machine only has: {}. Try reducing `gpus`.".format(
            gpus, expected, available
        )
    )


def not_symbolic(function, value):
    return NotAModelError(
        "{}() takes a Keras model with symbolic inputs, functional or Sequential with an input "
        "shape, to make another one around it; it was given {!r}. compat.parallelize() takes any "
        "Keras model.".format(function, _class_of(value))
    )


def session_ignored():
    """The text of a warning."""
    return (
        "set_session() does nothing here: this Keras runs in no TensorFlow session, and the "
        "session's settings have no effect. Pass them to compat.configure_gpu(), such as "
        'memory="grow" for allow_growth.'
    )


def no_session():
    return UnsupportedError(
        "get_session() has nothing to return: this Keras runs in no TensorFlow session. Call "
        "models and functions directly; compat.configure_gpu() has what a session's ConfigProto "
        "set."
    )


def shadowed(script, path):
    """The text of a warning."""
    return (
        "`import compat` in {} finds {}, not this package. Rename that one to use "
        "compat.configure_gpu() there.".format(script, path)
    )


# Files ----------------------------------------------------------------------------------------


def unreadable_file(path, problem, remedy):
    return ConfigurationFileError("{} cannot be read: {}. {}".format(path, problem, remedy))


def unwritable_file(path, problem):
    return ConfigurationFileError(
        "{} could not be written: {}. The file is as it was before.".format(path, problem)
    )


# MXNet ----------------------------------------------------------------------------------------


def invalid_number_option(option, value):
    return InvalidArgumentError(
        "{}={!r} is not understood. Use a number, 1 or more.".format(option, value)
    )


def no_memory_size(framework, memory):
    """The text of a warning."""
    return (
        "memory={} was asked for, but {} limits GPU memory by no size. It takes memory as it is "
        "needed; memory=0.5 makes it give cached memory back while less than half of a GPU is "
        "free.".format(memory, framework)
    )


# Keras 3 --------------------------------------------------------------------------------------


def keras_distribution_does_nothing(framework):
    """The text of a warning."""
    return (
        "A keras.distribution is set: on {} Keras accepts it and does nothing with it. Remove "
        "keras.distribution.set_distribution(); parallelize() splits the batches by "
        "itself.".format(framework)
    )


# TensorFlow 2 ---------------------------------------------------------------------------------


def several_devices_in_xla():
    return unsupported(
        "tensorflow2",
        "run a model on several devices under jit_compile=True: XLA puts a whole step on one",
        "Compile the model with jit_compile=False.",
    )


def arrays_are_no_tensors(model):
    """The text of a warning."""
    return (
        "A call of the parallelized {} was given numpy arrays, which are not split, so it ran on "
        "one device: give it tensors, tf.constant(array).".format(model)
    )


def not_divided(model, reason, device):
    """The text of a warning."""
    return (
        "parallelize() leaves model {!r} on {}: {}, so its batches cannot be split. The numbers "
        "are those of one device, and so is the speed.".format(model, device, reason)
    )


# JAX ------------------------------------------------------------------------------------------


def jax_devices_made(first, made, settings):
    return too_late(
        "jax",
        "JAX made its devices ({}) with its first operation (it was imported by `import {}`), and "
        "cannot change them or their memory any more ({})".format(made, first, settings),
        "Call it before the first model, variable or array is made, best before the first "
        "`import jax` or `import keras`.",
    )


def platforms_without_gpus(platforms):
    """The text of a warning."""
    return (
        "JAX_PLATFORMS={} keeps JAX from GPUs. Remove the variable, or ask for no GPU with "
        "gpus=0.".format(platforms)
    )


def one_fraction_for_all_gpus(memory):
    return unsupported(
        "jax",
        "limit memory to {}: it takes one fraction for all GPUs, and nvidia-smi does not tell "
        "that they all have the same amount".format(memory),
        'Use a fraction such as memory=0.5, or memory="grow".',
    )


def one_program(device):
    return unsupported(
        "jax",
        "place parts of a model on {}: under jax.jit a step is one program, all of which runs on "
        "the same devices".format(device),
        "Leave compat.device() out; parallelize() splits the batches of the whole model.",
    )


def keras_distribution_is_set(model):
    return UnsupportedError(
        "parallelize() cannot shard the batches of model {!r}: a keras.distribution is set, or "
        "was when the model was built, and Keras shards them itself, with an error for batches "
        "that do not divide. Use one of the two: call keras.distribution.set_distribution(None) "
        "before the model is built, or leave parallelize() out.".format(model)
    )


# Theano ---------------------------------------------------------------------------------------


def theano_flags_invalid(flags, problem):
    return InvalidArgumentError(
        "theano_flags={!r} is not understood: {}. Use a dictionary of Theano's flags, such as "
        '{{"optimizer": "fast_compile", "openmp": True}}.'.format(flags, problem)
    )


def theano_flags_unreadable(text, problem):
    return InvalidArgumentError(
        "THEANO_FLAGS={} cannot be read: {}. Theano cannot be imported with it. Put a backslash "
        "before a quote, a comma or a backslash that belongs to a value.".format(text, problem)
    )


def theanorc_unreadable(path, problem):
    return unreadable_file(
        path,
        problem.rstrip("."),
        "Theano cannot be imported with it. Mend the file: each option stands once, as "
        "`name = value`, under a section such as [global].",
    )


def theanorc_names_no_file():
    return ConfigurationFileError(
        "persist=True has no file to write: THEANORC is set and names none. Unset it, for "
        "~/.theanorc, or name a file."
    )


def theanorc_without_home(path):
    return ConfigurationFileError(
        "persist=True would write {}: HOME is set and empty. Set HOME to the home folder, unset "
        "it, or name a file in THEANORC.".format(path)
    )


def theanorc_not_a_path(path):
    return ConfigurationFileError(
        "{!r} is the path of no file: it holds a NUL character. Give THEANORC, or HOME, another "
        "value.".format(path)
    )


def theanorc_not_a_file(path):
    return unreadable_file(
        path,
        "it is not a regular file",
        "Theano would wait for what it says when it is imported. Put a file there, or name one in "
        "THEANORC.",
    )


def theanorc_defaults(section, options):
    return ConfigurationFileError(
        "persist=True has written nothing: it needs a section [{0}], and what a section [DEFAULT] "
        "says of {1} would then hold there, where it does not yet. Move that from [DEFAULT] into "
        "the sections that it is for, or add the line [{0}] yourself.".format(
            section, " and ".join(options)
        )
    )


def theano_has_no_flag(name, value, version, meant):
    """The text of a warning."""
    return "{}={}: Theano {} has no flag {}, and ignores it.{}".format(
        name, value, version, name, " Did you mean {}?".format(meant) if meant else ""
    )


def theano_device_without_pygpu(device):
    """The text of a warning."""
    return (
        "device={}: Theano needs the package pygpu for it, which is not installed, and goes on "
        "with the CPU. Install libgpuarray and pygpu 0.7.".format(device)
    )


def theano_device_without_gpu(device):
    """The text of a warning."""
    return "device={}: no GPU is visible, and Theano goes on with the CPU.".format(device)


def theano_device_overruled(said, devices):
    """The text of a warning."""
    if said.startswith(("cuda", "gpu")):
        return (
            "Theano's flags say device={}, but compat chose {}, so device=cpu was set. "
            "`compat env` tells which GPUs are visible.".format(said, devices)
        )
    return (
        "Theano's flags say device={}, but compat chose {}, so device=cpu was set. For a "
        'device that is no CUDA GPU pass theano_flags={{"device": "{}"}}.'.format(
            said, devices, said
        )
    )


def theano_input_not_fed(model):
    return unsupported(
        "theano",
        "run model {!r} on several devices: an input of it is a tensor of the user's, "
        "Input(tensor=...), whose rows cannot be split".format(model),
        "Give the model an Input(shape=...) and feed it.",
    )


# TensorFlow 1 ---------------------------------------------------------------------------------


def memory_total_unknown(memory):
    return unsupported(
        "tensorflow1",
        "limit memory to {}: it takes a fraction of each GPU only, and nvidia-smi does not tell "
        "how much memory the GPUs have".format(memory),
        'Use a fraction such as memory=0.5, or memory="grow".',
    )


def keras_session_exists(variables, missing):
    return too_late(
        "tensorflow",
        "Keras has made its session already, without {}; what a session has cannot be changed, "
        "and another one would lose the values of its {} variables".format(missing, variables),
        "Call it before the first model is built.",
    )


def gpus_initialised(gpu_options):
    return too_late(
        "tensorflow",
        "a session was made in this process, which fixed GPUs and their memory; they cannot "
        "become {}".format(gpu_options),
        "Call it before the first tf.Session().",
    )


def custom_gradient(operation):
    return unsupported(
        "tensorflow",
        "run {} on several devices: it is in a loop and has a gradient by tf.custom_gradient, "
        "which is bound to the undivided batch".format(operation),
        "Use one device: gpus=1, or give the operation TensorFlow's own gradient.",
    )


def parts_placed(model, parts, devices):
    """The text of a warning."""
    return (
        "Parts of {} were placed on {} by device(), but parallelize() runs all of it on each of "
        "{}. Leave out one of the two; parallelize(model, gpus=1) puts the parts back.".format(
            model, ", ".join(parts), ", ".join(devices)
        )
    )


def reference_variables(model):
    """The text of a warning."""
    return (
        "The weights of {} are reference variables, which TensorFlow may overwrite while a "
        "replica still reads them: training goes wrong now and then. Call configure_gpu() before "
        "the model is built; it switches resource variables on.".format(model)
    )


# torch ----------------------------------------------------------------------------------------


def keras_torch_device_overruled(said, devices):
    """The text of a warning."""
    return "KERAS_TORCH_DEVICE says {}, but compat chose {}.".format(said, devices)


def several_devices_in_torch_compile():
    return unsupported(
        "torch",
        "run a model on several devices under jit_compile=True: torch.compile() makes one program "
        "for one device",
        "Compile the model with jit_compile=False.",
    )


# CNTK -----------------------------------------------------------------------------------------


def one_device_only(backend, asked, first):
    return unsupported(
        backend,
        "run a model on {} in one process: all of it runs on {}".format(asked, first),
        "Start one process per device, with compat run -n, or train on that one, with "
        "parallelize(model, gpus=1).",
    )


def cntk_device_fixed(device, imported):
    return too_late(
        "cntk",
        "its default device was fixed when {} was imported, and cannot become {}".format(
            imported[0] if imported else "cntk", device
        ),
        "Call it before the first `import keras`.",
    )


def cntk_without_gpus():
    """The text of a warning."""
    return (
        "This CNTK shows no GPU: it is a build for the CPU, or CUDA's driver is not there. The "
        "package cntk-gpu is the build for GPUs."
    )


def cntk_no_memory_limit(memory):
    """The text of a warning."""
    return "memory={} was asked for, but CNTK has no setting for a GPU's memory.".format(memory)


def cntk_trains_in_float32(floatx):
    """The text of a warning."""
    return (
        "floatx={} was asked for, but on CNTK Keras trains in float32 only: it makes the places "
        "for gradients in that type.".format(floatx)
    )


def cntk_excluded_devices_invalid(asked):
    return InvalidArgumentError(
        'excluded_devices={!r} is not understood. Use a list of GPU ids and "cpu", such as '
        '[1, "cpu"].'.format(asked)
    )


def cntk_without_openmpi(folder, missing):
    """``missing``: each library that CNTK is linked with, and the file of OpenMPI 4 that does."""
    commands = " && ".join(
        "ln -s $(ldconfig -p | grep -o '/.*/{}') {}/{}".format(there, folder, name)
        for name, there in sorted(missing.items())
    )
    return BrokenInstallError(
        "cntk is installed, but importing it fails without OpenMPI's {}. On Debian and Ubuntu: "
        "apt-get install libopenmpi3 && {}".format(" and ".join(sorted(missing)), commands)
    )
