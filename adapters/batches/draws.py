"""`Draws`: records the random streams that a loader draws batches with, and its last batches."""

from collections import deque
from collections.abc import Mapping
from typing import Any, final

import attrs
import numpy as np
import torch

from trainfold.adapters.batches.feed import OTHER, mismatch
from trainfold.adapters.batches.loader_extras import KEY, LoaderExtras, streams_only
from trainfold.adapters.batches.sampler_tap import order_problems
from trainfold.adapters.batches.worker_trace import Report
from trainfold.adapters.streams.rng_streams import moved_stream_problems
from trainfold.adapters.streams.stream_reader import Streams
from trainfold.core.errors import TrainfoldError
from trainfold.core.resume.drift import DriftAction, verdict_of
from trainfold.core.state.state import Opaque


@final
@attrs.frozen
class Drawn:
    """How one batch was drawn.

    Attributes:
        worker: the worker that drew it; None for this process.
        digest: the digest of the batch.
        moved: the streams that the batch moved, as they are after it; in this process, some of them are enough.
        before: this process's streams before the batch, and the components under ``extra``; empty in a worker.
        kind: a short description of the batch.
        logged: the digest for a flight log.
    """

    worker: int | None
    digest: str | None
    moved: Streams
    before: Streams = attrs.field(factory=dict)
    kind: str = ""
    logged: str = ""

    @classmethod
    def by_worker(cls, report: Report) -> "Drawn":
        """The record of a batch from a worker's report."""
        return cls(report.worker, report.digest, report.moved, kind=report.kind, logged=report.logged)


@final
@attrs.frozen
class LastBatch:
    """A batch consumed in this epoch: the last one, or the last one of its worker.

    Attributes:
        digest: the digest of its contents.
        samples: its number of samples.
        before: the streams that it was drawn with, in the process that drew it; under `KEY`, the components under ``extra``.
        kind: a short description of the batch.
    """

    digest: str
    samples: int
    before: Streams
    kind: str = ""


