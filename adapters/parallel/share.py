"""`share_of_rank`: which share of the data a rank reads; `PositionOfShare`: the position of a loader, with its share."""

from typing import Any, Protocol, final

import attrs
import torch

from trainfold.adapters.components.component import ComponentAdapter, Undo
from trainfold.adapters.parallel.pipelines.pipeline import PipelineParallelism
from trainfold.adapters.parallel.torch_parallelism import TorchParallelism
from trainfold.core.errors import DataPositionMismatch, InvalidArgument, TrainfoldError
from trainfold.core.layout.parallelism import Coordinates, Parallelism
from trainfold.core.layout.world import Collectives
from trainfold.core.state.state import Opaque


class HasParallelism(Protocol):
    """What says how the ranks train."""

    @property
    def parallelism(self) -> Parallelism:
        """How the ranks train."""


class ReadsShare(HasParallelism, Protocol):
    """A run whose ranks read shares of the data."""

    share: int | None


def share_of_rank(run: ReadsShare, world: Collectives) -> int:
    """The data-parallel coordinate of this rank: of its loader, or of its model; the rank itself if neither says it.

    Ranks that read the same samples, such as those of a tensor-parallel group, have the same one.

    Args:
        run: with a share that its loader knows, or None.
        world: the ranks that load together.
    """
    if run.share is not None:
        return run.share
    share = share_of_model(run, world)
    return world.rank if share is None else share


def share_of_model(run: HasParallelism, world: Collectives) -> int | None:
    """The data-parallel coordinate of this rank's part of the model; None if neither the model nor the caller says it."""
    here = _coordinates(run)
    return None if here is None or here.world.size != world.world_size else here.data.rank


def shares_of(run: HasParallelism, world: Collectives) -> int:
    """The number of shares of the data, if the model or the caller says it; else 1, the own."""
    here = _coordinates(run)
    return 1 if here is None or here.world.size != world.world_size else here.data.size


def known_share(run: HasParallelism) -> tuple[int, int] | None:
    """The share of the data that this rank reads, and their number, for what is saved of it; None if neither the model nor the caller says it."""
    here = _coordinates(run)
    return (
        None
        if here is None or (here.world.size == 1 and _is_a_guess(run.parallelism))
        else (here.data.rank, here.data.size)
    )


@final
@attrs.frozen
class PositionOfShare:
    """The adapter of a loader's position that is kept for a share of the data: every rank that reads the share takes it.

    Args:
        part: the adapter of the position.
        ranks: how the ranks train.
    """

    part: ComponentAdapter
    ranks: HasParallelism

    def capture(self) -> Opaque:
        """The position, and the share if it is known."""
        found: Opaque = self.part.capture()
        known = known_share(self.ranks)
        return found if known is None else Opaque({**found.value, "share": known[0], "shares": known[1]})

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every reason why the position cannot be taken, or the epoch not begun."""
        if not self._joins(saved):
            return self.part.problems(saved)
        begun = [
            f"epoch {now['epoch']} after {now['batches']} batches, to join in epoch {theirs.get('epoch')!r}"
            for theirs, now in self._begins(saved)
            if type(theirs.get("epoch")) is not int or theirs["epoch"] < 0 or now["epoch"] or now["batches"]
        ]
        if begun:
            return [
                DataPositionMismatch(
                    "state.dataset",
                    expected="a loader from which nothing was read, for a share that joins at the start of an epoch",
                    found=begun[0],
                    fix="restore before the first batch",
                )
            ]
        return self.part.problems(self._joined(saved, begins=False))

    def write(self, saved: Any) -> Undo:
        """Take the position; a share that was not saved begins the epoch in which the others are."""
        return self.part.write(self._joined(saved) if self._joins(saved) else saved)

    def _joins(self, saved: Any) -> bool:
        """Whether the position is that of another share; the plan gives it only to a share for which none was saved."""
        value = saved.value if isinstance(saved, Opaque) and isinstance(saved.value, dict) else {}
        is_of_share = "share" in value and any(each.get("kind") == "stateful" for each in _loaders(value).values())
        here = _coordinates(self.ranks) if is_of_share else None
        return here is not None and here.data.size > 1 and here.data.rank != value["share"]

    def _begins(self, saved: Any) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """The saved position, and that of this share, of each loader with a state of its own."""
        mine = _loaders(self.part.capture().value)
        return [
            (each, mine[name])
            for name, each in _loaders(saved.value).items()
            if each.get("kind") == "stateful" and name in mine
        ]

    def _joined(self, saved: Any, *, begins: bool = True) -> Opaque:
        """The start of the epoch in which the others are, or of the first one; a loader that is read over all ranks is where they are."""
        mine = self.part.capture().value

        def joined(theirs: dict[str, Any], now: dict[str, Any]) -> dict[str, Any]:
            if theirs.get("kind") != "stateful":
                return theirs
            return {**now, "epoch": theirs["epoch"]} if begins else now

        if saved.value.get("kind") != "group":
            return Opaque(joined(saved.value, mine))
        loaders = {name: joined(each, mine["loaders"].get(name, {})) for name, each in _loaders(saved.value).items()}
        return Opaque({**saved.value, "loaders": loaders})


def _loaders(position: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Loader -> its position; ``""`` for the only one."""
    if position.get("kind") != "group":
        return {"": position}
    found = position.get("loaders")
    return {name: each for name, each in found.items() if isinstance(each, dict)} if isinstance(found, dict) else {}


def _is_a_guess(ranks: Parallelism) -> bool:
    """Whether one share is only what the modules of one process look like; ranks may be threads of it."""
    is_initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    return isinstance(ranks, TorchParallelism | PipelineParallelism) and not is_initialized


def _coordinates(run: HasParallelism) -> Coordinates | None:
    try:
        return run.parallelism.coordinates
    except InvalidArgument:  # nothing says how the ranks train
        return None
