"""`read_archive`: the members of a file that `torch.save` has written. They are stored as they are; a compressed one is refused, so none grows when it is read."""

import struct
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, TypeAlias, final

import xxhash

from trainfold.backends.formats.torch_save.byte_range import ByteRange, torn_bytes
from trainfold.core.errors import CheckpointDamaged, CheckpointError, CheckpointHostile
from trainfold.core.printable import printable
from trainfold.core.torch_files.stored_values import StoredTensor, read_values

_END: Final = struct.Struct("<4s4H2LH")
_END_64: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR: Final = struct.Struct("<4sLQL")
_ENTRY: Final = struct.Struct("<4s6H3L5H2L")
_LOCAL: Final = struct.Struct("<4s5H3L2H")
_TAIL: Final = 4096  # bytes read at first; with one tensor in it, all of the directory is there
_FULL_32: Final = 0xFFFF_FFFF
_PICKLE_LIMIT: Final = 1 << 30
_DIRECTORY_LIMIT: Final = 1 << 28
_PIECE_BYTES: Final = 1 << 22
_LARGE_BYTES: Final = 1 << 20
_LAST: Final[
    list[tuple[bytes, Any]]
] = []  # the values of the last large pickle by its digest: a command asks for them several times, and 100,000 tensors take seconds
_LAST_TABLE: Final[list[tuple[bytes, dict[str, "_Place"]]]] = []  # of the last large directory of members, so too
_MAGIC: Final = b"PK\x03\x04"


def is_archive(file: ByteRange) -> bool:
    """Whether a range begins as an archive does. torch before 1.6 wrote another form."""
    return file.size >= len(_MAGIC) and file.read(0, len(_MAGIC)) == _MAGIC


_Place: TypeAlias = tuple[int, int, int]
"""Where the header of a member is, its size and its CRC-32."""


@final
class _Members(Mapping[str, ByteRange]):
    """The members of an archive. What is at the place of one is looked at when it is asked for: there may be 100,000."""

    def __init__(self, file: ByteRange, places: Mapping[str, _Place]) -> None:
        self._file = file
        self._places = places

    def __getitem__(self, name: str) -> ByteRange:
        start, size, _ = self._places[name]
        try:
            return _member(self._file, name, start, size)
        except struct.error as error:
            raise _damaged(self._file, "a whole archive", error) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)


def read_archive(file: ByteRange) -> Mapping[str, ByteRange]:
    """Name -> where its bytes are, for each member, without the folder of the archive: ``data.pkl``, ``data/0``.

    What is got of the mapping raises CheckpointDamaged if there is no member at its place, and CheckpointTorn if it is not inside the file.

    Raises:
        CheckpointHostile: if a member is compressed, or two have one name.
        CheckpointDamaged: if it is not an archive, or is cut off.
    """
    return _Members(file, _places(file))


def check_sums(file: ByteRange, *, advance: Callable[[int], None] = lambda _: None) -> bool:
    """Read all members of an archive, and compare them with their CRC-32.

    Args:
        file: the archive.
        advance: called with the number of bytes of each piece.

    Returns:
        Whether there were such sums: torch writes 0 for them after ``set_crc32_options(False)``.

    Raises:
        CheckpointDamaged: if other bytes are there than were written; the message names the member.
        CheckpointTorn, CheckpointHostile: as `read_archive` raises them.
    """
    sums = {name: check_sum for name, (_, _, check_sum) in _places(file).items()}
    for name, member in read_archive(file).items():
        found = 0
        for _, piece in member.pieces(0, member.size, _PIECE_BYTES):
            found = zlib.crc32(piece, found)
            advance(len(piece))
        if sums[name] not in (0, found):
            raise _damaged(member, f"CRC-32 {sums[name]:08x}", f"{found:08x}: other bytes than were written")
    return any(sums.values())


def archive_values(file: ByteRange, members: Mapping[str, ByteRange]) -> Any:
    """What was saved, with a `StoredTensor` for each tensor; see `read_values`. Do not change it: other callers may have the same.

    Raises:
        CheckpointHostile: if the pickle would run something, or the machine that wrote it has the other order of bytes.
        CheckpointDamaged: if there is no pickle, or a tensor's memory is not there.
    """
    order = members.get("byteorder")
    if order is not None and (order.size > 16 or order.read(0, order.size) != b"little"):
        raise _damaged(file, "bytes in little-endian order", "another order")
    pickled = members.get("data.pkl")
    if pickled is None or pickled.size > _PICKLE_LIMIT:
        raise _damaged(
            file, f"a data.pkl of at most {_PICKLE_LIMIT} bytes", "none" if pickled is None else pickled.size
        )
    data = pickled.read(0, pickled.size)
    if len(data) < _LARGE_BYTES:
        return read_values(data, file.name)
    key = xxhash.xxh3_128_digest(data)
    for held, values in _LAST[:1]:
        if held == key:
            return values
    values = read_values(data, file.name)
    _LAST[:] = [(key, values)]
    return values