@final
class Draws:
    """The streams after the last consumed batch. Batches that were drawn ahead do not count.

    Args:
        workers: the number of workers of the loader.
        persistent: whether the workers stay alive between epochs.

    Attributes:
        moved: whether any batch of this run has moved a stream.
        born: everything that the seed of persistent workers was drawn from; None for workers that live for one epoch.
        streams: for each worker, the streams that it has moved since it was seeded.
        next: the worker that makes the next batch.
        lasts: the last batch of each worker in this epoch, oldest first; without workers, the last batch.
        read: the digest of the last batch consumed here, in whatever epoch; None before it.
        is_logged: whether batches are digested for a flight log.
        logged: these digests of the batches that were consumed and are not in the log yet.
    """

    def __init__(self, workers: int, *, persistent: bool) -> None:
        self.workers = workers
        self.persistent = persistent
        self.moved = False
        self.born: Opaque | None = None
        self.streams: list[Streams] = [{} for _ in range(workers)]
        self.next = 0
        self.lasts: deque[LastBatch] = deque(maxlen=max(1, workers))
        self.read: str | None = None
        self.is_logged = False
        self.logged: list[str] = []

    def reset(self) -> None:
        """Forget everything: the next batch is the first one that is drawn here."""
        self.moved, self.born, self.next = False, None, 0
        self.streams = [{} for _ in range(self.workers)]
        self.lasts.clear()

    def consume(self, drawn: Drawn, samples: int) -> None:
        """Count a consumed batch."""
        self.moved = self.moved or bool(drawn.moved)
        before = drawn.before
        if drawn.worker is not None:
            before = self.streams[drawn.worker]
            self.streams[drawn.worker] = {**before, **drawn.moved}
            self.next = (drawn.worker + 1) % self.workers
        self.read = drawn.digest
        if self.is_logged and drawn.digest is not None:
            self.logged.append(drawn.logged)
        if drawn.digest is None:
            self.lasts.clear()
            return
        held = before if self.moved else {name: before[name] for name in (KEY,) if name in before}
        self.lasts.append(LastBatch(drawn.digest, samples, held, drawn.kind))

    def take_logged(self) -> list[str]:
        """Digests of the batches consumed since the last call, for a flight log; the next batches are digested for it from here on."""
        self.is_logged, taken, self.logged = True, self.logged, []
        return taken

    def absorb(self, drawn: Drawn) -> None:
        """Take the streams of a batch not trained on: its worker continues after it."""
        self.moved = self.moved or bool(drawn.moved)
        if drawn.worker is not None:
            self.streams[drawn.worker] = {**self.streams[drawn.worker], **drawn.moved}

    def end_epoch(self) -> None:
        """Count an epoch; the next one starts at the first worker."""
        self.next = 0
        self.lasts.clear()
        if not self.persistent:
            self.streams = [{} for _ in range(self.workers)]

    def starts(self, *, probe: bool) -> dict[int, Streams]:
        """The streams that each worker starts with.

        Args:
            probe: whether each worker draws its last batch again first; it then starts with the streams of that batch.
        """
        found = dict(enumerate(self.streams))
        if probe:
            found.update((worker, last.before) for worker, last in zip(self.last_workers, self.lasts, strict=True))
        return {worker: streams for worker, streams in found.items() if streams}

    @property
    def last_workers(self) -> list[int]:
        """The workers that made the `lasts`, in the same order; empty without workers."""
        if not self.workers:
            return []
        return [(self.next - back) % self.workers for back in range(len(self.lasts), 0, -1)]

    @property
    def first_worker(self) -> int:
        """The worker that makes the first batch if the `lasts` are drawn again."""
        return (self.next - len(self.lasts)) % self.workers

    def afters(self) -> dict[int, Streams]:
        """For each worker that draws its last batch again, the streams that it continues with."""
        return {worker: self.streams[worker] for worker in self.last_workers}

    def capture(self, born: Opaque | None) -> dict[str, Any]:
        """Return the record as plain values.

        Args:
            born: everything that the seed of this epoch's workers was drawn from.
        """
        return {
            "count": self.workers,
            "persistent": self.persistent,
            "moved": self.moved,
            "next": self.next,
            "streams": [plain(each) for each in self.streams],
            "born": None if born is None else born.value,
            "lasts": [{**attrs.asdict(last, recurse=False), "before": plain(last.before)} for last in self.lasts],
        }

    def problems(  # noqa: PLR0913 - keywords
        self,
        saved: Any,
        generators: Mapping[str, torch.Generator],
        policy: Mapping[str, DriftAction],
        *,
        inside: bool,
        tied: bool = False,
        extras: LoaderExtras | None = None,
    ) -> list[TrainfoldError]:
        """List every reason why a run cannot continue here from a saved record.

        Args:
            saved: from `capture`; None if the position is older than this record.
            generators: the generators of the loader.
            policy: what to do about another number of workers.
            inside: whether the position is in the middle of an epoch.
            tied: whether the loader's own state fits only the same number of workers.
            extras: the components under ``extra`` that a batch may be drawn from.
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
                    "none: an older trainfold saved this position and did not read them",
                    'resume at the end of an epoch; or continue with new streams, with policy={"num_workers": "warn"}',
                )
            ]
        found = self._malformed(saved, generators, extras)
        differs = saved["count"] != self.workers if not found else False
        if found or (accepts and not (tied and differs)):
            return found
        fix = (
            f"make the loader with num_workers={saved['count']}, persistent_workers={saved['persistent']}; or accept "
            'other samples than the run would have had, with policy={"num_workers": "warn"}'
        )
        if tied:
            fix = fix.partition(";")[0]
        if (differs and (saved["moved"] or tied)) or saved["persistent"] != self.persistent:
            found.append(
                mismatch(
                    f"{where}.num_workers",
                    _workers(saved["count"], persistent=saved["persistent"])
                    + (", whose random streams have moved" if saved["moved"] else ""),
                    _workers(self.workers, persistent=self.persistent),
                    fix,
                )
            )
        return found

    def _malformed(
        self, saved: Any, generators: Mapping[str, torch.Generator], extras: LoaderExtras | None
    ) -> list[TrainfoldError]:
        where = "state.dataset.draws"
        kinds = {"count": int, "persistent": bool, "moved": bool, "next": int, "streams": list}
        if not isinstance(saved, dict) or any(type(saved.get(name)) is not kind for name, kind in kinds.items()):
            return [mismatch(where, f"a record of {sorted(kinds)}", repr(saved)[:80], OTHER)]
        count = saved["count"]
        if count < 0 or len(saved["streams"]) != count or not 0 <= saved["next"] < max(count, 1):
            found = f"{len(saved['streams'])} for {count} workers, the next is worker {saved['next']}"
            return [mismatch(f"{where}.streams", "the streams of each worker", found, OTHER)]
        problems: list[TrainfoldError] = []
        for worker, streams in enumerate(saved["streams"]):
            problems.extend(moved_stream_problems(streams, path=f"{where}.streams[{worker}]"))
        if saved.get("born") is not None:
            problems.extend(order_problems(saved["born"], dict(generators), extras, where=f"{where}.born"))
        lasts = _lasts_of(saved)
        if not isinstance(lasts, list) or len(lasts) > max(1, count):
            return [*problems, mismatch(f"{where}.lasts", "at most one batch of each worker", repr(lasts)[:80], OTHER)]
        for number, last in enumerate(lasts):
            path = f"{where}.lasts[{number}]"
            kinds = {"digest": str, "samples": int, "kind": str}
            if not isinstance(last, dict) or any(type(last.get(name, "")) is not kind for name, kind in kinds.items()):
                problems.append(mismatch(path, "a digest and a number of samples", repr(last)[:80], OTHER))
                continue
            before = last.get("before")
            problems.extend(moved_stream_problems(streams_only(before), path=f"{path}.before"))
            if extras is not None and isinstance(before, dict):
                problems.extend(extras.problems(before.get(KEY, {}), where=f"{path}.before.{KEY}"))
        return problems

    def take(self, saved: Any) -> None:
        """Continue from a saved record; with new streams if the number of workers has changed."""
        fresh: list[Streams] = [{} for _ in range(self.workers)]
        if saved is None:
            self.moved, self.born, self.streams, self.next = True, None, list(fresh), 0
            self.lasts.clear()
            return
        same = saved["count"] == self.workers
        self.moved = saved["moved"]
        self.born = None if saved["born"] is None else Opaque(saved["born"])
        self.streams = list(saved["streams"]) if same else list(fresh)
        self.next = saved["next"] if same else 0
        lasts = [] if self.moved and not same else _lasts_of(saved)
        self.lasts = deque((LastBatch(**last) for last in lasts), maxlen=max(1, self.workers))


def _lasts_of(saved: Any) -> Any:
    """The last batches of a record; an older record has only the very last one."""
    if "lasts" in saved:
        return saved["lasts"]
    return [] if saved.get("last") is None else [saved["last"]]


def plain(streams: Streams) -> Streams:
    """Streams in the form in which they are saved: torch's as a tensor.

    Examples:
        >>> plain({"torch": np.zeros(2, np.uint8)})
        {'torch': tensor([0, 0], dtype=torch.uint8)}
    """
    state = streams.get("torch")
    return {**streams, "torch": torch.from_numpy(state.copy())} if isinstance(state, np.ndarray) else streams


def _workers(count: int, *, persistent: bool) -> str:
    return f"{count} worker{'' if count == 1 else 's'}" + (", persistent" if persistent else "")
