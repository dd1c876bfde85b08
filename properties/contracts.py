"""Contracts: suites that check whether an implementation of `Store`, `Metric`, `Collectives`, `Parallelism`, `WeightSource` or `Converter` keeps its protocol.

Each rule is a function; `check_store` runs the rules of a store, each on a fresh one, and reports every broken rule; `check_metric`
runs those of a metric.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from functools import partial
from typing import Any, Final, cast

from trainfold.backends.stores.protocol import Buffer, KeepsTime, Store, SyncsLater, preference_of
from trainfold.core.digest import digest_of
from trainfold.core.errors import (
    CheckpointHostile,
    CheckpointMissing,
    CheckpointTorn,
    CommitConflict,
    NoSpace,
    RunLocked,
    SaveFailed,
    TrainfoldError,
)
from trainfold.properties.collectives_contract import check_collectives
from trainfold.properties.converter_contract import check_converter
from trainfold.properties.differences import ContractBroken
from trainfold.properties.metrics.metric_contract import check_metric
from trainfold.properties.parallelism_contract import check_parallelism
from trainfold.properties.weight_source_contract import check_weight_source

__all__ = [
    "STORE_RULES",
    "ContractBroken",
    "check_collectives",
    "check_converter",
    "check_metric",
    "check_parallelism",
    "check_store",
    "check_weight_source",
]

Rule = Callable[[Store], None]

_HOSTILE: Final = (
    "", ".", "..", "/", "/etc/passwd", "../a", "a/..", "a/../b", "a//b", "a/b/c", ".hidden", "a/.hidden", "a\\b", "a b",
    "a\n", "a\0b", "~", "é", "C:", "a/", "x" * 300,
)  # fmt: skip
_NOWHERE_BYTES: Final = 1 << 62  # more than any place has, and it fits into the signed 64 bits of a store's library
_LONG_AGO_SECS: Final = 1e9  # 2001: milliseconds and monotonic clocks are outside this range of seconds since 1970
_LATE_SECS: Final = 1e11
_BIG_BYTES: Final = (2 << 20) + 4321  # beyond one block, one page and any alignment


def check_store(factory: Callable[[], Store]) -> None:
    """Check that a store keeps the contract of `Store`.

    Args:
        factory: makes an empty store; called once for each rule.

    Raises:
        ContractBroken: naming every broken rule.

    Examples:
        >>> from trainfold.stores import MemoryStore
        >>> check_store(MemoryStore)
    """
    broken = []
    for rule in STORE_RULES:
        try:
            rule(factory())
        except Exception as error:  # noqa: BLE001  # whatever a foreign store raises breaks the rule
            broken.append(f"{rule.__name__.replace('_', ' ')}: {type(error).__name__}: {error}")
    if broken:
        raise ContractBroken(f"{len(broken)} of {len(STORE_RULES)} rules are broken:\n  " + "\n  ".join(broken))


def it_has_the_methods(store: Store) -> None:
    """Every verb exists, and the place has a name for messages."""
    _equal("isinstance(store, Store)", expected=True, found=isinstance(store, Store))
    _equal("type of url", expected=str, found=type(store.url))


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
        _equal(f"size({name!r})", expected=len(whole), found=store.size(name))
        _equal(f"digest of read({name!r})", expected=digest_of(whole), found=digest_of(store.read(name)))


def one_buffer_can_serve_for_all_parts(store: Store) -> None:
    """A part is used before the next one is asked for."""
    buffer = bytearray(300_000)

    def parts() -> Iterator[memoryview]:
        for value in range(10):
            buffer[:] = bytes([value]) * len(buffer)
            yield memoryview(buffer)

    store.write("step-1/a", parts(), size_bytes=10 * len(buffer))
    expected = b"".join(bytes([value]) * len(buffer) for value in range(10))
    _equal("digest of the file", expected=digest_of(expected), found=digest_of(store.read("step-1/a")))


def a_write_of_another_size_fails_and_leaves_nothing(store: Store) -> None:
    """Too few bytes, too many, or the caller's error: the old contents stay, new names do not appear."""
    store.write("step-1/old", [b"old"], size_bytes=3)
    for name in ("step-1/old", "step-1/new"):
        for size in (1, 9):
            _raises(SaveFailed, store.write, name, [b"1234"], size_bytes=size)

        def failing() -> Iterator[bytes]:
            yield b"12"
            raise KeyError("the caller's own error")

        _raises(KeyError, store.write, name, failing(), size_bytes=4)
    _equal("names", expected=["old"], found=store.list("step-1"))
    _equal("old contents", expected=b"old", found=store.read("step-1/old"))


def an_uncommitted_file_is_replaced(store: Store) -> None:
    """A second write of a name wins, also if it is shorter."""
    store.write("step-1/a", [b"long contents"], size_bytes=13)
    store.write("step-1/a", [b"short"], size_bytes=5)
    _equal("contents", expected=b"short", found=store.read("step-1/a"))


