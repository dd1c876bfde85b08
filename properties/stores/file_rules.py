"""Rules of a store for files: what is written is read, listed and deleted under its name, and nothing else is."""

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from typing import Final, cast

from trainfold.backends.stores.protocol import Buffer, Store, SyncsLater
from trainfold.core.digest import digest_of
from trainfold.core.errors import (
    CheckpointHostile,
    CheckpointMissing,
    CheckpointTorn,
    NoSpace,
    SaveFailed,
)
from trainfold.properties.stores.store_checks import equal, in_threads, raises

_HOSTILE: Final = (
    "", ".", "..", "/", "/etc/passwd", "../a", "a/..", "a/../b", "a//b", "a/b/c", ".hidden", "a/.hidden", "a\\b", "a b",
    "a\n", "a\0b", "~", "é", "C:", "a/", "x" * 300,
)  # fmt: skip
_NOWHERE_BYTES: Final = 1 << 62  # more than any place has, and it fits into the signed 64 bits of a store's library
_BIG_BYTES: Final = (2 << 20) + 4321  # beyond one block, one page and any alignment


def it_has_the_methods(store: Store) -> None:
    """Every verb exists, and the place has a name for messages."""
    equal("isinstance(store, Store)", expected=True, found=isinstance(store, Store))
    equal("type of url", expected=str, found=type(store.url))


