"""`archive_around`: the bytes before and after a tensor that make a file of `torch.save` of it."""

import struct
import zlib
from collections.abc import Sequence
from typing import Final

ALIGNED: Final = 64
"""The bytes of a tensor begin at a multiple of so many bytes of the file."""

_LOCAL: Final = struct.Struct("<4s5H3L2H")
_ENTRY: Final = struct.Struct("<4s6H3L5H2L")
_END_64: Final = struct.Struct("<4sQ2H2L4Q")
_LOCATOR: Final = struct.Struct("<4sLQL")
_END: Final = struct.Struct("<4s4H2LH")
_FULL_32: Final = 0xFFFF_FFFF
_IS_AFTER: Final = 8  # a flag: the sum of a member comes after its data
_FOLDER: Final = "archive"


def archive_around(
    small: Sequence[tuple[str, bytes]], data: tuple[str, int] | None = None, *, at: int, check_sum: int = 0
) -> tuple[bytes, bytes]:
    r"""The bytes of an archive before and after the data of its last member. Members are stored as they are, the last one aligned in the file.

    Args:
        small: the first members, with their contents.
        data: the name and the size of the last member; None if there is no other.
        at: where the archive begins in its file.
        check_sum: CRC-32 of the data. It is in what comes after them, so that they can be written before it is known; the sizes do not depend on it.

    Examples:
        >>> head, tail = archive_around([("version", b"3")], ("data/0", 8), at=10)
        >>> (len(head) + 10) % 64, tail[-22:-18]
        (0, b'PK\x05\x06')
    """
    head, listing = bytearray(), bytearray()
    for name, contents in small:
        _member(head, listing, (name, len(contents), zlib.crc32(contents)), None)
        head += contents
    size = 0
    if data is not None:
        size = data[1]
        _member(head, listing, (data[0], size, check_sum), at)
    count, first = len(small) + (data is not None), len(head) + size
    tail = b"" if data is None else _descriptor(check_sum, size)
    first += len(tail)
    tail += bytes(listing)
    tail += _END_64.pack(b"PK\x06\x06", _END_64.size - 12, 45, 45, 0, 0, count, count, len(listing), first)
    tail += _LOCATOR.pack(b"PK\x06\x07", 0, first + len(listing), 1)
    tail += _END.pack(b"PK\x05\x06", 0, 0, count, count, len(listing), min(first, _FULL_32), 0)
    return bytes(head), tail


def _member(head: bytearray, listing: bytearray, member: tuple[str, int, int], at: int | None) -> None:
    """Add the header of a member, and its line in the directory. With `at`, what follows the header is aligned.

    A member is its name, its size and its CRC-32.
    """
    name, size, check_sum = member
    start, path = len(head), f"{_FOLDER}/{name}".encode()
    is_long = size >= _FULL_32
    wide = struct.pack("<2H2Q", 1, 16, size, size) if is_long else b""
    short = _FULL_32 if is_long else size
    pad = b""
    if at is not None:
        room = -(at + start + _LOCAL.size + len(path) + len(wide) + 4) % ALIGNED
        pad = b"FB" + struct.pack("<H", room) + bytes(room)
    flags, early = (_IS_AFTER, 0) if at is not None else (0, check_sum)
    head += _LOCAL.pack(b"PK\x03\x04", 45, flags, 0, 0, 0x21, early, short, short, len(path), len(wide) + len(pad))
    head += path + wide + pad
    listing += _ENTRY.pack(b"PK\x01\x02", 45, 45, flags, 0, 0, 0x21, check_sum, short, short, len(path), len(wide), 0, 0, 0, 0, start)  # fmt: skip
    listing += path + wide


def _descriptor(check_sum: int, size: int) -> bytes:
    """What comes after the data of a member whose sum was not known before."""
    return struct.pack("<4sL2Q" if size >= _FULL_32 else "<4s3L", b"PK\x07\x08", check_sum, size, size)