def ranges_are_slices(store: Store) -> None:
    """``read`` cuts like a slice; ``read_into`` is exact or raises."""
    store.write("step-1/a", [b"0123456789"], size_bytes=10)
    for start, stop in ((0, None), (0, 0), (3, 7), (8, 100), (10, None), (12, 20), (5, 3)):
        found = store.read("step-1/a", start=start, stop=stop)
        _equal(f"read [{start}, {stop})", expected=b"0123456789"[start:stop], found=found)
    _equal("type of what read gives", expected=bytes, found=type(store.read("step-1/a")))
    buffer = bytearray(b"____")
    store.read_into("step-1/a", memoryview(buffer), start=6)
    _equal("read_into at 6", expected=b"6789", found=bytes(buffer))
    store.read_into("step-1/a", memoryview(bytearray()), start=10)
    _raises(CheckpointTorn, store.read_into, "step-1/a", memoryview(buffer), start=7)


def what_is_absent_is_said_to_be(store: Store) -> None:
    """In an empty run, and beside existing files."""
    for _ in range(2):
        for name in ("nothing", "step-9/nothing"):
            _equal(f"size({name!r})", expected=None, found=store.size(name))
            _raises(CheckpointMissing, store.read, name)
            _raises(CheckpointMissing, store.read_into, name, memoryview(bytearray(1)), start=0)
            store.delete(name)
        _equal("list of an absent directory", expected=[], found=store.list("step-9"))
        store.delete("step-9/")
        store.write("step-1/a", [b"1"], size_bytes=1)
    _equal("size of a directory", expected=None, found=store.size("step-1"))


def names_are_listed_one_level_at_a_time(store: Store) -> None:
    """Sorted, without the prefix, without temporary files, locks and hints."""
    _equal("an empty run", expected=[], found=store.list())
    for name in ("step-2/b", "step-2/a", "step-10/a", "run.json"):
        store.write(name, [b"1"], size_bytes=1)
    store.point("latest", "step-10")
    with store.lock():
        _equal("the top", expected=["run.json", "step-10", "step-2"], found=store.list())
        for prefix in ("step-2", "step-2/"):
            _equal(f"list({prefix!r})", expected=["a", "b"], found=store.list(prefix))


def a_commit_happens_once(store: Store) -> None:
    """Put-if-absent: the second one is refused and changes nothing."""
    store.write("step-1/a", [b"1"], size_bytes=1)
    store.commit("step-1/manifest.json", b"first")
    _raises(CommitConflict, store.commit, "step-1/manifest.json", b"second")
    _equal("contents", expected=b"first", found=store.read("step-1/manifest.json"))
    store.commit("run.json", b"{}")
    _raises(CommitConflict, store.commit, "run.json", b"{}")
    _equal("names", expected=["a", "manifest.json"], found=store.list("step-1"))


def a_commit_replaces_only_what_it_names(store: Store) -> None:
    """Compare-and-swap: the right digest swaps; another digest, or an absent name, is refused."""
    missing = digest_of(b"first")
    _raises(CommitConflict, store.commit, "step-1/manifest.json", b"x", replaces=missing)
    store.commit("step-1/manifest.json", b"first")
    _raises(CommitConflict, store.commit, "step-1/manifest.json", b"x", replaces=digest_of(b"other"))
    _equal("contents after refusals", expected=b"first", found=store.read("step-1/manifest.json"))
    store.commit("step-1/manifest.json", b"second", replaces=digest_of(b"first"))
    with store.lock():
        store.commit("step-1/manifest.json", b"third", replaces=digest_of(b"second"))
    _equal("contents after two swaps", expected=b"third", found=store.read("step-1/manifest.json"))


def of_many_commits_one_wins(store: Store) -> None:
    """Threads race for a name: one returns, the others raise `CommitConflict`, and the winner's bytes stay."""
    won: list[int] = []
    others: list[str] = []
    start = threading.Barrier(4)

    def race(number: int) -> None:
        start.wait()
        try:
            store.commit("step-1/manifest.json", b"%d" % number)
            won.append(number)
        except CommitConflict:
            pass
        except Exception as error:  # noqa: BLE001  # reported below
            others.append(f"{type(error).__name__}: {error}")

    _run([partial(race, number) for number in range(4)])
    _equal("other errors", expected=[], found=others)
    _equal("winners", expected=1, found=len(won))
    _equal("contents", expected=b"%d" % won[0], found=store.read("step-1/manifest.json"))


