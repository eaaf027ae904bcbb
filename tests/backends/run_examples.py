"""Run scripts one after the other in this process, and write what they did to a file.

    python run_examples.py RESULTS FRAMEWORK KERAS VERIFIED SCRIPT...

RESULTS is the file, a pickled dict by the scripts' names. VERIFIED are the names of scripts, joined
by commas, whose first steps compat verifies, where it verifies any.
"""

import contextlib
import importlib
import io
import os
import pickle
import runpy
import sys
import traceback

VERIFIES = os.environ.get("COMPAT_VERIFY") == "1"

# The folders beside this file have the names of frameworks, which they would hide.
sys.path = [each for each in sys.path if each != os.path.dirname(os.path.abspath(__file__))]


def main(results, framework, keras, verified, *scripts):
    outcomes = {}
    for script in scripts:
        name = os.path.splitext(os.path.basename(script))[0]
        verify_steps(name in verified.split(","))
        outcomes[name] = outcome(importlib.import_module(framework), script)
        backend = importlib.import_module(keras + ".backend")
        if hasattr(backend, "clear_session"):  # Theano has none
            backend.clear_session()
    with open(results, "wb") as file:
        pickle.dump(outcomes, file)


def verify_steps(wanted):
    """Whether compat verifies models from now on; the first script's it verifies in any case."""
    module = sys.modules.get("compat._runtime.process")
    configuration = module and module.process.configuration
    if configuration and VERIFIES:
        configuration.settings.verify = int(wanted)


def outcome(framework, script):
    """Return the output of a script, its models' weights, and where their products ran."""
    sys.argv = [script]
    seed(framework)
    printed, error, weights = io.StringIO(), None, []
    before = len(records())
    try:
        with contextlib.redirect_stdout(printed):
            namespace = runpy.run_path(script, run_name="__main__")
        weights = [w for model in models(namespace) for w in model.get_weights()]
    except Exception:
        error = traceback.format_exc()
    return {
        "printed": printed.getvalue().splitlines(),
        "error": error,
        "weights": weights,
        "operations": [record.operations for record in records()[before:]],
    }


def models(namespace):
    """Return the Keras models in a script's variables, by name."""
    values = [namespace[name] for name in sorted(namespace)]
    return [v for v in values if hasattr(v, "train_on_batch") and not isinstance(v, type)]


def seed(framework):
    """Seed what a script's seeds do not reach: tf.keras before 2.7, and MXNet.

    Theano draws from 15,360 streams, each of which takes a call of Python without a compiler.
    """
    if framework.__name__ == "mxnet":
        framework.random.seed(1337)
    elif framework.__name__ == "theano":
        rng_mrg = importlib.import_module("theano.sandbox.rng_mrg")
        rng_mrg.MRG_RandomStreams.n_streams = lambda self, size: 60
    elif framework.__name__ == "tensorflow":
        (getattr(framework, "set_random_seed", None) or framework.random.set_seed)(1337)


def records():
    """Return the records of verification in this process."""
    kept = sys.modules.get("compat._runtime.process")
    return kept.process.verified[:] if kept else []


if __name__ == "__main__":
    main(*sys.argv[1:])
