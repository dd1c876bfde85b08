"""`Feed`: the protocol of the source that a loop reads batches from: a loader with a position.

Also what every feed needs: the batches in flight, the generators of a loader, and checks of a position. The feeds are in `loaders`.
"""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, TypeAlias

import attrs
import torch

from trainfold.adapters.batches.global_sampler import GlobalBatchSampler, SharedOrder
from trainfold.adapters.components.component import ComponentAdapter, Stateful, Undo
from trainfold.adapters.streams.stream_states import check_torch_state
from trainfold.backends.ranks.launcher import log_for_all
from trainfold.core.errors import DataPositionMismatch, InvalidArgument, InvalidState, TrainfoldError
from trainfold.core.resume.drift import DriftAction
from trainfold.core.state.state import Opaque

_LOG = logging.getLogger("trainfold")
OTHER = "attach the loader that the state was captured from, or leave dataset out with components="
END = object()
OPENED = object()  # the first item of `Feed.batches`: the loader's iterator has been made
Generators = dict[str, torch.Tensor]


class Position(Protocol):
    """Where the loop is in a loader.

    Attributes:
        policy: what the next or the latest restore does about differences that only the feed sees.
    """

    policy: Mapping[str, DriftAction]

    @property
    def epoch(self) -> int:
        """The number of epochs whose samples were all consumed."""

    @property
    def is_inside(self) -> bool:
        """Whether a batch of the epoch was consumed and the epoch has not ended."""

    @property
    def last_read(self) -> str | None:
        """The digest of the last batch consumed here; None if there is none."""

    def take_logged(self) -> list[str]:
        """Digests of the batches consumed since the last call, for a flight log; the next ones are digested for it from here on."""

    def attend(self, extra: Mapping[str, ComponentAdapter]) -> None:
        """Follow the components under ``extra`` that batches may be drawn from."""


class Feed(Position, Protocol):
    """A loader with a position; also a `ComponentAdapter`, of the component ``dataset``.

    Attributes:
        counts_over_ranks: whether `advance` returns the samples of all ranks, and not of this one alone.
        share: which share of the data it reads; None if only the caller knows.
        take: takes each batch as it is drawn; the ranks may take theirs together, and end their epochs together.
    """

    counts_over_ranks: bool
    share: int | None
    take: "Take"

    @property
    def sure_size(self) -> tuple[int, int] | None:
        """The batches and the samples of each epoch; None if they are not certain."""

    @property
    def shared_order(self) -> SharedOrder | None:
        """The order of samples that its sampler shares with those of other ranks; None without one."""

    def count_shares(self, shares: int) -> None:
        """Count the samples of as many shares of the data, which are equally long, unless a sampler has them counted already."""

    def batches(self, *, epochs: int | None, done: Callable[[], bool]) -> Iterator[Any]:
        """Yield batches from the position on, epoch after epoch, until ``epochs`` are over or ``done()`` is true.

        `OPENED` comes before the first batch.
        """

    def advance(self, samples: int | None) -> int:
        """Count delivered batches as consumed; return their number of samples."""

    def check_samples(self, samples: int | None) -> None:
        """Raise what `advance` would raise, without counting anything."""

    def waiting_samples(self) -> int | None:
        """The samples of the batches delivered but not consumed; None if only the caller knows."""

    def undelivered(self) -> int:
        """The number of batches delivered but not consumed."""

    def drop(self) -> int:
        """Drop the batches delivered but not consumed; return their number of samples."""

    def rewind(self) -> None:
        """Take these batches back: they will be delivered again."""

    def leave_epoch(self) -> None:
        """Start the next epoch, as a plain loop does that leaves this one early."""

    def contract(self) -> dict[str, Any]:
        """The settings that must be the same at a resume."""

    def capture(self) -> Opaque:
        """The position."""

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """List every reason why this position cannot be written."""

    def write(self, saved: Any) -> Undo:
        """Move the loader to a position."""


