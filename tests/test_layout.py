"""The rooms of compat/: what each may import, and which files the backends have."""

import ast
import collections
import functools
import inspect
import os
import re

import pytest
from conftest import ROOT
from sources import MODULES, nodes, texts, tree

import compat
from compat._configuration import registry

# From the top to the ground. A module imports from its own room and from those below it. Rooms on
# one line do not import each other.
ROOMS = [
    ["compat.__main__"],
    ["compat._commands", "compat.testing"],
    ["compat._commands.pytest_plugin"],
    ["compat"],
    ["compat._api.device_use", "compat._api.legacy"],
    ["compat._api.environment"],
    ["compat._api"],
    ["compat._api.configuring", "compat._keras.automatic_parallel"],
    ["compat._keras.wrappers"],
    ["compat._backends"],
    ["compat._verification", "compat._ranks (Keras models)"],
    ["compat._keras.steps"],
    ["compat._keras"],
    ["compat._configuration.detection"],
    ["compat._configuration.registry"],
    ["compat.backend"],
    ["compat._ranks.engines"],
    ["compat._ranks.launch"],
    ["compat._ranks"],
    ["compat._configuration.device_choice"],
    ["compat._configuration.gpu_selection"],
    ["compat._runtime.reporting", "compat._runtime.usage"],
    ["compat._configuration.settings", "compat._runtime.operation_times"],
    ["compat._rows", "compat._runtime.work", "compat._runtime.effects"],
    ["compat._runtime.containers"],
    ["compat._configuration", "compat._runtime", "compat.errors"],
    ["compat._configuration.numeric", "compat._configuration.pip_extras"],
]  # fmt: skip

# A room has an upper floor where some of its modules need more than the others.
UPPER_FLOORS = {
    "compat._ranks." + name: "compat._ranks (Keras models)"
    for name in (
        "callbacks",
        *(
            "horovod_optimizers",
            "keras2",
            "keras2_divisors",
            "keras2_losses",
            "keras2_state",
            "keras_model",
            "losses",
            "metrics",
        ),
        *("rank_usage", "own_functions", "state", "tables", "weights", "weight_comparison"),
        *("keras3_state", "script_gradients"),
    )
}

# Parts of a room that lie elsewhere: what needs more than the rest of its room does.
PARTS = {
    "compat.testing": "compat._commands",  # contracts of backends train the models of `compat test`
}


