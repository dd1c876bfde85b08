"""`TreeExchange`: exchanges in which each rank communicates with its neighbours in a `RankTree` only.

What the ranks give goes up to rank 0, put together on the way, and what they get comes down. Each message begins with a head of fixed size, so no rank has to know
beforehand what another one has.
"""

import struct
from collections import deque
from collections.abc import Callable, Sequence
from itertools import pairwise, zip_longest
from typing import Any, Final, final

import attrs
import numpy as np
import torch

from trainfold.backends.job import Job
from trainfold.backends.ranks.call import Call, Deadline
from trainfold.backends.ranks.process_group import keep_exchange, padded_bytes, release_exchange
from trainfold.backends.ranks.processes.edges import Edge, Edges
from trainfold.backends.ranks.processes.mesh import call_digest
from trainfold.backends.ranks.processes.waiting import Waiting, differing_calls
from trainfold.core.layout.agreement.rank_tree import TreePlace

HEAD_BYTES: Final = (
    4096  # a message, which may hold all that there is to say; a second one takes longer than the rest of this one
)
HEAD: Final = struct.Struct("<qqqq")  # number of the call, its digest, whether all below make it, bytes of the body
PIECE_BYTES: Final = 2**18  # of what comes down: so much of it can be on each level at the same time
_INLINE: Final = HEAD_BYTES - HEAD.size  # of the body
SIZE: Final = struct.Struct("<q")
_NUMBER_BYTES: Final = 8
_TEXT_ROUND: Final = -1  # its number: nothing is compared there


@final
@attrs.define(eq=False)
class _Round:
    """A call, and what this rank gives; for numbers that were started, also what has become of them.

    Attributes:
        call: the call.
        number: of the call.
        payload: what this rank gives.
        posted: the exchanges of a rank without children that has sent its numbers already, and their bytes: what goes up, and the head that comes down.
        job: what passes on the numbers of a rank with children.
        found: what all ranks gave.
        error: why it is not known.
    """

    call: Call
    number: int
    payload: bytes
    posted: "list[tuple[Any, torch.Tensor]]" = attrs.field(factory=list)
    job: Job[None] | None = None
    found: bytes | None = None
    error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        return self.found is not None or self.error is not None