def files_that_are_synced_later_are_whole_or_gone(store: Store) -> None:
    """A file of `SyncsLater` has its name after it was finished, and leaves nothing if it was not; a store without that passes."""
    if not hasattr(type(store), "written_unsynced"):
        return
    later = cast("SyncsLater", store)
    with later.written_unsynced("step-1/dropped", [b"1"], size_bytes=1):
        pass
    _equal("size of one that was not finished", expected=None, found=store.size("step-1/dropped"))
    with ExitStack() as files:
        finish = [
            files.enter_context(later.written_unsynced(f"step-1/{name}", [name.encode()], size_bytes=1))
            for name in "ab"
        ]
        for each in finish[::-1]:
            each()
        _equal("contents of two", expected=b"ab", found=store.read("step-1/a") + store.read("step-1/b"))
    _equal("names afterwards", expected=["a", "b"], found=store.list("step-1"))


def writers_do_not_disturb_each_other(store: Store) -> None:
    """Threads write different files at once."""

    def write(number: int) -> None:
        for turn in range(3):
            store.write(f"step-{turn}/{number}", [bytes([number]) * 70_000] * 20, size_bytes=1_400_000)

    _run([partial(write, number) for number in range(4)])
    for turn in range(3):
        for number in range(4):
            found = digest_of(store.read(f"step-{turn}/{number}"))
            _equal(f"file {number}", expected=digest_of(bytes([number]) * 1_400_000), found=found)


def hostile_names_are_refused(store: Store) -> None:
    """No verb accepts a name outside the run."""
    for name in _HOSTILE:
        _raises(CheckpointHostile, store.read, name)
        _raises(CheckpointHostile, store.read_into, name, memoryview(bytearray(1)), start=0)
        _raises(CheckpointHostile, store.size, name)
        _raises(CheckpointHostile, store.committed_at, name)
        _raises(CheckpointHostile, store.write, name, [b"1"], size_bytes=1)
        _raises(CheckpointHostile, store.commit, name, b"1")
        if name != "a/":
            _raises(CheckpointHostile, store.delete, name)
            if name:
                _raises(CheckpointHostile, store.list, name)
    _equal("names", expected=[], found=store.list())


def deleting_removes_a_file_or_a_directory(store: Store) -> None:
    """And nothing else; a deleted name can be committed again."""
    for name in ("step-1/a", "step-1/b", "step-2/a"):
        store.write(name, [b"1"], size_bytes=1)
    store.commit("step-1/manifest.json", b"{}")
    store.delete("step-1/a")
    _equal("names after a file", expected=["b", "manifest.json"], found=store.list("step-1"))
    store.delete("step-1/")
    _equal("names after a directory", expected=["step-2"], found=store.list())
    store.commit("step-1/manifest.json", b"again")
    _equal("contents", expected=b"again", found=store.read("step-1/manifest.json"))


def one_writer_has_the_lock(store: Store) -> None:
    """A second writer is refused at once; leaving the block, also by an error, frees the lock."""
    for _ in range(2):
        with suppress(KeyError), store.lock():
            _raises(RunLocked, store.lock().__enter__)
            raise KeyError
    with store.lock():
        store.write("step-1/a", [b"1"], size_bytes=1)
        store.commit("step-1/manifest.json", b"{}")


def room_is_checked_before_writing(store: Store) -> None:
    """A few bytes fit; more than any place holds is refused, and neither changes the files that exist."""
    for names in ([], ["step-2"]):
        store.reserve(1)
        _raises(NoSpace, store.reserve, _NOWHERE_BYTES)
        _equal("names", expected=names, found=store.list())
        store.write("step-2/a", [b"1"], size_bytes=1)
    _equal("contents", expected=b"1", found=store.read("step-2/a"))


def the_time_of_a_commit_is_told_or_not_known(store: Store) -> None:
    """None, or seconds since 1970, which neither reading the run nor other writes in it change."""
    name = "step-1/manifest.json"
    _equal("time of what is absent", expected=None, found=store.committed_at(name))
    store.commit(name, b"{}")
    time = store.committed_at(name)
    if time is not None:
        _equal("type of the time", expected=float, found=type(time))
        _equal(f"whether {time} can be seconds since 1970", expected=True, found=_LONG_AGO_SECS < time < _LATE_SECS)
    store.read(name)
    store.write("step-1/a", [b"1"], size_bytes=1)
    store.commit("step-2/manifest.json", b"{}")
    store.point("latest", "step-1")
    store.commit(name, b"{}", replaces=digest_of(b"{}"))
    _equal("time after other things", expected=time, found=store.committed_at(name))
    _equal("time of a directory", expected=None, found=store.committed_at("step-1"))
    store.delete("step-1/")
    _equal("time after its deletion", expected=None, found=store.committed_at(name))


