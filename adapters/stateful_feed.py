"""`StatefulFeed`: a loader that knows its own position, such as torchdata's StatefulDataLoader."""

from collections.abc import Callable, Iterator
from typing import Any, final

from torch.utils.data import DataLoader

from trainfold.adapters.feed import (
    END,
    OTHER,
    VERSION,
    Deliveries,
    generator_problems,
    generators_of,
    length_of,
    mismatch,
    position_problems,
    set_generators,
    stale,
    tell_epoch,
)
from trainfold.adapters.part import Undo, copied, copied_containers, kind_of
from trainfold.adapters.rng import preserved_rng
from trainfold.adapters.tap import capture_order, order_problems, restore_order
from trainfold.core.errors import IncompleteWindow, InvalidArgument, TrainfoldError
from trainfold.core.state import Opaque


@final
class StatefulFeed:
    """A loader that knows its own position, asked for it at the right moment: between two batches.

    Args:
        loader: an iterable with ``state_dict`` and ``load_state_dict``.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._generators = generators_of(loader)
        self._deliveries = Deliveries()
        self._epoch = self._batches = 0
        self._drawing, self._drawn = 0, 0
        self._iterator: Iterator[Any] | None = None
        self._order: Opaque | None = None  # what the epoch's order was drawn from
        self._loaded: Any = None  # a state that the loader has taken and not been iterated with
        self._run = 0

    @property
    def epoch(self) -> int:
        """Epochs whose batches were all consumed."""
        return self._epoch

    def undelivered(self) -> int:
        """How many batches were handed out and not consumed."""
        return len(self._deliveries.waiting)

    def rewind(self) -> None:
        """Such a loader cannot go back.

        Raises:
            IncompleteWindow: if a batch was handed out and not consumed.
        """
        if self._deliveries.waiting:
            raise IncompleteWindow(
                "live.batches",
                expected="that every batch of the earlier iteration was consumed",
                found=f"{len(self._deliveries.waiting)} that were not",
                mend="call live.advance() after the last step, or live.drop_window(), before iterating again",
            )

    def advance(self, samples: int | None) -> int:
        """Count every batch that was handed out as consumed; only the caller knows how many samples they had."""
        for _, last in self._deliveries.take(None):
            self._batches += 1
            if last:
                self._epoch, self._batches = self._epoch + 1, 0
        return samples or 0

    def drop(self) -> int:
        """Give up what was handed out and not consumed."""
        return self.advance(None)

    def batches(self, *, epochs: int | None, done: Callable[[], bool]) -> Iterator[Any]:
        """Batches from where the loader is."""
        self._run += 1
        run = self._run
        self.rewind()
        while (epochs is None or self._drawing < epochs) and not done():
            if self._iterator is None:
                self._iterator = self._open()
            iterator, total = self._iterator, length_of(self._loader)
            last = False
            while not last and not done():
                batch = next(iterator, END)
                if batch is END:
                    self._end_late()
                    break
                self._drawn += 1
                last = self._drawn == total
                if last and next(iterator, END) is not END:  # so that the loader knows of its end, and saves that
                    raise mismatch("attach.loader", f"{total} batches, as len() says", "more", "mend its __len__")
                self._deliveries.waiting.append((0, last))
                if last:
                    self._iterator, self._drawing, self._drawn = None, self._drawing + 1, 0
                yield batch
                if self._run != run:
                    raise stale()

    def _end_late(self) -> None:
        """The end of an epoch of unknown length is known one call after its last batch."""
        if self._drawn == 0:
            raise InvalidArgument(
                "attach.loader", expected="at least one batch an epoch", found="none", mend="check the dataset"
            )
        self._iterator, self._drawing, self._drawn = None, self._drawing + 1, 0
        if self._deliveries.waiting:
            self._deliveries.waiting[-1] = (0, True)
        else:
            self._epoch, self._batches = self._epoch + 1, 0

    def _open(self) -> Iterator[Any]:
        tell_epoch(self._loader, self._drawing)
        loaded, self._loaded = self._loaded, None
        if not isinstance(self._loader, DataLoader):
            return iter(self._loader)
        if loaded is None:
            return self._start()
        now = {name: generator.get_state() for name, generator in self._generators.items()}
        with preserved_rng():  # the run that was not interrupted made this iterator when the epoch began
            if self._order is not None:
                restore_order(self._order, self._generators)  # for samplers whose state the loader cannot keep
            iterator = iter(self._loader)
        ran_ahead = self._loader.num_workers > 0 and getattr(self._loader.sampler, "replacement", False)
        if self._drawn == 0 or not ran_ahead:
            set_generators(self._generators, now)
        if self._drawn > 0:
            return iterator
        if hasattr(self._loader.sampler, "next_yielded"):
            # torchdata 0.11: a StatefulDistributedSampler at the end of an epoch would skip the whole next one
            self._loader.sampler.next_yielded = None
        return self._start()

    def _start(self) -> Iterator[Any]:
        """An iterator at the start of an epoch, which is made now, whether the run was interrupted or not."""
        self._order = capture_order(self._generators)
        return iter(self._loader)

    def contract(self) -> dict[str, Any]:
        """What must be the same at a resume."""
        return {
            "loader.kind": kind_of(self._loader),
            "batch_size": getattr(self._loader, "batch_size", None),
            "dataset_size": length_of(getattr(self._loader, "dataset", None)),
        }

    def capture(self) -> Opaque:
        """The loader's own state, and the epochs counted here."""
        return Opaque(
            {
                "kind": "stateful",
                "version": VERSION,
                "loader": kind_of(self._loader),
                "epoch": self._epoch,
                "batches": self._batches,
                "state": self._state(),
                "order": self._order.value if self._batches and self._order is not None else None,
                "generators": {name: generator.get_state() for name, generator in self._generators.items()},
            }
        )

    def _state(self) -> Any:
        if self._loaded is not None:
            return self._loaded
        untouched = self._iterator is None and self._drawing == 0
        if untouched and isinstance(self._loader, DataLoader):
            return None  # asking would start its workers and draw from the global stream
        return copied_containers(self._loader.state_dict())

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every way in which a position does not fit this loader."""
        found = position_problems(saved, "stateful", ("epoch", "batches"))
        if found:
            return found
        value = saved.value
        if value.get("loader") != kind_of(self._loader):
            found.append(mismatch("state.dataset.loader", kind_of(self._loader), value.get("loader"), OTHER))
        if "state" not in value or (value["state"] is None and (value["epoch"] or value["batches"])):
            found.append(mismatch("state.dataset.state", "the loader's own state", "nothing", OTHER))
        if value.get("order") is not None:
            found.extend(order_problems(value["order"], self._generators))
        found.extend(generator_problems(self._generators, value.get("generators"), "generators"))
        return found

    def write(self, saved: Any) -> Undo:
        """Give the loader its state; it moves when the batches are asked for."""
        before = copied(self.capture()).value

        def take(value: dict[str, Any]) -> None:
            state = value["state"]
            self._loader.load_state_dict({} if state is None else copied(state))
            self._run += 1
            self._epoch, self._batches = value["epoch"], value["batches"]
            self._drawing, self._drawn = self._epoch, self._batches
            self._iterator, self._loaded = None, state
            self._order = None if value["order"] is None else Opaque(value["order"])
            self._deliveries.waiting.clear()
            set_generators(self._generators, value["generators"])

        try:
            take(copied(saved).value)
        except Exception:
            take(before)
            raise
        return lambda: take(before)