def _statements(node):
    """All statements but those that only a type checker reads."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
            continue
        if not isinstance(child, ast.expr):
            yield child
            yield from _statements(child)


@functools.lru_cache(None)
def _imports(module):
    """Return the modules of compat that a module imports, anywhere in it."""
    return list(_imported(module))


def _imported(module):
    path, source = MODULES[module]
    package = module if path.endswith("__init__.py") else module.rpartition(".")[0]
    for node in _statements(tree(source)):
        if isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                parts = parts[: len(parts) - node.level + 1]
                base = ".".join(parts + ([node.module] if node.module else []))
            for name in node.names:
                target = "{}.{}".format(base, name.name)
                target = target if target in MODULES else base
                if target in MODULES and target != module:
                    yield target
        elif isinstance(node, ast.Import):
            for name in node.names:
                if name.name in MODULES:
                    yield name.name


@functools.lru_cache(None)
def _level(module):
    """Return the line of ``ROOMS`` that a module belongs to, and its room."""
    module = UPPER_FLOORS.get(module, module)
    rooms = [(len(room), level, room) for level, rooms in enumerate(ROOMS) for room in rooms]
    inside = [
        entry
        for entry in rooms
        if module == entry[2] or (entry[2] != "compat" and module.startswith(entry[2] + "."))
    ]
    assert inside, "{} is in no room of ROOMS".format(module)
    return max(inside)[1:]


def test_a_module_imports_only_from_its_room_and_below():
    upwards = []
    for module in sorted(MODULES):
        level, room = _level(module)
        for target in _imports(module):
            its_level, its_room = _level(target)
            if its_room != room and its_level <= level and PARTS.get(room) != its_room:
                upwards.append((module, target))
    assert not upwards


def test_no_modules_import_each_other_in_a_circle():
    graph = {module: set(_imports(module)) for module in MODULES}
    while graph:
        free = [module for module, targets in graph.items() if not targets & set(graph)]
        assert free, "a circle within {}".format(sorted(graph))
        for module in free:
            del graph[module]


# What backends import besides their own packages: what both TensorFlows use, and TensorFlow 1's
# graphs, which TensorFlow 2 runs in v1 mode.
OTHER_BACKENDS = {
    "tensorflow1": {"_tensorflow"},
    "tensorflow2": {"_tensorflow", "tensorflow1"},
}


def test_a_backend_imports_no_other_one():
    for module in MODULES:
        parts = module.split(".")
        if parts[:2] == ["compat", "_backends"] and len(parts) > 2:
            others = {
                target.split(".")[2]
                for target in _imports(module)
                if target.startswith("compat._backends.")
            }
            assert others <= {parts[2]} | OTHER_BACKENDS.get(parts[2], set()), module


FRAMEWORKS = re.compile(r"tensorflow|theano|mxnet|cntk|torch|\bjax", re.IGNORECASE)
# Modules outside of the backends and engines that name frameworks, and why.
NAMING = {
    "compat._keras.automatic_parallel": "where each Keras defines compile()",
    "compat._commands": "the help lists the backends",
    "compat._commands.saved_files": "torch.save()",
    "compat._commands.tox": "what a row of a generated tox.ini sets, and an example in the help",
    "compat._api.batch_norm": "layers that communicate with the other ranks by themselves",
    "compat._api.environment": "packages that come with CUDA",
    "compat._configuration.detection": "which Keras runs on which framework",
    "compat._configuration.pip_extras": "the extras of setup.cfg",
    "compat._configuration.tested_versions": "the requirements of each tested pair",
    "compat._keras": "tells the kinds of Keras apart",
    "compat._keras.functions": "tells Keras' functions from a script's",
    "compat._api.legacy": "old names",
    "compat._ranks": "a process group of torch.distributed that the script made",
    "compat._ranks.adapting": "where each Keras defines layers that adapt",
    "compat._ranks.arrays": "what shard() takes",
    "compat._ranks.checksum": "likely causes of a drift",
    "compat._ranks.datasets": "tf.data",
    "compat._ranks.loaders": "random numbers as a DataLoader of torch draws them",
    "compat._ranks.launchers": "names of variables",
    "compat._ranks.nesting": "names of variables",
    "compat._ranks.rendezvous": "names of variables",
    "compat._ranks.losses": "tells the kinds of Keras apart",
    "compat._ranks.rank_usage": "where a fit() holds a model's weights",
    "compat._runtime.containers": "what frameworks' own objects hold is not searched",
    "compat._verification.keras_steps": "versions in an error's advice",
}


def _naming():
    """Return the modules that have a framework's name in a text, docstrings excepted."""
    for module, (_, source) in MODULES.items():
        if module.startswith(("compat._backends", "compat._ranks.engines", "compat.testing")):
            continue
        if any(map(FRAMEWORKS.search, texts(source))):
            yield module


def test_frameworks_are_named_in_backends_engines_and_where_a_reason_is_given():
    assert set(_naming()) == set(NAMING)


def test_no_module_outside_of_backends_and_engines_imports_a_framework():
    for module, (_, source) in MODULES.items():
        if module.startswith(("compat._backends", "compat._ranks.engines", "compat.testing")):
            continue
        if module == "compat._keras":  # the one that tells the kinds of Keras apart
            continue
        for node in _statements(tree(source)):
            names = [name.name for name in getattr(node, "names", [])]
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else names
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                assert not [name for name in names if FRAMEWORKS.match(name)], module


def test_no_two_classes_have_the_same_name():
    """But those of one role in several backends."""
    owners = collections.defaultdict(list)
    for module, (_, source) in sorted(MODULES.items()):
        _, _, backend = module.partition("compat._backends.")
        for node in nodes(tree(source)):
            if isinstance(node, ast.ClassDef):
                owners[node.name, backend.partition(".")[0]].append(module)
    everywhere = {name for name, backend in owners if not backend}
    clashes = {
        key: found
        for key, found in owners.items()
        if len(found) > 1 or key[1] and key[0] in everywhere
    }
    assert clashes == {}


# The files of backends --------------------------------------------------------------------------

