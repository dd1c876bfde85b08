"""`Chunks`: cuts the batches of an evaluation again, at sample indices that do not depend on the batches or the ranks."""

from collections import deque
from collections.abc import Iterator
from typing import Any, Final, final

from trainfold.adapters.evaluation.batch_source import BatchSource
from trainfold.core.checks import count
from trainfold.core.data.chunks import Columns, columns_of, joined
from trainfold.core.errors import InvalidArgument, InvalidBatch
from trainfold.core.evaluate.coverage import Cut
from trainfold.core.evaluate.suite import Tally

_END: Final[Any] = object()


def check_chunk(chunk: object, source: BatchSource, start: Tally | None, *, world_size: int) -> None:
    """Refuse chunks that cannot be cut, before anything is evaluated.

    Args:
        chunk: samples of a chunk; None if the forward sees the batches as they are.
        source: the source of the batches.
        start: the tally that the evaluation continues.
        world_size: how many ranks evaluate.

    Raises:
        InvalidArgument: if the index of a sample is not known, if a share or the first sample would split a chunk, or if
            ``start`` has other chunks.
    """
    if chunk is not None:
        count("chunk", chunk, expected="a number of samples, >= 1", fix="pass one such as chunk=32, or leave it out")
    if start is not None and start.batches and start.chunk != (chunk or 0):
        raise InvalidArgument(
            "start",
            expected=f"a tally in {f'chunks of {chunk}' if chunk else 'batches as they were given, because chunk= is left out'}",
            found=f"one in chunks of {start.chunk}" if start.chunk else "one in batches as they were given",
            fix="pass the same chunk= to every part of an evaluation",
        )
    if not isinstance(chunk, int):
        return
    cursors = f"eval_batches(cursor, fetch, collectives=..., chunk={chunk})"
    is_begun = start is not None and start.batches
    if len(source.parts) > 1 or (not source.parts and (world_size > 1 or is_begun)):
        why = f"{world_size} ranks" if world_size > 1 else "an evaluation that goes on"
        raise InvalidArgument(
            "batches",
            expected=f"the batches of one cursor: for chunk={chunk} with {why}, the index of each sample has to be known",
            found=f"those of {len(source.parts)} cursors"
            if source.parts
            else "batches whose samples have no known index",
            fix=f"pass {cursors}",
        )
    for part in source.parts:
        if world_size > 1 and part.chunk % chunk:
            raise InvalidArgument(
                "batches",
                expected=f"shares that begin and end at multiples of chunk={chunk}",
                found="shares that may begin inside a chunk",
                fix=f"pass {cursors}, with a global_batch_size that is a multiple of {chunk}",
            )
        if part.cursor.next_index % chunk and not part.cursor.is_done:
            raise InvalidArgument(
                "batches",
                expected=f"a cursor that begins at a multiple of chunk={chunk}",
                found=f"next_index={part.cursor.next_index}",
                fix="continue from the tally of an evaluation in such chunks, at next_index=tally.next_index, or from the first sample",
            )


@final
class Chunks:
    """An iterator over chunks: each has the samples ``[k * chunk, (k + 1) * chunk)``, and the last one has the rest.

    If the batches end inside a chunk and not at the last sample, as those of a limited part may, that chunk is not yielded: the
    evaluation that continues starts with it.

    Args:
        source: the source of the batches, which `check_chunk` has accepted.
        batches: the iterator.
        chunk: samples of a chunk.
    """

    def __init__(self, source: BatchSource, batches: Iterator[Any], chunk: int) -> None:
        self._part = source.parts[0] if source.parts else None
        self._shares = None if self._part is None else self._part.shares()
        self._batches = batches
        self._chunk = chunk
        self._pending: deque[Columns] = deque()
        self._waiting = 0  # samples in it
        self._at = 0 if self._part is None else self._part.cursor.next_index  # the index of the first of them
        self._drawn = 0
        self._in_step = True
        self._has_ended = False
        self._yielded = 0
        self._last: deque[range] = deque([range(self._at, self._at)], maxlen=2)

    def __iter__(self) -> "Chunks":
        return self

    def __next__(self) -> Any:
        while self._waiting < self._chunk and not self._has_ended:
            self._draw()
        size = min(self._waiting, self._chunk)
        if size == 0 or (size < self._chunk and not self._is_last()):
            raise StopIteration
        parts = []
        while size:
            first = self._pending.popleft()
            count = min(size, first.samples)
            parts.append(first.part(0, count))
            if count < first.samples:
                self._pending.appendleft(first.part(count, first.samples))
            size -= count
        samples = sum(part.samples for part in parts)
        self._last.append(range(self._at, self._at + samples))
        self._at += samples
        self._waiting -= samples
        self._yielded += 1
        return joined(parts)

    def is_known(self) -> bool:
        """Whether each batch was the next one of its cursor, as far as the number and sizes of the batches show."""
        return self._part is None or self._part.given == self._drawn

    def cut(self, seen: int) -> Cut:
        """Which samples of this rank were seen.

        Args:
            seen: how many chunks were evaluated: all that were yielded, or all but the last.
        """
        if self._part is None:
            return Cut(is_in_order=True, first=-1, last=-1)
        if seen < self._yielded:
            return Cut(self.is_known(), self._last[0].stop, self._last[1].start)
        assert self._shares is not None  # as the part
        rest = self._at if self._waiting else next((share.start for share in self._shares), self._part.after.next_index)
        return Cut(self.is_known(), self._last[-1].stop, rest)

    def check_order(self) -> None:
        """Refuse the batches if some turn out to be missing: the samples after them had other indices.

        Raises:
            InvalidArgument: with the number of batches.
        """
        if not self._in_step and not self.is_known():
            assert self._part is not None  # else it is known
            raise InvalidArgument(
                "batches",
                expected="every batch of eval_batches, in order, from the first on",
                found=f"{self._drawn} of the {self._part.given} that it gave",
                fix="pass what eval_batches returns, and do in fetch what a wrapper does",
            )

    def _draw(self) -> None:
        batch = next(self._batches, _END)
        if batch is _END:
            self._has_ended = True
            self.check_order()
            return
        columns = columns_of(batch)
        self._drawn += 1
        if self._part is not None:
            self._in_step = self._in_step and self.is_known()
            assert self._shares is not None  # as the part
            share = next(self._shares, range(0))
            if len(share) != columns.samples:
                wanted = f"the {len(share)} samples [{share.start}, {share.stop}), which fetch was asked for"
                raise InvalidBatch(
                    f"batch {self._drawn}",
                    expected=wanted if share else f"no more batches than the {self._drawn - 1} that eval_batches gives",
                    found=f"{columns.samples} samples",
                    fix="return one row for each position from fetch, and let no wrapper join, split, repeat or drop batches; or leave chunk= out",
                )
            if not self._waiting:
                self._at = share.start
        if columns.samples:
            self._pending.append(columns)
            self._waiting += columns.samples

    def _is_last(self) -> bool:
        """Whether a partial chunk ends with the last sample, as far as it is known."""
        return self._part is None or (self._part.complete and self.is_known() and self._part.given == len(self._part))
