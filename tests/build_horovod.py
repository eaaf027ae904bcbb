"""Build Horovod for this Python and its framework, once, and install it here.

    python tests/build_horovod.py FOLDER

The framework is TensorFlow or MXNet, whichever is installed. FOLDER keeps the wheels, for other
environments and later runs: no registry has any. A build takes 35 to 55 CPU-seconds on a fast
machine. pip's own cache would not tell frameworks apart, so it is left out.
"""

import fcntl
import glob
import hashlib
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
# CMake reads this before Horovod's own files. A library for tests may be slow, so nothing is
# optimized. Joined sources read the same headers once.
TOOLCHAIN = """
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O0 -w" CACHE STRING "")
# Else an nvcc that is installed is tried, for nothing: this build has no CUDA.
set(CMAKE_CUDA_COMPILER NOTFOUND)
set(CMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit ON)
if(PROJECT_NAME STREQUAL horovod)  # and not what CMake compiles to try the compiler
    set(CMAKE_UNITY_BUILD ON)
    # The 25 sources that come first are the same for all frameworks. The framework's own stay
    # apart from them: both define LOG.
    set(CMAKE_UNITY_BUILD_BATCH_SIZE 25)
    # This runs after Horovod's own files, when there are targets.
    cmake_language(DEFER CALL cmake_language EVAL CODE [[
        # One or two of these, for different C++ ABIs. Only what the framework links is built.
        foreach(gloo gloo compatible_gloo compatible17_gloo)
            if(TARGET ${gloo})
                # Its fourth and fifth source define the same name, so they stay apart.
                set_target_properties(
                    ${gloo} PROPERTIES EXCLUDE_FROM_ALL ON UNITY_BUILD_BATCH_SIZE 4)
            endif()
        endforeach()
        if(TARGET tensorflow)
            # Left out: it is large, and used only with HOROVOD_ENABLE_XLA_OPS=1.
            set_source_files_properties(
                ${CMAKE_SOURCE_DIR}/horovod/tensorflow/xla_mpi_ops.cc
                TARGET_DIRECTORY tensorflow PROPERTIES HEADER_FILE_ONLY ON)
        endif()
    ]])
endif()
"""


def pip(command, *arguments, **options):
    subprocess.run(
        [sys.executable, "-m", "pip", command, "--quiet", "--no-deps", "--no-cache-dir"]
        + list(arguments),
        check=True,
        **options,
    )


def wheel(folder):
    """Return the path of the wheel, which is built if it is not there."""
    (framework,) = filter(importlib.util.find_spec, FRAMEWORKS)
    version = importlib.import_module(framework).__version__
    recipe = hashlib.sha256(repr((HOROVOD, sorted(BUILD.items()), TOOLCHAIN)).encode()).hexdigest()
    name = "python{}.{}-{}{}-{}".format(*sys.version_info[:2], framework, version, recipe[:8])
    target = os.path.join(folder, name)
    os.makedirs(target, exist_ok=True)
    with open(target + ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # environments run side by side
        if not glob.glob(os.path.join(target, "*.whl")):
            # cmake comes with this environment.
            path = os.path.dirname(sys.executable) + os.pathsep + os.environ["PATH"]
            with tempfile.TemporaryDirectory(dir=target) as aside:
                toolchain = os.path.join(aside, "toolchain.cmake")
                with open(toolchain, "w") as file:
                    file.write(TOOLCHAIN)
                build = dict(os.environ, PATH=path, CMAKE_TOOLCHAIN_FILE=toolchain, **BUILD)
                for each in FRAMEWORKS:
                    wanted = "WITH" if each == framework else "WITHOUT"
                    build["HOROVOD_{}_{}".format(wanted, each.upper())] = "1"
                pip("wheel", "--no-build-isolation", "--wheel-dir", aside, HOROVOD, env=build)
                (built,) = glob.glob(os.path.join(aside, "*.whl"))
                os.rename(built, os.path.join(target, os.path.basename(built)))
    (path,) = glob.glob(os.path.join(target, "*.whl"))
    return path


if __name__ == "__main__":
    pip("install", wheel(sys.argv[1]))
