"""`GlobalPosition`: the position of a loop in samples over all ranks, for a loader with a `GlobalBatchSampler`."""

from collections.abc import Iterable
from typing import Any, Final, final

import torch

from trainfold.adapters.batches.feed import OTHER, mismatch
from trainfold.adapters.batches.global_sampler import GlobalBatchSampler
from trainfold.core.errors import TrainfoldError
from trainfold.core.rng import fold_in, make_key, seed_of

_COUNTS: Final = ("seed", "length", "batch_size", "rank", "replicas", "start", "next")
_FLAGS: Final = ("shuffle", "drop_last")


@final
class GlobalPosition:
    """Where all ranks together are in an epoch.

    Args:
        sampler: of the loader.

    Attributes:
        start: the position at which this world took the epoch over; 0 if it has read all of it.
        next: the position after the last consumed batch.
    """

    def __init__(self, sampler: GlobalBatchSampler) -> None:
        self.sampler = sampler
        self.start = self.next = 0

    def sizes(self, samples: Iterable[int]) -> list[int]:
        """The size of each of the next batches, over all ranks.

        Args:
            samples: the size of this rank's share of each.

        Raises:
            DataPositionMismatch: if a share has another size, so that this rank has not read what the others expect.
        """
        batches, at, found = self.sampler.batches, self.next, list[int]()
        for size in samples:
            positions = batches.positions(at) or batches.positions(0)  # drawn ahead, of the next epoch
            share = len(batches.share(positions, self.sampler.rank))
            if size != share:
                raise mismatch("advance", f"a share of {share} samples, of the {len(positions)} from sample {at} on", size,
                               "iterate over live.batches(), and leave the sampler as it is")  # fmt: skip
            found.append(len(positions))
            at = positions.stop
        return found

    def consume(self, samples: int) -> int:
        """Count one batch; return its samples over all ranks."""
        (size,) = self.sizes([samples])
        self.next += size
        return size

    def end_epoch(self) -> None:
        """Move to the start of the next epoch."""
        self.start = self.next = 0

    def capture(self) -> dict[str, Any]:
        """The position, the same on every rank but for ``rank``."""
        sampler = self.sampler
        return {
            "seed": sampler.seed,
            "shuffle": sampler.shuffle,
            "length": sampler.batches.length,
            "batch_size": sampler.batch_size,
            "drop_last": sampler.drop_last,
            "rank": sampler.rank,
            "replicas": sampler.replicas,
            "start": self.start,
            "next": self.next,
        }

    def is_own(self, saved: Any) -> bool:
        """Whether a position was saved with this rank's share of the same batches, so that everything of this rank fits."""
        mine = self.capture()
        return all(saved[name] == mine[name] for name in mine if name not in ("start", "next"))

    def take(self, saved: Any) -> bool:
        """Move to a position; return whether its epoch is over for this world, because only samples are left that it leaves out."""
        self.next = saved["next"]
        self.start = saved["start"] if self.is_own(saved) else self.next
        return not self.is_own(saved) and self.next > 0 and not self.sampler.batches.count(self.next)

    def derive(self, generators: dict[str, torch.Generator], epoch: int) -> None:
        """Seed the generators of a loader for a share that no rank had before, as a function of the position and the share."""
        key = fold_in(make_key(self.sampler.seed), "epoch", epoch, "sample", self.next, "rank", self.sampler.rank)
        for name, generator in generators.items():
            generator.manual_seed(seed_of(fold_in(key, name)))

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every reason why a position cannot be taken by this share."""
        where, batches = "state.dataset.shared", self.sampler.batches
        kinds = {**dict.fromkeys(_COUNTS, int), **dict.fromkeys(_FLAGS, bool)}
        if not isinstance(saved, dict) or any(type(saved.get(name)) is not kind for name, kind in kinds.items()):
            return [mismatch(where, "a position in samples over all ranks", repr(saved)[:80], OTHER)]
        if not 0 <= saved["start"] <= saved["next"] < batches.length:
            return [
                mismatch(f"{where}.next", f"a position below {batches.length}", saved["next"], "use another checkpoint")
            ]
        if saved["next"] == 0:
            return []
        found: list[TrainfoldError] = []
        for name, mine in (("seed", self.sampler.seed), ("shuffle", self.sampler.shuffle)):
            if saved[name] != mine:
                fix = f"make the sampler with {name}={saved[name]}, or resume at the end of an epoch"
                found.append(mismatch(f"{where}.{name}", f"the order of this sampler, {name}={mine}", saved[name], fix))
        left = 0 if self.is_own(saved) else batches.without_share(saved["next"])
        if left:
            expected = f"a sample for each of the {batches.replicas} replicas in the next batch"
            fix = (
                f"resume on at most {left} replicas, or at the end of an epoch; or leave these samples out on purpose, with "
                "GlobalBatchSampler(..., drop_last=True)"
            )
            found.append(mismatch(where, expected, f"{left} samples left in the epoch", fix))
        return found


def shared_of(loader: Any) -> GlobalPosition | None:
    """The position over all ranks of a loader with a `GlobalBatchSampler`; None for any other loader."""
    sampler = getattr(loader, "batch_sampler", None)
    return GlobalPosition(sampler) if isinstance(sampler, GlobalBatchSampler) else None