# The same role has the same name in each backend, and in its tests. One that lacks a role lacks the
# file.
ROLES = {
    "__init__": "the subclass of Backend",
    "configuration": "visibility of devices, memory, environment variables, versions",
    "graph": "queries on the framework's graph, trace or calls",
    "rules": "RULES: operation -> rule",
    "propagation": "Propagation.placement_of(value): placements inferred over a graph or trace",
    "partition": "a graph's sharded and unsharded part",
    "trial": "placements checked on three samples",
    "custom_gradients": "user-defined gradients",
    "arguments": "data arguments, their batch dimension, and their shards",
    "replicas": "replicas on the devices, and what replaces the model's call",
    "merging": "values of replicas combined by their placement",
    "redistribution": "values of the whole batch, gathered from replicas, and split again",
    "reductions": "values of the whole batch, reduced over replicas that go on with them",
    "ranked_reductions": "values of the whole batch, reduced over ranks while a step runs",
    "batch_functions": "functions along the batch, computed by reductions while they run",
    "thread_state": "what a thread has to have for the framework, where replicas take turns",
    "batch_norm": "batch normalization by the statistics of the whole batch",
    "ranked_batch_norm": "the same on ranks, where the layers are not those of batch_norm",
    "weight_copies": "weights sent from device to device",
    "state": "a model's state: snapshots, restored and committed",
    "side_effects": "what calls change besides their results",
    "native": "models without Keras",
    "device_scope": "compat.device()",
    "verification": "a step on several devices compared with one",
    "profiler": "which operations a device executed, and when",
    "executions": "proof of use: which devices executed operations in a first step",
    "ranks": "one process per device",
}

