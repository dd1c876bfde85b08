"""The store in a directory: its commit protocol, and everything that can interfere with it."""

import errno
import fcntl
import os
import resource
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainfold.backends.stores import direct_io
from trainfold.backends.stores.local import LocalStore
from trainfold.core.digest import digest_of
from trainfold.core.errors import (
    CheckpointForeign,
    CheckpointHostile,
    CheckpointTorn,
    CommitConflict,
    NoSpace,
    NotWritable,
    RunLocked,
    SaveFailed,
)

MANIFEST = "step-1/manifest.json"


def save(store, step=1, data=b"weights"):
    store.write(f"step-{step}/a", [data], size_bytes=len(data))
    store.commit(f"step-{step}/manifest.json", b"{}")


def all_files(path):
    return sorted(str(found.relative_to(path)) for found in Path(path).rglob("*") if not found.is_dir())


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path / "run")


@pytest.fixture
def calls(monkeypatch):
    """The system calls that make bytes durable or visible, in order."""
    made = []

    def record(name, describe):
        real = getattr(os, name)

        def spy(*args, **kwargs):
            made.append(f"{name} {describe(*args)}")
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, spy)

    def target(fd, *_):
        path = Path(f"/proc/self/fd/{fd}").readlink()
        return "temporary" if path.name.startswith(".tmp-") else path.name

    record("fsync", target)
    record("rename", lambda source, last: last)
    record("link", lambda source, last: last)
    return made


# --- the protocol ----------------------------------------------------------------------------------------------------


def test_files_then_directories_then_the_record_then_its_directory_are_synced(store, calls, tmp_path):
    """C01: nothing is visible before everything that it needs is durable."""
    save(store)
    device = tmp_path.stat().st_dev
    above = [f"fsync {path.name}" for path in [tmp_path, *tmp_path.parents] if path.stat().st_dev == device]
    assert calls == [
        "fsync temporary",
        "rename a",
        "fsync step-1",
        "fsync run",
        *above,  # the directory entry of the run, even if another process made it, and of each directory above it
        "fsync temporary",
        "link manifest.json",
        "fsync step-1",
    ]
    assert all_files(tmp_path) == ["run/step-1/a", "run/step-1/manifest.json"]
    calls.clear()
    save(store, step=2)
    assert not set(calls) & set(above), "once is enough"


def test_a_replacement_is_one_rename(store, calls):
    """C08: at no moment is there no manifest."""
    save(store)
    calls.clear()
    store.commit(MANIFEST, b"new", replaces=digest_of(b"{}"))
    assert [call for call in calls if not call.startswith("fsync")] == ["rename manifest.json"]
    assert store.read(MANIFEST) == b"new"


@pytest.mark.parametrize("failing", range(8))
def test_a_failed_fsync_abandons_the_file_and_is_never_repeated(store, monkeypatch, failing):
    """C15: after a failed fsync the bytes may be lost, and a second fsync would succeed all the same."""
    save(store, 0)
    real, synced, failed = os.fsync, [], []

    def fsync(fd):
        path = Path(f"/proc/self/fd/{fd}").readlink()
        assert path not in failed or path.is_dir()
        synced.append(path)
        if len(synced) == failing + 1:
            failed.append(path)
            raise OSError(errno.EIO, "Input/output error")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    try:
        save(store)
    except SaveFailed as error:
        where = error.where
    else:
        where = ""
    assert bool(failed) == (failing < 5)  # a save syncs five times
    assert where.startswith(store.url) == bool(failed)
    assert ("manifest.json" in store.list("step-1")) != bool(failed)
    monkeypatch.setattr(os, "fsync", real)
    assert not any(".tmp-" in name for name in all_files(store.url))
    assert store.read("step-0/a") == b"weights"
    if failing < 5:
        save(store)


