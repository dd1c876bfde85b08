"""`Rounds`: who takes part in the current round, with which unit, and when it is over. It decides; the server acts."""

from collections.abc import Mapping
from typing import Any, final

import attrs

from trainfold.core.diloco.work_units import WorkUnit, WorkUnits, as_text, from_text


@final
@attrs.frozen
class Rounds:
    """The rounds of a run, as a value.

    Law: however workers join, end, come late or claim, and whatever checkpoint the server goes on from, each unit is counted once in the rounds that
    this value descends from.

    Attributes:
        units: what is left to hand out.
        mark: names the weights of this round; a worker that has trained from others cannot contribute. Another one for each round, and never
            the same for two histories.
        members: the workers that are waited for.
        taken: worker -> the unit that it trains on.
        sent: worker -> the unit that it has contributed in this round.
        idle: the members for whom there was no unit when they asked.
    """

    units: WorkUnits
    mark: str
    members: frozenset[str] = frozenset()
    taken: Mapping[str, WorkUnit] = attrs.field(factory=dict)
    sent: Mapping[str, WorkUnit] = attrs.field(factory=dict)
    idle: frozenset[str] = frozenset()

    def hand_out(self, worker: str) -> tuple["Rounds", WorkUnit | None]:
        """Give a worker a unit; it is waited for from now on. A unit that it had is given back. None if it has to wait for the next round."""
        before = self.without_unit(worker)
        units, unit = (before.units, None) if worker in self.sent else before.units.take()
        taken = before.taken if unit is None else {**before.taken, worker: unit}
        idle = self.idle | {worker} if unit is None else self.idle - {worker}
        return attrs.evolve(before, units=units, taken=taken, members=self.members | {worker}, idle=idle), unit

    def without_unit(self, worker: str) -> "Rounds":
        """Give back the unit of a worker, if it has one."""
        if worker not in self.taken:
            return self
        taken = {each: unit for each, unit in self.taken.items() if each != worker}
        return attrs.evolve(self, units=self.units.give_back([self.taken[worker]]), taken=taken)

    def hand_over(self) -> "Rounds":
        """Give back a unit for each idle member, those that were handed out first; idle members ask again.

        Their workers are not waited for any more, and are not stopped: the first that sends a unit counts.
        """
        found = self
        for worker in list(self.taken)[: len(self.idle)]:
            found = found.leave(worker)
        return attrs.evolve(found, idle=frozenset())

    def leave(self, worker: str) -> "Rounds":
        """Do not wait for a worker any more: it has ended. What it has contributed counts; what it trained on is handed out again."""
        before = self.without_unit(worker)
        return attrs.evolve(before, members=before.members - {worker}, idle=before.idle - {worker})

    def accept(self, worker: str, mark: str, unit: WorkUnit) -> "Rounds | None":
        """Count the unit of a worker in this round; None if it cannot be counted: it is too late, or the unit has counted.

        The first that sends a unit, trained from the weights of this round, counts. Another worker that has it loses it, and is not waited for any more. It may also
        be free: the connection may have been lost, or the server.
        """
        if mark != self.mark or worker in self.sent:
            return None
        before = self if self.taken.get(worker) == unit else self.without_unit(worker)
        holder = next((each for each, held in before.taken.items() if held == unit), None)
        left = before.units if holder is not None else before.units.claim(unit)
        if left is None:
            return None
        return attrs.evolve(
            before,
            units=left,
            taken={each: held for each, held in before.taken.items() if each != holder},
            sent={**self.sent, worker: unit},
            members=(self.members - {holder}) | {worker},
            idle=self.idle - {worker},
        )

    @property
    def waiting(self) -> frozenset[str]:
        """The members that have asked for a unit, and for whom there is still none."""
        return self.idle if self.units.is_exhausted else frozenset()

    @property
    def is_over(self) -> bool:
        """Whether there is something to count, and everybody who is waited for has sent."""
        return bool(self.sent) and self.members <= self.sent.keys() | self.waiting

    @property
    def is_finished(self) -> bool:
        """Whether every sample is counted in earlier rounds."""
        return self.units.is_exhausted and not self.taken and not self.sent

    def close(self, mark: str) -> "Rounds":
        """The next round. Those who have neither sent nor asked in vain have weight zero in this one, and are not waited for until they ask again."""
        units = self.units.give_back(self.taken.values())
        return Rounds(units, mark, members=self.members & (self.sent.keys() | self.idle))

    def position(self) -> dict[str, Any]:
        """What a checkpoint has between two rounds: the data position and the mark. See `resumed`."""
        return {
            "next_index": self.units.next_index,
            "returned": as_text(self.units.returned),
            "mark": self.mark,
        }


def waits_since(rounds: Rounds, before: Mapping[str, float], now: float) -> dict[str, float]:
    """Since when each worker has waited for others: for the end of the round, once something was sent, and for a unit before that.

    Args:
        rounds: now.
        before: what this function returned after the change before.
        now: of any clock, in seconds.

    Examples:
        >>> rounds, unit = Rounds(WorkUnits(size=4, total=4), "a").hand_out("one")
        >>> rounds, none = rounds.hand_out("two")
        >>> before = waits_since(rounds, {}, 7.0)
        >>> before, waits_since(rounds.accept("one", "a", unit), before, 9.0)
        ({'two': 7.0}, {'one': 9.0})
    """
    return {worker: before.get(worker, now) for worker in rounds.sent or rounds.idle}


def resumed(position: Mapping[str, Any], *, size: int, total: int | None) -> Rounds:
    """The rounds that go on from a checkpoint; the size of units and the end may be others than before.

    Examples:
        >>> rounds, unit = Rounds(WorkUnits(size=4, total=8), "a").hand_out("one")
        >>> resumed(rounds.leave("one").position(), size=4, total=8).units.returned
        (WorkUnit(start=0, stop=4),)
    """
    units = WorkUnits(size, total, position["next_index"], from_text(position["returned"]))
    return Rounds(units, position["mark"])
