"""A directory that is staged is absent or whole after any crash, and the same calls, made again, finish it."""

import errno
import os
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest

from crash.disk.disk import Disk
from crash.disk.effects import Recorder
from crash.disk.states import Budget, crash_states, live
from crash.disk.syscalls import watched
from crash.faults.faulty_disk import Fault, FaultyDisk
from crash.saves.scenarios import SHM
from trainfold.backends.formats import staged_directory as staging
from trainfold.backends.formats.staged_directory import staged_directory
from trainfold.core.errors import NoSpace, SaveFailed

FILES = {"config.json": b"{}", "model-1.safetensors": bytes(range(256)) * 40, "model-2.safetensors": b"2" * 5000}


class Killed(BaseException):
    """No handler of the program runs after that."""


def write(top, *, plan="a", files=FILES):
    """Write the directory; return the names that were written by this call."""
    sizes = {name: len(data) for name, data in files.items()}
    with staged_directory(Path(top, "model"), plan=plan, files=sizes) as staged:
        names = [name for name, data in files.items() if staged.write(name, lambda at, data=data: [data[at : at + 7], data[at + 7 :]], size_bytes=len(data))]  # fmt: skip
        staged.commit()
        return names


def what_is_there(top):
    """The files of the directory; None if there is none."""
    found = Path(top, "model")
    return {each.name: each.read_bytes() for each in found.iterdir()} if found.is_dir() else None


@pytest.fixture(autouse=True)
def small_notes():
    """One of the files is noted twice before it is whole."""
    with mock.patch.object(staging, "NOTE_BYTES", 4096):
        yield


@pytest.fixture
def top():
    with TemporaryDirectory(dir=SHM) as made:
        yield made


class Killing:
    """A handler for `watched`: from one call on, none is made."""

    def __init__(self, top, index):
        self.recorder, self.index, self.calls = Recorder(top), index, 0

    def __call__(self, name, real, args, kwargs):
        if self.recorder.target(name, args, kwargs) is not None and name != "close":
            if self.calls >= self.index:
                raise Killed
            self.calls += 1
        return self.recorder(name, real, args, kwargs)


def recorded(top, index=10**9):
    """Write under watch, and be killed before one of the calls; return the handler, and whether that came before the end."""
    handler = Killing(top, index)
    try:
        with watched(handler):
            write(top)
    except Killed:
        for fd in list(handler.recorder._opened):  # the end of a process closes them, and frees its lock
            os.close(fd)
        return handler, True
    return handler, False


def test_a_killed_writer_leaves_no_directory_or_a_whole_one_and_the_next_one_goes_on(top):
    """Killed before each call that changes the disk; the files that were finished by then are not written again."""
    index, kept = 0, set()
    while True:
        place = Path(top, str(index))
        place.mkdir()
        handler, was_killed = recorded(place, index)
        assert what_is_there(place) in (None, FILES), f"killed before call {index}"
        written = write(place)
        assert what_is_there(place) == FILES, f"killed before call {index}"
        assert [each.name for each in place.iterdir()] == ["model"], f"killed before call {index}"
        kept.add(len(FILES) - len(written))
        if not was_killed:
            break
        index += 1
    assert handler.calls > 20
    assert kept == {0, 1, 2, 3}


def test_a_power_cut_leaves_no_directory_or_a_whole_one(top):
    """Each state of the disk that the order of syncs allows, and what a writer makes of a share of them."""
    handler, _ = recorded(top)
    count = 0
    for state in crash_states(handler.recorder.effects, Budget(12, 4)):
        found = {name.removeprefix("model/"): data for name, data in state.files.items() if name.startswith("model/")}
        assert "model" not in state.files or {name: bytes(data) for name, data in found.items()} == FILES, state
        count += 1
    assert count > 80


def test_a_directory_whose_write_returned_is_durable(top):
    handler, _ = recorded(top)
    disk = Disk()
    for effect in handler.recorder.effects:
        disk = disk.after(effect)
    found, _ = live(disk)
    assert {name for name in found if name.startswith("model")} == {"model", *(f"model/{name}" for name in FILES)}
    assert all("model/model-1.safetensors" in state.files for state in crash_states([], Budget(64, 8), disk))


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_each_call_that_fails_is_an_error_with_a_name_and_the_next_one_goes_on(top, code):
    clean = FaultyDisk(Recorder(top))
    with watched(clean):
        clean.is_armed = True
        write(top)
    changing = [index for index, call in enumerate(clean.calls) if call.changes]
    assert len(changing) > 20
    for index in changing:
        place = Path(top, str(index))
        place.mkdir()
        disk = FaultyDisk(Recorder(place), Fault(index, code))
        disk.is_armed, raised = True, None
        with watched(disk):
            try:
                write(place)
            except SaveFailed as error:
                raised = error
        assert what_is_there(place) in (None, FILES), f"at call {index}"
        if disk.failed and raised is not None:
            assert isinstance(raised, NoSpace) == (code == errno.ENOSPC), (disk.failed, raised)
        write(place)  # also where the rename was made, and what came after it failed
        assert what_is_there(place) == FILES, (index, disk.failed, raised)
        shutil.rmtree(place)