class AtPosition:
    """The part of a feed that its position answers.

    Args:
        position: of the loader, or the feed of the loader that is read.
    """

    counts_over_ranks = False
    share: int | None = None

    def __init__(self, position: Position) -> None:
        self._position = position
        self.take: Take = take_alone

    @property
    def policy(self) -> Mapping[str, DriftAction]:
        """What the last or the next restore does about differences that only a feed sees."""
        return self._position.policy

    @policy.setter
    def policy(self, policy: Mapping[str, DriftAction]) -> None:
        self._position.policy = policy

    @property
    def epoch(self) -> int:
        """Epochs whose samples were all consumed."""
        return self._position.epoch

    @property
    def is_inside(self) -> bool:
        """Whether a batch of the epoch was consumed, and the epoch is not over."""
        return self._position.is_inside

    @property
    def last_read(self) -> str | None:
        """The digest of the last batch consumed here; None if there is none."""
        return self._position.last_read

    def take_logged(self) -> list[str]:
        """Digests of the batches consumed since the last call, for a flight log."""
        return self._position.take_logged()

    def attend(self, extra: Mapping[str, ComponentAdapter]) -> None:
        """Keep track of the components under ``extra`` that batches may be drawn from."""
        self._position.attend(extra)


@attrs.frozen
class Delivery:
    """A batch delivered to the loop.

    Attributes:
        samples: its number of samples; None if only the caller knows.
        last: whether it was the last of its epoch.
        drawn: how it was drawn.
        left: the batches of this epoch that came after it, if the ranks end the epoch with it and leave them out.
        everywhere: the samples of the batches that all shares of the data took with it; None if only this one is known.
    """

    samples: int | None
    last: bool
    drawn: Any = None
    left: tuple["Delivery", ...] = ()
    everywhere: int | None = None

    def over_shares(self, shares: int) -> int:
        """The samples over all shares of the data, of which each has as many unless more is known."""
        return (self.samples or 0) * shares if self.everywhere is None else self.everywhere


@attrs.frozen
class Ended:
    """The end of an epoch, found where a batch was asked for.

    Attributes:
        left: the batches that this rank still had, if the ranks end the epoch together and leave them out.
    """

    left: tuple[Delivery, ...] = ()


Draw: TypeAlias = Callable[[], tuple[Delivery | Ended, Any]]
Take: TypeAlias = Callable[[Draw], tuple[Delivery | Ended, Any]]


def take_alone(draw: Draw) -> tuple[Delivery | Ended, Any]:
    """Take a batch without asking another rank."""
    return draw()


class Deliveries:
    """The batches delivered but not consumed yet, in order."""

    def __init__(self) -> None:
        self.waiting: deque[Delivery] = deque()

    @property
    def samples(self) -> int | None:
        """The number of samples in all waiting batches; None if only the caller knows."""
        sizes = [each.samples for each in self.waiting if each.samples is not None]
        return sum(sizes) if len(sizes) == len(self.waiting) else None

    def take(self, samples: int | None) -> list[Delivery]:
        """Remove the first batches with exactly this many samples, or all batches for None.

        Raises:
            DataPositionMismatch: if no number of waiting batches has exactly this many samples; nothing is removed.
        """
        return [self.waiting.popleft() for _ in range(self.count_of(samples))]

    def count_of(self, samples: int | None) -> int:
        """How many of the first batches have exactly this many samples: all of them for None, or if only the caller knows.

        Raises:
            DataPositionMismatch: if no number of waiting batches has exactly this many samples.
        """
        if len(self.waiting) == 1 and samples in (None, self.waiting[0].samples):
            return 1  # nearly always
        if samples is None or (samples and self.samples is None):
            return len(self.waiting)
        count, total = 0, 0
        while count < len(self.waiting) and total < samples:
            total += self.waiting[count].samples or 0
            count += 1
        if total != samples:
            raise mismatch(
                "advance.samples",
                f"the samples of whole batches from live.batches(); {[each.samples for each in self.waiting]} are waiting",
                samples,
                "iterate over live.batches(), and count every sample of each batch, or leave samples= out",
            )
        return count


def generators_of(loader: Any) -> dict[str, torch.Generator]:
    """The torch generators of a loader and its samplers, each once."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = {
        "loader": loader,
        "sampler": getattr(loader, "sampler", None),
        "batch_sampler": batch_sampler,
        "batch_sampler.sampler": getattr(batch_sampler, "sampler", None),
    }
    found: dict[str, torch.Generator] = {}
    for name, owner in owners.items():
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is known for known in found.values()):
            found[name] = generator
    return found


def samplers_of(loader: Any) -> dict[str, Stateful]:
    """A loader's samplers that have a state."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    owners = {
        "sampler": getattr(loader, "sampler", None),
        "batch_sampler": batch_sampler,
        "batch_sampler.sampler": getattr(batch_sampler, "sampler", None),
    }
    found: dict[str, Stateful] = {}
    for name, owner in owners.items():
        if isinstance(owner, Stateful) and not any(owner is known for known in found.values()):
            found[name] = owner
    return found


