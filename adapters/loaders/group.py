"""`FeedGroup`: a feed of several loaders, each with its own position; together they are the component ``dataset``."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias, final

from trainfold.adapters.batches.feed import OTHER, Feed, mismatch, position_problems
from trainfold.adapters.components.component import ComponentAdapter, Undo
from trainfold.core.checks import count
from trainfold.core.errors import InvalidArgument, TrainfoldError
from trainfold.core.resume.drift import DriftAction
from trainfold.core.state.state import Opaque

Samples: TypeAlias = int | Mapping[str, int] | None


@final
class FeedGroup:
    """Several loaders by name. Each advances on its own, so a loop may zip them, nest them or take them in turns.

    Args:
        feeds: name -> the feed of a loader, at least one. The epochs of the run are those of the first.
    """

    def __init__(self, feeds: Mapping[str, Feed]) -> None:
        self.feeds = dict(feeds)
        self._first = next(iter(self.feeds.values()))
        self.share = self._first.share

    @property
    def counts_over_ranks(self) -> bool:
        """Whether a loader counts the samples of all ranks."""
        return any(feed.counts_over_ranks for feed in self.feeds.values())

    @property
    def policy(self) -> Mapping[str, DriftAction]:
        """The policy of every feed."""
        return self._first.policy

    @policy.setter
    def policy(self, policy: Mapping[str, DriftAction]) -> None:
        for feed in self.feeds.values():
            feed.policy = policy

    def attend(self, extra: Mapping[str, ComponentAdapter]) -> None:
        """Pass the components under ``extra`` to each feed."""
        for feed in self.feeds.values():
            feed.attend(extra)

    @property
    def epoch(self) -> int:
        """Epochs of the first loader."""
        return self._first.epoch

    def feed(self, name: str | None) -> Feed:
        """The feed of one loader.

        Raises:
            InvalidArgument: if the name is missing, or no loader has it.
        """
        if name in self.feeds:
            return self.feeds[name]
        raise InvalidArgument(
            "live.batches",
            expected=f"the name of a loader, one of {list(self.feeds)}",
            found=repr(name),
            fix=f"call live.batches({next(iter(self.feeds))!r})",
        )

    def batches(self, *, epochs: int | None, done: Callable[[], bool]) -> Iterator[Any]:
        """Raise: several loaders have no common order."""
        del epochs, done
        self.feed(None)
        return iter(())

    def advance(self, samples: Samples) -> int:
        """Count batches handed out as consumed.

        Args:
            samples: loader name -> samples of whole batches; an omitted loader counts nothing. A number must equal
                the samples of all waiting batches, or of one loader's; then all waiting batches count. None counts all.

        Raises:
            DataPositionMismatch: if the samples match no batches; nothing is counted.
            InvalidArgument: for a name that no loader has, or a value that is not a number of samples.
        """
        if isinstance(samples, Mapping):
            return self._advance_each(samples)
        known = {name: feed.waiting_samples() for name, feed in self.feeds.items()}
        sizes = [size for size in known.values() if size is not None]
        fits = samples in (None, 0) or samples == sum(sizes) or samples in sizes
        if not fits and len(sizes) == len(known):
            raise mismatch(
                "advance.samples",
                f"the samples of all batches that were handed out, {sum(sizes)}, or of one loader's: {known}",
                samples,
                f"count them by loader: live.advance(samples={{{next(iter(known))!r}: ...}}); or leave samples= out",
            )
        return sum(feed.advance(samples if samples == 0 else None) for feed in self.feeds.values())

    def _advance_each(self, samples: Mapping[str, int]) -> int:
        for name, value in samples.items():
            self.feed(name)
            count(f"advance.samples[{name!r}]", value, least=0, fix="count up only")
        for name, value in samples.items():
            self.feeds[name].check_samples(value)
        return sum(self.feeds[name].advance(value) for name, value in samples.items())

    def undelivered(self) -> int:
        """How many batches were handed out and not consumed."""
        return sum(feed.undelivered() for feed in self.feeds.values())

    def drop(self) -> int:
        """Discard the batches handed out but not consumed; return their samples."""
        return sum(feed.drop() for feed in self.feeds.values())

    def rewind(self) -> None:
        """Return each feed to its position."""
        for feed in self.feeds.values():
            feed.rewind()

    def leave_epoch(self) -> None:
        """Begin the next epoch of each loader."""
        for feed in self.feeds.values():
            feed.leave_epoch()

    def contract(self) -> dict[str, Any]:
        """What must be the same at a resume, by loader name."""
        return {
            f"loaders.{name}.{key}": value
            for name, feed in self.feeds.items()
            for key, value in feed.contract().items()
        }

    def capture(self) -> Opaque:
        """The positions, by loader name."""
        return Opaque(
            {
                "kind": "group",
                "version": 1,
                "loaders": {name: feed.capture().value for name, feed in self.feeds.items()},
            }
        )

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every reason why these positions cannot be taken."""
        found = position_problems(saved, "group", (), versions=(1,))
        if found:
            return found
        positions = saved.value.get("loaders")
        if not isinstance(positions, dict) or set(positions) != set(self.feeds):
            names = sorted(map(str, positions)) if isinstance(positions, dict) else type(positions).__qualname__
            return [mismatch("state.dataset.loaders", f"those of {sorted(self.feeds)}", names, OTHER)]
        return [problem for name, feed in self.feeds.items() for problem in feed.problems(Opaque(positions[name]))]

    def write(self, saved: Any) -> Undo:
        """Take all positions; if one feed raises, undo those before it."""
        undos: list[Undo] = []

        def undo() -> None:
            for each in reversed(undos):
                each()

        try:
            for name, feed in self.feeds.items():
                undos.append(feed.write(Opaque(saved.value["loaders"][name])))
        except Exception:
            undo()
            raise
        return undo


def total_of(samples: Samples) -> Any:
    """The number of samples of all loaders.

    Examples:
        >>> total_of({"labelled": 3, "unlabelled": 5}), total_of(3)
        (8, 3)
    """
    if not isinstance(samples, Mapping):
        return samples
    return sum(each for each in samples.values() if type(each) is int)


def no_names(samples: Samples) -> int:
    """The number of samples of a run whose loader has no name.

    Raises:
        InvalidArgument: for samples by name.
    """
    if type(samples) is not int and isinstance(samples, Mapping):
        raise InvalidArgument(
            "advance.samples",
            expected="a number, where no loader has a name",
            found=repr(dict(samples))[:80],
            fix="pass the number of samples that the step was trained on, or attach(..., loader={name: loader})",
        )
    return samples or 0
