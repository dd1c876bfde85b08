"""`Draws`: where the random streams stand that a loader draws its batches with, and what its last batch was."""

from collections.abc import Mapping
from typing import Any, final

import attrs
import numpy as np
import torch

from trainfold.adapters.components.rng_streams import moved_stream_problems
from trainfold.adapters.components.stream_reader import Streams
from trainfold.adapters.loaders.feed import OTHER, mismatch
from trainfold.adapters.loaders.sampler_tap import order_problems
from trainfold.adapters.loaders.worker_trace import Report
from trainfold.core.errors import TrainfoldError
from trainfold.core.policy import Verdict, verdict_of
from trainfold.core.state import Opaque


@final
@attrs.frozen
class Drawn:
    """How one batch was drawn.

    Attributes:
        worker: which one drew it; None for this process.
        digest: of the batch.
        moved: a worker's streams that it moved, as they are after it. In this process: any that it moved.
        before: this process's streams before it; empty in a worker.
    """

    worker: int | None
    digest: str | None
    moved: Streams
    before: Streams = attrs.field(factory=dict)

    @classmethod
    def by_worker(cls, report: Report) -> "Drawn":
        """What a worker has reported."""
        return cls(report.worker, report.digest, report.moved)


@final
@attrs.frozen
class Last:
    """The last batch that was consumed in this epoch.

    Attributes:
        digest: what it held.
        samples: how many it had.
        before: the streams that it was drawn with, in the process that drew it.
    """

    digest: str
    samples: int
    before: Streams


