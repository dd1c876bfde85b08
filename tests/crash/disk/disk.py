"""A disk as a value: which changes are durable and which are not, and so what a crash may leave.

The rules are those of POSIX and no more: fsync of a file makes its bytes durable but not its name; fsync of a
directory makes the names in it durable. Until then each change of a name may have reached the disk or not, independently
of every other one, and each block of a file too, and its size by itself. A rename replaces its target at once, but the old
name may still be there beside the new one. A filesystem with an ordered journal (ext4) leaves a subset of these states.

Source: T. S. Pillai et al., All File Systems Are Not Created Equal, OSDI 2014.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from random import Random
from typing import TypeAlias, final

import attrs

from crash.disk.effects import TOP, Bind, Effect, Move, Resize, Sync, SyncFailed, Unbind, Write
from crash.disk.extents import FILE, WHOLE_BYTES, Data, Extents

BLOCK_BYTES = 4096
_BLOCK_CHOICES = 6  # up to so many unsynced blocks of a file are torn in every way; more blocks in some ways

Entry: TypeAlias = tuple[int, str]  # the inode of a directory, and a name in it
FileOp: TypeAlias = Write | Resize


@final
@attrs.frozen
class Change:
    """A change of one name that is not durable yet.

    Attributes:
        entry: the name.
        inode: the inode that it leads to afterwards; None if it is gone.
        needs: the number of the change that must have happened before this one, or None.
        number: its number, counted over the whole run.
    """

    entry: Entry
    inode: int | None
    number: int
    needs: int | None = None


@final
@attrs.frozen
class Disk:
    """A disk after some effects; `after` gives the next one.

    Attributes:
        entries: the durable names.
        pending: the changes of names that are not durable, in order.
        kinds: inode -> file, directory, or a link's target after ``link:``.
        durable: inode -> the durable bytes of a file.
        written: inode -> the writes and resizes since then.
        dropped: the files whose sync has failed: the data written before it never become durable.
        count: the number of changes so far.
    """

    entries: Mapping[Entry, int] = attrs.field(factory=dict)
    pending: tuple[Change, ...] = ()
    kinds: Mapping[int, str] = attrs.field(factory=lambda: {TOP: "directory"})
    durable: Mapping[int, Data] = attrs.field(factory=dict)
    written: Mapping[int, tuple[FileOp, ...]] = attrs.field(factory=dict)
    dropped: frozenset[int] = frozenset()
    count: int = 0

    @classmethod
    def of(cls, files: Mapping[str, Data | str | None]) -> "Disk":
        """A disk on which these files are durable: path -> bytes, None for a directory, a string for the target of a link."""
        inodes = {"": TOP, **{path: inode for inode, path in enumerate(sorted(files), TOP + 1)}}
        entries, durable, kinds = {}, {}, {TOP: "directory"}
        for path, data in files.items():
            above, _, name = path.rpartition("/")
            entries[inodes[above], name] = inode = inodes[path]
            kinds[inode] = "directory" if data is None else "file" if isinstance(data, FILE) else f"link:{data}"
            if isinstance(data, FILE):
                durable[inode] = data
        return cls(entries, (), kinds, durable)

    def after(self, effect: Effect) -> "Disk":
        """The disk after one more effect."""
        match effect:
            case Bind(directory, name, inode, kind, target):
                kinds = {**self.kinds, inode: f"link:{target}" if kind == "link" else kind}
                durable = self.durable if kind != "file" or inode in self.durable else {**self.durable, inode: b""}
                return attrs.evolve(self, kinds=kinds, durable=durable)._changed(((directory, name), inode))
            case Unbind(directory, name):
                return self._changed(((directory, name), None))
            case Move():
                return self._changed(((effect.directory, effect.name), effect.inode),
                                     ((effect.source_directory, effect.source), None))  # fmt: skip
            case Write(inode) | Resize(inode):
                return attrs.evolve(self, written={**self.written, inode: (*self.written.get(inode, ()), effect)})
            case Sync(inode):
                return self._synced(inode)
            case SyncFailed(inode):
                is_file = self.kinds[inode] == "file"
                return attrs.evolve(self, dropped=self.dropped | {inode}) if is_file else self
        return self

    def _changed(self, *changes: tuple[Entry, int | None]) -> "Disk":
        added = tuple(
            Change(entry, inode, self.count + i, self.count if i else None) for i, (entry, inode) in enumerate(changes)
        )
        return attrs.evolve(self, pending=self.pending + added, count=self.count + len(added))

    def _synced(self, inode: int | None) -> "Disk":
        kept = tuple(change for change in self.pending if inode is not None and change.entry[0] != inode)
        entries = dict(self.entries)
        for change in self.pending:
            if change not in kept:
                _apply(entries, change)
        files = {each: ops for each, ops in self.written.items() if inode in {None, each} and each not in self.dropped}
        durable = {**self.durable, **{each: content(self.durable[each], ops) for each, ops in files.items()}}
        written = {each: ops for each, ops in self.written.items() if each not in files}
        # the changes that a kept change needed have happened
        gone = {change.number for change in self.pending} - {change.number for change in kept}
        kept = tuple(attrs.evolve(change, needs=None) if change.needs in gone else change for change in kept)
        return attrs.evolve(self, entries=entries, pending=kept, durable=durable, written=written)

    def names(self, chosen: Iterable[int]) -> dict[Entry, int]:
        """The names after these pending changes, given by their indices in order, have reached the disk."""
        entries = dict(self.entries)
        for i in chosen:
            _apply(entries, self.pending[i])
        return entries

    def is_legal(self, chosen: Sequence[int]) -> bool:
        """Whether no change has happened without the one that it needs."""
        numbers = {self.pending[i].number for i in chosen}
        return all(self.pending[i].needs is None or self.pending[i].needs in numbers for i in chosen)

    def contents(self, inode: int) -> tuple[Data, ...]:
        """The contents that a file may have after a crash: the durable ones first, everything written last."""
        return _contents(self.durable[inode], self.written.get(inode, ()))


def _apply(entries: dict[Entry, int], change: Change) -> None:
    if change.inode is None:
        entries.pop(change.entry, None)
    else:
        entries[change.entry] = change.inode


def content(data: Data, ops: Iterable[FileOp]) -> Data:
    """A file's bytes after writes and changes of its size."""
    ops = tuple(ops)
    if isinstance(data, Extents) or max(map(_reach, ops), default=0) > WHOLE_BYTES:
        return Extents.of(data).after(ops)
    out = bytearray(data)
    for op in ops:
        if isinstance(op, Resize):
            out = out[: op.size].ljust(op.size, b"\0")
        else:
            out = out.ljust(op.offset, b"\0")
            out[op.offset : op.offset + len(op.data)] = op.data
    return bytes(out)


