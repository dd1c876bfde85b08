"""`SharedReads`: ranks that share a slow store read once what several of them need: one of them reads it, and sends it to the others (ADR-0037).

`SharedStore` stands between a `PlanReader` and the store. It gives the reader the bytes that it asks for, wherever they come from. The reader
verifies them in either case: no rank trusts another.
"""

import logging
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Final, NoReturn, TypeVar, final

from trainfold.backends.ranks.all_ranks import on_all_ranks
from trainfold.backends.side_by_side import at_once
from trainfold.backends.stores.protocol import SharedByRanks, Store
from trainfold.core.digest import digest_of
from trainfold.core.format.manifest import PIECE_BYTES, FileRecord, Manifest
from trainfold.core.json_values import canonical_json
from trainfold.core.layout.sharing.hops import hops_of
from trainfold.core.layout.sharing.ranges import ByteSpan, SharedRange
from trainfold.core.layout.sharing.rank_grid import RankGrid, rank_grid
from trainfold.core.layout.sharing.share_ranges import share_ranges
from trainfold.core.layout.world import Collectives, Exchanges
from trainfold.core.resume.reads import ReadPlan

T = TypeVar("T")
_LOG: Final = logging.getLogger("trainfold")
ROUND_BYTES: Final = 16 << 20  # what a rank takes, or sends, in a round
_MESH_RANKS: Final = 256  # more ranks stand in a grid, in which a rank has fewer sockets
_ROUND_RANKS: Final = (
    64  # longer rows and columns have larger rounds, so that a rank reads 256 KiB at once if all need the same
)
_SPANS_LIMIT: Final = 2**19  # of all ranks, each distinct list once: about 150 MB
_THREADS: Final = 8  # reads at once, from a store that was declared slow
_READING: Final = "read for the other ranks"


def may_share(store: Store, world: Collectives) -> bool:
    """Whether this rank is to read for others, and can."""
    return (
        isinstance(store, SharedByRanks) and store.is_shared and isinstance(world, Exchanges) and world.world_size > 1
    )


