"""The states that a crash may leave, one after another, each one once."""

import itertools
from collections.abc import Container, Iterable, Iterator, Sequence
from hashlib import blake2b
from random import Random
from typing import Any, final

import attrs

from crash.disk.disk import Disk, Entry
from crash.disk.effects import TOP, Effect, Mark, Sync
from crash.disk.extents import Data, Extents


@final
@attrs.frozen
class CrashState:
    """The disk that the next boot finds.

    Attributes:
        files: path below the top -> bytes of a file, None for a directory, a string for the target of a link.
        done: how many effects had happened.
        how: which of them reached the disk, for messages.
    """

    files: dict[str, Data | str | None] = attrs.field(repr=lambda files: f"{sorted(files)}")
    done: int
    how: str

    def key(self) -> bytes:
        """A digest of all files."""
        return digest_of_files(self.files)


@final
@attrs.frozen
class Budget:
    """How many states to look at if there are too many.

    Attributes:
        names: subsets of the pending name changes after each effect; all of them if there are fewer.
        contents: combinations of the files' contents for each subset.
        seed: the seed of the choice.
    """

    names: int = 256
    contents: int = 64
    seed: int = 0


def crash_states(
    effects: Sequence[Effect], budget: Budget, disk: Disk | None = None, *, places: Container[int] | None = None
) -> Iterator[CrashState]:
    """Yield every state after each prefix of some effects; a seeded choice of them if there are too many.

    The same files come again after a later effect only if a promise was made in between.

    Args:
        effects: the effects.
        budget: how many states to look at.
        disk: the disk before the effects; None for an empty one.
        places: look only after so many effects, and before and after each promise; None to look after each.
    """
    disk, seen = disk or Disk(), set[bytes]()
    before: Disk | None = None
    for done in range(len(effects) + 1):
        near = effects[max(0, done - 1) : done + 1]
        is_due = (
            places is None or done in places or done == len(effects) or any(isinstance(effect, Mark) for effect in near)
        )
        if disk is not before and is_due:
            for state in states_of(disk, done, budget):
                key = state.key()
                if key not in seen:
                    seen.add(key)
                    yield state
        if done == len(effects):
            return
        before = disk
        if isinstance(effects[done], Mark):
            seen, before = set(), None
        else:
            disk = disk.after(effects[done])


def before_syncs(effects: Sequence[Effect]) -> list[int]:
    """The places where something is about to become durable: what a crash may leave elsewhere, it may leave at the next of them too.

    The exception are the sizes in between of a file that grows by several writes; its contents after each write are among them.
    """
    return [done for done, effect in enumerate(effects) if isinstance(effect, Sync)]


def states_of(disk: Disk, done: int, budget: Budget) -> Iterator[CrashState]:
    """The states that a crash may leave of one disk."""
    random, seen = Random(f"{budget.seed} {done}"), set[frozenset[tuple[Entry, int]]]()
    for chosen in subsets(disk, budget.names, random):
        names = disk.names(chosen)
        if (known := frozenset(names.items())) in seen:
            continue  # for example a name that was made and removed
        seen.add(known)
        files, inodes = _walk(disk, names)
        open_files = [path for path, inode in inodes.items() if inode in disk.written]
        choices = [disk.contents(inodes[path]) for path in open_files]
        for each, picked in enumerate(_combinations(choices, budget.contents, random)):
            how = f"{_said(disk, chosen)}; {[len(data) for data in picked]}#{each}"
            yield CrashState({**files, **dict(zip(open_files, picked, strict=True))}, done, how)


def subsets(disk: Disk, limit: int, random: Random) -> Iterable[tuple[int, ...]]:
    """Legal subsets of the pending changes: all; or the prefixes of a journal, each change alone, all but one, and a random choice."""
    every = _legal(disk, 4 * limit)
    if every is not None and len(every) <= limit:
        return every
    count = len(disk.pending)
    whole = range(count)
    structured = [tuple(range(i)) for i in range(count + 1)]
    structured += [(i,) for i in whole] + [tuple(j for j in whole if j != i) for i in whole]
    drawn = (
        tuple(i for i in whole if random.random() < bias)
        for bias in itertools.islice(itertools.cycle((0.5, 0.2, 0.8)), 4 * limit)
    )
    found = dict.fromkeys(chosen for chosen in structured if disk.is_legal(chosen))
    for chosen in drawn:
        if len(found) >= limit:
            break
        if disk.is_legal(chosen):
            found[chosen] = None
    return found


