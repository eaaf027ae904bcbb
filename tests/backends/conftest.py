"""Collect the tests of the backends that are installed here.

In an environment whose backend is missing nothing is collected, and pytest fails by itself.
"""

import gc
import importlib
import os
import platform
import re
import sys

import pytest

from compat._configuration import detection, packages, registry
from compat.testing import contract_of, slow

KERAS = os.environ.get("COMPAT_TEST_KERAS", "keras")
IS_KERAS3 = KERAS == "keras" and (packages.version("keras") or "").startswith("3.")


def _installed():
    """Yield the backends that are installed, without those on which Keras here cannot run.

    TensorFlow 2.12 requires JAX, which nothing but Keras 3 runs on.
    """
    for backend in registry.backends():
        version = detection.installed_version(backend)
        if version is not None and backend.accepts(version):
            if IS_KERAS3 or backend.framework not in ("jax", "torch"):
                yield backend


INSTALLED = list(_installed())
for _backend in INSTALLED:  # frameworks read these when they first run
    os.environ.update(_backend.recording)
# The tests of a mode of the whole process, or of an engine of ranks that has to be installed
# besides, are in files of their own, which run alone.
MODES = ("contexts", "horovod", "keras23", "launchers", "mpi", "v1", "workers")
V1_MODE = os.environ.get("COMPAT_TEST_KERAS") == "tensorflow.compat.v1.keras"
MODE = "v1" if V1_MODE else os.environ.get("COMPAT_TEST_MODE")
if V1_MODE:
    importlib.import_module("tensorflow").compat.v1.disable_v2_behavior()

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
sys.path.insert(0, os.path.join(ROOT, "benchmarks"))
benchmarks_run = importlib.import_module("run")
del sys.path[0]
# Each script is tried where that takes the least time; many_models.py does what building.py does.
# test_traffic.py of their backends runs those that count bytes, but that of torch.
LEFT_OUT = (
    r"first_(fit|step)\.py .* (tensorflow1|tensorflow2|keras3|jax|theano|torch)$|building\.py"
    r"|ranks_tensorflow\.py --peer horovod|py311-keras3 .*replicas_tensorflow\.py"
    r"|bytes_(mxnet|tensorflow\d)\.py|batch_norm\.py .* theano"  # which compiles convolutions
)
ENVIRONMENT = os.environ.get("TOX_ENV_NAME")
BENCHMARKS = [
    command
    for command in benchmarks_run.scripts(ENVIRONMENT)
    if not re.search(LEFT_OUT, "{} {}".format(ENVIRONMENT, command))
]


def _is_tested(folder, file):
    """Return whether a folder has tests of a backend here; those of a mode are in test_MODE*.py."""
    if not folder:
        return MODE is None if file == "test_examples.py" else bool(BENCHMARKS)
    if folder not in [each.name for each in INSTALLED]:
        return False
    of_mode = re.match("test_({})[._]".format("|".join(MODES)), file)
    return MODE == (of_mode and of_mode.group(1))


def _ignored():
    """Yield the files whose tests are not for this environment, as paths from this folder."""
    here = os.path.dirname(os.path.abspath(__file__))
    for path, _, files in os.walk(here):
        folder = os.path.relpath(path, here).replace(".", "")
        for file in files:
            if re.match(r"test_.*\.py$", file) and not _is_tested(folder, file):
                yield os.path.join(folder, file)


collect_ignore = list(_ignored())

IS_TENSORFLOW_20 = any(
    b.framework == "tensorflow" and detection.installed_version(b)[:4] == "2.0." for b in INSTALLED
)
if IS_TENSORFLOW_20:
    # Models without Keras are not verified there: tensorflow2/test_native.py sees the warning.
    collect_ignore.append("tensorflow2/test_native_verification.py")

TENSORFLOW2 = next(
    (detection.installed_version(b) for b in INSTALLED if b.name == "tensorflow2"), ""
)
if not TENSORFLOW2.startswith("2.15."):
    collect_ignore.append("tensorflow2/test_pages.py")  # the documentation shows that version