# Files that one backend alone needs, and why.
OF_ONE_BACKEND = {
    "_tensorflow.rules_common": "what the rules in all files of them share",
    "_tensorflow.rules_lookups": "rules of one kind, too many for one file",
    "_tensorflow.rules_shapes": "rules of one kind, too many for one file",
    "_tensorflow.rules_sizes": "rules of one kind, too many for one file",
    "_tensorflow.rules_text": "rules of one kind, too many for one file",
    "_tensorflow.rules_values": "rules of one kind, too many for one file",
    "cntk.openmpi": "CNTK's libraries need some that its package does not bring",
    "jax.counted_steps": "Keras runs a step as one program, in which nothing counts batches",
    "jax.ranked_programs": "a rank's step is traced, and cut where ranks exchange",
    "jax.gradient_exchange": "jax.grad() in a rank's step gives means over all ranks",
    "jax.gradient_marks": "jax.grad() marks gradients in a traced step",
    "jax.ranked_step_trial": "Keras' step on ranks is tried on parts of a batch",
    "jax.inlined_calls": "a traced step has calls of compiled functions",
    "jax.loss_totals": "losses of a traced step divide by totals of all ranks",
    "jax.partitioner_fixes": "faults of XLA's partitioner",
    "jax.programs": "XLA's text of compiled programs",
    "jax.ranked_step": "Keras' step is a pure function of the state, which a rank's replaces",
    "mxnet.arrays": "two kinds of arrays, nested in what Gluon blocks take and return",
    "mxnet.comparison": "no version of an array: values tell whether it was written",
    "mxnet.executors": "graphs are bound to a context before they run",
    "mxnet.gradient_store": "Module has gradients summed by an object, a KVStore",
    "mxnet.invocations": "one function of MXNet's computes all operations on arrays",
    "mxnet.joined_executors": "executors cannot wait for each other within a graph",
    "mxnet.keras_mxnet_fixes": "faults of keras-mxnet",
    "mxnet.keras_phases": "a graph for each of training, testing and prediction, cut in two",
    "mxnet.keras_replicas": "a kind of models: Keras'",
    "mxnet.locks": "executors and compiled blocks may not be used by several threads",
    "mxnet.model_kinds": "models are told apart before mxnet is imported",
    "mxnet.module": "a kind of models: Module",
    "mxnet.optimizer_states": "step counts and states are those of a device",
    "mxnet.synchronization": "what is computed in the background fails, and writes, later",
    "mxnet.worker_threads": "threads have memory and random numbers of MXNet's",
    "mxnet.watched_calls": "calls of models without Keras, observed by the usage check",
    "tensorflow1.colocation": "Keras does not ask that gradients run beside what they belong to",
    "tensorflow1.copying": "replicas of a static graph are copies of its operations",
    "tensorflow1.fetches": "callbacks add to what Keras' functions compute",
    "tensorflow1.gradient_marks": "on ranks, gradients of a graph that are not exchanged are found",
    "tensorflow1.kept_weights": "operations of the graph find that a weight has changed",
    "tensorflow1.loss_gradients": "on ranks, scripts differentiate the loss of a graph",
    "tensorflow1.optimizer_order": "nothing orders how Keras' Adam reads and counts its steps",
    "tensorflow1.replicated_function": "Keras runs a model by three functions, not by a call",
    "tensorflow1.resource_variables": "TensorFlow 1 makes reference variables, which race",
    "tensorflow2.batch_counts": "a graph's steps do not pass through Python: they count themselves",
    "tensorflow2.output_gradients": "a tape sees a replica as one function, and no way within",
    "tensorflow2.call_function": "an eager call has no graph in which replicas can reduce",
    "tensorflow2.call_reductions": "replicas are calls, and add operations of their own to a graph",
    "tensorflow2.call_trace": "a call is traced once more, to infer the placements of its results",
    "tensorflow2.functional_call": "a replica's gradient and a trace need the call as a function",
    "tensorflow2.differentiation": "tapes, eagerly; in a function's graph, the graph's gradients",
    "tensorflow2.gradient_exchange": "gradients of ranks become the mean where tapes compute them",
    "tensorflow2.ranked_step_trial": "a step may use one rank's gradients, if it does so linearly",
    "tensorflow2.gradient_sums": "a tape would send the replicas' gradients to one device",
    "tensorflow2.kept_weights": "no version of a variable counts its changes: values are compared",
    "tensorflow2.keras_patches": "what is replaced in Keras' layers and functions",
    "tensorflow2.native_kinds": "asked before TensorFlow is imported, which native.py imports",
    "tensorflow2.op_callbacks": "TensorFlow calls back for each operation that a thread executes",
    "tensorflow2.ranked_state": "variables that steps of ranks set, merged as a trial found",
    "tensorflow2.refusals": "modes and strategies of TensorFlow that take no replicas",
    "tensorflow2.run_metadata": "TensorFlow records the partitions of graphs that it executes",
    "tensorflow2.table_gradients": "Keras 3 squares the gradients of each lookup in a table",
    "tensorflow2.tape_depth": "no tape shows whether another one records it, too",
    "tensorflow2.trace_profiles": "the profilers of two versions write forms of their own",
    "tensorflow2.variable_reads": "operations read variables by themselves, on their device",
    "tensorflow2.watched_loops": "a loop of one's own is seen where it calls models and tapes",
    "theano.compilation": "a body's functions are compiled for each device",
    "theano.replica_device": "a device is a default context, with variables of its own",
    "theano.flag_problems": "Theano ignores flags that it does not know",
    "theano.flags": "THEANO_FLAGS and .theanorc, as Theano reads them before its import",
    "theano.function_copies": "simulated devices run copies of one compiled function",
    "theano.gpu_start": "Theano only logs that a GPU did not come up",
    "theano.gradient_marks": "on ranks, gradients of a graph that are not exchanged are found",
    "theano.loss_gradients": "on ranks, scripts differentiate the loss of a graph",
    "theano.plan": "a function is compiled in parts, for devices and for the whole batch",
    "theano.replicated_function": "Keras calls functions that K.function makes",
    "theano.rules_loops": "the rule of scan, which follows the graph of a step",
    "theano.softmax": "one operation, which reduces within",
    "theano.stages": "a compiled function cannot wait for those of other devices",
    "theano.sizes": "sizes are inferred by infer_shape, without compiling",
    "theano.theanorc": "persist=True writes it",
    "torch.activation_hooks": "ranks: hooks on gradients that are not exchanged",
    "torch.backward_passes": "ranks: when a backward pass ends, and of which rows it is",
    "torch.containers": "nested values that keep the identity of their containers",
    "torch.expressions": "totals over rows that torch computes on, which replicas merge later",
    "torch.gradient_exchange": "ranks: gradients exchanged by autograd's hooks, in no method",
    "torch.gradient_sums": "ranks: buckets of gradients",
    "torch.kept_rows": "rows of a batch that a model keeps between calls",
    "torch.host_values": "Python chooses its way by values of rows, while replicas run",
    "torch.keras_batch_norm": "layers of Keras, which refuses this on torch",
    "torch.keras_ranks": "ranks of Keras models",
    "torch.keras_replicas": "replicas of Keras models; those of modules are in native",
    "torch.linked_values": "gradients by results from which other results were computed",
    "torch.loss_terms": "ranks: what a loss was divided by, from autograd's graph",
    "torch.merge_rules": "how each value is merged, which the first call of a kind decides",
    "torch.native_ranks": "ranks of modules",
    "torch.native_verification": "verification of modules, whose step is a call",
    "torch.optimizer_steps": "ranks: modules' optimizers, whose steps no method of a model sees",
    "torch.outcomes": "what one replica made, before it is merged",
    "torch.parameter_hooks": "ranks: hooks on parameters wait for the mean",
    "torch.ranked_buffers": "ranks: buffers that forward() sets",
    "torch.ranked_calls": "ranks: what those of Keras models and of modules have in common",
    "torch.ranked_state": "ranks: variables that a step of Keras sets",
    "torch.row_counts": "numbers of rows in Python, which sees sizes of tensors while it runs",
    "torch.rules_indexing": "rules of tensor[index]",
    "torch.split_calls": "one call; replicas.py has the plans of all, and what runs unsplit",
    "torch.tensors": "tensors found in nested values, compared and converted",
    "torch.tracing": "torch's own traces and transformations of a call",
    "torch.watched_calls": "hooks that check the calls of modules, which have no steps",
}

