"""`Flight`: a flight log as a value: the record of each step, and the digests of the state."""

from collections.abc import Iterable, Mapping
from typing import Final, final

import attrs

from trainfold.core.flight.damage import Damage, LeftOut, steps_left_out
from trainfold.core.flight.log_lines import short_name
from trainfold.core.flight.step_record import LogLine, StateDigest, StepRecord

_WHOLE: Final = Damage()


@final
@attrs.frozen
class Flight:
    """What a run did, by its steps.

    Attributes:
        steps: step -> its record, in order.
        states: step -> component -> digest of its bits.
        damage: what of the log could not be read; false without any.
        left_out: what of the log is not known to be the run, and is not in it.

    Examples:
        >>> print(flight_of([StepRecord(1), StepRecord(2), StateDigest(2, "model", bytes(16))]))
        2 steps, 1 to 2; the state of 1 of them
    """

    steps: Mapping[int, StepRecord] = attrs.field(factory=dict)
    states: Mapping[int, Mapping[str, bytes]] = attrs.field(factory=dict)
    damage: Damage = _WHOLE
    left_out: tuple[LeftOut, ...] = ()

    def run_alone(self, saved: Mapping[int, int]) -> "Flight":
        """The same flight without the steps that a resume which recorded nothing may have undone; whole if lines of the log are damaged.

        Args:
            saved: the steps of the run's checkpoints, each with that of the one before; 0 without one.
        """
        found = () if self.damage else tuple(steps_left_out(self.steps.keys(), saved))
        if not found:
            return self

        def is_kept(step: int) -> bool:
            return not any(each.first <= step <= each.last for each in found)

        steps = {step: record for step, record in self.steps.items() if is_kept(step)}
        states = {step: each for step, each in self.states.items() if is_kept(step)}
        return attrs.evolve(self, steps=steps, states=states, left_out=found)

    def until(self, last: int) -> "Flight":
        """The same flight up to a step."""
        steps = {step: record for step, record in self.steps.items() if step <= last}
        return attrs.evolve(
            self, steps=steps, states={step: each for step, each in self.states.items() if step <= last}
        )

    def __str__(self) -> str:
        if not self.steps:
            return "no step"
        states = f"; the state of {len(self.states)} of them" if self.states else ""
        count = f"{len(self.steps)} step{'s' if len(self.steps) > 1 else ''}"
        return f"{count}, {min(self.steps)} to {max(self.steps)}{states}"


def flight_of(lines: Iterable[LogLine], damage: Damage = _WHOLE) -> Flight:
    """The flight that these lines record; of two lines about the same thing the later one counts."""
    steps: dict[int, StepRecord] = {}
    states: dict[int, dict[str, bytes]] = {}
    for line in lines:
        if isinstance(line, StateDigest):
            states.setdefault(line.step, {})[line.component] = line.digest
        else:
            steps[line.step] = line
    return Flight(steps, states, damage)


def state_digests(step: int, fingerprints: Mapping[str, str]) -> tuple[StateDigest, ...]:
    """The lines for the fingerprints of a state, without the streams and the position, which each step has.

    Examples:
        >>> state_digests(2, {"model": "xxh3:" + "0" * 32})[0].component
        'model'
    """
    return tuple(
        StateDigest(step, short_name(name), bytes.fromhex(text.partition(":")[2]))
        for name, text in fingerprints.items()
        if name not in ("rng", "dataset")
    )