@final
class Draws:
    """The streams after the last batch that was consumed. What was drawn ahead leaves no trace here.

    Args:
        workers: how many the loader has.
        persistent: whether they live on from epoch to epoch.

    Attributes:
        moved: whether any batch of this run has moved a stream.
        born: everything that the seed of living workers was drawn from; None for workers that live for one epoch.
        streams: what each worker has moved, since it was seeded.
        next: the worker whose turn it is.
        last: the last batch; None at the start of an epoch.
    """

    def __init__(self, workers: int, *, persistent: bool) -> None:
        self.workers = workers
        self.persistent = persistent
        self.moved = False
        self.born: Opaque | None = None
        self.streams: list[Streams] = [{} for _ in range(workers)]
        self.next = 0
        self.last: Last | None = None

    def consume(self, drawn: Drawn, samples: int) -> None:
        """Count a batch."""
        self.moved = self.moved or bool(drawn.moved)
        before = drawn.before
        if drawn.worker is not None:
            before = self.streams[drawn.worker]
            self.streams[drawn.worker] = {**before, **drawn.moved}
            self.next = (drawn.worker + 1) % self.workers
        self.last = None if not drawn.digest else Last(drawn.digest, samples, before if self.moved else {})

    def absorb(self, drawn: Drawn) -> None:
        """Take the streams of a batch that nobody trains on: its worker goes on after it."""
        self.moved = self.moved or bool(drawn.moved)
        if drawn.worker is not None:
            self.streams[drawn.worker] = {**self.streams[drawn.worker], **drawn.moved}

    def end_epoch(self) -> None:
        """Count an epoch; the next one begins at the first worker."""
        self.next, self.last = 0, None
        if not self.persistent:
            self.streams = [{} for _ in range(self.workers)]

    def starts(self, *, probe: bool) -> dict[int, Streams]:
        """The streams that each worker starts with: those of its next batch, or those of the last one to draw it again."""
        found = {worker: streams for worker, streams in enumerate(self.streams) if streams}
        if probe and self.last is not None:
            found[self.last_worker] = self.last.before
        return found

    @property
    def last_worker(self) -> int:
        """The worker that made the last batch."""
        return (self.next - 1) % self.workers

    def capture(self, born: Opaque | None) -> dict[str, Any]:
        """As plain values.

        Args:
            born: what the seed of the workers of this epoch was drawn from.
        """
        last = self.last
        return {
            "count": self.workers,
            "persistent": self.persistent,
            "moved": self.moved,
            "next": self.next,
            "streams": [plain(each) for each in self.streams],
            "born": None if born is None else born.value,
            "last": None if last is None else {**attrs.asdict(last, recurse=False), "before": plain(last.before)},
        }

    def problems(
        self,
        saved: Any,
        generators: Mapping[str, torch.Generator],
        policy: Mapping[str, Verdict],
        *,
        inside: bool,
        tied: bool = False,
    ) -> list[TrainfoldError]:
        """Every reason why a saved one cannot be gone on with here.

        Args:
            saved: from `capture`; None where the position is older than this record.
            generators: those of the loader.
            policy: what to do about another number of workers.
            inside: whether the position is in the middle of an epoch.
            tied: whether the loader's own state is of no use to another number of workers.
        """
        where = "state.dataset.draws"
        accepts = verdict_of("num_workers", where, policy) != "refuse"
        if saved is None:
            if accepts or not self.workers or not (inside or self.persistent):
                return []
            return [
                mismatch(
                    where,
                    f"the random streams of {self.workers} workers",
                    "none: an older trainfold saved this position, and did not read them",
                    'resume at the end of an epoch; or go on with new streams, with policy={"num_workers": "warn"}',
                )
            ]
        found = self._malformed(saved, generators)
        differs = saved["count"] != self.workers if not found else False
        if found or (accepts and not (tied and differs)):
            return found
        mend = (
            f"make the loader with num_workers={saved['count']}, persistent_workers={saved['persistent']}; or go on "
            'with other samples than the run would have had, with policy={"num_workers": "warn"}'
        )
        if tied:
            mend = mend.partition(";")[0]
        if (differs and (saved["moved"] or tied)) or saved["persistent"] != self.persistent:
            found.append(
                mismatch(
                    f"{where}.num_workers",
                    _workers(saved["count"], persistent=saved["persistent"])
                    + (", whose random streams have moved" if saved["moved"] else ""),
                    _workers(self.workers, persistent=self.persistent),
                    mend,
                )
            )
        return found

    def _malformed(self, saved: Any, generators: Mapping[str, torch.Generator]) -> list[TrainfoldError]:
        where = "state.dataset.draws"
        kinds = {"count": int, "persistent": bool, "moved": bool, "next": int, "streams": list}
        if not isinstance(saved, dict) or any(type(saved.get(name)) is not kind for name, kind in kinds.items()):
            return [mismatch(where, f"a record of {sorted(kinds)}", repr(saved)[:80], OTHER)]
        count, last = saved["count"], saved.get("last")
        if count < 0 or len(saved["streams"]) != count or not 0 <= saved["next"] < max(count, 1):
            found = f"{len(saved['streams'])} for {count}, the next is {saved['next']}"
            return [mismatch(f"{where}.streams", "those of each worker", found, OTHER)]
        problems: list[TrainfoldError] = []
        for worker, streams in enumerate(saved["streams"]):
            problems.extend(moved_stream_problems(streams, path=f"{where}.streams[{worker}]"))
        if saved.get("born") is not None:
            problems.extend(order_problems(saved["born"], dict(generators), where=f"{where}.born"))
        if last is not None:
            if (
                not isinstance(last, dict)
                or type(last.get("digest")) is not str
                or type(last.get("samples")) is not int
            ):
                problems.append(mismatch(f"{where}.last", "a digest and a number of samples", repr(last)[:80], OTHER))
            else:
                problems.extend(moved_stream_problems(last.get("before"), path=f"{where}.last.before"))
        return problems

    def take(self, saved: Any) -> None:
        """Go on with a saved one; with new streams, where the number of workers is another."""
        fresh: list[Streams] = [{} for _ in range(self.workers)]
        if saved is None:
            self.moved, self.born, self.streams, self.next, self.last = True, None, list(fresh), 0, None
            return
        same = saved["count"] == self.workers
        last = saved["last"]
        self.moved = saved["moved"]
        self.born = None if saved["born"] is None else Opaque(saved["born"])
        self.streams = list(saved["streams"]) if same else list(fresh)
        self.next = saved["next"] if same else 0
        self.last = None if last is None or (self.moved and not same) else Last(**last)


def plain(streams: Streams) -> Streams:
    """Streams as they are saved: a tensor for torch's.

    Examples:
        >>> plain({"torch": np.zeros(2, np.uint8)})
        {'torch': tensor([0, 0], dtype=torch.uint8)}
    """
    state = streams.get("torch")
    return {**streams, "torch": torch.from_numpy(state.copy())} if isinstance(state, np.ndarray) else streams


def _workers(count: int, *, persistent: bool) -> str:
    return f"{count} workers" + (", kept from epoch to epoch" if persistent else "")