# Where the tests of a role have another name: they run in a mode of their own, or the contract
# proves it.
TESTED_IN = {
    "cntk.ranks": "test_mpi.py",
    "mxnet.invocations": "test_batch_norm.py",
    "mxnet.joined_executors": "test_batch_norm.py",
    "mxnet.ranked_batch_norm": "test_horovod.py",
    "mxnet.ranks": "test_horovod.py",
    "mxnet.reductions": "test_batch_norm.py",
    "mxnet.thread_state": "test_batch_norm.py",
    "mxnet.weight_copies": "test_traffic.py",
    "mxnet.worker_threads": "test_batch_norm.py",
    "tensorflow1.ranked_batch_norm": "test_horovod.py",
    "tensorflow1.ranked_reductions": "test_horovod.py",
    "tensorflow1.ranks": "test_horovod.py",
    "tensorflow1.weight_copies": "test_traffic.py",
    "tensorflow2.ranked_reductions": "test_horovod.py",
    "tensorflow2.batch_functions": "test_call_reductions.py",
    "tensorflow2.ranks": "test_horovod.py",
    "tensorflow2.thread_state": "test_batch_norm.py",
    "tensorflow2.weight_copies": "test_traffic.py",
    "theano.ranks": "test_mpi.py",
    "theano.verification": "test_contract.py",
    "torch.ranked_batch_norm": "test_ranks.py",
    "torch.ranked_reductions": "test_ranks.py",
    "torch.batch_functions": "test_reductions.py",
    "torch.thread_state": "test_batch_norm.py",
    "torch.weight_copies": "test_traffic.py",
}

# Packages of what several backends use, and these: the tests are theirs.
SHARED = {"_tensorflow": ["tensorflow1", "tensorflow2"]}
PACKAGES = sorted({*registry.names(), *SHARED})


@pytest.mark.parametrize("backend", PACKAGES)
def test_backends_have_files_of_the_same_roles(backend):
    prefix = "compat._backends.{}".format(backend)
    found = {
        module[len(prefix) + 1 :] or "__init__"
        for module in MODULES
        if module == prefix or module.startswith(prefix + ".")
    }
    own = {key.partition(".")[2] for key in OF_ONE_BACKEND if key.startswith(backend + ".")}
    assert own <= found
    assert found - own <= set(ROLES)
    for role in sorted(found - own - {"__init__"}):
        name = TESTED_IN.get("{}.{}".format(backend, role), "test_{}.py".format(role))
        for tested in SHARED.get(backend, [backend]):
            assert os.path.exists(os.path.join(ROOT, "tests", "backends", tested, name)), name


@pytest.mark.parametrize("backend", PACKAGES)
def test_a_file_of_a_backend_begins_with_its_one_subject(backend):
    for module, (_, source) in MODULES.items():
        if module.startswith("compat._backends.{}.".format(backend)):
            first = ast.get_docstring(tree(source)).split("\n\n")[0]
            assert first.endswith(".") and first.count(". ") == 0, module
            assert not re.search("^# .* -{9,}$", source, re.M), module


