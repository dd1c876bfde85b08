"""`SharedReads`: ranks that share a slow store read once what several of them need: one of them reads it, and sends it to the others (ADR-0037).

`SharedStore` stands between a `PlanReader` and the store. It gives the reader the bytes that it asks for, wherever they come from. The reader
verifies them in either case: no rank trusts another.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Final, NoReturn, TypeVar, final

from trainfold.backends.ranks.all_ranks import on_all_ranks
from trainfold.backends.side_by_side import at_once
from trainfold.backends.stores.protocol import SharedByRanks, Store
from trainfold.core.format.manifest import PIECE_BYTES, FileRecord, Manifest
from trainfold.core.layout.shared_reads import ByteSpan, SharedRange, share_ranges
from trainfold.core.layout.world import Collectives, Exchanges
from trainfold.core.resume.reads import ReadPlan

T = TypeVar("T")
ROUND_BYTES: Final = 16 << 20  # what a rank takes, or sends, in a round
_ROUND_RANKS: Final = 64  # more ranks have larger rounds, so that each reads 256 KiB at once if all need the same
_RANKS_LIMIT: Final = 256  # rounds of 64 MiB
_THREADS: Final = 8  # reads at once, from a store that was declared slow
_READING: Final = "read for the other ranks"


def may_share(store: Store, world: Collectives) -> bool:
    """Whether this rank is to read for others, and can."""
    is_shared = isinstance(store, SharedByRanks) and store.is_shared
    return is_shared and isinstance(world, Exchanges) and 1 < world.world_size <= _RANKS_LIMIT


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

        Memory: beside what is loaded, a rank has at most about four times `ROUND_BYTES`: what it has read or received, what it sends and receives now, and
        what it sent last, which its collectives keep until the next exchange.

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

        def plan_spans() -> list[tuple[int, int, int]]:
            plans.append(make_plan())
            files = {file.label: number for number, file in enumerate(_file_order(plans[0], manifest))}
            return sorted((files[name], *span) for name, spans in plans[0].ranges.items() for span in spans)

        told = self.on_all_ranks(plan_spans, doing="plan what it reads")
        wanted = [[ByteSpan(*span) for span in spans] for spans in told]
        limit = max(ROUND_BYTES, ROUND_BYTES // _ROUND_RANKS * self.world_size)
        rounds = share_ranges(wanted, unit_bytes=PIECE_BYTES, round_bytes=limit)
        if not rounds:  # no two ranks need the same
            yield plans[0], self._store
            return
        names = [file.path(plans[0].checkpoint) for file in _file_order(plans[0], manifest)]
        shared = SharedStore(self._store, self, names, rounds)
        try:
            yield plans[0], shared  # type: ignore[misc]  # as much of a store as a reader needs
        except Exception as error:  # noqa: BLE001 - raised again
            shared.stop(error)
        shared.finish()

    def on_all_ranks(self, action: Callable[[], T], *, doing: str) -> list[T]:
        """See `trainfold.backends.ranks.all_ranks.on_all_ranks`."""
        return on_all_ranks(self, action, doing=doing)  # type: ignore[arg-type]  # as much of a world as it needs

    def gather(self, value: T, *, doing: str = "", is_vote: bool = False) -> list[T]:
        """See `Collectives.gather`."""
        with self._noted():
            return self._world.gather(value, doing=doing, is_vote=is_vote)

    def exchange(
        self, parts: Sequence[Sequence[memoryview]], sizes: Sequence[int], *, doing: str
    ) -> Sequence[bytes | memoryview]:
        """See `Exchanges.exchange`."""
        assert isinstance(self._world, Exchanges)  # `may_share`
        with self._noted():
            return self._world.exchange(parts, sizes, doing=doing)

    @contextmanager
    def _noted(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.broken = error
            raise


def _file_order(plan: ReadPlan, manifest: Manifest) -> list[FileRecord]:
    """The files in the order in which they are read: component by component, and by name."""
    places = {name: place for place, name in enumerate(plan.components)}
    return sorted(manifest.files, key=lambda file: (places.get(file.component, -1), file.path(plan.checkpoint)))


@final
class SharedStore:
    """A store as a `PlanReader` uses it, in which ranks read for each other. It does a round when bytes of that round are asked for.

    Args:
        store: the run.
        ranks: the calls of the ranks.
        names: the name of each file, by its number in the ranges.
        rounds: who reads what, from `share_ranges`; the same on all ranks.
    """

    in_order = True

    def __init__(
        self,
        store: Store,
        ranks: SharedReads,
        names: Sequence[str],
        rounds: Sequence[Sequence[SharedRange]],
    ) -> None:
        self._store, self._ranks, self._names, self._rounds, self._done = store, ranks, names, rounds, 0
        self._came: dict[tuple[int, int], memoryview] = {}
        self._mine: dict[str, list[tuple[int, SharedRange]]] = {name: [] for name in names}
        for number, each in enumerate(rounds):
            for one in each:
                if ranks.rank in one.takers:
                    self._mine[names[one.file]].append((number, one))
        self._starts = {name: [one.start for _, one in mine] for name, mine in self._mine.items()}

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
        view, mine, starts = buffer.cast("B"), self._mine[name], self._starts[name]
        at, end = start, start + len(view)
        while at < end:
            number, one = mine[bisect_right(starts, at) - 1]
            while self._done <= number:
                self._do_round()
            stop = min(end, one.stop)
            view[at - start : stop - start] = self._came[one.file, one.start][at - one.start : stop - one.start]
            at = stop

    def finish(self) -> None:
        """Take part in the rounds that are left, of which this rank needs nothing."""
        while self._done < len(self._rounds):
            self._do_round()

    def stop(self, error: Exception) -> NoReturn:
        """Report an error of this rank to those that wait for what it reads, and raise it."""
        if self._done < len(self._rounds):
            self._done = len(self._rounds)
            self._ranks.on_all_ranks(partial(_raise, error), doing=_READING)
        raise error

    def _do_round(self) -> None:
        """Read what this rank reads in the next round, send it, and keep what comes."""
        me, number = self._ranks.rank, self._done
        go: list[list[memoryview]] = [[] for _ in range(self._ranks.world_size)]
        come: list[list[SharedRange]] = [[] for _ in go]
        self._came = {}
        reads = []
        for one in self._rounds[number]:
            if one.reader == me:
                data = memoryview(bytearray(one.stop - one.start))
                self._came[one.file, one.start] = data
                reads.append(partial(self._store.read_into, self._names[one.file], data, start=one.start))
                for rank in one.takers - {me}:
                    go[rank].append(data)
            elif me in one.takers:
                come[one.reader].append(one)
        self._done = len(self._rounds)  # after a failure no rank makes another call
        self._ranks.on_all_ranks(partial(_read, reads), doing=_READING)
        sizes = [sum(one.stop - one.start for one in each) for each in come]
        for each, received in zip(come, self._ranks.exchange(go, sizes, doing=_READING), strict=True):
            place = 0
            for one in each:
                end = place + one.stop - one.start
                self._came[one.file, one.start] = memoryview(received)[place:end]
                place = end
        self._done = number + 1


def _read(reads: Sequence[Callable[[], None]]) -> None:
    """Nothing, where `at_once` has a list of it, which the ranks would send each other."""
    at_once(reads, threads=_THREADS)


def _raise(error: Exception) -> NoReturn:
    raise error
