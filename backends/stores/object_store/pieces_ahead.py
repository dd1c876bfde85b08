"""`PiecesAhead`: reads the announced ranges of an object in few and large requests, several at once, before they are asked for."""

from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Final, final

from trainfold.backends.helpers import Helpers, Task
from trainfold.backends.stores.object_store.bucket import Bucket
from trainfold.backends.stores.os_errors import torn

# read although they are not needed: they take less time than another request
_GAP_BYTES: Final = 32 << 10
_PIECE_BYTES: Final = 8 << 20
AT_ONCE: Final = 4  # so 32 MiB are in memory


@final
class PiecesAhead:
    """The ranges of one object, read in the order of their bytes.

    Args:
        bucket: the run.
        key: the object.
        spans: the ranges that will be read, as (first byte, one past the last), in any order.
        helpers: threads that send the requests.
    """

    def __init__(self, bucket: Bucket, key: str, spans: Sequence[tuple[int, int]], helpers: Helpers) -> None:
        self._bucket, self._key, self._helpers = bucket, key, helpers
        self._waiting = deque(_pieces(spans))
        self._begun: deque[tuple[int, int, Task[memoryview]]] = deque()
        self._last: tuple[int, memoryview] = (0, memoryview(b""))

    def read_into(self, buffer: memoryview, start: int) -> None:
        """See `Store.read_into`; bytes that were not announced, or that lie before those of the last call, take a request of their own."""
        view, done = buffer.cast("B"), 0
        while done < len(view):
            at = start + done
            low, data = self._holding(at)
            part = data[at - low : at - low + len(view) - done]
            if not part:
                part = view[done:]
                count = self._bucket.fill(self._key, part, at)
                if count < len(part):
                    raise torn(self._bucket.where(self._key), expected_bytes=start + len(view), found_bytes=at + count)
            else:
                view[done : done + len(part)] = part
            done += len(part)

    def _holding(self, at: int) -> tuple[int, memoryview]:
        """The piece with a byte, and where it begins; an empty one if there is none."""
        low, data = self._last
        if low <= at < low + len(data):
            return self._last
        for pieces in (self._begun, self._waiting):
            while pieces and pieces[0][1] <= at:  # passed over
                pieces.popleft()
        while self._waiting and len(self._begun) < AT_ONCE:
            start, stop = self._waiting.popleft()
            task = Task(partial(self._bucket.view, self._key, start, stop))
            self._begun.append((start, stop, self._helpers.give(task)))
        if not self._begun or self._begun[0][0] > at:
            return at, memoryview(b"")
        start, _, task = self._begun.popleft()
        self._last = (0, memoryview(b""))  # its memory is free before the next one's is taken
        self._last = (start, task.result())
        return self._last

    def close(self) -> None:
        """Withdraw the requests that have not begun."""
        self._waiting.clear()
        while self._begun:
            self._begun.popleft()[2].withdraw()


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