def test_an_import_of_compat_within_a_function_says_why():
    """Beside it, or beside the one after it in the same block."""
    silent = []
    for module, (_, source) in MODULES.items():
        lines = source.split("\n")
        for function in nodes(tree(source)):
            if isinstance(function, ast.FunctionDef):
                for node in _statements(function):
                    if isinstance(node, ast.ImportFrom) and node.level:
                        first = last = node.lineno - 1
                        while lines[first - 1].lstrip().startswith(("from ", "import ")):
                            first -= 1
                        while lines[last + 1].lstrip().startswith(("from ", "import ")):
                            last += 1
                        if not any("#" in line for line in lines[first : last + 1]):
                            silent.append((module, lines[node.lineno - 1].strip()))
    assert not silent


# State, and changes to others' objects ------------------------------------------------------------

# Modules that write to an object's ``__dict__`` or ``__class__`` by hand, and why.
BY_HAND = {
    "compat._runtime.patching": "the functions that do it for all others",
    "compat.backend": "the class of its own module",
    "compat._backends.tensorflow1.copying": "a context of control flow, which is its own copy",
    "compat._backends.torch.containers": "contents of a container, restored",
    "compat._commands.pytest_plugin.own_process": "the options of its parent",
    "compat._commands.reported_script": "the module that it runs a script as",
}


def _attributes_of(node):
    """Return the object whose ``__dict__`` an expression is: an expression, too, or None."""
    if isinstance(node, ast.Attribute) and node.attr == "__dict__":
        return node.value
    is_vars = isinstance(node, ast.Call) and getattr(node.func, "id", "") == "vars"
    return node.args[0] if is_vars and node.args else None


def _written_by_hand(node):
    """Return the objects whose ``__dict__`` or ``__class__`` a node writes to."""
    if isinstance(node, ast.Subscript) and isinstance(node.ctx, (ast.Store, ast.Del)):
        yield _attributes_of(node.value)
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        if node.attr == "__class__":
            yield node
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        if node.func.attr in ("update", "pop", "setdefault", "clear"):
            yield _attributes_of(node.func.value)
        if node.func.attr == "__setattr__" and getattr(node.func.value, "id", "") == "object":
            yield node


def _globals(source):
    """Return the variables of a module, and the expressions that they are bound to."""
    for node in tree(source).body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name):
                    yield target.id, node.value


def test_attributes_and_classes_of_other_objects_are_changed_by_patching_alone():
    found = set()
    for module, (_, source) in MODULES.items():
        own = {"self"}.union(name for name, _ in _globals(source))
        for node in nodes(tree(source)):
            written = [each for each in _written_by_hand(node) if each is not None]
            if any(getattr(each, "id", "") not in own for each in written):
                found.add(module)
    assert found == set(BY_HAND)


# What a module may keep: it belongs to a lock, a thread, a block or an object, or only counts on.
PASSING = {
    *("Lock", "RLock", "CallLock", "local", "_local", "Within", "count"),
    *("WeakKeyDictionary", "WeakSet", "WeakIdKeyDictionary"),
}
CHANGING = {"add", "append", "clear", "discard", "extend", "insert", "pop", "remove", "setdefault"}
CHANGING |= {"update"}
# Other variables of modules that functions change, and why they are not in ``process``.
KEPT_BY_MODULES = {
    "compat._backends.mxnet.ranked_batch_norm._step": "empty but while a step of ranks runs",
    "compat._backends.mxnet.state._passes": "a number, which only grows",
    "compat._backends.mxnet.worker_threads._idle": "threads that MXNet has memory for are kept",
    "compat._backends.mxnet.worker_threads._seed": "as MXNet keeps it",
    "compat._backends.tensorflow1.configuration._defaults": "the sessions' patch stays as well",
    "compat._backends.tensorflow1.executions._recordings": "empty but while something records",
    "compat._backends.tensorflow1.profiler._around_calls": "empty but while something records",
    "compat._backends.tensorflow2.output_gradients.listeners": "as the patch that calls them",
    "compat._backends.tensorflow2.call_reductions._thread": "of a thread, unset but in a call",
    "compat._backends.tensorflow2.device_scope._thread": "of a thread, empty but within device()",
    "compat._backends.tensorflow2.op_callbacks._listening": "empty but while something records",
    "compat._backends.tensorflow2.replicas.reached": "only counts on",
    "compat._backends.tensorflow2.run_metadata._recordings": "empty but while something records",
    "compat._backends.tensorflow2.tape_depth._thread": "of a thread, 0 but within a tape",
    "compat._backends.tensorflow2.variable_reads._thread": "of a thread, empty but in a replica",
    "compat._backends.tensorflow2.watched_loops._watches": "goes with the model",
    "compat._backends.theano.executions._patches": "empty but while something records",
    "compat._backends.theano.executions._recorders": "empty but while something records",
    "compat._backends.torch.gradient_exchange.calls": "of a thread, empty but in a call",
    "compat._backends.torch.optimizer_steps._handles": "a hook for all optimizers, as a patch",
    "compat._backends.torch.rules.RULES": "filled while the module is imported",
    "compat._configuration.registry._registered": "as a module that is imported stays",
    "compat._rows.replica_threads._thread": "of a thread, empty but in a replica",
    "compat._runtime.on_import._waiting": "as a patch, until the module is imported",
    "compat._runtime.patching._patches": "patches outlast what a process was configured to",
    "compat._runtime.progress._doing": "empty but while something takes long",
}


