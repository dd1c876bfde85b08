"""`end_together`: lets the epochs of all ranks end with the same batch, where their loaders may have other numbers of batches."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, Protocol, final

import attrs

from trainfold.adapters.batches.feed import Delivery, Draw, Ended, Feed, take_alone
from trainfold.adapters.batches.global_sampler import SharedOrder
from trainfold.adapters.parallel.share import ReadsShare, share_of_model, share_of_rank, shares_of
from trainfold.core.errors import RanksDisagree, TrainfoldError, place
from trainfold.core.layout.world import Collectives

Uneven = Literal["refuse", "drop"]
_LOG: Final = logging.getLogger("trainfold")
_NONE, _LAST, _MORE = range(3)  # what a rank has where it is asked for its next batch
_SHOWN: Final = 8
_FIX: Final = (
    "read a dataset with trainfold.data.GlobalBatchSampler, which leaves nothing out; or give each rank as many batches; or end every epoch with "
    'the shortest share on purpose, with attach(..., uneven="drop")'
)


class HasCounts(Protocol):
    """The counters of a run."""

    @property
    def step(self) -> int:
        """Optimizer steps."""

    @property
    def samples(self) -> int:
        """Samples trained on."""

    def add_samples(self, samples: int) -> None:
        """Count samples that other ranks have trained on."""


def end_together(  # noqa: PLR0913 - keywords
    run: ReadsShare, feeds: Mapping[str, Feed], world: Collectives, uneven: Uneven, counts: HasCounts, *, is_late: bool
) -> None:
    """Compare the loaders of the ranks once, and let those take their batches together that may end at another batch.

    Loaders whose numbers of batches are certain and equal exchange nothing afterwards. Where not every rank has the loaders, as in a
    pipeline of which only the first stage reads data, nothing is exchanged either.

    Args:
        run: says which share of the data this rank reads, so that the samples of all shares are counted.
        feeds: name -> loader, of this rank.
        world: the ranks; all of them call.
        uneven: what happens with batches that not every rank has.
        counts: the counters of the run; not the run itself, which would then wait for a collection.
        is_late: whether the loop has begun without a restore: then samples that were counted on each rank alone are counted over all shares.

    Raises:
        RanksDisagree: on every rank, if the numbers are certain and differ, and such batches are refused; or if the loop has begun, and the
            epoch has ended on some ranks only.
    """
    if world.world_size == 1:
        return
    for feed in feeds.values():
        feed.take = take_alone
    try:
        _compare(run, feeds, world, uneven, counts, is_late=is_late)
    except TrainfoldError as error:
        place(error, step=counts.step)
        raise


def _compare(  # noqa: PLR0913 - as above
    run: ReadsShare, feeds: Mapping[str, Feed], world: Collectives, uneven: Uneven, counts: HasCounts, *, is_late: bool
) -> None:
    mine = {name: (feed.sure_size, feed.is_inside, feed.epoch if is_late else 0) for name, feed in feeds.items()}
    orders = {name: feed.shared_order for name, feed in feeds.items()}
    here = (mine, uneven, share_of_rank(run, world), counts.samples, share_of_model(run, world), orders)
    told = world.gather(here, doing="compare its loaders", is_vote=True)
    if any(list(each) != list(mine) for each, *_ in told):
        return
    declared, shares = [each for _, each, *_ in told], [each for _, _, each, *_ in told]
    counted_alone = is_late and not any(feed.counts_over_ranks for feed in feeds.values())
    if any(each != uneven for each in declared):
        raise RanksDisagree(
            "attach.uneven", expected="the same on every rank", found=by_rank(declared), fix="pass the same everywhere"
        )
    for name, feed in feeds.items():
        _check_order(_loader(name), [each[name] for *_, each in told], [each for *_, each, _ in told])
        rows = [each[name] for each, *_ in told]
        sizes = [None if size is None else size[0] for size, *_ in rows]
        epochs = [epoch for *_, epoch in rows]
        if None not in sizes and uneven == "refuse" and len(set(sizes)) > 1:
            raise RanksDisagree(
                _loader(name),
                expected="as many batches on every rank, because each step needs one from each",
                found=by_rank(sizes),
                fix=_FIX,
            )
        if len(set(epochs)) > 1:
            raise RanksDisagree(
                _loader(name),
                expected="the same epoch on every rank, because each step needs a batch from each",
                found=by_rank([f"epoch {epoch}" for epoch in epochs]),
                fix=f"call manager.restore(live) before the loop, also in a new run: then epochs end together; or {_FIX}",
            )
        if None in sizes or any(row != rows[0] for row in rows):
            feed.counts_over_ranks = True
            feed.take = TakeTogether(world.duplicate(), name, shares, counts, drops=uneven == "drop")
        else:
            feed.count_shares(shares_of(run, world))
    if counted_alone and any(feed.counts_over_ranks for feed in feeds.values()):
        counts.add_samples(sum(told[reader][3] for reader in _readers(shares)) - counts.samples)


def _check_order(where: str, orders: Sequence[SharedOrder | None], models: Sequence[int | None]) -> None:
    """Check that ranks with shares of one order have the same one, that each share is read, and that ranks which hold parts of one model read the same.

    Args:
        where: the loader.
        orders: of each rank.
        models: the share of the data for which each rank trains; None where nothing says it.

    Raises:
        RanksDisagree: naming the ranks.
    """
    found = [each for each in orders if each is not None]
    shares = max((each.shares for each in found), default=1)
    if len(found) < len(orders) or shares == 1:
        return
    if len({(each.order, each.shares) for each in found}) > 1:
        raise RanksDisagree(
            where,
            expected="one order of the samples, of which each rank reads a share",
            found=by_rank([f"{each.order}, {each.shares} shares" for each in found]),
            fix="make the sampler with the same arguments on every rank, but for rank=; otherwise samples are read twice, and others never",
        )
    together = {
        share: {each.share for each, other in zip(found, models, strict=True) if other == share} for share in models
    }
    if any(share is not None and len(those) > 1 for share, those in together.items()):
        raise RanksDisagree(
            where,
            expected="the same samples on all ranks that hold parts of one model, such as those of a tensor-parallel group",
            found=by_rank([f"share {each.share} of {each.shares}" for each in found]),
            fix="pass the data-parallel coordinate to the sampler, and the number of replicas, which is 1 if no mesh has replicas: "
            "GlobalBatchSampler(..., rank=mesh['dp'].get_local_rank(), replicas=mesh['dp'].size())",
        )
    if missing := sorted(set(range(shares)) - {each.share for each in found}):
        raise RanksDisagree(
            where,
            expected=f"each of the {shares} shares of the samples on a rank",
            found=f"{by_rank([f'share {each.share}' for each in found])}; share {', '.join(map(str, missing[:_SHOWN]))} on none",
            fix="pass each rank's own data-parallel coordinate as rank=, or leave rank= and the number of shares out",
        )


def _loader(name: str) -> str:
    return f"loader[{name!r}]" if name else "loader"


@final
class TakeTogether:
    """Takes a batch on every rank, or on none.

    The ranks exchange two numbers for each batch: whether there is one, and its samples, which are counted over all shares of the data. A
    batch that is drawn and not taken was not trained on; whether there are such batches is known before any rank trains on the batch
    with which the epoch ends.

    Args:
        ranks: that read together; in use for nothing else.
        name: of the loader; empty for the only one.
        shares: the share of the data that each rank reads.
        counts: the counters of the run, for the step of an error.
        drops: whether an epoch ends with the shortest share, and the rest is left out.
    """

    def __init__(self, ranks: Collectives, name: str, shares: Sequence[int], counts: HasCounts, *, drops: bool) -> None:
        self._ranks = ranks
        self._counts = counts
        self._readers = _readers(shares)
        self._drops = drops
        self._where = f"live.batches({name!r})" if name else "live.batches"
        self._warned: list[list[int | None]] | None = None

    def __call__(self, draw: Draw) -> tuple[Delivery | Ended, Any]:
        """Take what this rank draws; the last one is marked so on every rank.

        Raises:
            RanksDisagree: on every rank, if some have batches that others have not.
            RankFailed: if another rank failed to draw.
        """
        try:
            return self._taken(draw)
        except TrainfoldError as error:
            place(error, step=self._counts.step)
            raise

    def _taken(self, draw: Draw) -> tuple[Delivery | Ended, Any]:
        found, batch = self._reported(draw)
        mine = _kind(found)
        size = None if isinstance(found, Ended) else found.samples
        rows = self._ranks.start_gather([mine, 0 if size is None else size + 1], doing="draw its next batch").wait()
        each, sizes = [row[0] for row in rows], [rows[reader][1] for reader in self._readers]
        if isinstance(found, Delivery) and all(sizes):
            found = attrs.evolve(found, everywhere=sum(sizes) - len(sizes))
        if all(one == _MORE for one in each):
            return found, batch
        rest = [] if isinstance(found, Ended) or _NONE not in each else [found]
        while mine == _MORE and (self._drops or not rest):
            extra, _ = self._reported(draw)
            mine = _kind(extra)
            if isinstance(extra, Delivery):
                rest.append(extra)
        self._settle(rest)
        if isinstance(found, Ended) or _NONE in each:
            return Ended(tuple(rest)), None
        return attrs.evolve(found, last=True, left=tuple(rest)), batch

    def _reported(self, draw: Draw) -> tuple[Delivery | Ended, Any]:
        try:
            return draw()
        except BaseException as error:
            self._ranks.fail(error)  # or the others would wait for this rank
            raise

    def _settle(self, rest: Sequence[Delivery]) -> None:
        """Compare what the ranks have left of the epoch."""
        sizes = [each.samples for each in rest]
        samples = None if None in sizes else sum(size or 0 for size in sizes)
        told: list[list[int | None]] = self._ranks.gather([len(rest), samples], doing="read the rest of its epoch")
        if not any(batches for batches, _ in told):
            return
        if not self._drops:
            raise RanksDisagree(
                self._where,
                expected="an epoch that ends on every rank with the same batch, because each step needs one from each",
                found=by_rank(["more batches" if batches else "none left" for batches, _ in told]),
                fix=_FIX,
            )
        if self._ranks.rank == 0 and told != self._warned:
            self._warned = told
            _LOG.warning(
                '%s: the epoch ends with the shortest share of the data, because of uneven="drop". Left out: %s. Each epoch in which as '
                "much is left out ends like this without another warning",
                self._where,
                by_rank([_amount(*each) for each in told]),
            )


def _readers(shares: Sequence[int]) -> list[int]:
    """One rank of each share."""
    return [shares.index(share) for share in sorted(set(shares))]


def _kind(found: Delivery | Ended) -> int:
    return _NONE if isinstance(found, Ended) else _LAST if found.last else _MORE


def _amount(batches: int | None, samples: int | None) -> str:
    if not batches:
        return "nothing"
    return f"{batches} batches" + ("" if samples is None else f" ({samples} samples)")


def by_rank(values: Sequence[object]) -> str:
    """Each value with its ranks.

    Examples:
        >>> by_rank([10, 10, 7]), by_rank(["none"] * 20)
        ('10 on ranks 0, 1; 7 on rank 2', 'none on ranks 0, 1, 2, 3, 4, 5, 6, 7 and 12 more')
    """
    ranks: dict[object, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return "; ".join(f"{value} on {_named(those)}" for value, those in ranks.items())


def _named(ranks: Sequence[int]) -> str:
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_SHOWN]))}{more}"