def _legal(disk: Disk, limit: int) -> list[tuple[int, ...]] | None:
    """Every legal subset, or None if there are more."""
    places = {change.number: i for i, change in enumerate(disk.pending)}
    found: list[tuple[int, ...]] = [()]
    for i, change in enumerate(disk.pending):
        needed = None if change.needs is None else places[change.needs]
        found += [(*chosen, i) for chosen in found if needed is None or needed in chosen]
        if len(found) > limit:
            return None
    return found


def digest_of_files(files: dict[str, Data | str | None]) -> bytes:
    """A digest of names and bytes."""
    whole = blake2b(digest_size=16)
    for path in sorted(files):
        value = files[path]
        whole.update(f"{path}\0{type(value).__name__}\0".encode())
        whole.update(
            value.digest()
            if isinstance(value, Extents)
            else _digest(value)
            if isinstance(value, bytes)
            else str(value).encode()
        )
    return whole.digest()


_DIGESTS: dict[
    int, tuple[bytes, bytes]
] = {}  # the same few objects come again and again, so they are known by identity and kept alive


def _digest(data: bytes) -> bytes:
    known = _DIGESTS.get(id(data))
    if known is None or known[0] is not data:
        known = _DIGESTS[id(data)] = (data, blake2b(data, digest_size=16).digest())
    return known[1]


def _walk(disk: Disk, names: dict[tuple[int, str], int]) -> tuple[dict[str, Any], dict[str, int]]:
    """The files that can be reached from the top, with their durable bytes; and the inodes."""
    below: dict[int, list[tuple[str, int]]] = {}
    for (directory, name), inode in names.items():
        below.setdefault(directory, []).append((name, inode))
    files: dict[str, Any] = {}
    inodes: dict[str, int] = {}
    todo = [("", TOP)]
    while todo:
        above, directory = todo.pop()
        for name, inode in below.get(directory, ()):
            path, kind = f"{above}{name}", disk.kinds[inode]
            inodes[path] = inode
            if kind == "directory":
                files[path] = None
                todo.append((f"{path}/", inode))
            elif kind == "file":
                files[path] = disk.durable[inode]
            else:
                files[path] = kind.removeprefix("link:")
    return files, inodes


def _combinations(choices: list[tuple[Data, ...]], limit: int, random: Random) -> Iterable[tuple[Data, ...]]:
    """Every way to choose one of each; if there are too many, the extremes and a random choice."""
    total = 1
    for each in choices:
        total *= len(each)
    if total <= limit:
        return itertools.product(*choices)
    found = dict.fromkeys([tuple(each[0] for each in choices), tuple(each[-1] for each in choices)])
    if len(choices) == 1:
        found |= dict.fromkeys((data,) for data in choices[0])
    while len(found) < limit:
        found[tuple(random.choice(each) for each in choices)] = None
    return list(found)


def _said(disk: Disk, chosen: tuple[int, ...]) -> str:
    return f"{len(chosen)} of {len(disk.pending)} changes of names: {list(chosen)}"


def after_all(effects: Iterable[Effect], disk: Disk | None = None) -> Disk:
    """The disk after all effects."""
    disk = disk or Disk()
    for effect in effects:
        disk = disk.after(effect)
    return disk


def live(disk: Disk) -> tuple[dict[str, Data | str | None], dict[str, int]]:
    """The files that a program sees while the machine is up, durable or not; and the inodes."""
    names = disk.names(range(len(disk.pending)))
    files, inodes = _walk(disk, names)
    return {**files, **{path: disk.contents(i)[-1] for path, i in inodes.items() if disk.kinds[i] == "file"}}, inodes
