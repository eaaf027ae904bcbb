"""Build Horovod for this Python and its framework, once, and install it here.

    python tests/build_horovod.py FOLDER

The framework is TensorFlow or MXNet, whichever is installed. FOLDER keeps the wheels, for other
environments and later runs: no registry has any. A build takes four to five CPU-minutes. pip's
own cache would not tell frameworks apart, so it is left out.
"""

import fcntl
import glob
import importlib
import importlib.util
import os
import subprocess
import sys
import tempfile

HOROVOD = "horovod==0.28.1"
FRAMEWORKS = ("tensorflow", "mxnet")
BUILD = {
    "HOROVOD_WITH_GLOO": "1",
    "HOROVOD_WITHOUT_MPI": "1",
    "HOROVOD_WITHOUT_PYTORCH": "1",
    "MAKEFLAGS": "-j2",
}


def pip(command, *arguments, **options):
    subprocess.run(
        [sys.executable, "-m", "pip", command, "--quiet", "--no-deps", "--no-cache-dir"]
        + list(arguments),
        check=True,
        **options,
    )


def wheel(folder):
    """The path of the wheel, which is built if it is not there."""
    (framework,) = filter(importlib.util.find_spec, FRAMEWORKS)
    version = importlib.import_module(framework).__version__
    name = "python{}.{}-{}{}".format(*sys.version_info[:2], framework, version)
    target = os.path.join(folder, name)
    os.makedirs(target, exist_ok=True)
    with open(target + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # environments run side by side
        if not glob.glob(os.path.join(target, "*.whl")):
            # cmake comes with this environment.
            path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
            with tempfile.TemporaryDirectory(dir=target) as aside:
                build = dict(os.environ, PATH=path, **BUILD)
                for each in FRAMEWORKS:
                    wanted = "WITH" if each == framework else "WITHOUT"
                    build["HOROVOD_{}_{}".format(wanted, each.upper())] = "1"
                pip("wheel", "--no-build-isolation", "--wheel-dir", aside, HOROVOD, env=build)
                (built,) = os.listdir(aside)
                os.rename(os.path.join(aside, built), os.path.join(target, built))
    (path,) = glob.glob(os.path.join(target, "*.whl"))
    return path


if __name__ == "__main__":
    pip("install", wheel(sys.argv[1]))