def what_is_written_is_read(store: Store) -> None:
    """Parts come back in order, whatever their type and size."""
    big = bytes(range(256)) * (_BIG_BYTES // 256 + 1)
    cases: tuple[tuple[str, list[Buffer]], ...] = (
        ("step-1/small", [b"ab", bytearray(b"c"), memoryview(b"de")]),
        ("step-1/empty", []),
        ("step-1/big", [big[:7], big[7 : 1 << 20], b"", big[1 << 20 : _BIG_BYTES]]),
        ("top.json", [b"{}"]),
    )
    for name, parts in cases:
        whole = b"".join(parts)
        store.write(name, iter(parts), size_bytes=len(whole))
        equal(f"size({name!r})", expected=len(whole), found=store.size(name))
        equal(f"digest of read({name!r})", expected=digest_of(whole), found=digest_of(store.read(name)))


def one_buffer_can_serve_for_all_parts(store: Store) -> None:
    """A part is used before the next one is asked for."""
    buffer = bytearray(300_000)

    def parts() -> Iterator[memoryview]:
        for value in range(10):
            buffer[:] = bytes([value]) * len(buffer)
            yield memoryview(buffer)

    store.write("step-1/a", parts(), size_bytes=10 * len(buffer))
    expected = b"".join(bytes([value]) * len(buffer) for value in range(10))
    equal("digest of the file", expected=digest_of(expected), found=digest_of(store.read("step-1/a")))


def a_write_of_another_size_fails_and_leaves_nothing(store: Store) -> None:
    """Too few bytes, too many, or the caller's error: the old contents stay, new names do not appear."""
    store.write("step-1/old", [b"old"], size_bytes=3)
    for name in ("step-1/old", "step-1/new"):
        for size in (1, 9):
            raises(SaveFailed, store.write, name, [b"1234"], size_bytes=size)

        def failing() -> Iterator[bytes]:
            yield b"12"
            raise KeyError("the caller's own error")

        raises(KeyError, store.write, name, failing(), size_bytes=4)
    equal("names", expected=["old"], found=store.list("step-1"))
    equal("old contents", expected=b"old", found=store.read("step-1/old"))


def an_uncommitted_file_is_replaced(store: Store) -> None:
    """A second write of a name wins, also if it is shorter."""
    store.write("step-1/a", [b"long contents"], size_bytes=13)
    store.write("step-1/a", [b"short"], size_bytes=5)
    equal("contents", expected=b"short", found=store.read("step-1/a"))


def ranges_are_slices(store: Store) -> None:
    """``read`` cuts like a slice; ``read_into`` is exact or raises."""
    store.write("step-1/a", [b"0123456789"], size_bytes=10)
    for start, stop in ((0, None), (0, 0), (3, 7), (8, 100), (10, None), (12, 20), (5, 3)):
        found = store.read("step-1/a", start=start, stop=stop)
        equal(f"read [{start}, {stop})", expected=b"0123456789"[start:stop], found=found)
    equal("type of what read gives", expected=bytes, found=type(store.read("step-1/a")))
    buffer = bytearray(b"____")
    store.read_into("step-1/a", memoryview(buffer), start=6)
    equal("read_into at 6", expected=b"6789", found=bytes(buffer))
    store.read_into("step-1/a", memoryview(bytearray()), start=10)
    raises(CheckpointTorn, store.read_into, "step-1/a", memoryview(buffer), start=7)


def what_is_absent_is_said_to_be(store: Store) -> None:
    """In an empty run, and beside existing files."""
    for _ in range(2):
        for name in ("nothing", "step-9/nothing"):
            equal(f"size({name!r})", expected=None, found=store.size(name))
            raises(CheckpointMissing, store.read, name)
            raises(CheckpointMissing, store.read_into, name, memoryview(bytearray(1)), start=0)
            store.delete(name)
        equal("list of an absent directory", expected=[], found=store.list("step-9"))
        store.delete("step-9/")
        store.write("step-1/a", [b"1"], size_bytes=1)
    equal("size of a directory", expected=None, found=store.size("step-1"))


def names_are_listed_one_level_at_a_time(store: Store) -> None:
    """Sorted, without the prefix, without temporary files, locks and hints."""
    equal("an empty run", expected=[], found=store.list())
    for name in ("step-2/b", "step-2/a", "step-10/a", "run.json"):
        store.write(name, [b"1"], size_bytes=1)
    store.point("latest", "step-10")
    with store.lock():
        equal("the top", expected=["run.json", "step-10", "step-2"], found=store.list())
        for prefix in ("step-2", "step-2/"):
            equal(f"list({prefix!r})", expected=["a", "b"], found=store.list(prefix))


def files_that_are_synced_later_are_whole_or_gone(store: Store) -> None:
    """A file of `SyncsLater` has its name after it was finished, and leaves nothing if it was not; a store without that passes."""
    if not hasattr(type(store), "written_unsynced"):
        return
    later = cast("SyncsLater", store)
    with later.written_unsynced("step-1/dropped", [b"1"], size_bytes=1):
        pass
    equal("size of one that was not finished", expected=None, found=store.size("step-1/dropped"))
    with ExitStack() as files:
        finish = [
            files.enter_context(later.written_unsynced(f"step-1/{name}", [name.encode()], size_bytes=1))
            for name in "ab"
        ]
        for each in finish[::-1]:
            each()
        equal("contents of two", expected=b"ab", found=store.read("step-1/a") + store.read("step-1/b"))
    equal("names afterwards", expected=["a", "b"], found=store.list("step-1"))


def writers_do_not_disturb_each_other(store: Store) -> None:
    """Threads write different files at once."""

    def write(number: int) -> None:
        for turn in range(3):
            store.write(f"step-{turn}/{number}", [bytes([number]) * 70_000] * 20, size_bytes=1_400_000)

    in_threads([partial(write, number) for number in range(4)])
    for turn in range(3):
        for number in range(4):
            found = digest_of(store.read(f"step-{turn}/{number}"))
            equal(f"file {number}", expected=digest_of(bytes([number]) * 1_400_000), found=found)


def hostile_names_are_refused(store: Store) -> None:
    """No verb accepts a name outside the run."""
    for name in _HOSTILE:
        raises(CheckpointHostile, store.read, name)
        raises(CheckpointHostile, store.read_into, name, memoryview(bytearray(1)), start=0)
        raises(CheckpointHostile, store.size, name)
        raises(CheckpointHostile, store.committed_at, name)
        raises(CheckpointHostile, store.write, name, [b"1"], size_bytes=1)
        raises(CheckpointHostile, store.commit, name, b"1")
        if name != "a/":
            raises(CheckpointHostile, store.delete, name)
            if name:
                raises(CheckpointHostile, store.list, name)
    equal("names", expected=[], found=store.list())


def deleting_removes_a_file_or_a_directory(store: Store) -> None:
    """And nothing else; a deleted name can be committed again."""
    for name in ("step-1/a", "step-1/b", "step-2/a"):
        store.write(name, [b"1"], size_bytes=1)
    store.commit("step-1/manifest.json", b"{}")
    store.delete("step-1/a")
    equal("names after a file", expected=["b", "manifest.json"], found=store.list("step-1"))
    store.delete("step-1/")
    equal("names after a directory", expected=["step-2"], found=store.list())
    store.commit("step-1/manifest.json", b"again")
    equal("contents", expected=b"again", found=store.read("step-1/manifest.json"))


def room_is_checked_before_writing(store: Store) -> None:
    """A few bytes fit; more than any place holds is refused, and neither changes the files that exist."""
    for names in ([], ["step-2"]):
        store.reserve(1)
        raises(NoSpace, store.reserve, _NOWHERE_BYTES)
        equal("names", expected=names, found=store.list())
        store.write("step-2/a", [b"1"], size_bytes=1)
    equal("contents", expected=b"1", found=store.read("step-2/a"))