def set_generators(generators: dict[str, torch.Generator], states: Generators) -> None:
    """Write captured states into generators, by name."""
    for name, generator in generators.items():
        generator.set_state(states[name].cpu())


def generator_problems(generators: dict[str, torch.Generator], saved: Any, where: str) -> list[TrainfoldError]:
    """List every reason why states cannot be written into these generators."""
    if not isinstance(saved, dict) or set(saved) != set(generators):
        names = sorted(saved) if isinstance(saved, dict) else saved
        fix = "give the loader and its samplers the same generators as in the saved run"
        return [mismatch(where, f"the states of {sorted(generators)}", names, fix)]
    found: list[TrainfoldError] = []
    for name, generator in generators.items():
        try:
            check_torch_state(saved[name], generator.device)
        except (ValueError, RuntimeError) as error:
            found.append(mismatch(f"{where}[{name!r}]", "a generator's state", str(error), OTHER))
    return found


def position_problems(
    saved: Any, kind: str, counters: tuple[str, ...], *, versions: tuple[int, ...]
) -> list[TrainfoldError]:
    """List the faults of a position: its kind of loader, its version, its counters."""
    value = saved.value if isinstance(saved, Opaque) else None
    if not isinstance(value, dict) or value.get("kind") != kind:
        held = value.get("kind") if isinstance(value, dict) else type(saved).__qualname__
        return [mismatch("state.dataset", f"the position of a {kind!r} loader", held, OTHER)]
    if value.get("version") not in versions or isinstance(value["version"], bool):
        fix = "resume with the trainfold that wrote it"
        return [mismatch("state.dataset.version", f"one of {versions}", value.get("version"), fix)]
    return [
        mismatch(f"state.dataset.{name}", "an int >= 0", repr(value.get(name)), "use another checkpoint")
        for name in counters
        if type(value.get(name)) is not int or value[name] < 0
    ]


def warn_if_old(value: dict[str, Any], *, inside: bool) -> None:
    """Warn about a position without a record of how its batches were drawn. Where workers need it, a refusal has come first."""
    if inside and value.get("version") == 1:
        log_for_all(
            "the position comes from an older trainfold, which did not record the number of loader workers, whether their "
            "random streams had moved, and the last batch. If the run had num_workers > 0 and drew random numbers in its workers, the "
            "rest of this epoch has other samples than it would have had, and a change of the data goes unnoticed. To avoid both, resume "
            "from the end of an epoch"
        )


def set_epochs(loader: Any, epoch: int) -> None:
    """Call ``set_epoch`` of the loader, its samplers and its dataset, each once, if they have it, as a ``DistributedSampler`` does."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    called: list[Any] = []
    for owner in (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    ):
        set_epoch = getattr(owner, "set_epoch", None)
        if callable(set_epoch) and not any(owner is known for known in called):
            called.append(owner)
            # our own is documented to have another order in each epoch
            of_torch = not isinstance(owner, GlobalBatchSampler)
            if of_torch and epoch and getattr(owner, "epoch", None) == 0 and getattr(owner, "shuffle", True):
                log_for_all(
                    "set_epoch(%d) is called on the %s, here and at the start of each epoch, so each epoch has a different order, as "
                    "torch's documentation recommends. A plain loop that never calls it repeats the order of epoch 0. To keep that order, "
                    "give the loader a sampler without set_epoch. To silence this warning, call set_epoch(epoch) in the body of live.epochs()",
                    epoch,
                    type(owner).__qualname__,
                )
            set_epoch(epoch)


def length_of(value: Any) -> int | None:
    """``len(value)``, or None if it has no length."""
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def stale() -> InvalidState:
    """The error for an iterator used after another one, or a restore, has replaced it."""
    return InvalidState(
        "live.batches",
        expected="one iteration at a time",
        found="one that another iteration or a restore has replaced",
        fix="leave this loop and call live.batches() again",
    )


def no_batch(fix: str) -> InvalidArgument:
    """The error for an epoch without a batch."""
    return InvalidArgument("attach.loader", expected="at least one batch an epoch", found="none", fix=fix)


def mismatch(where: str, expected: object, found: object, fix: str) -> DataPositionMismatch:
    """Make a `DataPositionMismatch`, in one line."""
    return DataPositionMismatch(where, expected=expected, found=found, fix=fix)