@final
class SharedReads:
    """One load in which ranks read for each other. It has what its calls need of the ranks.

    Args:
        store: the run, for which `may_share` holds on all ranks.
        world: the ranks.

    Attributes:
        broken: the error of a call of the ranks that failed: no rank makes another one.
    """

    def __init__(self, store: Store, world: Collectives) -> None:
        self._store, self._world = store, world
        self.rank, self.world_size = world.rank, world.world_size
        self.broken: BaseException | None = None

    @contextmanager
    def planned(self, manifest: Manifest, make_plan: Callable[[], ReadPlan]) -> Iterator[tuple[ReadPlan, Store]]:
        """A context in which the ranks read. All of them enter it; if one fails in it, the others leave it at the next round.

        Memory: beside what is loaded, a rank has at most about five times `round_bytes`: what it has read or received, of this round and before its turn, what it sends and
        receives now, and what it sent last, which its collectives keep until the next exchange.

        Args:
            manifest: of the checkpoint; the same on all ranks.
            make_plan: makes the plan of this rank. The components and their order are the same on all ranks.

        Yields:
            The plan, and what it is read from: component by component, in the order of the plan.

        Raises:
            Exception: on a rank whose plan failed, or whose read for others: that error.
            RankFailed: on the other ranks.
        """
        plans: list[ReadPlan] = []
        mine: list[tuple[int, int, int]] = []

        def plan_spans() -> tuple[str, int]:
            plans.append(make_plan())
            mine[:] = spans_of(plans[0], manifest)
            return digest_of(canonical_json(mine)), len(mine)

        wanted, needs = self._wanted(self.on_all_ranks(plan_spans, doing="plan what it reads"), mine)
        grid = rank_grid(self.world_size, most_connected=_MESH_RANKS)
        rounds = share_ranges(wanted, needs=needs, grid=grid, unit_bytes=PIECE_BYTES, round_bytes=round_bytes(grid))
        first = next(rounds, None)
        if first is None:  # no two ranks need the same
            yield plans[0], self._store
            return
        names = [file.path(plans[0].checkpoint) for file in _file_order(plans[0], manifest)]
        shared = SharedStore(self._store, self, names, chain([first], rounds), grid, mine=mine)
        try:
            yield plans[0], shared  # type: ignore[misc]  # as much of a store as a reader needs
        # an interrupted process is to end, and does not wait until the others meet
        except Exception as error:  # noqa: BLE001 - raised again
            shared.stop(error)
        shared.finish()

    def _wanted(
        self, told: Sequence[tuple[str, int]], mine: Sequence[tuple[int, int, int]]
    ) -> tuple[list[list[ByteSpan]], list[int]]:
        """The distinct lists of spans, each of which one rank sends, and which list each rank needs; empty lists if they have too many."""
        lists = {each: number for number, each in enumerate(dict.fromkeys(told))}
        needs = [lists[each] for each in told]
        if sum(count for _, count in lists) > _SPANS_LIMIT:
            if self.rank == 0:
                _LOG.warning(
                    "each rank reads alone, though the store is shared: together they need %d parts of files, in %d different lists, and agree on %d at most",
                    sum(count for _, count in lists), len(lists), _SPANS_LIMIT,
                )  # fmt: skip
            return [[] for _ in lists], needs
        if len(lists) == 1:
            return [[ByteSpan(*span) for span in mine]], needs
        is_first = needs.index(needs[self.rank]) == self.rank
        texts = self.gather(mine if is_first else [], doing="name what it reads")
        return [[ByteSpan(*span) for span in texts[needs.index(number)]] for number in range(len(lists))], needs

    def on_all_ranks(self, action: Callable[[], T], *, doing: str) -> list[T]:
        """See `trainfold.backends.ranks.all_ranks.on_all_ranks`."""
        return on_all_ranks(self, action, doing=doing)  # type: ignore[arg-type]  # as much of a world as it needs

    def gather(self, value: T, *, doing: str = "", is_vote: bool = False) -> list[T]:
        """See `Collectives.gather`."""
        with self._noted():
            return self._world.gather(value, doing=doing, is_vote=is_vote)

    def exchange(
        self, parts: Sequence[Sequence[memoryview]], sizes: Sequence[int], *, among: Sequence[int], doing: str
    ) -> Sequence[bytes | memoryview]:
        """See `Exchanges.exchange`."""
        assert isinstance(self._world, Exchanges)  # `may_share`
        some = {} if len(among) == self.world_size else {"among": among}
        with self._noted():
            return self._world.exchange(parts, sizes, doing=doing, **some)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.broken = error
            raise


def spans_of(plan: ReadPlan, manifest: Manifest) -> list[tuple[int, int, int]]:
    """The spans of bytes that a plan reads, in the order in which they are read: component by component, and there by the names of files.

    Returns:
        The number of what a file has of a component, as all ranks count it; the first byte; and one past the last.
    """
    names = [file.label for file in _file_order(plan, manifest)]
    places = {name: place for place, name in enumerate(names)}
    return [
        (number * len(names) + place, *span)
        for number, reads in enumerate(plan.components.values())
        for place, spans in sorted((places[name], spans) for name, spans in plan.ranges_of(reads.shards).items())
        for span in spans
    ]


def _file_order(plan: ReadPlan, manifest: Manifest) -> list[FileRecord]:
    """The files in the order in which those of a component are read."""
    return sorted(manifest.files, key=lambda file: file.path(plan.checkpoint))


