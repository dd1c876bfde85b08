"""`StatefulIterators`: opens iterators of a loader with its own state at a position."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

from torch.utils.data import DataLoader

from trainfold.adapters.batches.batch_digest import batch_digest, batch_kind
from trainfold.adapters.batches.close_workers import closed_on_error
from trainfold.adapters.batches.data_probe import compare_batch, is_wanted, warn_uncompared
from trainfold.adapters.batches.draw_batches import replaced, streams_put_back
from trainfold.adapters.batches.draws import Drawn, LastBatch
from trainfold.adapters.batches.feed import END, OTHER, mismatch, samplers_of, set_epochs, set_generators
from trainfold.adapters.batches.hand_out import Counted, Unreported
from trainfold.adapters.batches.loader_extras import KEY, KeptExtras
from trainfold.adapters.batches.sampler_tap import capture_order, restore_order
from trainfold.adapters.batches.worker_trace import WorkerTrace
from trainfold.adapters.components.component import copied, copied_containers, kind_of
from trainfold.adapters.loaders.iterable import Replay, ended_in_part, iterates, keeps_nothing, torchdatas
from trainfold.adapters.loaders.stateful_position import StatefulPosition
from trainfold.adapters.streams.rng_streams import preserved_rng
from trainfold.adapters.streams.stream_reader import StreamReader, set_streams
from trainfold.core.errors import DataPositionMismatch


@final
class StatefulIterators:
    """Opens iterators of a loader, at the start of an epoch or in the middle of one.

    Args:
        position: of the loop. The iterators read it, and add what each epoch was started from.
    """

    def __init__(self, position: StatefulPosition) -> None:
        loader, workers = position.loader, position.draws.workers
        self._at = position
        self._loader = loader
        self.probe_due = False  # since a restore
        self.reader = StreamReader() if torchdatas(loader) and not workers else None
        self.counted: Counted | None = None  # counts samples, without workers
        self._counts = getattr(loader, "batch_sampler", None) is not None

    def open(self) -> Iterator[Any]:
        """An iterator at the position."""
        at = self._at
        set_epochs(self._loader, at.drawing)
        if not isinstance(self._loader, DataLoader):
            if self.probe_due and at.drawn > 0:
                self._warn_uncompared("only the loader knows how to go back")
            at.loaded = None
            return iter(self._loader)
        if at.drawn > 0:
            return self._inside()
        if at.loaded is not None:
            self._end_again(at.loaded, at.samplers)
        return self._start()

    def open_again(self) -> Iterator[Any]:
        """An iterator of an epoch whose first batch is delivered again."""
        at = self._at
        with self.apart():
            restore_order(at.again[0], at.generators, at.extras)
            iterator = self.open()
            at.again[0] = capture_order(at.generators, at.extras)
        return iterator

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Leave every stream and generator as it is."""
        at = self._at
        now = {name: generator.get_state() for name, generator in at.generators.items()}
        try:
            with at.extras.kept(everything=self.probe_due), streams_put_back():
                yield
        finally:
            set_generators(at.generators, now)

    # --- the start of an epoch ----------------------------------------------------------------------------------------

    def _start(self) -> Iterator[Any]:
        """An iterator at the start of an epoch, made at the same point as in a run without an interruption."""
        at = self._at
        at.order = capture_order(at.generators, at.extras)
        with self._traced():
            iterator = self._unreported(iter(self._loader))
        at.loaded = at.replay = at.began = None
        if iterates(self._loader):
            state = copied_containers(self._loader.state_dict())
            if not keeps_nothing(state):
                at.began = state
            if at.began is None or self._loader.num_workers > 0:
                at.replay = Replay(self._loader, at.order)
        if at.replay is None:
            at.digest = None
        return iterator

    def _end_again(self, state: Any, samplers: Mapping[str, Any], *, again: bool = False) -> None:
        """Bring the loader to the end of an epoch, before the next one starts."""
        at, loader = self._at, self._loader
        now = {name: generator.get_state() for name, generator in at.generators.items()}
        with preserved_rng(), self._traced(again=again, resumes=True):
            if not isinstance(state, dict) or not state.get("_iterator_finished"):
                iter(loader)
            elif loader.num_workers > 0 and not loader.persistent_workers:
                at.give(None)  # the datasets end with their workers, and what reads ahead would move the sampler
            else:
                loader.state_dict()  # makes the iterator that has ended, not the next one
        set_generators(at.generators, now)
        for name, sampler in samplers_of(loader).items():
            if name in samplers:
                sampler.load_state_dict(copied(samplers[name]))
        if hasattr(loader.sampler, "next_yielded"):
            # torchdata 0.11: a StatefulDistributedSampler at the end of an epoch would skip the whole next one
            loader.sampler.next_yielded = None
        set_epochs(loader, at.drawing)

    # --- the middle of an epoch ---------------------------------------------------------------------------------------

    def _inside(self) -> Iterator[Any]:
        """An iterator in the middle of an epoch, from a position that was restored."""
        at, loader, digest = self._at, self._loader, self._at.digest
        if digest is not None and self._starts_over():
            return self._again_from_start(digest)
        lasts = self._lasts_to_compare()
        now = {name: generator.get_state() for name, generator in at.generators.items()}
        # a run without an interruption has made this iterator at the start of the epoch
        with at.extras.kept() as kept, preserved_rng():
            if lasts:
                self._go_back()
            if at.order is not None:  # for samplers whose state the loader cannot keep
                restore_order(at.order, at.generators, at.extras)
            with self._traced(again=bool(lasts), resumes=True):
                iterator = self._unreported(iter(loader))
            kept.put_back()
            with closed_on_error(iterator, loader):
                error = self._compared(iterator, lasts, kept)
        if error is not None:
            set_generators(at.generators, now)
            # a traceback would keep it and its workers alive until a garbage collection, which waits for them
            del iterator
            at.give(at.loaded)
            raise error
        reads_ahead = loader.num_workers > 0 and getattr(loader.sampler, "replacement", False)
        if at.again or not reads_ahead:
            set_generators(at.generators, now)
        if iterates(loader) and keeps_nothing(loader.state_dict()):
            raise mismatch("attach.loader", "the dataset with a state that was saved", "one without", OTHER)
        if digest is not None and at.order is not None:
            at.replay = Replay(loader, at.order, digest=digest)
        at.loaded, self.probe_due = None, False
        return iterator

    def _starts_over(self) -> bool:
        """Whether the epoch starts over, and its batches are drawn again and compared."""
        loader, state = self._loader, self._at.loaded
        if state is None or ended_in_part(state) or loader.batch_size is None:
            return True  # without batches a worker's state does not say that it has ended
        # a stream may draw when a worker starts it; the probe sees one worker, and notices that only after its second batch
        return self._at.began is not None and 1 < loader.num_workers >= self._at.drawn

    def _again_from_start(self, digest: str) -> Iterator[Any]:
        """An iterator of an epoch that starts over, after the batches that were drawn of it."""
        at = self._at
        assert at.order is not None
        now = {name: generator.get_state() for name, generator in at.generators.items()}
        with at.extras.kept(), preserved_rng():
            restore_order(at.order, at.generators, at.extras)
            if at.began is not None:
                self._loader.load_state_dict(copied(at.began))
            with self._traced():
                iterator = self._unreported(iter(self._loader))
            replay = Replay(self._loader, at.order)
            with closed_on_error(iterator, self._loader):
                replay.skip(iterator, at.drawn, digest)
        set_generators(at.generators, now)
        at.replay, at.loaded, self.probe_due = replay, None, False
        return iterator

    # --- the data probe -----------------------------------------------------------------------------------------------

    def _lasts_to_compare(self) -> tuple[LastBatch, ...]:
        """The last batch of each worker; empty if they cannot be drawn again."""
        if not self.probe_due or not is_wanted(self._at.policy):
            return ()
        lasts = self._at.draws.lasts
        if not lasts or not self._at.states_before.back(len(lasts)):
            self._warn_uncompared(
                "its state before the last batch is not in the position, because the state is large, or the position older than this release"
            )
            return ()
        return tuple(lasts)

    def _go_back(self) -> None:
        """Give the loader the state that it had before the last batch of each worker."""
        before = self._at.states_before.known[-len(self._at.draws.lasts)]
        self._at.give(before["state"])
        if before["first"] and before["state"] is not None:
            self._end_again(before["state"], before["samplers"], again=True)

    def _warn_uncompared(self, why: str) -> None:
        self.probe_due = False
        warn_uncompared(kind_of(self._loader), why, self._at.policy)

    def _compared(
        self, iterator: Iterator[Any], lasts: tuple[LastBatch, ...], kept: KeptExtras
    ) -> DataPositionMismatch | None:
        """Draw the last batches again and compare them with what was trained on; return what to raise."""
        at, others = self._at, 0
        for number, last in enumerate(lasts):
            if number:
                at.states_before.known[number - len(lasts)] = at.states_before.between()
            held = last.before.get(KEY, {})
            if not at.draws.workers:
                set_streams(last.before)
                at.extras.write(held)
            batch = next(iterator, END)
            drawn: Drawn | None = None
            if isinstance(iterator, Unreported):
                drawn = iterator.drawn if batch is not END else None
            elif batch is not END:
                drawn = Drawn(None, batch_digest(batch), {}, kind=batch_kind(batch))
            if others or (drawn is not None and drawn.digest == last.digest):
                continue
            others += 1
            error = compare_batch(last, drawn, self._at.policy, drew_from=sorted(set(kept.drawn_from()) - set(held)))
            if error is not None:
                return error
        return None

    # --- reports ------------------------------------------------------------------------------------------------------

    @contextmanager
    def _traced(self, *, again: bool = False, resumes: bool = False) -> Iterator[None]:
        """Workers that are started in this block report their batches; without workers, samples are counted.

        Args:
            again: whether the last batches are drawn again first.
            resumes: whether the workers start with the streams of the position.
        """
        loader, draws = self._loader, self._at.draws
        if not draws.workers:
            if self.reader is None:
                yield
                return
            self.counted = Counted(loader.collate_fn, counts=self._counts)
            with replaced(loader, {"collate_fn": self.counted}):
                yield
            return
        trace = WorkerTrace(
            loader.collate_fn,
            loader.worker_init_fn,
            starts=draws.starts(probe=again) if resumes else {},
            afters=draws.afters() if again else None,
            counts=self._counts,
            is_logged=draws.is_logged,
        )
        with replaced(loader, {"collate_fn": trace.collate, "worker_init_fn": trace.start}):
            yield

    def _unreported(self, iterator: Iterator[Any]) -> Iterator[Any]:
        return Unreported(iterator) if self._at.draws.workers else iterator
