"""`refer_to_unchanged`: finds the leaves of a save that hold the bytes that they held before, piece by piece, and plans references to them."""

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Final, Protocol, final

import torch
import xxhash

from trainfold.backends.hold.held_leaf import HeldLeaf
from trainfold.backends.hold.hold import Hold
from trainfold.backends.side_by_side import side_by_side
from trainfold.backends.stores.protocol import Store
from trainfold.core.digest import DIGEST_PREFIX
from trainfold.core.format.codec import as_tensor
from trainfold.core.format.manifest import DIGEST_DIGITS, PIECE_BYTES, ShardRecord
from trainfold.core.save.reuse.base import LEAST_BYTES, Base, Candidate, candidates, needed_files, there
from trainfold.core.save.reuse.references import referring
from trainfold.core.save.save_plan import SavePlan
from trainfold.core.tensor_memory import byte_view, tensor_bytes


class _Source(Protocol):
    """Bytes of a leaf that can be read more than once."""

    def peek(self, start: int, memory: memoryview) -> None:
        """Copy bytes from one on into memory."""

    def end_peek(self, *, is_read: bool) -> None:
        """Free what that needed; a leaf that was read to its end is not written."""


def refer_to_unchanged(  # noqa: PLR0913 - keywords
    plan: SavePlan,
    base: Base,
    tensors: Mapping[str, Mapping[str, Any]],
    *,
    store: Store,
    rank: int,
    hold: Hold | None = None,
) -> SavePlan:
    """The plan without the leaves that hold what they held in the checkpoint before, and with references to the files that have them.

    A leaf is read up to the first piece that differs, so one that trains costs a piece, and one that does not is read once.

    Args:
        plan: with the files of this rank.
        base: what this rank has stored before.
        tensors: component -> path -> this rank's tensor leaf, or a held leaf.
        store: the run.
        rank: this rank.
        hold: what held leaves are read through.

    Raises:
        SaveFailed: if a held leaf was written to.
    """
    found = candidates(plan, base, rank, least_bytes=LEAST_BYTES)
    if not found:
        return plan
    names = needed_files(found)
    sizes = dict(zip(names, side_by_side([partial(store.size, name) for name in names]), strict=True))
    memory, unchanged = memoryview(bytearray(PIECE_BYTES)), dict[Candidate, str | None]()
    for each in there(found, sizes):
        leaf = tensors[each.component][each.path]
        source: _Source = leaf if isinstance(leaf, HeldLeaf) else _Dense(as_tensor(leaf, each.path))
        whole = xxhash.xxh3_128() if each.parts[0][0].is_first_of_whole else None
        is_same = _is_same(each, source, memory, whole)
        if is_same and whole is not None:
            held = each.parts[-1][0].bytes_held[1]
            for piece in _pieces(source, held, _bytes_of(leaf), memory):
                whole.update(piece)
        source.end_peek(is_read=is_same)
        if is_same:
            unchanged[each] = None if whole is None else DIGEST_PREFIX + whole.hexdigest()
            _check(each, unchanged[each], hold)
    return referring(plan, unchanged)


def _is_same(candidate: Candidate, source: _Source, memory: memoryview, whole: "xxhash.xxh3_128 | None") -> bool:
    """Whether the leaf holds the stored bytes; reads on to the first piece that differs."""
    for placed, _, shard in candidate.parts:
        wanted = _digests(shard)
        for piece in _pieces(source, *placed.bytes_held, memory):
            if whole is not None:
                whole.update(piece)
            if next(wanted) != xxhash.xxh3_128_hexdigest(piece):
                return False
    return True


def _digests(shard: ShardRecord) -> Iterator[str]:
    """The digest of each piece of a shard."""
    if not shard.pieces:
        yield shard.digest.removeprefix(DIGEST_PREFIX)
    for start in range(0, len(shard.pieces), DIGEST_DIGITS):
        yield shard.pieces[start : start + DIGEST_DIGITS]


def _pieces(source: _Source, start: int, end: int, memory: memoryview) -> Iterator[memoryview]:
    """The bytes of a leaf between two places, as pieces that digests cover. Nothing is one empty piece, because that has a digest too."""
    for low in range(start, max(end, start + 1), PIECE_BYTES):
        piece = memory[: min(PIECE_BYTES, end - low)]
        source.peek(low, piece)
        yield piece


def _bytes_of(leaf: Any) -> int:
    return leaf.size_bytes if isinstance(leaf, HeldLeaf) else as_tensor(leaf, "").nbytes


def _check(candidate: Candidate, whole: str | None, hold: Hold | None) -> None:
    """Compare the bytes of a leaf with those that were held, as `Hold.check_written` does for one that is written."""
    placed, _, shard = candidate.parts[0]
    digest = shard.digest if placed.held is None else whole
    if hold is not None and digest:
        hold.check_written(candidate.component, {candidate.path: digest})


@final
class _Dense:
    """A tensor that nothing else writes to: on a device, only what is asked for is copied."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._bytes: Final = byte_view(tensor)

    def peek(self, start: int, memory: memoryview) -> None:
        """See `_Source`."""
        memory[:] = tensor_bytes(self._bytes[start : start + len(memory)])

    def end_peek(self, *, is_read: bool) -> None:
        """See `_Source`; there is nothing to free."""
