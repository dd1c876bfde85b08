"""Rules of a store for what makes a checkpoint count: commits, locks, the time of a commit, swaps and hints."""

import threading
from contextlib import suppress
from functools import partial
from typing import Final

from trainfold.backends.stores.protocol import KeepsTime, Store, preference_of
from trainfold.core.digest import digest_of
from trainfold.core.errors import CommitConflict, RunLocked
from trainfold.properties.stores.store_checks import equal, in_threads, raises

_LONG_AGO_SECS: Final = 1e9  # 2001: milliseconds and monotonic clocks are outside this range of seconds since 1970
_LATE_SECS: Final = 1e11


def a_commit_happens_once(store: Store) -> None:
    """Put-if-absent: the second one is refused and changes nothing."""
    store.write("step-1/a", [b"1"], size_bytes=1)
    store.commit("step-1/manifest.json", b"first")
    raises(CommitConflict, store.commit, "step-1/manifest.json", b"second")
    equal("contents", expected=b"first", found=store.read("step-1/manifest.json"))
    store.commit("run.json", b"{}")
    raises(CommitConflict, store.commit, "run.json", b"{}")
    equal("names", expected=["a", "manifest.json"], found=store.list("step-1"))


def a_commit_replaces_only_what_it_names(store: Store) -> None:
    """Compare-and-swap: the right digest swaps; another digest, or an absent name, is refused."""
    missing = digest_of(b"first")
    raises(CommitConflict, store.commit, "step-1/manifest.json", b"x", replaces=missing)
    store.commit("step-1/manifest.json", b"first")
    raises(CommitConflict, store.commit, "step-1/manifest.json", b"x", replaces=digest_of(b"other"))
    equal("contents after refusals", expected=b"first", found=store.read("step-1/manifest.json"))
    store.commit("step-1/manifest.json", b"second", replaces=digest_of(b"first"))
    with store.lock():
        store.commit("step-1/manifest.json", b"third", replaces=digest_of(b"second"))
    equal("contents after two swaps", expected=b"third", found=store.read("step-1/manifest.json"))


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

    in_threads([partial(race, number) for number in range(4)])
    equal("other errors", expected=[], found=others)
    equal("winners", expected=1, found=len(won))
    equal("contents", expected=b"%d" % won[0], found=store.read("step-1/manifest.json"))


def one_writer_has_the_lock(store: Store) -> None:
    """A second writer is refused at once; leaving the block, also by an error, frees the lock."""
    for _ in range(2):
        with suppress(KeyError), store.lock():
            raises(RunLocked, store.lock().__enter__)
            raise KeyError
    with store.lock():
        store.write("step-1/a", [b"1"], size_bytes=1)
        store.commit("step-1/manifest.json", b"{}")


def the_time_of_a_commit_is_told_or_not_known(store: Store) -> None:
    """None, or seconds since 1970, which neither reading the run nor other writes in it change."""
    name = "step-1/manifest.json"
    equal("time of what is absent", expected=None, found=store.committed_at(name))
    store.commit(name, b"{}")
    time = store.committed_at(name)
    if time is not None:
        equal("type of the time", expected=float, found=type(time))
        equal(f"whether {time} can be seconds since 1970", expected=True, found=_LONG_AGO_SECS < time < _LATE_SECS)
    store.read(name)
    store.write("step-1/a", [b"1"], size_bytes=1)
    store.commit("step-2/manifest.json", b"{}")
    store.point("latest", "step-1")
    store.commit(name, b"{}", replaces=digest_of(b"{}"))
    equal("time after other things", expected=time, found=store.committed_at(name))
    equal("time of a directory", expected=None, found=store.committed_at("step-1"))
    store.delete("step-1/")
    equal("time after its deletion", expected=None, found=store.committed_at(name))


def a_commit_may_be_as_old_as_what_it_replaces(store: Store) -> None:
    """One of `KeepsTime` has the new contents and the old time, and refuses to replace anything else; a store without that passes."""
    if not isinstance(store, KeepsTime):
        return
    name = "step-1/manifest.json"
    store.commit(name, b"{}")
    time = store.committed_at(name)
    store.commit_as_old(name, b"[]", replaces=digest_of(b"{}"))
    equal("contents", expected=b"[]", found=store.read(name))
    equal("time", expected=time, found=store.committed_at(name))
    raises(CommitConflict, store.commit_as_old, name, b"{}", replaces=digest_of(b"{}"))
    equal("contents after a refusal", expected=b"[]", found=store.read(name))


def a_swap_replaces_only_the_version_that_it_names(store: Store) -> None:
    """One of `SwapsFiles` keeps apart what two processes put without a lock; a store without that passes."""
    if not hasattr(store, "swap") or not hasattr(store, "read_version"):
        return
    equal("version of what is absent", expected=None, found=store.read_version("a.log"))
    first = store.swap("a.log", b"1", None)
    equal("whether a swap has made it", expected=(True, b"1"), found=(first is not None, store.read("a.log")))
    equal("a second swap that makes it", expected=None, found=store.swap("a.log", b"2", None))
    second = store.swap("a.log", b"12", first)
    equal("a swap of a version that is gone", expected=None, found=store.swap("a.log", b"3", first))
    equal("contents", expected=b"12", found=store.read("a.log"))
    data, version = store.read_version("a.log")
    third = store.swap("a.log", b"123", version)
    equal("contents by their version", expected=(b"12", b"123"), found=(data, store.read("a.log")))
    equal("names", expected=["a.log"], found=store.list())
    store.delete("a.log")
    equal(
        "swaps of what is deleted",
        expected=[None] * 3,
        found=[store.swap("a.log", b"4", each) for each in (second, version, third)],
    )
    equal("names after its deletion", expected=[], found=store.list())


def hints_are_replaced(store: Store) -> None:
    """A pointer may be set again, also to a missing name, because it is only a hint."""
    for target in ("step-1", "step-2", "step-1"):
        store.point("latest", target)
    store.point("best", "step-2")
    equal("names", expected=[], found=store.list())
    found = store.pointers()  # a place that cannot have pointers returns an empty dict
    equal("pointers", expected={"best": "step-2", "latest": "step-1"} if found else {}, found=found)
    store.delete("best")
    equal(
        "pointers without one that was deleted", expected={"latest": "step-1"} if found else {}, found=store.pointers()
    )


def the_files_that_it_prefers_are_sizes_or_not_said(store: Store) -> None:
    """A save asks before each plan, and two answers would give two plans."""
    equal("prefers, asked again", expected=preference_of(store), found=preference_of(store))
