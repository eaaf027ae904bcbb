"""How compat writes files: what is there stays what it is. docs/command-line.md has the table."""

import errno
import os
import stat
import subprocess
import sys
import threading
import types

import pytest
from conftest import ROOT

from compat._ranks import ranked_methods, saving
from compat._runtime import safe_files

NEW = "new\n"


def reader(path):
    """Return a function that reads all that is written to a FIFO. No reader or writer waits."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    return lambda: os.read(descriptor, 100000).decode()


def text(path):
    with open(path, encoding="utf-8") as file:
        return file.read()


def fifo(path):
    os.mkfifo(path)
    return path, reader(path)


def device(path):
    """Return a device of this test: a null device where it may make one, or else a terminal."""
    try:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 3))
        with open(path, "w"):
            return path, lambda: NEW
    except OSError:
        controller, terminal = os.openpty()
        path = os.ttyname(terminal)
        return path, lambda: os.read(controller, 100).decode().replace("\r", "")


def descriptor(path):
    receive, send = os.pipe()
    return "/dev/fd/{}".format(send), lambda: os.read(receive, 100000).decode()


def private(path):
    with open(path, "w") as file:
        file.write("old")
    os.chmod(path, 0o600)
    return path, lambda: text(path)


def link(path):
    os.mkdir(path + ".folder")
    target, content = private(os.path.join(path + ".folder", "target"))
    os.symlink(target, path)
    return path, content


def dangling(path):
    os.symlink(path + ".target", path)
    return path, lambda: text(path + ".target")


def long_name(path):
    return private(os.path.join(os.path.dirname(path), "n" * 255))


PLACES = fifo, device, descriptor, private, link, dangling, long_name


def kept(path):
    """Return the state of a link and its target that writing keeps: of a file only the mode."""
    found = [look(path) for look in (os.lstat, os.stat)[: 1 + os.path.exists(path)]]
    return [(each.st_mode, stat.S_ISREG(each.st_mode) or each.st_ino) for each in found]


def files(folder):
    return sorted(os.path.join(root, name) for root, _, names in os.walk(folder) for name in names)


@pytest.fixture(params=PLACES, ids=lambda place: place.__name__)
def stays(request, tmp_path):
    """Return a function that writes to an existing file, which has to stay as it is."""

    def stays(look, write):
        path, content = request.param(str(tmp_path / "file.keras"))
        before, names = kept(path), files(str(tmp_path))
        look(path)
        assert files(str(tmp_path)) == names
        write(path)
        assert content() == NEW
        assert kept(path)[: len(before)] == before
        made = [path + ".target"] if request.param is dangling else []
        assert files(str(tmp_path)) == sorted(names + made)

    return stays


def test_what_is_there_stays_what_it_is(stays):
    stays(safe_files.check_writable, lambda path: safe_files.write(path, NEW))


def test_a_new_file_has_the_mode_of_new_files(tmp_path):
    with open(str(tmp_path / "plain"), "w"):
        pass
    safe_files.write(str(tmp_path / "file"), NEW)
    assert kept(str(tmp_path / "file")) == kept(str(tmp_path / "plain"))


def test_a_file_is_replaced_as_a_whole_or_stays(tmp_path, monkeypatch):
    path, content = private(str(tmp_path / "file"))

    def replace(*paths):
        raise OSError("no")

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(OSError, match="no"):
        safe_files.write(path, NEW)
    assert (content(), files(str(tmp_path))) == ("old", [path])


def test_a_fifo_is_written_to_when_somebody_reads_it(tmp_path):
    path = str(tmp_path / "fifo")
    os.mkfifo(path)
    writer = threading.Thread(target=safe_files.write, args=(path, NEW), daemon=True)
    writer.start()
    writer.join(0.1)
    assert writer.is_alive()
    assert text(path) == NEW
    writer.join()


def test_another_name_of_a_file_keeps_what_it_had(tmp_path):
    path, _ = private(str(tmp_path / "file"))
    os.link(path, str(tmp_path / "other"))
    safe_files.write(path, NEW)
    assert text(str(tmp_path / "other")) == "old"


def test_standard_output_in_a_file_is_not_cut(tmp_path):
    program = (
        "from compat._runtime import safe_files\nprint('before')\n"
        "safe_files.check_writable('/dev/stdout')\n"
        "safe_files.write('/dev/stdout', 'new\\n')\nprint('after')"
    )
    with open(str(tmp_path / "out"), "w") as out:
        subprocess.check_call(
            [sys.executable, "-c", program], stdout=out, env=dict(os.environ, PYTHONPATH=ROOT)
        )
    assert text(str(tmp_path / "out")) == "before\nnew\nafter\n"


def test_what_may_not_be_written_to_is_an_error_and_stays(tmp_path, monkeypatch):
    path, content = private(str(tmp_path / "file"))
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write to everything

    def replace(path):  # as theanorc does
        with safe_files.replacement(path):
            pass

    for call in (safe_files.check_writable, lambda path: safe_files.write(path, NEW), replace):
        with pytest.raises(PermissionError) as error:
            call(path)
        assert (error.value.errno, error.value.filename) == (errno.EACCES, path)
    assert content() == "old"


# Models on ranks ------------------------------------------------------------------------------


class Model:
    """Saves as Keras does: a file in place, and with ``export()`` a folder and those it is in."""

    def save(self, filepath, overwrite=True):
        with open(filepath, "w") as file:
            file.write(NEW)

    def save_weights(self, filepath, overwrite=True):
        self.save(filepath, overwrite)

    def export(self, filepath):
        os.makedirs(os.path.join(filepath, "variables"), exist_ok=True)
        for name in "saved_model.pb", os.path.join("variables", "index"):
            self.save(os.path.join(filepath, name))


def ranked(rank=0):
    model = Model()
    place = types.SimpleNamespace(rank=rank)
    ranked_methods.install(model, types.SimpleNamespace(place=place), saving.KINDS)
    return model


def test_a_model_is_saved_to_what_is_there(stays):
    stays(lambda path: ranked(1).save(path), lambda path: ranked().save(path))


def test_a_folder_keeps_what_is_not_saved_anew(tmp_path, monkeypatch):
    folder = tmp_path / "exported"
    (folder / "variables").mkdir(parents=True)
    for name in "notes.txt", "variables/index", "variables/own":
        (folder / name).write_text("old")
    os.chmod(str(folder), 0o700)
    (tmp_path / "link").symlink_to(folder)
    ranked().export(str(tmp_path / "link"))
    found = {name: (folder / name).read_text() for name in ("notes.txt", "variables/own")}
    assert found == {"notes.txt": "old", "variables/own": "old"}
    assert (folder / "variables" / "index").read_text() == NEW
    assert (folder / "saved_model.pb").read_text() == NEW
    assert folder.stat().st_mode & 0o777 == 0o700 and (tmp_path / "link").is_symlink()
    assert sorted(os.listdir(str(tmp_path))) == ["exported", "link"]
    monkeypatch.chdir(str(folder))  # a folder that goes elsewhere takes this process along
    ranked().export(".")
    assert os.path.samefile(os.curdir, str(folder)) and len(files(str(folder))) == 4


def test_keras_alone_sees_to_folders_that_are_missing_and_urls(tmp_path, monkeypatch):
    monkeypatch.chdir(str(tmp_path))
    ranked().export(os.path.join("a", "b", "exported"))
    assert len(files(str(tmp_path / "a" / "b" / "exported"))) == 2
    for path in "ram://model.keras", str(tmp_path / "missing" / "model.keras"):
        with pytest.raises(FileNotFoundError) as error:
            ranked().save(path)
        assert error.value.filename == path
    (tmp_path / "ram:").mkdir()  # is no reason to take it for a path
    monkeypatch.setattr(Model, "save", lambda self, filepath: filepath)
    assert ranked().save("ram://model.keras") == "ram://model.keras"


@pytest.mark.parametrize(
    "name, answer", [("path.ismount", True), ("access", False)], ids=["mount point", "no new files"]
)
def test_keras_alone_writes_where_nothing_can_be_renamed(tmp_path, monkeypatch, name, answer):
    folder = str(tmp_path / "exported")
    os.mkdir(folder)
    owner = os.path if name.startswith("path") else os
    monkeypatch.setattr(owner, name.rpartition(".")[2], lambda *arguments: answer)
    with saving.atomic_write(folder) as path:
        assert path == folder


def test_a_folder_in_a_file_s_place_is_an_error_and_stays(tmp_path):
    (tmp_path / "model.keras").mkdir()
    (tmp_path / "model.keras" / "notes.txt").write_text("old")
    with pytest.raises(IsADirectoryError):
        ranked().save(str(tmp_path / "model.keras"))
    assert (tmp_path / "model.keras" / "notes.txt").read_text() == "old"
