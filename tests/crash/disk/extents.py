"""The bytes of a large file as a value: a few slices of the written data, and zeros. Copies, cuts and torn states cost nothing.

So neither the number of states that a crash may leave of a file, nor their memory, grows with the size of the file. Bytes are
put together only when a reader wants them.
"""

from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b
from itertools import groupby
from typing import Final, TypeAlias, final

import attrs

from crash.disk.effects import Effect, Resize, Write

WHOLE_BYTES: Final = 1 << 18  # a file up to this size is represented as bytes
RUN_WRITES: Final = 2  # the writes into a large file between two other effects are merged into at most so many extents

_ZEROS: Final = bytes(1 << 16)


@final
@attrs.frozen
class Slice:
    """A slice of written data; zeros if the source is None."""

    source: bytes | None = attrs.field(eq=id, repr=lambda source: f"<{len(source or b'')} bytes>")
    start: int
    count: int

    def cut(self, start: int, stop: int) -> "Slice":
        """A part of it."""
        return Slice(self.source, self.start + start if self.source is not None else 0, stop - start)

    def pieces(self) -> Iterator[memoryview]:
        """Its bytes, without a copy."""
        if self.source is not None:
            yield memoryview(self.source)[self.start : self.start + self.count]
            return
        for done in range(0, self.count, len(_ZEROS)):
            yield memoryview(_ZEROS)[: min(len(_ZEROS), self.count - done)]


@final
class Extents:
    """A file's bytes, immutable; equal if it is made of the same slices.

    Args:
        slices: in order.
    """

    __slots__ = ("_hash", "size", "slices")

    def __init__(self, slices: Iterable[Slice] = ()) -> None:
        joined: list[Slice] = []
        for each in slices:
            last = joined[-1] if joined else None
            if last is not None and last.source is each.source and (
                each.source is None or last.start + last.count == each.start
            ):  # fmt: skip
                joined[-1] = attrs.evolve(last, count=last.count + each.count)
            elif each.count:
                joined.append(each)
        self.slices = tuple(joined)
        self.size = sum(each.count for each in joined)
        self._hash = hash(self.slices)

    @classmethod
    def of(cls, data: "Data") -> "Extents":
        """Any contents as extents."""
        return data if isinstance(data, Extents) else cls([Slice(data, 0, len(data))])

    def __len__(self) -> int:
        return self.size

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Extents) and self.slices == other.slices

    def __bytes__(self) -> bytes:
        return b"".join(piece for each in self.slices for piece in each.pieces())

    def __getitem__(self, part: slice) -> bytes:
        """The bytes of a part, as a slice of bytes gives them."""
        start, stop, _ = part.indices(self.size)
        return bytes(self.cut(start, stop))

    def cut(self, start: int, stop: int) -> "Extents":
        """A part of it; zeros beyond its end."""
        found, offset = [], 0
        for each in self.slices:
            low, high = max(start, offset), min(stop, offset + each.count)
            if low < high:
                found.append(each.cut(low - offset, high - offset))
            offset += each.count
        return Extents([*found, Slice(None, 0, max(0, stop - max(start, self.size)))])

    def after(self, ops: Iterable[Write | Resize]) -> "Extents":
        """The contents after writes and changes of the size."""
        found = self
        for op in ops:
            if isinstance(op, Resize):
                found = found.cut(0, op.size)
            else:
                end = op.offset + len(op.data)
                tail = found.cut(end, max(end, found.size))
                found = Extents([*found.cut(0, op.offset).slices, Slice(op.data, 0, len(op.data)), *tail.slices])
        return found

    def digest(self) -> bytes:
        """A digest of the slices, not of the bytes, so that no bytes have to be read."""
        made_of = [(_number(each.source), each.start, each.count) for each in self.slices]
        return blake2b(repr(made_of).encode(), digest_size=16).digest()


Data: TypeAlias = bytes | Extents
FILE: Final = (bytes, Extents)
_NUMBERS: dict[int, tuple[bytes, int]] = {}  # by identity; the object is kept alive


def _number(source: bytes | None) -> int:
    """The number of a source; no two sources ever have the same number."""
    return 0 if source is None else _NUMBERS.setdefault(id(source), (source, len(_NUMBERS) + 1))[1]


def in_extents(effects: Sequence[Effect]) -> list[Effect]:
    """The same effects, with each run of writes into a large file merged into at most `RUN_WRITES` of them.

    A run is a sequence of effects on contents, between two effects of other kinds. After a crash, each extent is then
    there as a whole or not at all; everything else that a crash may do to a file is as before.
    """
    sizes: dict[int, int] = {}
    for effect in effects:
        if isinstance(effect, Write):
            sizes[effect.inode] = max(sizes.get(effect.inode, 0), effect.offset + len(effect.data))
    found: list[Effect] = []
    for is_contents, group in groupby(effects, lambda effect: isinstance(effect, Write | Resize)):
        run = list(group)
        if not is_contents:
            found += run
            continue
        for inode in dict.fromkeys(effect.inode for effect in run):  # type: ignore[union-attr]
            mine = [effect for effect in run if effect.inode == inode]  # type: ignore[union-attr]
            found += _joined(mine) if sizes.get(inode, 0) > WHOLE_BYTES else mine
    return found


def _joined(effects: list[Effect]) -> list[Effect]:
    """The writes and resizes of one file, with the writes between two resizes merged into a few extents."""
    found: list[Effect] = []
    for is_write, group in groupby(effects, lambda effect: isinstance(effect, Write)):
        run = list(group)
        found += _few(run) if is_write else run  # type: ignore[arg-type]
    return found


def _few(writes: list[Write]) -> list[Write]:
    """Writes sorted by offset; writes that fill a range without a gap become its first and its second half."""
    ranges: list[list[Write]] = []
    for write in sorted(writes, key=lambda write: write.offset):
        last = ranges[-1][-1] if ranges else None
        if last is not None and last.offset + len(last.data) == write.offset:
            ranges[-1].append(write)
        else:
            ranges.append([write])
    found = []
    for each in ranges:
        share = -(-len(each) // RUN_WRITES)
        halves = [each[i : i + share] for i in range(0, len(each), share)]
        found += [attrs.evolve(half[0], data=b"".join(write.data for write in half)) for half in halves]
    return found
