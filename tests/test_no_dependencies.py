"""compat imports no framework and nothing heavy, and neither does a call that fails."""

import json

# What compat may load by itself: nothing that "python -c pass" has not loaded.
PROGRAM = """\
import sys
before = set(sys.modules)
{}
after = set(sys.modules)
import json
print(json.dumps(sorted(after - before)))
"""

FRAMEWORKS = {"keras", "tensorflow", "tf_keras", "theano", "mxnet", "cntk", "jax", "torch", "numpy"}

OWN = {
    "",
    "._api",
    "._api.device_use",
    "._api.legacy",
    "._configuration",
    "._runtime",
    "._configuration.numeric",
    "._runtime.process",
    "._runtime.unsplit_models",
    "._ranks",
    "._ranks.place",
    "._configuration.registry",
    "._configuration.settings",
    ".backend",
    ".errors",
}


def loaded(run, program):
    return json.loads(run(PROGRAM.replace("{}", program)))


def test_import_loads_nothing_else(run):
    assert set(loaded(run, "import compat")) == {"compat" + name for name in OWN}


REFUSED = """\
import compat
wrong = dict(gpus="two", memory="much", floatx="float", simulate=0, backend="no")
for name in wrong:
    try:
        compat.configure_gpu(**{name: wrong[name]})
    except ValueError:
        continue
    raise SystemExit(name + ": no error")
"""


def test_a_wrong_argument_imports_no_framework(run):
    assert not FRAMEWORKS.intersection(loaded(run, REFUSED))


def test_choosing_a_backend_imports_no_framework(run):
    program = """\
import compat
from compat._configuration import detection
try:
    detection.choose()
except compat.CompatError:
    pass
detection.problems({})
"""
    assert not FRAMEWORKS.intersection(loaded(run, program))


def test_the_contract_of_backends_loads_what_is_asked_for(run):
    """Python 3.6 has no ``__getattr__`` of modules."""
    program = "from compat.backend import Backend, Job, Memory, Place, Settings"
    assert set(loaded(run, program)) == {"compat" + name for name in OWN}
    program = """\
from compat.backend import *
from compat import backend
for name in backend.__all__:
    assert globals()[name] is getattr(backend, name)
    assert name in dir(backend)
assert own_launcher(Job(2, "python", {}))[-1] == "2"
assert not hasattr(backend, "Absent")
"""
    assert not FRAMEWORKS.intersection(loaded(run, program))
