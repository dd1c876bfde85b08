"""`MapFeed`: an ordinary DataLoader over a map-style dataset, positioned in samples."""

from collections.abc import Callable, Iterator
from typing import Any, final

import torch
from torch.utils.data import DataLoader

from trainfold.adapters.components.component import Undo, copied, kind_of
from trainfold.adapters.components.rng_streams import preserved_rng
from trainfold.adapters.loaders.feed import (
    END,
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
from trainfold.adapters.loaders.sampler_tap import Tap, capture_order, order_problems, unfollowed
from trainfold.core.errors import InvalidArgument, TrainfoldError
from trainfold.core.state import Opaque


@final
class MapFeed:
    """An ordinary ``DataLoader`` over a map-style dataset, positioned in samples.

    The order of an epoch comes from the random streams, the loader's generators and ``set_epoch`` as they were when
    the epoch began, so these are kept; to resume inside an epoch they are put back, the sampler is started, and its
    indices are skipped. No skipped sample is read, and the training's own random streams do not move.

    Args:
        loader: the loader; it is left as it is.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self._loader = loader
        self._counts = loader.batch_sampler is not None
        self._slot = "batch_sampler" if self._counts else "sampler"
        self._generators = generators_of(loader)
        self._tap = Tap(getattr(loader, self._slot), self._generators, counts=self._counts)
        self._deliveries = Deliveries()
        self._epoch = self._samples = self._batches = 0
        self._drawing = 0
        self._orders: dict[int, Opaque] = {}  # epoch that batches are read from -> what its order was drawn from
        self._run = 0
        self._opened = False

    @property
    def epoch(self) -> int:
        """Epochs whose samples were all consumed."""
        return self._epoch

    def undelivered(self) -> int:
        """How many batches were handed out and not consumed."""
        return len(self._deliveries.waiting)

    def rewind(self) -> None:
        """Go back to the position: batches that were handed out and not consumed will be handed out again."""
        self._deliveries.waiting.clear()
        self._drawing = self._epoch

    def advance(self, samples: int | None) -> int:
        """Count batches that were handed out as consumed."""
        taken = self._deliveries.take(samples if self._counts else None)
        for size, last in taken:
            self._samples, self._batches = self._samples + size, self._batches + 1
            if last:
                self._orders.pop(self._epoch, None)
                self._epoch, self._samples, self._batches = self._epoch + 1, 0, 0  # G03
        return sum(size for size, _ in taken)

    def drop(self) -> int:
        """Give up what was handed out and not consumed."""
        return self.advance(None)

    def batches(self, *, epochs: int | None, done: Callable[[], bool]) -> Iterator[Any]:
        """Batches from the position on."""
        self._run += 1
        run = self._run
        self.rewind()
        while (epochs is None or self._drawing < epochs) and not done():
            iterator = self._open()
            tap, last = _present(self._tap.current), False
            while not last and not done():
                batch = next(iterator, END)
                if batch is END:
                    raise InvalidArgument(
                        "attach.loader",
                        expected="at least one batch an epoch",
                        found="none",
                        mend="make the batch size smaller than the dataset, or set drop_last=False",
                    )
                self._orders[self._drawing] = _present(self._tap.started_from)
                size, last = tap.passed.popleft() if tap.passed else (-1, True)
                if size < 0 or (last and next(iterator, END) is not END):
                    raise unfollowed(self._loader, "one that yields more batches than its sampler")
                self._deliveries.waiting.append((size, last))
                yield batch
                if self._run != run:
                    raise stale()
            del iterator
            self._drawing += int(last)

    def _open(self) -> Iterator[Any]:
        """An iterator of the loader at the position; `set_epoch` comes before the seek (G04)."""
        tell_epoch(self._loader, self._drawing)
        inside = self._drawing == self._epoch and self._samples > 0
        first, self._opened = not self._opened, True
        self._tap.start, self._tap.skip = None, 0
        if not inside:
            if first and self._drawing > 0 and self._loader.persistent_workers and self._loader.num_workers > 0:
                # the run that was not interrupted had its workers from epoch 0 and drew no seed for new ones here
                self._tap.start = capture_order(self._generators)
            return self._iterate()
        now = {name: generator.get_state() for name, generator in self._generators.items()}
        self._tap.start, self._tap.skip = self._orders[self._epoch], self._samples
        with preserved_rng():
            iterator = self._iterate()
            _present(self._tap.current).prime()
        if self._loader.num_workers == 0:
            set_generators(self._generators, now)
        return iterator

    def _iterate(self) -> Iterator[Any]:
        own, self._tap.current = vars(self._loader)[self._slot], None
        vars(self._loader)[self._slot] = self._tap  # for the time of this call; a loader's attributes cannot be set
        try:
            iterator = iter(self._loader)
        finally:
            vars(self._loader)[self._slot] = own
        if self._tap.current is None:
            raise unfollowed(self._loader, "one that does not start the sampler")
        return iterator

    def contract(self) -> dict[str, Any]:
        """What must be the same at a resume."""
        loader = self._loader
        return {
            "loader.kind": "torch.utils.data.DataLoader",
            "loader.sampler": kind_of(loader.sampler),
            "loader.drop_last": bool(loader.drop_last),
            "batch_size": loader.batch_size,
            "dataset_size": length_of(loader.dataset),
        }

    def capture(self) -> Opaque:
        """The position: ``epoch``, ``samples`` and ``batches`` in it, and what the order of the epoch was drawn from."""
        order = self._orders[self._epoch].value if self._samples else None
        return Opaque(
            {
                "kind": "map",
                "version": VERSION,
                "epoch": self._epoch,
                "samples": self._samples,
                "batches": self._batches,
                "batch_size": self._loader.batch_size,
                "length": length_of(self._loader.dataset),
                "order": order,
                "generators": {name: generator.get_state() for name, generator in self._generators.items()},
            }
        )

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every way in which a position does not fit this loader (G02, G12, G13)."""
        found = position_problems(saved, "map", ("epoch", "samples", "batches"))
        if found:
            return found
        value, loader = saved.value, self._loader
        length, size, samples, batches = (
            length_of(loader.dataset),
            loader.batch_size,
            value["samples"],
            value["batches"],
        )
        if value.get("length") != length:
            found.append(
                mismatch(
                    "state.dataset.length",
                    f"a position in the {length} samples of this dataset",
                    f"one in {value.get('length')}",
                    "give the dataset that the run was started with; its order depends on its length",
                )
            )
        old = value.get("batch_size")
        if type(old) is int and samples != batches * old:
            found.append(
                mismatch(
                    "state.dataset.samples",
                    f"{batches} batches of {old}, {batches * old} samples",
                    samples,
                    "use another checkpoint: batches and samples disagree",
                )
            )
        if size is not None and samples % size:
            found.append(
                mismatch(
                    "state.dataset.samples",
                    f"a multiple of the batch size {size}",
                    f"{samples} (it was {old})",
                    f"use a batch size that divides {samples}, or resume at the end of an epoch",
                )
            )
        end = self._epoch_samples()
        if end is not None and samples >= end:
            found.append(
                mismatch(
                    "state.dataset.samples",
                    f"a position before the epoch's end at {end}",
                    samples,
                    "the end of an epoch is written epoch + 1, samples 0; give the dataset the run was started with",
                )
            )
        if samples:
            found.extend(order_problems(value.get("order"), self._generators))
        found.extend(generator_problems(self._generators, value.get("generators"), "generators"))
        return found

    def _epoch_samples(self) -> int | None:
        """Samples of an epoch, where that is known without drawing an order."""
        if type(self._loader.batch_sampler) is not torch.utils.data.BatchSampler:
            return None
        total = length_of(self._loader.sampler)
        return total - total % int(self._loader.batch_size or 1) if total and self._loader.drop_last else total

    def write(self, saved: Any) -> Undo:
        """Take a position; the loader's iterator is made when the batches are asked for."""
        before = copied(self.capture())

        def take(value: dict[str, Any]) -> None:
            self._run += 1
            self._epoch, self._samples, self._batches = value["epoch"], value["samples"], value["batches"]
            self._orders = {} if value["order"] is None else {self._epoch: Opaque(value["order"])}
            set_generators(self._generators, value["generators"])
            self.rewind()

        take(copied(saved).value)
        return lambda: take(before.value)


def _present(value: Any) -> Any:
    assert value is not None
    return value