@final
class TreeExchange:
    """Exchanges over the edges of one rank.

    Numbers that were started move on in a thread of each rank that has children: it waits for them, and passes on what they sent. All calls come in the same
    order on all ranks, so a later call first waits until those that were started before it are over.

    Args:
        waiting: how this rank waits.
        place: of this rank in the tree.
        edges: to its neighbours.
        world_size: the number of ranks.
        make_group: makes a process group of all ranks, where sums or exchanges need one; called on all ranks.
    """

    def __init__(
        self, waiting: Waiting, place: TreePlace, edges: Edges, world_size: int, make_group: Callable[[], Any]
    ) -> None:
        self._waiting = self._now = waiting
        self._patient = waiting.in_background()  # of the threads that pass on numbers while no call is made
        self._place = place
        self._edges = edges
        self._world_size = world_size
        self._make_group = make_group
        self._group: Any = None
        self._calls = 0
        self._started: deque[_Round] = deque()
        self._flying: list[Any] = []
        self._landed: list[Any] = []

    def group(self) -> Any:
        """A process group of all ranks; see `Exchange`."""
        if self._group is None:
            self._group = self._make_group()
        return self._group

    def meet(self, call: Call, payload: bytes, until: Deadline) -> list[bytes]:
        """The bytes of all ranks, in rank order."""
        own = SIZE.pack(len(payload)) + payload if payload else b""
        return _values(self._round(_Round(call, self._next(until), own), until, self._joined), self._world_size)

    def give(self, call: Call, payload: bytes, source: int, until: Deadline) -> bytes:
        """The bytes of one rank."""
        own = payload if self._place.rank == source else b""
        return self._round(_Round(call, self._next(until), own), until, b"".join)

    def add(self, total: torch.Tensor, call: Call, until: Deadline) -> None:
        """Overwrite integers with their sums over the ranks."""
        summed, edges = total.view(torch.uint8), self._edges
        parts = [torch.empty_like(total) for _ in edges.down]
        self._wait(self._received(edges.down, [part.view(torch.uint8) for part in parts], until), call, until)
        for part in parts:
            total += part
        if edges.up is not None:
            self._wait([self._post(edges.up.send(summed, until.left()))], call, until)
            self._wait([self._post(edges.up.receive(summed, until.left()))], call, until)
        self._wait([self._post(each.send(summed, until.left())) for each in edges.down], call, until)

    def start(self, call: Call, payload: bytes, timeout_secs: float) -> "_PendingRound":
        """Start to gather whole numbers, which are on their way at once, unless others were started before and are not over."""
        begun = _Round(call, self._calls, payload)
        self._calls += 1
        up = self._edges.up
        if self._edges.down:
            until = Deadline(timeout_secs)
            before = self._started[-1].job if self._started else None
            begun.job = Job(lambda: self._run(begun, until), name="trainfold-row", after=before)
            begun.job.start()
        elif up is not None and not self._started:
            begun.posted = [
                (up.send(head := _head(begun.number, call, payload), timeout_secs), head),
                (up.receive(answer := torch.empty(HEAD_BYTES, dtype=torch.uint8), timeout_secs), answer),
            ]
            for work, _ in begun.posted:
                keep_exchange(work)
        self._started.append(begun)
        return _PendingRound(self, begun)

    def finish(self, until: Deadline, last: _Round | None = None) -> None:
        """End what was started, up to a given one."""
        while self._started and (last is None or last in self._started):
            begun = self._started[0]
            if begun.job is None:
                self._run(begun, until)
            else:
                begun.job.wait()
            self._started.popleft()
            if begun.error is not None:
                raise begun.error

    def _run(self, begun: _Round, until: Deadline) -> None:
        """End one that was started, whose predecessors are over."""
        self._now = self._waiting if begun.job is None else self._patient
        try:
            begun.found = self._round(begun, until, b"".join)
        except BaseException as error:
            begun.error = error  # raised where it is waited for
            if begun.job is None and not isinstance(error, Exception):
                raise
            return
        finally:
            self._now = self._waiting
        self._flying += [work for work, _ in begun.posted]  # kept until the next round
        for work, _ in begun.posted:
            release_exchange(work)

    def _next(self, until: Deadline) -> int:
        """The number of a new call, before which all that was started ends."""
        self._waiting.check()
        self.finish(until)
        number, self._calls = self._calls, self._calls + 1
        return number

    # --- one round: up and down ---------------------------------------------------------------------------------------

    def _round(self, given: _Round, until: Deadline, join: Callable[[Sequence[bytes]], bytes]) -> bytes:
        """What all ranks gave, put together.

        Args:
            given: the call, and what this rank gives.
            until: the deadline.
            join: puts together what this rank gives and what comes from each child.
        """
        self._landed, self._flying = self._flying, []
        edges, call, bodies, alike = self._edges, given.call, [given.payload], True
        mine = given.number, call_digest(call) if given.number != _TEXT_ROUND else 0
        for fields, body in self._messages(edges.down, call, until):
            bodies.append(body)
            alike = alike and bool(fields[2]) and fields[:2] == mine
        body = join(bodies) if alike else b""
        message = HEAD.pack(*mine, alike, len(body)) + body
        if edges.up is None:
            head, rest = _halves(message)
            self._send_down(head, rest, call, until)
        else:
            if given.posted:
                self._wait([work for work, _ in given.posted], call, until)
                head = given.posted[-1][1]
            else:
                self._wait(self._sent([edges.up], *_halves(message), until), call, until)
                head = torch.empty(HEAD_BYTES, dtype=torch.uint8)
                self._wait([self._post(edges.up.receive(head, until.left()))], call, until)
            body, alike = self._passed_on(edges.up, head, call, until)
        if not alike:
            raise differing_calls(self._texts(call, until))
        return body

    def _passed_on(self, up: Edge, head: torch.Tensor, call: Call, until: Deadline) -> tuple[bytes, bool]:
        """What comes from the parent after a head, which goes on to the children, and whether all ranks make the same call."""
        data = bytes(head.numpy())
        fields = HEAD.unpack_from(data)
        rest = torch.empty(max(fields[3] - _INLINE, 0), dtype=torch.uint8)
        come = [self._post(up.receive(piece, until.left())) for piece in _pieces(rest)]
        self._send_down(head, rest, call, until, come)
        return data[HEAD.size : HEAD.size + fields[3]] + bytes(rest.numpy()), bool(fields[2])

    def _send_down(
        self, head: torch.Tensor, rest: torch.Tensor, call: Call, until: Deadline, come: Sequence[Any] = ()
    ) -> None:
        """Send a message to the children, each piece of it when it has come; otherwise its bytes would be on one level at a time."""
        works = [self._post(each.send(head, until.left())) for each in self._edges.down]
        for piece, work in zip_longest(_pieces(rest), come):
            if work is not None:
                self._wait([work], call, until)
            works += [self._post(each.send(piece, until.left())) for each in self._edges.down]
        self._wait(works, call, until)

    def _texts(self, call: Call, until: Deadline) -> list[str]:
        """The calls of all ranks. Every rank has heard that they differ, so every rank gets here."""
        text = str(call).encode()[: _INLINE - SIZE.size]
        found = self._round(_Round(call, _TEXT_ROUND, SIZE.pack(len(text)) + text), until, self._joined)
        return [each.decode(errors="replace") for each in _values(found, self._world_size)]

    def _joined(self, bodies: Sequence[bytes]) -> bytes:
        """The sizes of what ranks gave, and then the bytes, of this rank and of its children; nothing if no rank gave anything."""
        counts = [1, *(child.size for child in self._place.children)]
        ends = [count * SIZE.size if body else 0 for count, body in zip(counts, bodies, strict=True)]
        if not any(ends):
            return b""
        sizes = [body[:end] or bytes(count * SIZE.size) for body, end, count in zip(bodies, ends, counts, strict=True)]
        return b"".join([*sizes, *(body[end:] for body, end in zip(bodies, ends, strict=True))])

    def _messages(self, edges: Sequence[Edge], call: Call, until: Deadline) -> list[tuple[tuple[int, ...], bytes]]:
        """What comes over these edges: the fields of the head, and the body."""
        heads = [torch.empty(HEAD_BYTES, dtype=torch.uint8) for _ in edges]
        self._wait(self._received(edges, heads, until), call, until)
        found = [(HEAD.unpack_from(data := bytes(head.numpy())), data[HEAD.size :]) for head in heads]
        rests = [torch.empty(max(fields[3] - _INLINE, 0), dtype=torch.uint8) for fields, _ in found]
        self._wait(self._received(edges, rests, until), call, until)
        return [
            (fields, inline[: fields[3]] + bytes(rest.numpy()))
            for (fields, inline), rest in zip(found, rests, strict=True)
        ]

    def _received(self, edges: Sequence[Edge], into: Sequence[torch.Tensor], until: Deadline) -> list[Any]:
        pairs = zip(edges, into, strict=True)
        return [self._post(each.receive(data, until.left())) for each, data in pairs if len(data)]

    def _sent(self, edges: Sequence[Edge], head: torch.Tensor, rest: torch.Tensor, until: Deadline) -> list[Any]:
        return [self._post(each.send(data, until.left())) for data in (head, rest) if len(data) for each in edges]

    def _post(self, work: Any) -> Any:
        """Note an exchange of this round, so that it is kept: see `Waiting.wait`."""
        self._flying.append(work)
        return work

    def _wait(self, works: Sequence[Any], call: Call, until: Deadline) -> None:
        """Wait for exchanges of this round.

        If they are abandoned, their groups are kept too: one waits for its exchanges when it is freed, and this process may want to end.
        """
        try:
            for work in works:
                self._now.wait(work, call, until)
        except BaseException:  # interrupts too
            for each in (*self._flying, self._edges):
                keep_exchange(each)
            raise


