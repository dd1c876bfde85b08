"""`PiecesAhead`: reads the announced ranges of an object in few and large requests. The next one begins when little is left of those before it."""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Final, final

import numpy as np

from trainfold.backends.helpers import Helpers, Task
from trainfold.backends.stores.object_store.bucket import Bucket
from trainfold.backends.stores.os_errors import torn

# read although they are not needed: they take less time than another request
_GAP_BYTES: Final = 32 << 10
_PIECE_BYTES: Final = 64 << 20  # so that a slow network sends it before the client's time limit
_AHEAD_BYTES: Final = 4 << 20  # what comes in the time that a store takes to answer
AT_ONCE: Final = 4  # requests; of each no more is in memory than what was sent and not read yet


@final
class _Piece:
    """One request: its range, and the bytes that have come and were not read."""

    def __init__(self, bucket: Bucket, key: str, start: int, stop: int, helpers: Helpers) -> None:
        self.stop = stop
        self._at = start
        self._chunks = bucket.chunks(key, start, stop)
        self._here = memoryview(b"")
        self._begun: Task[memoryview] | None = helpers.give(Task(self._next))

    def _next(self) -> memoryview:
        return next(self._chunks, memoryview(b""))

    @property
    def left_bytes(self) -> int:
        """The bytes that have not come yet."""
        return self.stop - self._at - len(self._here)

    def from_byte(self, at: int) -> memoryview:
        """The bytes that are here from one on; nothing if they have been passed, or the object ends before."""
        while at >= self._at + len(self._here):
            chunk = self._next() if self._begun is None else self._begun.result()
            self._at, self._here, self._begun = self._at + len(self._here), chunk, None
            if not chunk:
                break
        return self._here[at - self._at :] if at >= self._at else memoryview(b"")

    def close(self) -> None:
        """End the request."""
        if self._begun is None or self._begun.withdraw():
            self._chunks.close()


@final
class PiecesAhead:
    """The ranges of one object, read in the order of their bytes.

    Args:
        bucket: the run.
        key: the object.
        spans: the ranges that will be read, as (first byte, one past the last), in any order.
        helpers: threads in which requests begin.
    """

    def __init__(self, bucket: Bucket, key: str, spans: Sequence[tuple[int, int]], helpers: Helpers) -> None:
        self._bucket, self._key, self._helpers = bucket, key, helpers
        self._waiting = deque(_pieces(spans))
        self._begun: deque[_Piece] = deque()

    def read_into(self, buffer: memoryview, start: int) -> None:
        """See `Store.read_into`; bytes that were not announced, or that lie before those of the last call, take a request of their own."""
        view, done = buffer.cast("B"), 0
        memory = np.frombuffer(view, np.uint8)  # copies without the GIL: the first write to fresh memory takes long
        while done < len(view):
            at = start + done
            part = self._here(at)[: len(view) - done]
            if part:
                memory[done : done + len(part)] = np.frombuffer(part, np.uint8)
                done += len(part)
                continue
            count = self._bucket.fill(self._key, view[done:], at)
            if done + count < len(view):
                raise torn(self._bucket.where(self._key), expected_bytes=start + len(view), found_bytes=at + count)
            return

    def _here(self, at: int) -> memoryview:
        """Bytes from one on that have come; nothing if no request brings it."""
        while self._begun and self._begun[0].stop <= at:
            self._begun.popleft().close()
        while self._waiting and self._waiting[0][1] <= at:  # passed over
            self._waiting.popleft()
        while self._waiting and len(self._begun) < AT_ONCE and self._left_bytes() < _AHEAD_BYTES:
            self._begun.append(_Piece(self._bucket, self._key, *self._waiting.popleft(), self._helpers))
        return self._begun[0].from_byte(at) if self._begun else memoryview(b"")

    def _left_bytes(self) -> int:
        return sum(piece.left_bytes for piece in self._begun)

    def close(self) -> None:
        """End all requests."""
        for piece in self._begun:
            piece.close()


def _pieces(spans: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """What is asked for: ranges that nearly touch as one, cut into pieces.

    Examples:
        >>> list(_pieces([(100, 200), (0, 100), (1 << 20, (1 << 20) + 5)]))
        [(0, 200), (1048576, 1048581)]
    """
    joined: list[list[int]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1] + _GAP_BYTES:
            joined[-1][1] = max(joined[-1][1], stop)
        elif stop > start:
            joined.append([start, stop])
    for start, stop in joined:
        for low in range(start, stop, _PIECE_BYTES):
            yield low, min(low + _PIECE_BYTES, stop)
