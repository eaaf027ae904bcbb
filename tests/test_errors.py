"""Every text of compat/errors.py, whole. A new function there needs a row here."""

import inspect

import pytest

import compat
from compat import errors
from compat._launch import Ended
from compat._launchers import Ranks

# Function, its arguments, the exception's class (None: the text of a warning), the whole text.
RANKS = Ranks(1, 3, 1, 3, "torchrun")

TEXTS = [
    (
        errors.invalid_gpus,
        ("two", "'two' is neither an id nor a name"),
        errors.InvalidArgumentError,
        "gpus='two' is not understood: 'two' is neither an id nor a name. Use one of:\n"
        "    None            every visible GPU\n"
        "    2               two GPUs\n"
        "    -1              every visible GPU\n"
        '    [0, 2], "0,2"   these ids, counted inside CUDA_VISIBLE_DEVICES where it is set\n'
        '    [2], "2"        the one GPU with this id\n'
        '    ["GPU-8932f937"], "MIG-c7384736"\n'
        "                    GPUs, or MIG instances, by name\n"
        '    "free"          the idle GPUs\n'
        '    "free:2"        two idle GPUs\n'
        '    0, [], "cpu"    no GPU',
    ),
    (
        errors.invalid_gpus_option,
        ("two", "'two' is neither an id nor a name"),
        errors.InvalidArgumentError,
        "--gpus two is not understood: 'two' is neither an id nor a name. Use one of:\n"
        "    --gpus 0,2      these ids, counted inside CUDA_VISIBLE_DEVICES where it is set\n"
        "    --gpus 2        the one GPU with this id\n"
        "    --gpus GPU-8932f937\n"
        "                    GPUs, or MIG instances, by name\n"
        "    --gpus free     the idle GPUs\n"
        "    --gpus free:2   two idle GPUs\n"
        "    --gpus cpu      no GPU\n"
        "    --gpus all      every visible GPU, as without --gpus",
    ),
    (
        errors.gpus_option_is_an_id,
        ("4",),
        None,
        "--gpus 4 means the GPU with id 4; ids count from 0. Several are named one by one, such as "
        "--gpus 0,1, and --gpus cpu means none.",
    ),
    (
        errors.invalid_memory,
        (2, "a number is a fraction, above 0 and at most 1"),
        errors.InvalidArgumentError,
        "memory=2 is not understood: a number is a fraction, above 0 and at most 1. Use "
        '"grow" (take memory as it is needed), a fraction of each GPU such as 0.5, a size per GPU '
        'such as "4GiB" or "512MiB", or None (the backend\'s default).',
    ),
    (
        errors.invalid_floatx,
        ("float",),
        errors.InvalidArgumentError,
        'floatx=\'float\' is not understood. Use "float16", "float32", "float64", or None '
        "(what Keras is set to).",
    ),
    (
        errors.invalid_verify,
        ("yes",),
        errors.InvalidArgumentError,
        "verify='yes' (or the variable COMPAT_VERIFY) is not a number of steps to verify. "
        "Give 0 for none, or 1 or more, for example verify=1.",
    ),
    (
        errors.results_differ,
        ("net", "training", 3, "the loss", 0.5, 1e-5, "It is random."),
        errors.ResultsDifferError,
        "The first thing that differs when model 'net' does a training step on 3 devices and on "
        "one is the loss: by 0.5, where rounding explains at most 1e-05. It is random. The model "
        "is as it was before the step. Change the model, or run it on one device: "
        "parallelize(model, gpus=1); verify=0 goes on without looking.",
    ),
    (
        errors.invalid_simulate,
        (0,),
        errors.InvalidArgumentError,
        "simulate=0 is not understood. Use the number of CPU devices that shall stand in for "
        "GPUs, 1 or more, or None (no simulation).",
    ),
    (
        errors.simulate_with_gpus,
        ("gpus=4", 3),
        errors.InvalidArgumentError,
        "gpus=4 asks for a device that simulate=3 does not have. Simulated devices are numbered "
        "from 0; ask for at most 3, or leave gpus out.",
    ),
    (
        errors.unknown_option,
        ("memmory", "memory=1", ["gpus", "memory"], ["log_device_placement", "soft_placement"]),
        errors.UnknownOptionError,
        "configure_gpu() has no argument 'memmory', and no backend has an option of that name. Did "
        "you mean memory=1? Its arguments: gpus, memory. Options of single backends: "
        "log_device_placement, soft_placement.",
    ),
    (
        errors.unknown_option,
        ("mistake", None, ["gpus", "memory"], []),
        errors.UnknownOptionError,
        "configure_gpu() has no argument 'mistake', and no backend has an option of that name. Its "
        "arguments: gpus, memory. Options of single backends: none.",
    ),
    (
        errors.option_of_others,
        ("log_device_placement", "theano"),
        None,
        "The option 'log_device_placement' is for other backends: theano ignores it.",
    ),
    (
        errors.nothing_to_persist,
        ("mxnet",),
        None,
        "persist=True writes nothing: mxnet reads no configuration file.",
    ),
    (
        errors.invalid_strategy,
        ("mirror",),
        errors.InvalidArgumentError,
        "strategy='mirror' is not understood. Use None (the model's replicas run in this process, "
        'split by compat) or "mirrored" (TensorFlow 2\'s MirroredStrategy, for a function that '
        "builds the model).",
    ),
    (
        errors.strategy_needs_function,
        ("mirrored", 3),
        errors.NotAModelError,
        "strategy='mirrored' takes a function that builds the model, since its variables must be "
        "made under the strategy; it was given 'builtins.int'. Put the lines that build the model "
        "into a function, and pass that.",
    ),
    (
        errors.invalid_device,
        ("gpu", ["/gpu:0", "/gpu:1"]),
        errors.InvalidArgumentError,
        "device('gpu') is not understood. Use a number, counted among the configured devices from "
        '0, one of their names (/gpu:0, /gpu:1), or "cpu".',
    ),
    (
        errors.invalid_backend,
        (3, "it is no instance of a subclass of compat.Backend"),
        errors.InvalidArgumentError,
        "register() cannot take 'builtins.int': it is no instance of a subclass of compat.Backend. "
        "Pass an instance of a subclass of compat.Backend that has a name of its own.",
    ),
    (
        errors.broken_plugin,
        ("tpu", "tpu_keras:backend", "No module named 'tpu_keras'"),
        errors.BrokenInstallError,
        "An installed package names tpu_keras:backend as the backend 'tpu' in its entry points, "
        "but that gives no backend: No module named 'tpu_keras'. Mend or uninstall that package.",
    ),
    (
        errors.unknown_backend,
        ("KERAS_BACKEND=cntk", ["mxnet", "theano"]),
        errors.InvalidArgumentError,
        "KERAS_BACKEND=cntk, but compat does not know that backend. Known backends: mxnet, theano.",
    ),
    (
        errors.ambiguous_backend,
        (["mxnet", "theano"],),
        errors.AmbiguousBackendError,
        "Several backends are installed and nothing says which one this script uses: mxnet, "
        "theano. Pass backend=..., set KERAS_BACKEND, or import keras first.",
    ),
    (
        errors.ambiguous_backend,
        (["mxnet", "theano"], True),
        errors.AmbiguousBackendError,
        "Several backends are installed and nothing says which one this script uses: mxnet, "
        "theano. Pass --backend, such as --backend mxnet, or set KERAS_BACKEND.",
    ),
    (
        errors.not_installed,
        ("theano", "--backend theano was asked for", "theano", ["torch"], True),
        errors.NotInstalledError,
        "theano is not installed, but --backend theano was asked for. Use --backend torch, or "
        'install it: pip install "keras-gpu-compat[theano]".',
    ),
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
        errors.not_installed,
        ("theano", "KERAS_BACKEND=theano", "theano", []),
        errors.NotInstalledError,
        "theano is not installed, but KERAS_BACKEND=theano. Choose another backend, or install "
        'it: pip install "keras-gpu-compat[theano]".',
    ),
    (
        errors.not_installed,
        ("tensorflow", "it is the default of keras 2.2.4", "tensorflow1", ["theano", "mxnet"]),
        errors.NotInstalledError,
        "tensorflow is not installed, but it is the default of keras 2.2.4. Use "
        "backend='theano', or install it: pip install \"keras-gpu-compat[tensorflow1]\".",
    ),
    (
        errors.not_installable,
        ("theano", "KERAS_BACKEND=theano", "theano", ["jax"], "Python 3.6 to 3.8", "3.11"),
        errors.NotInstalledError,
        "theano is not installed, but KERAS_BACKEND=theano. Use backend='jax', or run the script "
        'on Python 3.6 to 3.8, where pip install "keras-gpu-compat[theano]" brings it: this is '
        "Python 3.11.",
    ),
    (
        errors.python_not_found,
        ("python9",),
        errors.PythonNotFoundError,
        "--python=python9: there is no such program. Give the path of an interpreter, or a name "
        "that is on the PATH, such as python2.7.",
    ),
    (
        errors.backend_of_python_unknown,
        ("/usr/bin/python2.7",),
        errors.AmbiguousBackendError,
        "compat does not look into /usr/bin/python2.7, and nothing says which backend the script "
        "uses there. Pass --backend, such as --backend=theano, or set KERAS_BACKEND.",
    ),
    (
        errors.unsupported_version,
        ("theano", "0.7", ["mxnet", "theano"]),
        errors.UnsupportedError,
        "theano 0.7 is installed, which no backend of compat accepts. Known backends: mxnet, "
        "theano.",
    ),
    (
        errors.broken_install,
        ("mxnet", "libgfortran.so.3: cannot open shared object file"),
        errors.BrokenInstallError,
        "mxnet is installed, but importing it fails: libgfortran.so.3: cannot open shared object "
        "file. Run `python -c 'import mxnet'` to see all of it.",
    ),
    (
        errors.no_keras,
        ("theano", "theano"),
        errors.NotInstalledError,
        "No Keras that runs on theano is installed, or KERAS_BACKEND and keras.json choose "
        "another backend for it. Install one: pip install "
        '"keras-gpu-compat[theano]".',
    ),
    (
        errors.keras_json_unreadable,
        ("/home/a/.keras/keras.json", "Expecting value: line 1 column 1 (char 0)"),
        errors.ConfigurationFileError,
        "/home/a/.keras/keras.json cannot be read: Expecting value: line 1 column 1 (char 0). "
        "Keras would ignore it without a word: mend or remove the file, or set KERAS_BACKEND.",
    ),
    (
        errors.keras_elsewhere,
        ("theano", "mxnet"),
        None,
        "keras is imported and runs on theano, but mxnet was configured: models of this keras "
        "will not use it. Call configure_gpu() before keras is imported.",
    ),
    (
        errors.keras_backend_ignored,
        ("theano", "keras 2.10.0"),
        None,
        "KERAS_BACKEND=theano is ignored: keras 2.10.0 runs on TensorFlow only. Unset it, or "
        "install another Keras.",
    ),
    (
        errors.two_kerases,
        (),
        None,
        "keras and keras-mxnet are both installed; they overwrite each other's files. Uninstall "
        "both, then install one.",
    ),
    (
        errors.visible_devices_spaces,
        ("0, 1", "0,1"),
        None,
        'CUDA_VISIBLE_DEVICES="0, 1" contains a space, where CUDA stops reading; compat reads it '
        'as "0,1".',
    ),
    (
        errors.visible_devices_invalid,
        ("0,x", "x"),
        None,
        'CUDA_VISIBLE_DEVICES="0,x": CUDA ignores "x" and what follows it, which is no id, no GPU '
        "name and no MIG name like those before it.",
    ),
    (
        errors.visible_devices_absent,
        ("0,7", "7"),
        None,
        'CUDA_VISIBLE_DEVICES="0,7": CUDA ignores "7" and what follows it, since this machine has '
        "no such GPU.",
    ),
    (
        errors.visible_devices_twice,
        ("0,0", "0"),
        None,
        'CUDA_VISIBLE_DEVICES="0,0": CUDA shows no GPU at all, since "0" is there twice.',
    ),
    (
        errors.device_order,
        ("FASTEST_FIRST",),
        None,
        "CUDA_DEVICE_ORDER=FASTEST_FIRST: ids may mean other GPUs than in nvidia-smi's listing. "
        "Set CUDA_DEVICE_ORDER=PCI_BUS_ID.",
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
        errors.already_configured,
        ("theano, devices: CPU", "theano, devices: GPU 0"),
        errors.AlreadyConfiguredError,
        "configure_gpu() was called before in this process, with other settings.\n"
        "first:  theano, devices: CPU\n"
        "second: theano, devices: GPU 0\n"
        "Devices are fixed once per process: make both calls the same, or drop one.",
    ),
    (
        errors.parallelized_before,
        ("net", ["cpu"], ["cpu:0", "cpu:1"]),
        None,
        "parallelize() put the model 'net' on cpu before configure_gpu() was called, and there it "
        "stays; configured now: cpu:0, cpu:1. Call configure_gpu() at the top of the script, or "
        "parallelize() the model again after it.",
    ),
    (
        errors.hip_devices_invalid,
        ("HIP_VISIBLE_DEVICES", "0,x", "x"),
        None,
        'HIP_VISIBLE_DEVICES="0,x": AMD\'s HIP ignores "x" and what follows it, which is no id of '
        "a GPU that is visible here.",
    ),
    (
        errors.fewer_devices,
        ("gpus=2", "1 GPU is visible", "Going on with GPU 0"),
        None,
        "gpus=2 was asked for, but 1 GPU is visible. Going on with GPU 0.",
    ),
    (
        errors.devices_not_found,
        ("gpus=2", "1 GPU is visible"),
        errors.DevicesNotFoundError,
        "gpus=2 was asked for, but 1 GPU is visible. Ask for fewer, or drop strict=True to go on "
        "with what there is.",
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
        errors.not_a_model,
        (3,),
        errors.NotAModelError,
        "parallelize() takes a Keras model, a model of the backend's own kind, or a function that "
        "builds one; it was given 'builtins.int'.",
    ),
    (
        errors.builds_no_model,
        ("build", None),
        errors.NotAModelError,
        "parallelize() was given the function build, which returned 'builtins.NoneType', not a "
        "model.",
    ),
    (
        errors.time_comes_first,
        ("lstm0_",),
        errors.UnsupportedError,
        "The RNN layer lstm0_ takes time as its first dimension, which parallelize() would split "
        'for the batch. Build it with layout="NTC".',
    ),
    (
        errors.no_rows_in_result,
        ([(1,), (1,)], [2, 3]),
        errors.UnsupportedError,
        "A block on several devices must return arrays with a row for each of the batch; its "
        "replicas were given 2, 3 rows and returned (1,), (1,). Compute totals and means outside "
        "of the block that is parallelized.",
    ),
    (
        errors.rows_cannot_be_cut,
        ("model_1", "its inputs have 6 and 11 rows"),
        errors.UnsupportedError,
        "'model_1' cannot be computed on a part of a batch: its inputs have 6 and 11 rows.\n"
        "parallelize() cuts each batch by rows: every input needs one row for each sample, and "
        "nothing may depend on how many there are. parallelize(model, gpus=1) runs it whole, on "
        "one device.",
    ),
    (
        errors.state_of_replicas,
        ("Custom", "model_1", "count"),
        errors.UnsupportedError,
        "The operation Custom of 'model_1' has the state 'count', which several devices would each "
        "change by their own rows. How these go together is known of BatchNorm's averages only. "
        "parallelize(model, gpus=1) runs it on one device.",
    ),
    (
        errors.across_rows,
        ("mean0", "model_1", "cpu(0)"),
        None,
        "The operation mean0 of 'model_1' computes across the rows of a batch, of which each "
        "device has a part. It, and all that follows from it, runs on cpu(0) with the whole batch.",
    ),
    (
        errors.not_a_plain_module,
        ("BucketingModule",),
        errors.UnsupportedError,
        "parallelize() runs an mx.mod.Module on several devices, not a BucketingModule. Give "
        "context=[...] to the BucketingModule itself.",
    ),
    (
        errors.module_has_an_optimizer,
        (),
        errors.UnsupportedError,
        "This Module has an optimizer already, and MXNet numbers its state by device. Call "
        "parallelize() before fit() or init_optimizer().",
    ),
    (
        errors.loss_depends_on_the_batch,
        ("softmax has normalization='batch'",),
        errors.UnsupportedError,
        "A Module on several devices must not divide its loss by the batch, since each device "
        "sees a shard of it: softmax has normalization='batch'. Leave the division to the "
        "optimizer's rescale_grad, which is 1/batch size.",
    ),
    (
        errors.state_on_two_devices,
        ("moving_mean",),
        errors.UnsupportedError,
        "moving_mean is used on several devices, and MXNet would keep only what one of them "
        "computes of it. Call the layer inside one compat.device() only.",
    ),
    (
        errors.device_with_replicas,
        ("model_1",),
        errors.UnsupportedError,
        "Parts of the model model_1 were placed by compat.device(), which parallelize() on several "
        "devices would undo. Use one of the two.",
    ),
    (
        errors.nothing_to_compare,
        (3, "cpu:0"),
        errors.DevicesNotFoundError,
        "3 devices are needed for the comparison, but the framework shows cpu:0.",
    ),
    (
        errors.wrong_backend,
        ("tensorflow2", "theano"),
        errors.InvalidArgumentError,
        "The model runs on tensorflow2, but configure_gpu() set up theano. Build the model with "
        "the Keras that was configured, or pass backend='tensorflow2' to configure_gpu().",
    ),
    (
        errors.too_few_gpus,
        ("gpus", 1),
        errors.InvalidArgumentError,
        "For multi-gpu usage to be effective, call `multi_gpu_model` with `gpus >= 2`. Received: "
        "`gpus=1`",
    ),
    (
        errors.gpus_not_available,
        (4, ["/cpu:0", "/gpu:0"], ["/cpu:0"]),
        errors.InvalidArgumentError,
        "To call `multi_gpu_model` with `gpus=4`, we expect the following devices to be available: "
        "['/cpu:0', '/gpu:0']. However this machine only has: ['/cpu:0']. Try reducing `gpus`.",
    ),
    (
        errors.not_symbolic,
        ("make_parallel", 3),
        errors.NotAModelError,
        "make_parallel() takes a Keras model with symbolic inputs, functional or Sequential with "
        "an input shape, to make another one around it; it was given 'builtins.int'. "
        "compat.parallelize() takes any Keras model.",
    ),
    (
        errors.session_ignored,
        (),
        None,
        "set_session() does nothing here: this Keras runs in no TensorFlow session, and the "
        "session's settings have no effect. Pass them to compat.configure_gpu(), such as "
        'memory="grow" for allow_growth.',
    ),
    (
        errors.no_session,
        (),
        errors.UnsupportedError,
        "get_session() has nothing to return: this Keras runs in no TensorFlow session. Call "
        "models and functions directly; compat.configure_gpu() has what a session's ConfigProto "
        "set.",
    ),
    (
        errors.unreadable_file,
        ("/home/a/.theanorc", "no section headers", "Mend the file."),
        errors.ConfigurationFileError,
        "/home/a/.theanorc cannot be read: no section headers. Mend the file.",
    ),
    (
        errors.unwritable_file,
        ("/home/a/.theanorc", "No space left on device"),
        errors.ConfigurationFileError,
        "/home/a/.theanorc could not be written: No space left on device. The file is as it was "
        "before.",
    ),
    (
        errors.unclaimed_gpu,
        (3, "/tmp/x.lock", OSError(13, "Permission denied", "/tmp/x.lock")),
        None,
        "GPU 3 is idle but cannot be claimed: /tmp/x.lock cannot be locked (Permission denied). "
        "Another job that asks for idle GPUs may take it, too. Choose GPUs by their ids, or have "
        "that file removed.",
    ),
    (
        errors.shadowed,
        ("train.py", "/home/a/compat.py"),
        None,
        "`import compat` in train.py finds /home/a/compat.py, not this package. Rename that one "
        "to use compat.configure_gpu() there.",
    ),
    # Texts of single backends.
    (
        errors.memory_total_unknown,
        ("4096 MiB per GPU",),
        errors.UnsupportedError,
        "tensorflow1 cannot limit memory to 4096 MiB per GPU: it takes a fraction of each GPU "
        "only, and nvidia-smi does not tell how much memory the GPUs have. Use a fraction such as "
        'memory=0.5, or memory="grow".',
    ),
    (
        errors.keras_session_exists,
        (4, 'device_count { key: "CPU" value: 3 }'),
        errors.TooLateError,
        "configure_gpu() came too late for tensorflow: Keras has made its session already, "
        'without device_count { key: "CPU" value: 3 }; what a session has cannot be changed, and '
        "another one would lose the values of its 4 variables.\n"
        "Call it before the first model is built.",
    ),
    (
        errors.gpus_initialised,
        ("allow_growth: true",),
        errors.TooLateError,
        "configure_gpu() came too late for tensorflow: a session was made in this process, which "
        "fixed GPUs and their memory; they cannot become allow_growth: true.\n"
        "Call it before the first tf.Session().",
    ),
    (
        errors.custom_gradient,
        ("scaled/IdentityN",),
        errors.UnsupportedError,
        "tensorflow cannot run scaled/IdentityN on several devices: it is in a loop and has a "
        "gradient by tf.custom_gradient, which is bound to the undivided batch. Use one device: "
        "gpus=1, or give the operation TensorFlow's own gradient.",
    ),
    (
        errors.parts_placed,
        ("dense_model", ["/device:CPU:0", "/device:CPU:1"], ["/device:CPU:1", "/device:CPU:2"]),
        None,
        "Parts of dense_model were placed on /device:CPU:0, /device:CPU:1 by device(), but "
        "parallelize() runs all of it on each of /device:CPU:1, /device:CPU:2. Leave out one of "
        "the two; parallelize(model, gpus=1) puts the parts back.",
    ),
    (
        errors.reference_variables,
        ("dense_model",),
        None,
        "The weights of dense_model are reference variables, which TensorFlow may overwrite while "
        "a replica still reads them: training goes wrong now and then. Call configure_gpu() "
        "before the model is built; it switches resource variables on.",
    ),
    (
        errors.jax_devices_made,
        ("keras", "cpu:0", "devices: 3 simulated on the CPU"),
        errors.TooLateError,
        "configure_gpu() came too late for jax: JAX made its devices (cpu:0) with its first "
        "operation (it was imported by `import keras`), and cannot change them or their memory "
        "any more (devices: 3 simulated on the CPU).\nCall it before the first model, variable "
        "or array is made, best before the first `import jax` or `import keras`.",
    ),
    (
        errors.platforms_without_gpus,
        ("cpu",),
        None,
        "JAX_PLATFORMS=cpu keeps JAX from GPUs. Remove the variable, or ask for no GPU with "
        "gpus=0.",
    ),
    (
        errors.one_fraction_for_all_gpus,
        ("4096 MiB per GPU",),
        errors.UnsupportedError,
        "jax cannot limit memory to 4096 MiB per GPU: it takes one fraction for all GPUs, and "
        "nvidia-smi does not tell that they all have the same amount. Use a fraction such as "
        'memory=0.5, or memory="grow".',
    ),
    (
        errors.one_program,
        ("cpu:1",),
        errors.UnsupportedError,
        "jax cannot place parts of a model on cpu:1: under jax.jit a step is one program, all of "
        "which runs on the same devices. Leave compat.device() out; parallelize() splits the "
        "batches of the whole model.",
    ),
    (
        errors.keras_distribution_is_set,
        ("encoder",),
        errors.UnsupportedError,
        "parallelize() cannot shard the batches of model 'encoder': a keras.distribution is set, "
        "or was when the model was built, and Keras shards them itself, with an error for "
        "batches that do not divide. Use one of the two: call "
        "keras.distribution.set_distribution(None) before the model is built, or leave "
        "parallelize() out.",
    ),
    (
        errors.several_devices_in_xla,
        (),
        errors.UnsupportedError,
        "tensorflow2 cannot run a model on several devices under jit_compile=True: XLA puts a "
        "whole step on one. Compile the model with jit_compile=False.",
    ),
    (
        errors.arrays_are_no_tensors,
        ("Net",),
        None,
        "A call of the parallelized Net was given numpy arrays, which are not split, so it ran on "
        "one device: give it tensors, tf.constant(array).",
    ),
    (
        errors.not_divided,
        ("encoder", "it is stateful", "/gpu:0"),
        None,
        "parallelize() leaves model 'encoder' on /gpu:0: it is stateful, so its batches cannot be "
        "split. The numbers are those of one device, and so is the speed.",
    ),
    (
        errors.invalid_number_option,
        ("cpu_worker_threads", "two"),
        errors.InvalidArgumentError,
        "cpu_worker_threads='two' is not understood. Use a number, 1 or more.",
    ),
    (
        errors.no_memory_size,
        ("mxnet", "4096 MiB per GPU"),
        None,
        "memory=4096 MiB per GPU was asked for, but mxnet limits GPU memory by no size. It takes "
        "memory as it is needed; memory=0.5 makes it give cached memory back while less than half "
        "of a GPU is free.",
    ),
    (
        errors.theano_flags_invalid,
        ({"floatX": "float32"}, "floatX is set by floatx="),
        errors.InvalidArgumentError,
        "theano_flags={'floatX': 'float32'} is not understood: floatX is set by floatx=. Use a "
        'dictionary of Theano\'s flags, such as {"optimizer": "fast_compile", "openmp": True}.',
    ),
    (
        errors.theano_flags_unreadable,
        ("cxx='g++", "No closing quotation"),
        errors.InvalidArgumentError,
        "THEANO_FLAGS=cxx='g++ cannot be read: No closing quotation. Theano cannot be imported "
        "with it. Put a backslash before a quote, a comma or a backslash that belongs to a value.",
    ),
    (
        errors.theanorc_unreadable,
        ("/home/a/.theanorc", "File contains no section headers."),
        errors.ConfigurationFileError,
        "/home/a/.theanorc cannot be read: File contains no section headers. Theano cannot be "
        "imported with it. Mend the file: each option stands once, as `name = value`, under a "
        "section such as [global].",
    ),
    (
        errors.theanorc_without_home,
        ("/.theanorc",),
        errors.ConfigurationFileError,
        "persist=True would write /.theanorc: HOME is set and empty. Set HOME to the home folder, "
        "unset it, or name a file in THEANORC.",
    ),
    (
        errors.theanorc_not_a_path,
        ("/a\0b",),
        errors.ConfigurationFileError,
        "'/a\\x00b' is the path of no file: it holds a NUL character. Give THEANORC, or HOME, "
        "another value.",
    ),
    (
        errors.theanorc_not_a_file,
        ("/home/a/.theanorc",),
        errors.ConfigurationFileError,
        "/home/a/.theanorc cannot be read: it is not a regular file. Theano would wait for what it "
        "says when it is imported. Put a file there, or name one in THEANORC.",
    ),
    (
        errors.theanorc_defaults,
        ("global", ["cxx", "floatx"]),
        errors.ConfigurationFileError,
        "persist=True has written nothing: it needs a section [global], and what a section "
        "[DEFAULT] says of cxx and floatx would then hold there, where it does not yet. Move that "
        "from [DEFAULT] into the sections that it is for, or add the line [global] yourself.",
    ),
    (
        errors.theanorc_names_no_file,
        (),
        errors.ConfigurationFileError,
        "persist=True has no file to write: THEANORC is set and names none. Unset it, for "
        "~/.theanorc, or name a file.",
    ),
    (
        errors.theano_has_no_flag,
        ("FloatX", "float32", "1.0.5", "floatX"),
        None,
        "FloatX=float32: Theano 1.0.5 has no flag FloatX, and ignores it. Did you mean floatX?",
    ),
    (
        errors.theano_has_no_flag,
        ("a", "b", "1.0.5", None),
        None,
        "a=b: Theano 1.0.5 has no flag a, and ignores it.",
    ),
    (
        errors.theano_device_without_pygpu,
        ("cuda",),
        None,
        "device=cuda: Theano needs the package pygpu for it, which is not installed, and goes on "
        "with the CPU. Install libgpuarray and pygpu 0.7.",
    ),
    (
        errors.theano_device_without_gpu,
        ("cuda",),
        None,
        "device=cuda: no GPU is visible, and Theano goes on with the CPU.",
    ),
    (
        errors.theano_device_overruled,
        ("cuda0", "CPU"),
        None,
        "Theano's flags say device=cuda0, but compat chose CPU, so device=cpu was set. `compat "
        "env` tells which GPUs are visible.",
    ),
    (
        errors.theano_device_overruled,
        ("opencl0:0", "CPU"),
        None,
        "Theano's flags say device=opencl0:0, but compat chose CPU, so device=cpu was "
        'set. For a device that is no CUDA GPU pass theano_flags={"device": "opencl0:0"}.',
    ),
    (
        errors.theano_input_not_fed,
        ("mine",),
        errors.UnsupportedError,
        "theano cannot run model 'mine' on several devices: an input of it is a tensor of the "
        "user's, Input(tensor=...), whose rows cannot be split. Give the model an "
        "Input(shape=...) and feed it.",
    ),
    (
        errors.keras_distribution_does_nothing,
        ("torch",),
        None,
        "A keras.distribution is set: on torch Keras accepts it and does nothing with it. Remove "
        "keras.distribution.set_distribution(); parallelize() splits the batches by itself.",
    ),
    (
        errors.keras_torch_device_overruled,
        ("cpu", "GPU 0"),
        None,
        "KERAS_TORCH_DEVICE says cpu, but compat chose GPU 0.",
    ),
    (
        errors.several_devices_in_torch_compile,
        (),
        errors.UnsupportedError,
        "torch cannot run a model on several devices under jit_compile=True: torch.compile() makes "
        "one program for one device. Compile the model with jit_compile=False.",
    ),
    (
        errors.one_device_only,
        ("cntk", "cpu:0, cpu:1", "cpu:0"),
        errors.UnsupportedError,
        "cntk cannot run a model on cpu:0, cpu:1 in one process: all of it runs on cpu:0. Start "
        "one process per device, with compat run -n, or train on that one, with "
        "parallelize(model, gpus=1).",
    ),
    (
        errors.cntk_device_fixed,
        ("gpu(1)", ["keras", "cntk"]),
        errors.TooLateError,
        "configure_gpu() came too late for cntk: its default device was fixed when keras was "
        "imported, and cannot become gpu(1).\nCall it before the first `import keras`.",
    ),
    (
        errors.cntk_without_gpus,
        (),
        None,
        "This CNTK shows no GPU: it is a build for the CPU, or CUDA's driver is not there. The "
        "package cntk-gpu is the build for GPUs.",
    ),
    (
        errors.cntk_no_memory_limit,
        ("0.5",),
        None,
        "memory=0.5 was asked for, but CNTK has no setting for a GPU's memory.",
    ),
    (
        errors.cntk_trains_in_float32,
        ("float64",),
        None,
        "floatx=float64 was asked for, but on CNTK Keras trains in float32 only: it makes the "
        "places for gradients in that type.",
    ),
    (
        errors.cntk_excluded_devices_invalid,
        (["gpu"],),
        errors.InvalidArgumentError,
        "excluded_devices=['gpu'] is not understood. Use a list of GPU ids and \"cpu\", such as "
        '[1, "cpu"].',
    ),
    (
        errors.cntk_without_openmpi,
        ("/env/cntk/libs", {"libmpi.so.12": "libmpi.so.40"}),
        errors.BrokenInstallError,
        "cntk is installed, but importing it fails without OpenMPI's libmpi.so.12. On Debian and "
        "Ubuntu: apt-get install libopenmpi3 && ln -s $(ldconfig -p | grep -o '/.*/libmpi.so.40') "
        "/env/cntk/libs/libmpi.so.12",
    ),
    (
        errors.invalid_ranks,
        ("torchrun", ["RANK", "WORLD_SIZE"], ["2", "2"]),
        errors.RankError,
        "The environment of torchrun contradicts itself: RANK=2, WORLD_SIZE=2. Ranks count from 0 "
        "and are fewer than the size. Start the script with its launcher again, or set "
        "COMPAT_ALONE=1 to train alone.",
    ),
    (
        errors.not_a_rank,
        ("RANK", "one"),
        errors.RankError,
        "RANK=one tells no place among ranks that compat understands. Set COMPAT_RANK, "
        "COMPAT_SIZE, COMPAT_LOCAL_RANK and COMPAT_LOCAL_SIZE instead, or COMPAT_ALONE=1 to train "
        "alone.",
    ),
    (
        errors.place_unknown,
        ("WORLD_SIZE", "8"),
        errors.RankError,
        "WORLD_SIZE=8 says that several processes train together, but nothing tells which of them "
        "this is: each would train alone. Start the script with a launcher that does (compat run "
        "-n N, torchrun, mpirun, srun), set COMPAT_RANK, COMPAT_SIZE, COMPAT_LOCAL_RANK and "
        "COMPAT_LOCAL_SIZE, or set COMPAT_ALONE=1 to train alone.",
    ),
    (
        errors.processes_without_torchrun,
        ("NPROC_PER_NODE", "8"),
        errors.RankError,
        "NPROC_PER_NODE=8 asks for 8 processes on each machine, but this one was started without "
        "torchrun, which would start them: RANK and WORLD_SIZE do not count them alike. Start the "
        "script with torchrun, or set NPROC_PER_NODE=1 for one process on each machine, or "
        "COMPAT_ALONE=1 to train alone.",
    ),
    (
        errors.sparse_cluster,
        ('{"sparseCluster": {}}',),
        errors.RankError,
        'TF_CONFIG={"sparseCluster": {}} names only some of the workers, so that nothing tells '
        "how many there are. Name all of them (in a TFJob, without enableDynamicWorker), or set "
        "COMPAT_ALONE=1 to train alone.",
    ),
    (
        errors.invalid_meeting_point,
        ("JAX_COORDINATOR_ADDRESS", "node1"),
        errors.RankError,
        "JAX_COORDINATOR_ADDRESS is 'node1': that is no host and port at which ranks can meet. Use "
        "the host name or address of rank 0's machine and a free port there, such as node1:29500.",
    ),
    (
        errors.meeting_point_taken,
        (RANKS, "node1", 29500, "Address already in use"),
        errors.RankError,
        "This process is rank 1 of 3 (torchrun), and ranks are to meet here at node1:29500, where "
        "it cannot listen: Address already in use. Set MASTER_ADDR and MASTER_PORT to another "
        "host or port, the same for all ranks.",
    ),
    (
        errors.invalid_timeout,
        ("COMPAT_TIMEOUT", "soon"),
        errors.InvalidArgumentError,
        "COMPAT_TIMEOUT=soon is not understood. Use a number of seconds above 0: how long a rank "
        "waits for the others.",
    ),
    (
        errors.invalid_number_of_ranks,
        (0,),
        errors.InvalidArgumentError,
        "-n 0 is not understood. Use the number of processes to start, 1 or more.",
    ),
    (
        errors.invalid_tf_config,
        ("{", "it is no JSON"),
        errors.RankError,
        'TF_CONFIG={ is not understood: it is no JSON. Use JSON such as {"cluster": {"worker": '
        '["host1:2222", "host2:2222"]}, "task": {"type": "worker", "index": 0}}, or set '
        "COMPAT_ALONE=1 to train alone.",
    ),
    (
        errors.parameter_servers,
        ('{"cluster": {"ps": ["a:1"]}}',),
        errors.RankError,
        'TF_CONFIG={"cluster": {"ps": ["a:1"]}} names parameter servers, which compat does not '
        "use: ranks train in step. Give all machines as workers, or set COMPAT_ALONE=1 to train "
        "alone.",
    ),
    (
        errors.not_built_in_rank,
        (RANKS,),
        errors.RankError,
        "This process is rank 1 of 3 (torchrun), but TensorFlow started before it could join the "
        "others: a model, a variable or a tensor was made. Give compat.parallelize() a function "
        "that builds the model, as the first thing after configure_gpu(); it joins them, and then "
        "calls it.",
    ),
    (
        errors.workers_without_eager_execution,
        (RANKS,),
        errors.UnsupportedError,
        "tensorflow2 cannot train as rank 1 of 3 (torchrun) after "
        "tf.compat.v1.disable_v2_behavior() or disable_eager_execution(). Remove that call, or "
        "start the script with horovodrun.",
    ),
    (
        errors.no_ranks,
        ("toy",),
        errors.UnsupportedError,
        "toy cannot train as one of several ranks yet. Start the script without a launcher (compat "
        "run without -n); parallelize() then uses the devices of one process.",
    ),
    (
        errors.strategy_in_rank,
        ("mirrored", RANKS),
        errors.UnsupportedError,
        "compat cannot use strategy='mirrored' in rank 1 of 3 (torchrun). Leave strategy out, or "
        "start the script without a launcher.",
    ),
    (
        errors.batch_too_small,
        (2, 3),
        errors.InvalidArgumentError,
        "A batch of 2 rows is too small for 3 ranks. Use 3 rows or more.",
    ),
    (
        errors.parts_differ,
        ([2, 3],),
        errors.InvalidArgumentError,
        "The arrays given to shard() have different numbers of rows: 2, 3. Give it arrays that "
        "belong together, row by row.",
    ),
    (
        errors.no_rows,
        (),
        errors.InvalidArgumentError,
        "There is no array to take rows of in what shard() was given.",
    ),
    (
        errors.not_rows,
        (object(),),
        errors.InvalidArgumentError,
        "shard() takes arrays, tuples, lists and dictionaries of arrays, and tf.data datasets; "
        "there is a builtins.object in what it was given. Let it read every size()-th item "
        "from rank() on.",
    ),
    (
        errors.too_few_rows,
        (2, 3),
        errors.InvalidArgumentError,
        "2 rows are too few for 3 ranks. Give shard() one row per rank or more.",
    ),
    (
        errors.rows_left_out,
        (2, 8, 3),
        None,
        "The last 2 of 8 rows are left out: they are too few for one on each of 3 ranks.",
    ),
    (
        errors.ranks_disagree,
        (RANKS, "TorchDistributed", 1),
        errors.RankError,
        "torchrun started this process as one of 3, but TorchDistributed sees 1: each would train "
        "alone. Start it with the launcher of TorchDistributed, or with compat run -n 3.",
    ),
    (
        errors.no_mpi4py,
        (RANKS,),
        errors.NotInstalledError,
        "Rank 1 of 3 (torchrun) needs mpi4py, which is not installed here, to train with the "
        "others. Install it for the MPI of the launcher: pip install mpi4py, which compiles it "
        "where there is no wheel (on Debian and Ubuntu that needs apt-get install libopenmpi-dev "
        "openmpi-bin).",
    ),
    (
        errors.no_mpirun,
        (),
        errors.NotInstalledError,
        "Ranks of Theano and CNTK are started by mpirun, which is not on PATH. Install the MPI "
        "that mpi4py was compiled with: on Debian and Ubuntu, apt-get install openmpi-bin.",
    ),
    (
        errors.no_meeting_point,
        (RANKS, "torch.distributed"),
        errors.RankError,
        "This process is rank 1 of 3 (torchrun), but nothing tells torch.distributed where ranks "
        "meet. Set MASTER_ADDR to the host name or address of rank 0's machine and MASTER_PORT to "
        "a free port there, the same for all ranks; or start the script with compat run -n 3.",
    ),
    (
        errors.rank_lost,
        (RANKS, "for the others' gradients", [0, 2], "Connection closed by peer"),
        errors.RankLostError,
        "Rank 1 of 3 waited for the others' gradients, but ranks 0 and 2 failed, ended or did not "
        "come: Connection closed by peer. Look at what ranks 0 and 2 printed. (COMPAT_TIMEOUT, or "
        "compat run --timeout, sets how many seconds ranks wait.)",
    ),
    (
        errors.out_of_step,
        (RANKS, [0], 1),
        errors.RankLostError,
        "Rank 1 of 3 has more batches, but rank 0 ran out of them after 1 batch. Give every rank "
        "the same number: compat.shard() does.",
    ),
    (
        errors.out_of_batches,
        (RANKS, [1], 2),
        errors.RankError,
        "Rank 1 of 3 ran out of batches after 2 batches, but ranks 0 and 2 had more. Give every "
        "rank the same number: compat.shard() does.",
    ),
    (
        errors.rank_ended,
        (Ended(1, 137, []), 3),
        None,
        "rank 1 of 3 was killed by signal 9; the others were ended.",
    ),
    (
        errors.interrupted,
        (60.0,),
        None,
        "compat run: interrupted. The ranks are, too, and have up to 60 seconds to end; Ctrl-C "
        "again ends them at once.",
    ),
    (
        errors.told_to_end,
        ("SIGTERM",),
        None,
        "compat run: told to end by SIGTERM; the ranks are ended.",
    ),
    (
        errors.launcher_failed,
        (1, []),
        None,
        "compat run: the launcher ended with exit status 1; no rank failed.",
    ),
    (
        errors.invalid_hosts,
        ("a:x",),
        errors.InvalidArgumentError,
        "--hosts a:x is not understood. Use machines, by the names that all of them know, and "
        "how many ranks each is to run: --hosts first:4,second:4.",
    ),
    (
        errors.invalid_host_name,
        ("a,-oProxyCommand=x", "-oProxyCommand=x"),
        errors.InvalidArgumentError,
        "--hosts a,-oProxyCommand=x: '-oProxyCommand=x' is not the name of a machine. Use a name "
        "of letters, digits, '.', '-' and '_' that does not begin with '-', or an IPv4 address; "
        "user@name logs in as another user.",
    ),
    (
        errors.invalid_host_name,
        ("[::1]:4", "[::1]:4"),
        errors.InvalidArgumentError,
        "--hosts [::1]:4: '[::1]:4' looks like an IPv6 address, and launchers take none. Use a "
        "name of letters, digits, '.', '-' and '_' that does not begin with '-', or an IPv4 "
        "address; user@name logs in as another user.",
    ),
    (
        errors.user_of_host,
        ("ann@a:2,b:2", "mpirun"),
        errors.InvalidArgumentError,
        "--hosts ann@a:2,b:2: mpirun takes no user@ in front of a machine. Name the user in "
        "~/.ssh/config, as User under the machine's Host.",
    ),
    (
        errors.no_room_on_hosts,
        (6, "a:2,b:3", 5),
        errors.InvalidArgumentError,
        "-n 6: --hosts a:2,b:3 has room for 5. Use fewer ranks, or give the machines more: "
        "--hosts first:4,second:4.",
    ),
    (
        errors.one_rank_on_hosts,
        ("a:1",),
        errors.InvalidArgumentError,
        "--hosts a:1 makes one rank, which has nobody to train with. Give the machines room for 2 "
        "or more, such as --hosts first:4,second:4, or run the script on that machine, without "
        "--hosts.",
    ),
    (
        errors.no_script,
        ("train.py",),
        errors.InvalidArgumentError,
        "there is no file train.py. Give the path of a script, or -m and the name of a module; "
        "what follows are its own arguments.",
    ),
    (
        errors.free_gpus_on_hosts,
        ("free:2",),
        errors.InvalidArgumentError,
        "--gpus free:2 with --hosts: idle GPUs cannot be found on other machines from here. Use "
        "ids that are meant on each of them, such as --gpus 0,1, or leave --gpus out.",
    ),
    (
        errors.not_one_update,
        ("dense", 2),
        errors.UnsupportedError,
        "jax cannot train model 'dense' as one of several ranks: its train_step calls "
        "optimizer.stateless_apply 2 times. Have it do so once.",
    ),
    (
        errors.own_loop_in_rank,
        ("dense", RANKS),
        errors.UnsupportedError,
        "jax cannot train model 'dense' in a loop of the script's own in rank 1 of 3 (torchrun): "
        "gradients of such a loop are never the model's. Use fit() or train_on_batch(), or start "
        "the script without a launcher.",
    ),
    (
        errors.ranks_differ,
        (RANKS, "dense"),
        errors.RankError,
        "Model 'dense' has other weights on rank 1 than on rank 0: their number or their shapes "
        "differ. Build the same model, and compile it with the same optimizer, on every rank.",
    ),
    (
        errors.no_horovod,
        ("tensorflow",),
        errors.NotInstalledError,
        "Ranks of tensorflow train together through Horovod, which is not installed. Build it "
        "where tensorflow is: HOROVOD_WITH_GLOO=1 HOROVOD_WITH_TENSORFLOW=1 pip install "
        "--no-build-isolation --no-cache-dir horovod==0.28.1 (that needs a C++ compiler, "
        "setuptools<60 and cmake<4). Or start the script without a launcher (compat run without "
        "-n).",
    ),
]


@pytest.mark.parametrize(
    "function, arguments, kind, text", TEXTS, ids=[row[0].__name__ for row in TEXTS]
)
def test_text(function, arguments, kind, text):
    made = function(*arguments)
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
    assert functions == {row[0] for row in TEXTS}


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