def a_commit_may_be_as_old_as_what_it_replaces(store: Store) -> None:
    """One of `KeepsTime` has the new contents and the old time, and refuses to replace anything else; a store without that passes."""
    if not isinstance(store, KeepsTime):
        return
    name = "step-1/manifest.json"
    store.commit(name, b"{}")
    time = store.committed_at(name)
    store.commit_as_old(name, b"[]", replaces=digest_of(b"{}"))
    _equal("contents", expected=b"[]", found=store.read(name))
    _equal("time", expected=time, found=store.committed_at(name))
    _raises(CommitConflict, store.commit_as_old, name, b"{}", replaces=digest_of(b"{}"))
    _equal("contents after a refusal", expected=b"[]", found=store.read(name))


def a_swap_replaces_only_the_version_that_it_names(store: Store) -> None:
    """One of `SwapsFiles` keeps apart what two processes put without a lock; a store without that passes."""
    if not hasattr(store, "swap") or not hasattr(store, "read_version"):
        return
    _equal("version of what is absent", expected=None, found=store.read_version("a.log"))
    first = store.swap("a.log", b"1", None)
    _equal("whether a swap has made it", expected=(True, b"1"), found=(first is not None, store.read("a.log")))
    _equal("a second swap that makes it", expected=None, found=store.swap("a.log", b"2", None))
    second = store.swap("a.log", b"12", first)
    _equal("a swap of a version that is gone", expected=None, found=store.swap("a.log", b"3", first))
    _equal("contents", expected=b"12", found=store.read("a.log"))
    data, version = store.read_version("a.log")
    third = store.swap("a.log", b"123", version)
    _equal("contents by their version", expected=(b"12", b"123"), found=(data, store.read("a.log")))
    _equal("names", expected=["a.log"], found=store.list())
    store.delete("a.log")
    _equal(
        "swaps of what is deleted",
        expected=[None] * 3,
        found=[store.swap("a.log", b"4", each) for each in (second, version, third)],
    )
    _equal("names after its deletion", expected=[], found=store.list())


def hints_are_replaced(store: Store) -> None:
    """A pointer may be set again, also to a missing name, because it is only a hint."""
    for target in ("step-1", "step-2", "step-1"):
        store.point("latest", target)
    store.point("best", "step-2")
    _equal("names", expected=[], found=store.list())
    found = store.pointers()  # a place that cannot have pointers returns an empty dict
    _equal("pointers", expected={"best": "step-2", "latest": "step-1"} if found else {}, found=found)
    store.delete("best")
    _equal(
        "pointers without one that was deleted", expected={"latest": "step-1"} if found else {}, found=store.pointers()
    )


def the_files_that_it_prefers_are_sizes_or_not_said(store: Store) -> None:
    """A save asks before each plan, and two answers would give two plans."""
    _equal("prefers, asked again", expected=preference_of(store), found=preference_of(store))


STORE_RULES: Final[tuple[Rule, ...]] = (
    it_has_the_methods,
    what_is_written_is_read,
    one_buffer_can_serve_for_all_parts,
    a_write_of_another_size_fails_and_leaves_nothing,
    an_uncommitted_file_is_replaced,
    ranges_are_slices,
    what_is_absent_is_said_to_be,
    names_are_listed_one_level_at_a_time,
    a_commit_happens_once,
    a_commit_replaces_only_what_it_names,
    of_many_commits_one_wins,
    files_that_are_synced_later_are_whole_or_gone,
    writers_do_not_disturb_each_other,
    hostile_names_are_refused,
    deleting_removes_a_file_or_a_directory,
    one_writer_has_the_lock,
    room_is_checked_before_writing,
    the_time_of_a_commit_is_told_or_not_known,
    a_swap_replaces_only_the_version_that_it_names,
    a_commit_may_be_as_old_as_what_it_replaces,
    hints_are_replaced,
    the_files_that_it_prefers_are_sizes_or_not_said,
)


def _equal(what: str, *, expected: object, found: object) -> None:
    if expected != found:
        raise ContractBroken(f"{what}: expected {expected!r}, found {found!r}"[:400])


def _raises(kind: type[BaseException], call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    about = f"{getattr(call, '__name__', call)}{args}"[:80]
    try:
        call(*args, **kwargs)
    except kind as error:
        if isinstance(error, TrainfoldError) and not (error.where and error.fix):
            raise ContractBroken(f"{kind.__name__} of {about} lacks a place or a fix: {error}") from error
        return
    except Exception as error:
        raise ContractBroken(f"{about}: expected {kind.__name__}, found {type(error).__name__}: {error}") from error
    raise ContractBroken(f"{about}: expected {kind.__name__}, and nothing was raised")


def _run(jobs: list[Callable[[], None]]) -> None:
    failed: list[BaseException] = []

    def guarded(job: Callable[[], None]) -> None:
        try:
            job()
        except BaseException as error:  # noqa: BLE001  # raised in the caller's thread below
            failed.append(error)

    threads = [threading.Thread(target=guarded, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
