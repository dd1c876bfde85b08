"""Content sums: a digest of a tensor that does not depend on how the tensor is cut. Imports no torch.

The bits of a tensor are read as words of 16 bits. A word counts as often as the product of the keys of its indices, and sums are taken modulo a
prime below 2^24, in four lanes with keys of their own. So the sum of a tensor is the sum of its boxes, whatever they are; and two tensors that
differ have equal sums with a probability of about 2^-90. It is for finding accidents, not for forgeries.

It reads 2 to 3 GB/s, where XXH3 reads more than 10. So saves record XXH3 digests of what they write, and content sums are computed on demand.
"""

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

from trainfold.core.format.dtypes import STORED
from trainfold.core.layout.slices import Box

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Ints: TypeAlias = npt.NDArray[np.int64]
    Words: TypeAlias = npt.NDArray[np.uint16] | npt.NDArray[np.uint8]

PRIME: Final = 2**24 - 3
LANES: Final = 4
_DIGIT: Final = 256  # an index is two digits, so that keys are few and a long dimension is many short rows
_MOST_COLUMNS: Final = 8192  # so many products of a word and a key are exact in a float64
_BLOCK_WORDS: Final = 2**17

ContentSum: TypeAlias = tuple[int, ...]
ZERO: Final[ContentSum] = (0,) * LANES


def box_sum(data: bytes | memoryview, dtype: str, box: Box) -> ContentSum:
    """The content sum of a box of a tensor.

    Law: for boxes that tile a tensor, ``add(box_sum(...) for each box)`` is the sum of the whole.

    Args:
        data: the bytes of the box, in order.
        dtype: torch's name of the dtype.
        box: where in the tensor it lies.

    Examples:
        >>> whole = box_sum(bytes(range(6)), "uint8", ((0, 2), (0, 3)))
        >>> columns = [box_sum(bytes([0, 3]), "uint8", ((0, 2), (0, 1))), box_sum(bytes([1, 2, 4, 5]), "uint8", ((0, 2), (1, 3)))]
        >>> add(columns) == whole, box_sum(bytes([0, 2, 1, 3, 4, 5]), "uint8", ((0, 2), (0, 3))) == whole
        (True, False)
    """
    import numpy as np

    if not len(data):
        return ZERO
    itemsize = STORED[dtype].itemsize
    words = np.frombuffer(data, dtype="<u2" if itemsize > 1 else "u1")
    tables = _tables(words, (*box, (0, max(itemsize // 2, 1))))
    return add(tuple(_table_sum(*each).tolist()) for each in tables)


def add(sums: Iterable[ContentSum]) -> ContentSum:
    """The content sum of a tensor from those of its boxes.

    Examples:
        >>> add([(1, 2, 3, 4), (PRIME - 1, 0, 0, 1)])
        (0, 2, 3, 5)
    """
    return tuple(sum(lane) % PRIME for lane in zip(ZERO, *sums, strict=True))


def sum_text(total: ContentSum) -> str:
    """The sum as text.

    Examples:
        >>> sum_text((1, 2, 3, 255))
        'sum:0000010000020000030000ff'
    """
    return "sum:" + "".join(f"{lane:06x}" for lane in total)


class _Side(NamedTuple):
    """Indices along one axis, or one digit of them."""

    axis: int
    start: int
    stop: int
    digits: tuple[int, ...] = (0, 1)

    def keys(self, places: "Ints") -> "Ints":
        """The keys of the indices that lie this far behind the first one."""
        indices = places + self.start
        if self.digits == (0, 1):
            return _keys(self.axis, 0)[indices % _DIGIT] * _some_keys(self.axis, 1, indices // _DIGIT) % PRIME
        return _some_keys(self.axis, self.digits[0], indices)


def _tables(words: "Words", box: Box) -> "Iterator[tuple[Words, list[_Side], list[_Side]]]":
    """The words as tables, with what their rows and columns are: as many trailing dimensions as are short together are columns."""
    sides = [_Side(axis, start, stop) for axis, (start, stop) in enumerate(box)]
    cut, columns = len(sides), 1
    while cut and columns * (sides[cut - 1].stop - sides[cut - 1].start) <= _MOST_COLUMNS:
        cut -= 1
        columns *= sides[cut].stop - sides[cut].start
    if not cut or columns * _DIGIT > _MOST_COLUMNS:
        yield words.reshape(-1, columns), sides[:cut], sides[cut:]
        return
    axis, start, stop, _ = sides[cut - 1]  # a long dimension of few columns: rows of up to 1024 of its indices
    table = words.reshape(-1, stop - start, columns)
    middle, end = min(-(-start // _DIGIT) * _DIGIT, stop), max(stop // _DIGIT * _DIGIT, start)
    for low, high in ((start, middle), (middle, end), (end, stop)) if middle <= end else ((start, stop),):
        if low < high:
            width = min(high - low, _DIGIT)
            digits = _Side(axis, low // _DIGIT, low // _DIGIT + (high - low) // width, (1,))
            inner = _Side(axis, low % _DIGIT, low % _DIGIT + width, (0,))
            part = table[:, low - start : high - start].reshape(-1, width * columns)
            yield part, [*sides[: cut - 1], digits], [inner, *sides[cut:]]


def _table_sum(table: "Words", rows: list[_Side], columns: list[_Side]) -> "Ints":
    import numpy as np

    total = np.zeros(LANES, dtype=np.int64)
    keys = _keys_of(columns, 0, table.shape[1]).astype(np.float64)
    step = max(1, _BLOCK_WORDS // table.shape[1])
    for first in range(0, len(table), step):
        sums = table[first : first + step].astype(np.float64) @ keys  # exact
        total += (sums.astype(np.int64) % PRIME * _keys_of(rows, first, first + len(sums)) % PRIME).sum(axis=0)
    return total % PRIME


def _keys_of(sides: list[_Side], first: int, last: int) -> "Ints":
    """The keys of these places, counted through all sides."""
    import numpy as np

    places = np.arange(first, last)
    found = np.ones((last - first, LANES), dtype=np.int64)
    for side in reversed(sides):
        length = side.stop - side.start
        found = found * side.keys(places % length) % PRIME
        places //= length
    return found


@lru_cache(maxsize=256)
def _keys(axis: int, digit: int) -> "Ints":
    """The keys of the first indices, which are nearly all."""
    import numpy as np

    return _hashed(axis, digit, np.arange(_DIGIT))


def _some_keys(axis: int, digit: int, indices: "Ints") -> "Ints":
    return _keys(axis, digit)[indices] if indices.max() < _DIGIT else _hashed(axis, digit, indices)


def _hashed(axis: int, digit: int, indices: "Ints") -> "Ints":
    """A key in 1..PRIME - 1 for each index and lane: SplitMix64."""
    import numpy as np

    lanes = np.arange(LANES, dtype=np.uint64)
    seed = np.uint64((axis * 2 + digit) << 48)
    mixed = (indices.astype(np.uint64)[:, None] * np.uint64(LANES) + lanes + seed + np.uint64(1)) * np.uint64(
        0x9E3779B97F4A7C15
    )
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) % np.uint64(PRIME - 1)).astype(np.int64) + 1