def round_bytes(grid: RankGrid) -> int:
    """What a rank takes, or sends, in a round."""
    longest = max(len(grid.row(grid.size - 1)), len(grid.column(0)))
    return max(ROUND_BYTES, ROUND_BYTES // _ROUND_RANKS * longest)


@final
class SharedStore:
    """A store as a `PlanReader` uses it, in which ranks read for each other. It does a round when bytes of that round are asked for.

    Args:
        store: the run.
        ranks: the calls of the ranks.
        names: the names of the files. A number in the ranges is that of a component, times their count, and the place of a name.
        rounds: who reads what, from `share_ranges`; the same on all ranks.
        grid: how the ranks are connected.
        mine: what this rank needs, from `spans_of`.
    """

    in_order = True

    def __init__(  # noqa: PLR0913 - private
        self,
        store: Store,
        ranks: SharedReads,
        names: Sequence[str],
        rounds: Iterator[Sequence[SharedRange]],
        grid: RankGrid,
        *,
        mine: Sequence[tuple[int, int, int]],
    ) -> None:
        self._store, self._ranks, self._names, self._grid = store, ranks, names, grid
        self._spans: dict[str, list[tuple[int, int]]] = {}  # of each file: the first bytes, each with its number
        for number, start, _ in mine:
            self._spans.setdefault(self._name(number), []).append((start, number))
        for spans in self._spans.values():
            spans.sort()
        self._rounds = rounds
        self._next = next(rounds, None)
        self._at = (0, 0)  # what is before is not read any more
        self._came: dict[tuple[int, int], memoryview] = {}
        self._starts: list[tuple[int, int]] = []

    @property
    def url(self) -> str:
        """See `Store.url`."""
        return self._store.url

    def size(self, name: str) -> int | None:
        """See `Store.size`."""
        return self._store.size(name)

    def read(self, name: str, *, start: int = 0, stop: int | None = None) -> bytes:
        """See `Store.read`."""
        return self._store.read(name, start=start, stop=stop)

    def read_into(self, name: str, buffer: memoryview, *, start: int = 0) -> None:
        """See `Store.read_into`; bytes of the plan, and none of those before the ones that were read last."""
        view, spans = buffer.cast("B"), self._spans[name]
        file = spans[bisect_right(spans, start, key=itemgetter(0)) - 1][1]
        at, end = start, start + len(view)
        while at < end:
            low, data = self._holding(file, at)
            stop = min(end, low + len(data))
            view[at - start : stop - start] = data[at - low : stop - low]
            at = stop

    def finish(self) -> None:
        """Take part in the rounds that are left, of which this rank needs nothing."""
        while self._next is not None:
            self._do_round()

    def stop(self, error: Exception) -> NoReturn:
        """Report an error of this rank to those that wait for what it reads, and raise it."""
        if self._next is not None:
            self._next = None
            self._ranks.on_all_ranks(partial(_raise, error), doing=_READING)
        raise error

    def _name(self, number: int) -> str:
        return self._names[number % len(self._names)]

    def _holding(self, file: int, at: int) -> tuple[int, memoryview]:
        """The range that has a byte: its first one, and its bytes. It does rounds until the byte has come."""
        self._at = file, at
        while True:
            if before := bisect_right(self._starts, (file, at)):
                found, low = place = self._starts[before - 1]
                if found == file and at < low + len(self._came[place]):
                    return low, self._came[place]
            self._do_round()

    def _do_round(self) -> None:
        """Read what this rank reads in the next round, send it, pass on what others read, and keep what this rank needs."""
        ranges, me = self._next, self._ranks.rank
        assert ranges is not None, "bytes of the plan are in some round"
        self._next = None  # after a failure no rank makes another call
        self._came = {place: data for place, data in self._came.items() if place > self._at}
        mine = [one for one in ranges if one.reader == me]
        held = {(one.file, one.start): memoryview(bytearray(one.size_bytes)) for one in mine}
        reads = [
            partial(self._store.read_into, self._name(one.file), held[one.file, one.start], start=one.start)
            for one in mine
        ]
        self._ranks.on_all_ranks(partial(_read, reads), doing=_READING)
        for hop in hops_of(ranges, self._grid, me):
            go = [[held[one.file, one.start] for one in hop.go.get(rank, ())] for rank in hop.ranks]
            come = [hop.come.get(rank, []) for rank in hop.ranks]
            sizes = [sum(one.size_bytes for one in each) for each in come]
            for each, received in zip(
                come, self._ranks.exchange(go, sizes, among=hop.ranks, doing=_READING), strict=True
            ):
                place = 0
                for one in each:
                    held[one.file, one.start] = memoryview(received)[place : place + one.size_bytes]
                    place += one.size_bytes
        self._came.update({(one.file, one.start): held[one.file, one.start] for one in ranges if me in one.takers})
        self._starts = sorted(self._came)
        self._next = next(self._rounds, None)


def _read(reads: Sequence[Callable[[], None]]) -> None:
    """Nothing, where `at_once` has a list of it, which the ranks would send each other."""
    at_once(reads, threads=_THREADS)


def _raise(error: Exception) -> NoReturn:
    raise error
