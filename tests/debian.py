"""Unpack packages of Debian's into a folder, without installing them.

    python tests/debian.py FOLDER PACKAGE... [--alone PACKAGE]... [--link NAME=LIBRARY]...

Unpacks the packages and what they depend on that is not installed, ``--alone`` a package without
that. FOLDER/libraries then has their shared libraries, for LD_LIBRARY_PATH and LIBRARY_PATH;
``--link`` gives one of them a second name, or, where NAME is a path in FOLDER, a file beside it.
Nobody need be root. What is there already stays.
Fails, with the command to type, where apt-get cannot get them.
"""

import argparse
import glob
import os
import shutil
import subprocess
import sys
import tempfile

OWN = ["-o", "Debug::NoLocking=1", "-o", "APT::Sandbox::User="]
DEPENDENCIES = ["install", "--yes", "--download-only", "--no-install-recommends", "--reinstall"]


def download(folder, packages, alone):
    """Get the packages' files into ``folder``/archives; whether that succeeded."""
    archives = os.path.join(folder, "archives")
    lists = os.path.join(folder, "lists")
    for each in (archives, lists):
        os.makedirs(os.path.join(each, "partial"))
    options = OWN + ["-o", "Dir::Cache=" + folder]
    commands = [DEPENDENCIES + packages] + [["download", package] for package in alone]
    if all(apt_get(archives, options + command) for command in commands):
        return True
    options += ["-o", "Dir::State::lists=" + lists]  # this machine has no lists yet, or old ones
    return all(apt_get(archives, options + command) for command in [["update"]] + commands)


def apt_get(folder, arguments):
    return subprocess.call(["apt-get", "--quiet=2"] + arguments, cwd=folder) == 0


def unpack(archives, root):
    for package in sorted(glob.glob(os.path.join(archives, "*.deb"))):
        subprocess.check_call(["dpkg-deb", "--extract", package, root])
    # One folder has them all, and each finds what it looks for beside itself.
    folder = glob.glob(os.path.join(root, "usr", "lib", "*-linux-*"))[0]
    for place in (("usr", "lib"), ("lib", os.path.basename(folder))):
        for library in glob.glob(os.path.join(root, *(place + ("*.so*",)))):
            os.rename(library, os.path.join(folder, os.path.basename(library)))
    os.symlink(os.path.relpath(folder, root), os.path.join(root, "libraries"))


def main(arguments):
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("packages", nargs="+")
    parser.add_argument("--alone", action="append", default=[])
    parser.add_argument("--link", action="append", default=[])
    asked = parser.parse_args(arguments)
    said = os.path.join(asked.target, "unpacked")
    if os.path.exists(said):
        with open(said) as file:
            if file.read().split() == arguments[1:]:
                return 0
        shutil.rmtree(asked.target)
    with tempfile.TemporaryDirectory() as folder:
        try:
            done = download(folder, asked.packages, asked.alone)
        except OSError as error:
            print(error)
            done = False
        if not done:
            packages = " ".join(asked.packages + asked.alone)
            print("apt-get did not get {0}. Try: apt-get install {0}".format(packages))
            return 1
        unfinished = asked.target + ".part"
        shutil.rmtree(unfinished, ignore_errors=True)
        unpack(os.path.join(folder, "archives"), unfinished)
    for link in asked.link:
        name, _, library = link.partition("=")
        name = name if "/" in name else os.path.join("libraries", name)
        os.symlink(library, os.path.join(unfinished, name))
    with open(os.path.join(unfinished, "unpacked"), "w") as file:
        file.write("\n".join(arguments[1:]))
    os.rename(unfinished, asked.target)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
