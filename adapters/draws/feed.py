"""What every feed needs: the protocol, the batches on their way, the generators of a loader, checks of a position."""

import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

import attrs
import torch

from trainfold.adapters.components.component import ComponentAdapter, Stateful, Undo
from trainfold.adapters.streams.stream_states import check_torch_state
from trainfold.core.errors import DataPositionMismatch, InvalidState, TrainfoldError
from trainfold.core.resume.drift import DriftAction
from trainfold.core.state.state import Opaque

_LOG = logging.getLogger("trainfold")
OTHER = "attach the loader that the state was captured from, or leave dataset out with components="
END = object()
OPENED = object()  # what `Feed.batches` yields first, when the loader's iterator is made
Generators = dict[str, torch.Tensor]


class Feed(Protocol):
    """A loader with a position; a `ComponentAdapter` of the component ``dataset`` too.

    Attributes:
        policy: what the restore that comes next, or came last, does about the differences that only the feed sees.
    """

    policy: Mapping[str, DriftAction]

    @property
    def epoch(self) -> int:
        """Epochs whose samples were all consumed."""

    @property
    def is_inside(self) -> bool:
        """Whether a batch of the epoch was consumed, and the epoch goes on."""

    def attend(self, extra: Mapping[str, ComponentAdapter]) -> None:
        """Look after the components under ``extra`` that batches may be drawn from."""

    def batches(self, *, epochs: int | None, done: Callable[[], bool]) -> Iterator[Any]:
        """Batches from the position on, epoch after epoch, until there were ``epochs`` or ``done()`` says so.

        `OPENED` comes before the first.
        """

    def advance(self, samples: int | None) -> int:
        """Count batches that were handed out as consumed; return how many samples that is."""

    def check_samples(self, samples: int | None) -> None:
        """Raise what `advance` would raise; nothing is counted."""

    def waiting_samples(self) -> int | None:
        """The samples of the batches that were handed out and not consumed; None where only the caller knows."""

    def undelivered(self) -> int:
        """How many batches were handed out and not consumed."""

    def drop(self) -> int:
        """Give up the batches that were handed out and not consumed; return their samples."""

    def rewind(self) -> None:
        """Forget them: they will be handed out again."""

    def leave_epoch(self) -> None:
        """Begin the next epoch, as a plain loop that leaves this one early does."""

    def contract(self) -> dict[str, Any]:
        """What must be the same at a resume."""

    def capture(self) -> Opaque:
        """The position."""

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every reason why this position cannot be taken."""

    def write(self, saved: Any) -> Undo:
        """Take a position."""


@attrs.frozen
class Delivery:
    """A batch that was handed out.

    Attributes:
        samples: how many it has; None where only the caller knows.
        last: whether it was the epoch's last.
        drawn: how it was drawn.
    """

    samples: int | None
    last: bool
    drawn: Any = None


class Deliveries:
    """Batches that were handed out and not consumed yet, in order."""

    def __init__(self) -> None:
        self.waiting: deque[Delivery] = deque()

    @property
    def samples(self) -> int | None:
        """Of all that wait; None where only the caller knows."""
        sizes = [each.samples for each in self.waiting if each.samples is not None]
        return sum(sizes) if len(sizes) == len(self.waiting) else None

    def take(self, samples: int | None) -> list[Delivery]:
        """Take batches of exactly so many samples, or all of them.

        Raises:
            DataPositionMismatch: if no number of waiting batches has so many samples; nothing is taken.
        """
        return [self.waiting.popleft() for _ in range(self.count_of(samples))]

    def count_of(self, samples: int | None) -> int:
        """How many batches have exactly so many samples: all of them for None, or where only the caller knows.

        Raises:
            DataPositionMismatch: if no number of waiting batches has so many samples.
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
    """The torch generators that a loader and its samplers hold, each once."""
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
    """The samplers of a loader that have a state."""
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
    """Every reason why states cannot be written into these generators."""
    if not isinstance(saved, dict) or set(saved) != set(generators):
        names = sorted(saved) if isinstance(saved, dict) else saved
        fix = "give the loader and its samplers generators as they had"
        return [mismatch(where, f"those of {sorted(generators)}", names, fix)]
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
    """Whether a value is a position of this kind of loader, of a known version (G13), with sound counters."""
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


def say_if_old(value: dict[str, Any], *, inside: bool) -> None:
    """Warn of a position that does not say how its batches were drawn (V09, W02); a refusal has come first, where workers need it."""
    if inside and value.get("version") == 1:
        _LOG.warning(
            "the position comes from an older trainfold, which did not write how many loader workers there were, whether their "
            "random streams had moved, and what the last batch was. If the run had num_workers > 0 and drew in its workers, the "
            "rest of this epoch has other samples than it would have had, and other data are not noticed. The cure: resume from "
            "the end of an epoch, where nothing of this matters"
        )


def tell_epoch(loader: Any, epoch: int) -> None:
    """Tell every sampler that wants to know, as a ``DistributedSampler`` does, and the dataset."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    told: list[Any] = []
    for owner in (
        loader,
        getattr(loader, "sampler", None),
        batch_sampler,
        getattr(batch_sampler, "sampler", None),
        getattr(loader, "dataset", None),
    ):
        set_epoch = getattr(owner, "set_epoch", None)
        if callable(set_epoch) and not any(owner is known for known in told):
            told.append(owner)
            if epoch and getattr(owner, "epoch", None) == 0 and getattr(owner, "shuffle", True):
                _LOG.warning(
                    "set_epoch(%d) is called on the %s, here and at the start of each epoch, and so each epoch has an order of its own, as "
                    "torch's documentation asks for. A plain loop that never calls it has the order of epoch 0 each time. To keep that, "
                    "give the loader a sampler without set_epoch. To hear no more of it, call set_epoch(epoch) yourself in the body of live.epochs()",
                    epoch,
                    type(owner).__qualname__,
                )
            set_epoch(epoch)


def length_of(value: Any) -> int | None:
    """``len(value)``, or None where there is none."""
    try:
        return len(value)
    except (TypeError, NotImplementedError):
        return None


def stale() -> InvalidState:
    """The error for an iterator that goes on after another one, or a restore, took its place."""
    return InvalidState(
        "live.batches",
        expected="one iteration at a time",
        found="one that another iteration or a restore has replaced",
        fix="leave this loop and call live.batches() again",
    )


def mismatch(where: str, expected: object, found: object, fix: str) -> DataPositionMismatch:
    """A `DataPositionMismatch`, in one line."""
    return DataPositionMismatch(where, expected=expected, found=found, fix=fix)
