"""Compile Debian's pygpu for this Python and its numpy, and install it here.

    python tests/build_pygpu.py FOLDER

FOLDER is where tests/debian.py unpacked python3-pygpu, whose package has the C code that Cython
made, and libgpuarray-dev: CPATH and LIBRARY_PATH say where. No registry has pygpu 0.7.
"""

import os
import sys
import sysconfig

import numpy
from setuptools import Extension, setup

EXTENSIONS = ("gpuarray", "blas", "_elemwise")  # Theano needs no collectives


def main(target):
    site = sysconfig.get_paths()["platlib"]
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    if all(os.path.exists(os.path.join(site, "pygpu", name + suffix)) for name in EXTENSIONS):
        return
    source = os.path.join("usr", "lib", "python3", "dist-packages", "pygpu")
    os.chdir(target)
    setup(
        name="pygpu",
        packages=["pygpu"],
        package_dir={"pygpu": source},
        package_data={"pygpu": ["*.h"]},
        ext_modules=[
            Extension(
                "pygpu." + name,
                [os.path.join(source, name + ".c")],
                include_dirs=[numpy.get_include()],
                libraries=["gpuarray"],
                define_macros=[("GPUARRAY_SHARED", None)],
                extra_compile_args=["-O0", "-g0", "-w"],
            )
            for name in EXTENSIONS
        ],
        script_args=["--quiet", "build", "--build-lib", site, "--build-temp", "build"],
    )


if __name__ == "__main__":
    main(sys.argv[1])