def _reach(op: FileOp) -> int:
    return op.size if isinstance(op, Resize) else op.offset + len(op.data)


@cache
def _contents(old: Data, ops: tuple[FileOp, ...]) -> tuple[Data, ...]:
    """No write, all writes, each prefix of them, each size, and each subset of the written blocks; zeros elsewhere."""
    if isinstance(old, Extents) or max(map(_reach, ops), default=0) > WHOLE_BYTES:
        return _large_contents(Extents.of(old), ops)
    stages = [content(old, ops[:i]) for i in range(len(ops) + 1)]
    new = stages[-1]
    dirty = _dirty_blocks(ops, max(map(len, stages)))
    found = dict.fromkeys(stages[:-1])
    longest = max(stages, key=len)
    for size in sorted(
        {len(old), len(new), *(block * BLOCK_BYTES for block in dirty if block * BLOCK_BYTES < len(longest))}
    ):
        inside = [block for block in dirty if block * BLOCK_BYTES < size]
        for blocks in _subsets(inside):
            out = bytearray(old[:size].ljust(size, b"\0"))
            for block in blocks:
                part = slice(block * BLOCK_BYTES, min(size, (block + 1) * BLOCK_BYTES))
                out[part] = longest[part] if len(new) < len(longest) else new[part].ljust(part.stop - part.start, b"\0")
            found[bytes(out)] = None
    found.pop(new, None)
    return (*found, new)


def _large_contents(old: Extents, ops: tuple[FileOp, ...]) -> tuple[Extents, ...]:
    """Like `_contents`, but with the written extents and the last block instead of all blocks."""
    stages = [old.after(ops[:i]) for i in range(len(ops) + 1)]
    new, longest = stages[-1], max(stages, key=len)
    edges = {0, len(old), len(new), len(longest), len(new) // BLOCK_BYTES * BLOCK_BYTES}
    edges |= {edge for op in ops if isinstance(op, Write) for edge in (op.offset, op.offset + len(op.data))}
    places = sorted(edge for edge in edges if edge <= len(longest))
    units = [(low, high) for low, high in itertools.pairwise(places) if longest.cut(low, high) != old.cut(low, high)]
    found = dict.fromkeys(stages[:-1])
    for size in places:
        inside = [unit for unit in units if unit[0] < size]
        held = range(len(inside))
        for chosen in {
            *(tuple(held[:i]) for i in (0, *held, len(held))),
            *(tuple(j for j in held if j != i) for i in held),
        }:
            out = old.cut(0, size)
            for low, high in (inside[i] for i in chosen):
                source = longest if len(new) < len(longest) else new
                out = Extents([*out.cut(0, low).slices, *source.cut(low, min(high, size)).slices,
                               *out.cut(min(high, size), size).slices])  # fmt: skip
            found[out] = None
    found.pop(new, None)
    return (*found, new)


def _dirty_blocks(ops: Iterable[FileOp], size: int) -> list[int]:
    touched: set[int] = set()
    for op in ops:
        if isinstance(op, Write):
            touched |= set(range(op.offset // BLOCK_BYTES, -(-(op.offset + len(op.data)) // BLOCK_BYTES)))
    return sorted(block for block in touched if block * BLOCK_BYTES < size)


def _subsets(blocks: list[int]) -> Iterable[tuple[int, ...]]:
    if len(blocks) <= _BLOCK_CHOICES:
        sizes = range(len(blocks) + 1)
        return itertools.chain.from_iterable(itertools.combinations(blocks, size) for size in sizes)
    random = Random(len(blocks))
    some = [tuple(block for block in blocks if random.random() < 0.5) for _ in range(32)]
    torn = [tuple(blocks[:i]) for i in range(len(blocks) + 1)]
    missing = [(*blocks[:i], *blocks[i + 1 :]) for i in range(len(blocks))]
    return [*torn, *missing, *some]