def _changed(node):
    """Return the name that a node changes, or "module.name", or None."""
    if isinstance(node, ast.Global):
        return node.names[0]
    owner = None
    if isinstance(node, (ast.Subscript, ast.Attribute)):
        owner = node.value if isinstance(node.ctx, (ast.Store, ast.Del)) else None
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in CHANGING:
        owner = node.func.value
    if isinstance(owner, ast.Attribute):
        return "{}.{}".format(getattr(owner.value, "id", ""), owner.attr)
    return getattr(owner, "id", "")


def test_what_lasts_from_call_to_call_is_kept_in_process_alone():
    found, changed = set(), {}
    for module, (_, source) in MODULES.items():
        functions = [each for each in nodes(tree(source)) if isinstance(each, ast.FunctionDef)]
        changed[module] = {_changed(node) for each in functions for node in ast.walk(each)}
    anywhere = set().union(*changed.values())
    for module, (_, source) in MODULES.items():
        for name, value in _globals(source):
            made = getattr(value, "func", None)
            is_passing = getattr(made, "attr", getattr(made, "id", "")) in PASSING
            by_others = "{}.{}".format(module.rpartition(".")[2], name) in anywhere
            if not is_passing and (name in changed[module] or by_others):
                found.add("{}.{}".format(module, name))
    assert found == set(KEPT_BY_MODULES)


# How files are written --------------------------------------------------------------------------

# What does not write with compat._runtime.safe_files.written(), and how it writes.
OTHERS = {
    "compat._runtime.safe_files": "has it",
    "compat._ranks.saving": "a temporary folder beside the model",
    "compat._ranks.launch.output": "logs, which are appended to",
    "compat._configuration.gpu_selection": "locks of GPUs",
    "compat._backends.theano.theanorc": "the lock of .theanorc",
}
TEMPORARY = {
    "compat._backends.jax.profiler", "compat._backends.mxnet.profiler",
    "compat._backends.tensorflow2.profiler", "compat._commands.script_test",
    "compat._ranks.launch.rank_process", "compat._commands.pytest_plugin.own_process",
    "compat._commands.machines",
}  # fmt: skip  # into temporary folders of their own


def test_all_files_are_written_in_one_way():
    """That of tests/test_files.py."""
    found = set()
    for module, (_, source) in MODULES.items():
        for call in (node for node in nodes(tree(source)) if isinstance(node, ast.Call)):
            name = getattr(call.func, "id", getattr(call.func, "attr", ""))
            if (
                name in ("rename", "mkstemp", "mkdtemp", "TemporaryDirectory")
                or (name == "replace" and "'os'" in ast.dump(call.func))
                or (name == "open" and re.search("'[rb]*[wax+][b+]*'", ast.dump(call)))
                or "os.O_CREAT" in source
            ):
                found.add(module)
    found = {each for each in found if not each.startswith("compat.testing")}
    assert found - {"compat.__main__"} - TEMPORARY == set(OTHERS)


@pytest.mark.parametrize("backend", registry.backends(), ids=lambda backend: backend.name)
def test_methods_of_backends_take_what_the_contract_hands_them(backend):
    """The types stand in the contract alone, so that no type checker compares the two."""
    for name, method in vars(compat.Backend).items():
        if inspect.isfunction(method):
            taken = inspect.signature(getattr(backend, name)).parameters
            assert list(taken) == list(inspect.signature(method).parameters)[1:], name