def member_of(file: ByteRange, members: Mapping[str, ByteRange], stored: StoredTensor) -> ByteRange:
    """The bytes of a tensor's storage.

    Raises:
        CheckpointDamaged: if they are not there, or not so many.
    """
    found = members.get(f"data/{stored.storage}")
    if found is None or found.size < stored.storage_bytes:
        raise CheckpointDamaged(
            file.name,
            expected=f"{stored.storage_bytes} bytes of data/{printable(stored.storage)}",
            found="none" if found is None else found.size,
            fix="copy it again",
        )
    return found


def _directory(file: ByteRange) -> tuple[bytes, int]:
    """The list of members, and how many there are."""
    start = max(0, file.size - _TAIL)
    tail = file.read(start, file.size - start)
    if len(tail) < _END.size or tail[-_END.size : -_END.size + 4] != b"PK\x05\x06":
        raise _damaged(file, "an archive of torch.save", "other bytes at its end")
    _, _, _, _, count, size, first, _ = _END.unpack_from(tail, len(tail) - _END.size)
    locator = len(tail) - _END.size - _LOCATOR.size
    if locator >= 0 and tail[locator : locator + 4] == b"PK\x06\x07":
        at = _LOCATOR.unpack_from(tail, locator)[2]
        wide = file.read(at, _END_64.size)
        if wide[:4] != b"PK\x06\x06":
            raise _damaged(file, "an archive of torch.save", "a directory that is not where it should be")
        count, size, first = _END_64.unpack(wide)[7:]
    if count * _ENTRY.size > size or size > min(file.size, _DIRECTORY_LIMIT):
        raise _damaged(file, f"a directory of {count} members", f"{size} bytes")
    listing = tail[first - start : first - start + size] if first >= start else file.read(first, size)
    if len(listing) != size:
        raise _damaged(file, f"a directory of {size} bytes at {first}", f"{len(listing)} bytes")
    return listing, count


def _places(file: ByteRange) -> Mapping[str, _Place]:
    """The name without the folder -> where it is, for each member."""
    try:
        listing, count = _directory(file)
        if len(listing) < _LARGE_BYTES:
            return _listed(file, listing, count)
        key = xxhash.xxh3_128_digest(listing) + struct.pack("<2Q", count, file.size)
        for held, places in _LAST_TABLE[:1]:
            if held == key:
                return places
        places = _listed(file, listing, count)
    except struct.error as error:
        raise _damaged(file, "a whole archive", error) from None
    _LAST_TABLE[:] = [(key, places)]
    return places


def _listed(file: ByteRange, listing: bytes, count: int) -> dict[str, _Place]:
    found: dict[str, _Place] = {}
    at = 0
    for _ in range(count):
        name, size, start, check_sum, at = _entry(file, listing, at)
        name = name.partition("/")[2]
        if name in found:
            raise _hostile(file, "another name for each member", printable(name))
        if start + _LOCAL.size + size > file.size:
            raise torn_bytes(
                f"{file.name}: {printable(name)}", f"bytes {start} to {start + size}", f"{file.size} bytes"
            )
        found[name] = start, size, check_sum
    return found


def _entry(file: ByteRange, listing: bytes, at: int) -> tuple[str, int, int, int, int]:
    """The name, the size, the place and the CRC-32 of a member, and where the next one is listed."""
    (magic, _, _, flags, method, _, _, check_sum, packed, size, name_size, extra_size, comment_size, _, _, _, start) = _ENTRY.unpack_from(listing, at)  # fmt: skip
    if magic != b"PK\x01\x02":
        raise _damaged(file, "a directory of members", "other bytes")
    name_at = at + _ENTRY.size
    extra_at = name_at + name_size
    after = extra_at + extra_size + comment_size
    if after > len(listing):
        raise _damaged(file, "a directory of members", "one that is cut off")
    name = listing[name_at:extra_at].decode("utf-8", "replace")
    if _FULL_32 in (packed, size, start):
        size, packed, start = _wide(listing[extra_at : extra_at + extra_size], size, packed, start)
    if method or flags & 1 or packed != size:
        raise _hostile(
            file, "members that are not compressed, as torch writes them", f"{printable(name)}, compressed or encrypted"
        )
    return name, size, start, check_sum, after


def _wide(extra: bytes, *short: int) -> list[int]:
    """Sizes and places of 64 bits, for those that did not fit."""
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            count = short.count(_FULL_32)
            wide = iter(struct.unpack_from(f"<{count}Q", extra, at + 4))
            return [next(wide) if each == _FULL_32 else each for each in short]
        at += 4 + length
    return list(short)


def _member(file: ByteRange, name: str, start: int, size: int) -> ByteRange:
    magic, _, _, _, _, _, _, _, _, name_size, extra_size = _LOCAL.unpack(file.read(start, _LOCAL.size))
    if magic != _MAGIC:
        raise _damaged(file, f"the member {printable(name)} at {start}", "other bytes")
    return file.inside(start + _LOCAL.size + name_size + extra_size, size, f"{file.name}: {printable(name)}")


def _damaged(file: ByteRange, expected: str, found: object) -> CheckpointDamaged:
    """The error for a file that is not as torch writes it."""
    return CheckpointDamaged(file.name, expected=expected, found=found, fix="copy or write it again")


def _hostile(file: ByteRange, expected: str, found: object) -> CheckpointError:
    return CheckpointHostile(file.name, expected=expected, found=found, fix="do not use this file")
