"""`MapPosition`: tracks where the loop is in a map-style dataset, and checks that a saved position fits the loader."""

import logging
import os
from collections.abc import Iterable, Mapping
from typing import Any, Final, final

import torch
from torch.utils.data import DataLoader, DistributedSampler

from trainfold.adapters.batches.draws import Draws, plain
from trainfold.adapters.batches.feed import (
    OTHER,
    Deliveries,
    Delivery,
    generator_problems,
    generators_of,
    length_of,
    mismatch,
    position_problems,
    set_generators,
)
from trainfold.adapters.batches.loader_extras import KEY, LoaderExtras, streams_only
from trainfold.adapters.batches.pull_watch import late_order_problems
from trainfold.adapters.batches.sampler_tap import order_problems
from trainfold.adapters.components.component import ComponentAdapter
from trainfold.adapters.loaders.global_position import shared_of
from trainfold.adapters.streams.rng_streams import moved_stream_problems
from trainfold.adapters.streams.stream_reader import Streams
from trainfold.backends.ranks.launcher import is_first_rank
from trainfold.core.errors import TrainfoldError
from trainfold.core.resume.drift import DriftAction
from trainfold.core.state.state import Opaque

_LOG: Final = logging.getLogger("trainfold")


@final
class MapPosition:
    """Counts of what the loop consumed, and what each epoch's order was drawn from.

    Args:
        loader: over a map-style dataset.
    """

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self.loader = loader
        self.generators = generators_of(loader)
        self.extras = LoaderExtras(loader)
        self.policy: Mapping[str, DriftAction] = {}
        self.draws = Draws(loader.num_workers, persistent=bool(loader.num_workers and loader.persistent_workers))
        self.deliveries = Deliveries()
        self.epoch = self.samples = self.batches = 0
        self.orders: dict[int, Opaque] = {}  # epoch that batches are read from -> what its order was drawn from
        self.worker_seeds: dict[int, Opaque] = {}  # epoch -> what the seed of its workers was drawn from
        self.shared = shared_of(loader)
        sampler = loader.sampler
        self.shares = sampler.num_replicas if type(sampler) is DistributedSampler else 1  # all of them are equally long

    @property
    def is_inside(self) -> bool:
        """Whether a batch of the epoch was consumed, and the epoch is not over."""
        return self.samples > 0 or (self.shared is not None and self.shared.next > 0)

    @property
    def last_read(self) -> str | None:
        """The digest of the last batch consumed here; None if there is none."""
        return self.draws.read

    def take_logged(self) -> list[str]:
        """Digests of the batches consumed since the last call, for a flight log; see `Draws.take_logged`."""
        return self.draws.take_logged()

    def attend(self, extra: Mapping[str, ComponentAdapter]) -> None:
        """Keep track of the components under ``extra`` that batches may be drawn from."""
        self.extras.attend(extra)

    def count(self, taken: Iterable[Delivery]) -> int:
        """Count batches as consumed; return their samples, over all ranks where that is known."""
        counted = 0
        for each in taken:
            size = each.samples or 0
            if self.shared is not None:
                counted += self.shared.consume(size)
            else:
                counted += size * self.shares if each.everywhere is None else each.everywhere
            self.samples, self.batches = self.samples + size, self.batches + 1
            self.draws.consume(each.drawn, size)
            if each.last:
                self.leave_out(each.left)
                self.end_epoch()
        return counted

    def leave_out(self, left: Iterable[Delivery]) -> None:
        """Leave out the rest of an epoch: persistent workers have drawn it, and continue after it."""
        for each in left:
            self.draws.absorb(each.drawn)

    def own_samples(self, samples: int) -> int:
        """This rank's share of samples of whole batches that wait; any other number is this rank's own.

        All waiting batches come first: with two ranks, two shares have as many samples as one batch of all ranks.
        """
        sizes = [each.samples or 0 for each in self.deliveries.waiting]
        if self.shared is None:
            everywhere = [each.over_shares(self.shares) for each in self.deliveries.waiting]
        else:
            everywhere = self.shared.sizes(sizes)
        own, total = sum(sizes), sum(everywhere)
        while sizes and samples not in (own, total):
            own, total = own - sizes.pop(), total - everywhere.pop()
        return own if sizes else samples

    def end_epoch(self) -> None:
        """Move to the start of the next epoch, which is written as ``epoch + 1, samples 0``."""
        self.orders.pop(self.epoch, None)
        self.worker_seeds.pop(self.epoch, None)
        self.draws.end_epoch()
        self.epoch, self.samples, self.batches = self.epoch + 1, 0, 0
        if self.shared is not None:
            self.shared.end_epoch()

    def forget_unread(self) -> None:
        """Forget the orders of epochs that no consumed batch comes from."""
        for epoch in [each for each in self.orders if each > self.epoch or not self.samples]:
            del self.orders[epoch]

    def capture(self, again: Iterable[Streams], late: list[str]) -> Opaque:
        """The position as a value.

        Args:
            again: the streams before each batch that a resume delivers again.
            late: the streams that a sampler drew from in the middle of an epoch.
        """
        order = self.orders[self.epoch] if self.samples else self.orders.get(self.epoch)
        draws, later = self.draws, sorted(each for each in self.orders if each > self.epoch)
        born = draws.born if draws.persistent else self.worker_seeds.get(self.epoch)
        return Opaque(
            {
                "kind": "map",
                "version": 2,  # 1 has no draws
                "epoch": self.epoch,
                "samples": self.samples,
                "batches": self.batches,
                "batch_size": self.loader.batch_size,
                "length": length_of(self.loader.dataset),
                "order": None if order is None else order.value,
                "later": [self.orders[each].value for each in later],
                "later_born": [self.worker_seeds[each].value for each in later if each in self.worker_seeds],
                "again": [
                    plain(each) if draws.moved else {KEY: each[KEY]}
                    for each in again
                    if (draws.moved or KEY in each) and not draws.workers
                ],
                "draws": draws.capture(born if order is not None or draws.persistent else None),
                "late": late if self.samples else [],
                "generators": {name: generator.get_state() for name, generator in self.generators.items()},
                **({} if self.shared is None else {"shared": self.shared.capture()}),
            }
        )

    def take(self, value: dict[str, Any]) -> None:
        """Move to a captured position; check it with `problems` first."""
        self.deliveries.waiting.clear()
        self.epoch, self.samples, self.batches = value["epoch"], value["samples"], value["batches"]
        if self.shared is not None and (shared := value.get("shared")) is not None:
            ends = self.shared.take(shared)
            if not self.shared.is_own(shared):
                self._take_over(ends=ends)
                return
        self.draws.take(value.get("draws"))
        if self.samples and self.loader.batch_size != value.get("batch_size"):
            self.batches = self.samples // (self.loader.batch_size or 1)
            self.draws.lasts.clear()  # the same samples now come in other batches
        orders = [value["order"], *value.get("later", [])]
        self.orders = {self.epoch + i: Opaque(order) for i, order in enumerate(orders) if order is not None}
        seeds = value.get("later_born", [])
        self.worker_seeds = {self.epoch + 1 + i: Opaque(born) for i, born in enumerate(seeds)}
        if self.draws.born is not None and not self.draws.persistent:
            self.worker_seeds[self.epoch], self.draws.born = self.draws.born, None
        set_generators(self.generators, value["generators"])

    def _take_over(self, *, ends: bool) -> None:
        """Continue from a position that was saved with other shares: no rank has read what this one reads next.

        Args:
            ends: whether this world leaves out what is left of the epoch.
        """
        shared = self.shared
        assert shared is not None
        self.samples = self.batches = 0
        self.draws.reset()
        self.orders, self.worker_seeds = {}, {}
        shared.derive(self.generators, self.epoch)
        note = _LOG.warning if shared.sampler.rank == 0 and is_first_rank(os.environ) else _LOG.debug  # once a run
        note(
            "the data continue at sample %d of epoch %d with other shares, %d of them, in batches of %d over all ranks: each sample of the epoch is "
            "read once, and the last batch is not compared; random numbers that workers or the loader's generator draw are new",
            shared.next,
            self.epoch,
            shared.sampler.replicas,
            shared.sampler.batch_size,
        )
        if ends:
            self.end_epoch()

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every way in which a saved position does not fit this loader."""
        found = position_problems(saved, "map", ("epoch", "samples", "batches"), versions=(1, 2))
        if found:
            return found
        value = saved.value
        shared = value.get("shared")
        if self.shared is not None and shared is not None:
            found.extend(self.shared.problems(shared))
            if found or not self.shared.is_own(shared):
                return found + self._length_problems(value)  # nothing else is taken from another rank's share
        elif (self.shared is None) != (shared is None) and (
            value["samples"] or (shared is not None and shared.get("next"))
        ):
            found.append(_other_sampler(self.shared is not None))
        found.extend(self._count_problems(value))
        if value["samples"]:
            found.extend(late_order_problems(value.get("late")))
        if value["samples"] or value.get("order") is not None:
            found.extend(order_problems(value.get("order"), self.generators, self.extras))
        found.extend(self._ahead_problems(value))
        inside = bool(value["samples"] or value.get("order"))
        draws = value.get("draws") if value["version"] > 1 else None
        if value["version"] > 1 and draws is None:
            found.append(mismatch("state.dataset.draws", "a record of how the batches were drawn", "none", OTHER))
        found.extend(self.draws.problems(draws, self.generators, self.policy, inside=inside, extras=self.extras))
        found.extend(generator_problems(self.generators, value.get("generators"), "state.dataset.generators"))
        return found

    def _count_problems(self, value: dict[str, Any]) -> list[TrainfoldError]:
        """Every reason why the counts do not fit the dataset's length and the loader's batches."""
        found = self._length_problems(value)
        loader, samples, batches, size = self.loader, value["samples"], value["batches"], self.loader.batch_size
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
                    "pass the dataset that the run was started with; the end of an epoch is written epoch + 1, samples 0",
                )
            )
        draws = value.get("draws")
        if samples and size != old and loader.num_workers and isinstance(draws, dict) and draws.get("moved") is True:
            found.append(
                mismatch(
                    "state.dataset.draws.batch_size",
                    f"batches of {old}, because the random streams of {loader.num_workers} workers have moved",
                    f"batches of {size}",
                    "use the batch size that the position was saved with, or resume at the end of an epoch",
                )
            )
        return found

    def _length_problems(self, value: dict[str, Any]) -> list[TrainfoldError]:
        length = length_of(self.loader.dataset)
        if value.get("length") == length:
            return []
        return [
            mismatch(
                "state.dataset.length",
                f"a position in the {length} samples of this dataset",
                f"one in {value.get('length')}",
                "pass the dataset that the run was started with; the order of the samples depends on its length",
            )
        ]

    def _ahead_problems(self, value: dict[str, Any]) -> list[TrainfoldError]:
        """Every reason why the record of batches drawn ahead cannot be used."""
        found: list[TrainfoldError] = []
        for name in ("later", "later_born", "again"):
            if not isinstance(value.get(name, []), list):
                found.append(mismatch(f"state.dataset.{name}", "a list", repr(value[name])[:80], OTHER))
            elif name == "again":
                for number, streams in enumerate(value.get(name, [])):
                    where = f"state.dataset.again[{number}]"
                    found.extend(moved_stream_problems(streams_only(streams), path=where))
                    if isinstance(streams, dict):
                        found.extend(self.extras.problems(streams.get(KEY, {}), where=f"{where}.{KEY}"))
            else:
                for order in value.get(name, []):
                    found.extend(order_problems(order, self.generators, self.extras))
        return found

    def _epoch_samples(self) -> int | None:
        """Samples of an epoch; None if that is not known before an order is drawn."""
        if type(self.loader.batch_sampler) is not torch.utils.data.BatchSampler:
            return None
        total = length_of(self.loader.sampler)
        return total - total % int(self.loader.batch_size or 1) if total and self.loader.drop_last else total


def _other_sampler(is_shared: bool) -> TrainfoldError:  # noqa: FBT001 - one of two
    """The error for a position of another kind of sampler, inside an epoch."""
    kinds = ("a position in samples over all ranks, of a GlobalBatchSampler", "a position in one rank's share")
    expected, found = kinds if is_shared else kinds[::-1]
    return mismatch(
        "state.dataset.shared",
        expected,
        found,
        "use the sampler that the position was saved with, or resume at the end of an epoch",
    )