def test_a_write_below_and_above_the_direct_size_gives_the_bytes_that_went_in(store):
    for size in (0, 1, 4095, 4096, (1 << 20) - 1, 1 << 20, (1 << 20) + 1, (32 << 20) + 4097):
        data = os.urandom(size)
        store.write("step-1/a", [data[: size // 3], data[size // 3 :]], size_bytes=size)
        assert store.size("step-1/a") == size
        assert digest_of(store.read("step-1/a")) == digest_of(data)


def test_a_filesystem_without_direct_writes_or_allocation_ahead_is_served(store, monkeypatch):
    def refuse(fd, data, offset, real=os.pwrite):
        if os.get_blocking(fd) and fcntl_flags(fd) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data[: 1 + len(data) // 2], offset)  # and writes are short too

    monkeypatch.setattr(os, "pwrite", refuse)
    monkeypatch.setattr(direct_io, "_allocate", lambda fd, start, size_bytes: None)
    data = os.urandom(3 << 20)
    store.write("step-1/a", [data], size_bytes=len(data))
    assert store.read("step-1/a") == data


def test_a_writer_whose_write_was_refused_while_the_other_gave_direct_writes_up_writes_again(store, monkeypatch):
    """Two threads write one file and share its O_DIRECT flag: the second one finds the flag cleared, and must write again."""

    def refuse(fd, data, offset, real=os.pwrite):
        if (flags := fcntl_flags(fd)) & os.O_DIRECT:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)  # as the other writer does
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(fd, data, offset)

    data = os.urandom(3 << 20)
    monkeypatch.setattr(os, "pwrite", refuse)
    store.write("step-1/a", [data], size_bytes=len(data))
    assert store.read("step-1/a") == data
    monkeypatch.setattr(os, "pwrite", refuse_all)
    with pytest.raises(SaveFailed, match="Invalid argument"):
        store.write("step-2/a", [data], size_bytes=len(data))


def refuse_all(fd, data, offset):
    raise OSError(errno.EINVAL, "Invalid argument")


def fcntl_flags(fd):
    return fcntl.fcntl(fd, fcntl.F_GETFL)


def test_reading_the_head_of_a_checkpoint_takes_six_system_calls(store, monkeypatch):
    """So listing a thousand checkpoints takes tens of milliseconds."""
    store.commit(MANIFEST, b"x" * 5000)
    made = []
    for name in ("open", "close", "fstat", "stat", "pread", "read", "listdir", "scandir"):
        real = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *a, name=name, real=real, **k: (made.append(name), real(*a, **k))[1])
    assert store.read(MANIFEST, stop=1024) == b"x" * 1024
    assert sorted(made) == ["close", "close", "fstat", "open", "open", "pread"]


def test_a_run_path_may_be_a_link_and_a_file_is_foreign(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    save(LocalStore(tmp_path / "link"))
    assert LocalStore(tmp_path / "real").list() == ["step-1"]
    (tmp_path / "file").write_bytes(b"torch.save")
    with pytest.raises(CheckpointForeign, match="file"):
        LocalStore(tmp_path / "file").list()


def test_hints_are_links_that_can_be_replaced(store):
    save(store)
    for target in ("step-1", "step-2"):
        store.point("latest", target)
        assert os.readlink(f"{store.url}/latest") == target  # noqa: PTH115 - text
    assert store.list() == ["step-1"]


# --- hostile contents ------------------------------------------------------------------------------------------------


def make_fifo(path):
    os.mkfifo(path)


def make_socket(path):
    with socket.socket(socket.AF_UNIX) as listening, pytest.MonkeyPatch.context() as patch:
        patch.chdir(path.parent)  # the paths of sockets are limited
        listening.bind(path.name)


def make_device(path):
    try:
        os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))  # /dev/zero: endless
    except PermissionError:
        pytest.skip("only root makes devices")


def make_link(path):
    path.symlink_to("/etc/hostname")


def make_link_inside(path):
    path.symlink_to("a")


@pytest.mark.parametrize("make", [make_fifo, make_socket, make_device, make_link, make_link_inside, Path.mkdir])
def test_what_is_not_a_file_is_refused_without_reading_it(store, make):
    """U04, U05: links cannot lead out of the run, and a planted fifo or device cannot hang or flood the reader."""
    save(store)
    planted = Path(store.url, "step-1", "planted")
    make(planted)
    for verb in (
        lambda: store.read("step-1/planted"),
        lambda: store.read_into("step-1/planted", memoryview(bytearray(1))),
    ):
        with pytest.raises(CheckpointHostile, match="planted"):
            verb()
    if make is not Path.mkdir:
        with pytest.raises(CheckpointHostile, match="planted"):
            store.size("step-1/planted")


def test_a_linked_directory_is_refused_by_every_verb(store, tmp_path):
    """U04: a symlinked checkpoint directory is not followed, for reading or for writing."""
    save(store)
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/a").write_bytes(b"secret")
    Path(store.url, "step-2").symlink_to(tmp_path / "outside")
    for verb in (
        lambda: store.read("step-2/a"),
        lambda: store.size("step-2/a"),
        lambda: store.list("step-2"),
        lambda: store.write("step-2/b", [b"1"], size_bytes=1),
        lambda: store.commit("step-2/manifest.json", b"1"),
        lambda: store.delete("step-2/a"),
        lambda: store.delete("step-2/"),
    ):
        with pytest.raises(CheckpointHostile, match="step-2"):
            verb()
    assert all_files(tmp_path / "outside") == ["a"]


def test_writing_over_a_planted_link_replaces_the_link_and_not_its_target(store, tmp_path):
    """U04: a link in the place of a file that is to be written leads nowhere."""
    save(store)
    (tmp_path / "victim").write_bytes(b"precious")
    Path(store.url, "step-1/b").symlink_to(tmp_path / "victim")
    store.write("step-1/b", [b"new"], size_bytes=3)
    assert (tmp_path / "victim").read_bytes() == b"precious"
    assert store.read("step-1/b") == b"new"
    Path(store.url, "run.json").symlink_to(tmp_path / "nothing")
    with pytest.raises(CommitConflict):
        store.commit("run.json", b"{}")
    Path(store.url, ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(CheckpointHostile), store.lock():
        pass


def test_a_read_asks_for_no_more_memory_than_the_file_has(store):
    """U05: a range far beyond the file allocates nothing."""
    save(store)
    assert store.read("step-1/a", stop=1 << 60) == b"weights"
    assert store.read("step-1/a", start=1 << 60) == b""


def test_short_reads_are_continued_and_a_shrunken_file_is_torn(store, monkeypatch):
    data = bytes(range(200))
    store.write("step-1/a", [data], size_bytes=len(data))
    real_pread, real_preadv = os.pread, os.preadv
    monkeypatch.setattr(os, "pread", lambda fd, count, offset: real_pread(fd, min(count, 7), offset))
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, offset: real_preadv(fd, [buffers[0][:7]], offset))
    assert store.read("step-1/a", start=3) == data[3:]
    buffer = bytearray(190)
    store.read_into("step-1/a", memoryview(buffer), start=5)
    assert bytes(buffer) == data[5:195]
    with store.opened("step-1/a") as read_into:
        os.truncate(f"{store.url}/step-1/a", 50)
        with pytest.raises(CheckpointTorn, match="at least 195 bytes"):
            read_into(memoryview(buffer), 5)


def test_a_directory_inside_of_a_checkpoint_goes_with_it_and_links_in_it_are_not_followed(store, tmp_path):
    """E05: the user's own files. They are deleted before the manifest: if one cannot be deleted, the checkpoint stays whole."""
    save(store)
    mine = Path(store.url, "step-1/mine/deep")
    mine.mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("stays")
    (mine / "link").symlink_to(tmp_path / "elsewhere")
    Path(store.url, "step-1/link").symlink_to(tmp_path / "elsewhere")
    store.delete("step-1/")
    assert not Path(store.url, "step-1").exists()
    assert (tmp_path / "elsewhere" / "file").read_text() == "stays"


# --- full and forbidden places ---------------------------------------------------------------------------------------


@contextmanager
def mounted(path, options):
    """A new tmpfs, if this process may mount one."""
    path.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", options, "tmpfs", path], capture_output=True, text=True, check=False
    )
    if done.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {done.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def test_a_full_disk_is_refused_before_and_survived_during_a_write(tmp_path):
    """C15: on a full disk the save raises NoSpace, leaves no temporary files, and leaves the earlier checkpoint whole."""
    with mounted(tmp_path / "small", "size=8m") as place:
        store = LocalStore(place / "run")
        save(store)
        with pytest.raises(NoSpace, match=r"bytes free, found .*trainfold prune RUN .*not by hand.* keep_last="):
            store.reserve(50 << 20)
        before = all_files(place)
        for size in (50 << 20, 12 << 20):
            with pytest.raises(NoSpace):
                store.write("step-2/a", [bytes(1 << 20)] * (size >> 20), size_bytes=size)
        # the allocation ahead failed above; now a write in the middle of the stream fails
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(direct_io, "_allocate", lambda fd, start, size_bytes: None)
            with pytest.raises(NoSpace):
                store.write("step-2/a", [bytes(1 << 20)] * 50, size_bytes=50 << 20)
        assert all_files(place) == before
        assert store.read("step-1/a") == b"weights"
        store.write("step-2/a", [bytes(4 << 20)], size_bytes=4 << 20)


def test_a_read_only_place_is_refused_by_name(tmp_path):
    """C15: a save into a read-only place fails before it changes anything, and the place can still be read."""
    with mounted(tmp_path / "place", "size=8m") as place:
        store = LocalStore(place / "run")
        save(store)
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        for verb in (
            lambda: store.reserve(1),
            lambda: store.write("step-2/a", [b"1"], size_bytes=1),
            lambda: store.commit("step-2/manifest.json", b"1"),
            lambda: store.delete("step-1/"),
            lambda: store.lock().__enter__(),
            lambda: LocalStore(place / "other").reserve(1),
        ):
            with pytest.raises(NotWritable, match="Read-only"):
                verb()
        store.point("latest", "step-1")
        assert store.list() == ["step-1"]
        assert store.read("step-1/a") == b"weights"


def test_an_injected_full_or_forbidden_disk_is_named(store, monkeypatch):
    """C15: the same without a mount, for a process that may not mount."""
    save(store)
    for code, kind in (
        (errno.ENOSPC, NoSpace),
        (errno.EDQUOT, NoSpace),
        (errno.EACCES, NotWritable),
        (errno.EIO, SaveFailed),
    ):

        def fail(fd, data, offset, code=code):
            raise OSError(code, os.strerror(code))

        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", fail)
            for size in (10, 3 << 20):
                with pytest.raises(kind) as caught:
                    store.write("step-2/a", [bytes(size)], size_bytes=size)
                assert type(caught.value) is kind
        assert store.list("step-2") == []
    assert store.read("step-1/a") == b"weights"
    assert not any(".tmp-" in name for name in all_files(store.url))


def test_a_file_larger_than_the_process_may_write_fails_by_name(store):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 20, limit[1]))
    try:
        with pytest.raises(NoSpace, match="ulimit -f"):
            store.write("step-1/a", [bytes(1 << 20)] * 4, size_bytes=4 << 20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
        signal.signal(signal.SIGXFSZ, ignored)
    assert all_files(store.url) == []


# --- two writers -----------------------------------------------------------------------------------------------------

HOLDER = """
import sys, time
from trainfold.backends.stores.local import LocalStore
store = LocalStore(sys.argv[1])
with store.lock():
    def parts():
        yield b"x" * 2_000_000
        print("locked", flush=True)
        time.sleep(60)
    store.write("step-9/a", parts(), size_bytes=4_000_000)
"""


def test_of_two_processes_that_save_into_one_run_the_second_is_told_who_has_it(store):
    """C15: the second of two writers is refused by name; when the first dies, its lock and its leftovers are removed."""
    save(store)
    with subprocess.Popen([sys.executable, "-c", HOLDER, store.url], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "locked\n"
        try:
            with pytest.raises(RunLocked, match=f"process {holder.pid} on"), store.lock():
                pass
            with pytest.raises(RunLocked):
                store.commit(MANIFEST, b"mine", replaces=digest_of(b"{}"))
            assert len([name for name in all_files(store.url) if ".tmp-" in name]) == 1
        finally:
            holder.kill()
            holder.wait()
    with store.lock():
        assert all_files(store.url) == [".lock", "step-1/a", "step-1/manifest.json"]
        store.commit(MANIFEST, b"mine", replaces=digest_of(b"{}"))


def test_a_second_store_object_of_the_same_process_is_refused_too(store):
    with store.lock():
        for other in (LocalStore(store.url), store):
            with pytest.raises(RunLocked, match=f"process {os.getpid()}"), other.lock():
                pass
    with LocalStore(store.url).lock():
        pass


def test_a_forked_child_does_not_keep_its_parents_lock(store):
    """A loader's worker may outlive the training process; the next process must get the lock of the run anyway."""
    with store.lock():
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.read(reader, 1)
            os._exit(0)
    try:
        with LocalStore(store.url).lock():
            pass
    finally:
        os.write(writer, b"x")
        os.waitpid(child, 0)
        os.close(reader)
        os.close(writer)


def test_a_living_writers_file_is_not_collected(store):
    def parts():
        yield b"12"
        with LocalStore(store.url).lock():
            pass
        yield b"34"

    store.write("step-1/a", parts(), size_bytes=4)
    assert store.read("step-1/a") == b"1234"


def test_a_pointer_leads_somewhere_at_every_instant(store, tmp_path, monkeypatch):
    """E14: after each system call that changes a directory, it is a relative link to the old or the new target, and never missing."""
    save(store, 1), save(store, 2)
    store.point("latest", "step-1")
    seen = []

    def spied(real):
        def spy(*args, **kwargs):
            found = real(*args, **kwargs)
            seen.append(str((tmp_path / "run" / "latest").readlink()))
            return found

        return spy

    with monkeypatch.context() as patch:
        for name in ("symlink", "link", "rename", "replace", "unlink", "remove"):
            patch.setattr(os, name, spied(getattr(os, name)))
        store.point("latest", "step-2")
    assert set(seen) <= {"step-1", "step-2"}
    assert seen[-1] == "step-2"
