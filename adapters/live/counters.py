"""`Counters`: the component ``trainer``: steps, epochs, samples and tokens of a live run."""

from typing import Any, final

import attrs

from trainfold.adapters.batches.feed import mismatch
from trainfold.adapters.components.component import Undo, nothing
from trainfold.adapters.live.loop.loop_data import LoopData
from trainfold.adapters.loaders.group import Samples, no_names, total_of
from trainfold.core.errors import InvalidArgument, InvalidState, TrainfoldError
from trainfold.core.state.state import Progress, make_progress


@final
class Counters:
    """Counts what was trained on.

    Args:
        data: where the loop is in its data; None without a loader.
    """

    def __init__(self, data: LoopData | None) -> None:
        self._data = data
        self._feed = None if data is None else data.feed
        self._counted = Progress()
        self._taken = 0  # batches handed out since the last optimizer step

    @property
    def progress(self) -> Progress:
        """The counters, as of the last `advance`."""
        if self._feed is None:
            return self._counted
        now, epoch = self._counted, self._feed.epoch  # at each step: `attrs.evolve` costs ten times as much
        return now if now.epoch == epoch else Progress(now.step, epoch, now.samples, now.tokens)

    @property
    def step(self) -> int:
        """Optimizer steps."""
        return self._counted.step

    @property
    def samples(self) -> int:
        """Samples trained on."""
        return self._counted.samples

    def add_samples(self, samples: int) -> None:
        """Count samples that other ranks have trained on."""
        self._counted = attrs.evolve(self._counted, samples=self._counted.samples + samples)

    def advance(self, samples: Samples, *, tokens: int, steps: int, is_scheduled: bool = False) -> int:
        """Count steps, and the batches that they were trained on; return the samples that were counted.

        Args:
            samples: as for `Live.advance`; checked with `check_increments`.
            tokens: as for `Live.advance`.
            steps: as for `Live.advance`.
            is_scheduled: whether a schedule has said how many batches the step takes.

        Raises:
            DataPositionMismatch: if the samples are not those of whole batches, or a loader is attached and none of its
                batches were handed out since the last step.
        """
        total = samples if samples is None or type(samples) is int else total_of(samples)
        taken = self._taken + (0 if self._feed is None else self._feed.undelivered())
        if self._feed is not None and steps and total != 0 and not taken:
            raise mismatch(
                "advance",
                "a step on batches from live.batches(), where a loader is attached",
                "none handed out since the last step",
                "iterate over live.batches() and not over the loader itself; or pass samples=0, for a step on no new data",
            )
        counted = (
            no_names(samples)
            if self._data is None
            else self._data.advance(samples, steps=steps, is_scheduled=is_scheduled)
        )
        self._taken = 0 if steps else taken
        if total is not None and not (self._feed is not None and self._feed.counts_over_ranks):
            counted = total
        now, epoch = self._counted, 0 if self._feed is None else self._feed.epoch
        self._counted = Progress(now.step + steps, epoch, now.samples + counted, now.tokens + tokens)
        return counted

    def drop(self) -> None:
        """Count the samples handed out but not trained on as consumed."""
        dropped = 0 if self._data is None else self._data.drop()
        self._taken = 0
        self._counted = attrs.evolve(self._counted, samples=self._counted.samples + dropped)

    def restored(self) -> None:
        """Note that a state was restored: no batch was handed out since."""
        self._taken = 0

    # --- the component ------------------------------------------------------------------------------------------------

    def capture(self) -> Progress:
        """The counters."""
        return self.progress

    def problems(self, saved: Any) -> list[TrainfoldError]:
        """Every reason why a value is not counters."""
        try:
            make_progress(step=saved.step, epoch=saved.epoch, samples=saved.samples, tokens=saved.tokens)
        except InvalidState as error:
            return [error]
        except AttributeError:
            return [InvalidState("trainer", expected="counters", found=repr(saved)[:80], fix="use another checkpoint")]
        return []

    may_refuse = False

    def write(self, saved: Any) -> Undo:
        """Set them."""
        self._counted = saved
        return nothing


def check_increments(samples: Samples, tokens: int | None, steps: int) -> None:
    """Refuse numbers that cannot be counted.

    Raises:
        InvalidArgument: naming the argument.
    """
    total = samples if samples is None or type(samples) is int else total_of(samples)
    for name, value in (("samples", total or 0), ("tokens", tokens or 0), ("steps", steps)):
        if type(value) is not int or value < 0:
            raise InvalidArgument(f"advance.{name}", expected="an int >= 0", found=repr(value), fix="count up only")