if not TENSORFLOW2.startswith(("2.3.", "2.15.")):  # the last one with a wrapper, and the whole row
    collect_ignore.append("tensorflow2/test_unwrap.py")
if IS_KERAS3:
    # No Keras is in them, or it has no graph mode; the rows of tf.keras and tf_keras test them.
    collect_ignore += ["tensorflow2/test_propagation.py", "tensorflow2/test_sessions.py"]
    collect_ignore.append("tensorflow2/test_native_verification.py")
else:
    collect_ignore.append("tensorflow2/test_rules.py")  # the newest TensorFlow proves it
if sys.version_info >= (3, 12):  # with the TensorFlow and Keras of a row on an older Python
    OLDER = "arguments compiled custom_gradients executions graph merging output_gradients"
    OLDER += " side_effects state table_gradients text"
    collect_ignore += ["tensorflow2/test_{}.py".format(name) for name in OLDER.split()]
    collect_ignore.append("tensorflow2/test_rules.py")

# What depends on the framework more than on Keras and Python, where the same version is tested with
# another Keras or Python, or an older and a newer one are.
GRAPHS = "partition resource_variables side_effects states threads"
ELSEWHERE = {
    "py36-tensorflow112-tfkeras": ("tensorflow1", GRAPHS),
    "py37-tensorflow1-keras231": ("tensorflow1", GRAPHS),
    "py38-tensorflow": ("tensorflow2", "output_gradients side_effects"),
    "py311-tf_keras": ("tensorflow2", "output_gradients side_effects"),
    "py38-theano": ("theano", "configuration propagation replicas side_effects trial"),
    "py36-mxnet16": ("mxnet", "configuration"),
    "py38-mxnet": ("mxnet", "configuration locks partition"),
}
if ENVIRONMENT in ELSEWHERE:
    _folder, _names = ELSEWHERE[ENVIRONMENT]
    collect_ignore += ["{}/test_{}.py".format(_folder, name) for name in _names.split()]

if packages.version("transformers") is None and "TOX_ENV_NAME" not in os.environ:
    collect_ignore.append("torch/test_transformers.py")  # tox.ini has it, and no extra


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark tests of subjects that all backends share as slow, but on one backend with each Keras.

    That is MXNet for Keras 2 and torch for Keras 3.
    """
    kept = {"mxnet", "torch"}
    if kept.isdisjoint(backend.name for backend in INSTALLED):
        for item in items:
            if item.get_closest_marker("any_backend"):
                item.add_marker(slow)


@pytest.fixture(autouse=True)
def collect_iterators():
    """TensorFlow 2.0 dies where an iterator is collected while a graph is traced."""
    yield
    if IS_TENSORFLOW_20:
        gc.collect()


@pytest.fixture(scope="session", autouse=True)
def modules_are_no_garbage():
    """Freeze the frameworks' modules, so that no collection of garbage traverses them again."""
    if hasattr(gc, "freeze"):  # from Python 3.7
        gc.collect()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def record_versions(record_testsuite_property, pytestconfig):
    """Record the versions that tests/support_table.py reads from the results."""
    frameworks = [(b.name, b.framework, detection.installed_version(b)) for b in INSTALLED]
    keras, version = KERAS, packages.version("keras-mxnet")
    if version is not None:
        keras = "keras-mxnet"
    elif keras == "keras" or frameworks[0][0] != "tensorflow1":
        version = packages.version("tf_keras" if keras == "tf_keras" else "keras")
    record_testsuite_property("python", platform.python_version())
    record_testsuite_property("backend", ", ".join(name for name, _, _ in frameworks))
    record_testsuite_property("framework", ", ".join("%s %s" % f[1:] for f in frameworks))
    record_testsuite_property("keras", " ".join(filter(None, [keras, version])))
    contract = "none" if MODE == "launchers" else contract_of(pytestconfig)
    record_testsuite_property("contract", contract)