@final
@attrs.frozen(eq=False)
class _PendingRound:
    owner: TreeExchange
    begun: _Round

    @property
    def has_come(self) -> bool:
        posted, job = self.begun.posted, self.begun.job
        if job is not None:
            return job.is_over
        return self.begun.is_over or (bool(posted) and bool(posted[-1][0].is_completed()))

    def rows(self, until: Deadline) -> list[tuple[int, ...]]:
        begun, owner = self.begun, self.owner
        if begun in owner._started:  # noqa: SLF001 - of this module
            owner._waiting.check()  # noqa: SLF001 - as above
            owner.finish(until, begun)
        if begun.error is not None:
            raise begun.error
        width = len(begun.payload) // _NUMBER_BYTES
        numbers = np.frombuffer(begun.found or b"", dtype="<i8").reshape(owner._world_size, width)  # noqa: SLF001 - of this module
        return [tuple(row) for row in numbers.tolist()]


def _halves(message: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """The head of a message, and the rest."""
    rest = torch.frombuffer(bytearray(message[HEAD_BYTES:] or b"0"), dtype=torch.uint8)
    return padded_bytes(message[:HEAD_BYTES], HEAD_BYTES), rest[: max(len(message) - HEAD_BYTES, 0)]


def _pieces(rest: torch.Tensor) -> Sequence[torch.Tensor]:
    """What comes down at a time."""
    return [rest[start : start + PIECE_BYTES] for start in range(0, len(rest), PIECE_BYTES)]


def _head(number: int, call: Call, payload: bytes) -> torch.Tensor:
    return padded_bytes(HEAD.pack(number, call_digest(call), True, len(payload)) + payload, HEAD_BYTES)  # noqa: FBT003 - a field


def _values(body: bytes, count: int) -> list[bytes]:
    """What each rank gave."""
    if not body:
        return [b""] * count
    ends = np.cumsum([count * SIZE.size, *np.frombuffer(body, "<i8", count).tolist()]).tolist()
    return [body[start:stop] for start, stop in pairwise(ends)]
