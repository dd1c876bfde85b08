"""Whichever workers join, die, are late or claim, and however often the server is killed: each sample counts once in the state that survives."""

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainfold.core.diloco.rounds import Rounds, resumed
from trainfold.core.diloco.work_units import MOST_AHEAD, WorkUnit, WorkUnits, as_text, from_text

WORKERS = "abcd"
ACTIONS = ("ask", "send", "die", "late", "close", "kill the server")


class World:
    """Workers and a server that follow `Rounds`, with the simplest state: the list of counted positions."""

    def __init__(self, size, total):
        self.size, self.total = size, total
        self.rounds = Rounds(WorkUnits(size, total), "0")
        self.counted = []
        self.saved = (self.rounds.position(), [])
        self.marks = 0
        self.holds = {}  # worker -> (mark, unit): what it has trained on, which outlives the server

    def ask(self, worker):
        self.rounds, unit = self.rounds.hand_out(worker)
        self.holds.pop(worker, None)
        if unit is not None:
            self.holds[worker] = self.rounds.mark, unit

    def send(self, worker):
        """Also of a unit that is not known to the server any more, and the same one twice."""
        if worker in self.holds:
            self.rounds = self.rounds.accept(worker, *self.holds[worker]) or self.rounds

    def die(self, worker):
        self.rounds = self.rounds.leave(worker)
        self.holds.pop(worker, None)

    def late(self, worker):
        """Its connection is lost, and it has its unit still."""
        self.rounds = self.rounds.leave(worker)

    def close(self, saves):
        if self.rounds.sent:
            self.counted = [*self.counted, *(each for unit in self.rounds.sent.values() for each in unit.positions)]
            self.marks += 1
            self.rounds = self.rounds.close(str(self.marks))
            if saves:
                self.saved = self.rounds.position(), self.counted

    def kill(self):
        position, self.counted = self.saved
        self.rounds = resumed(position, size=self.size, total=self.total)

    def finish(self):
        for _ in range(2 * self.total + 2):
            if self.rounds.is_finished:
                return
            for worker in WORKERS:  # those for whom there was no work are asked again then
                self.die(worker)
            for worker in "xy":
                self.ask(worker)
                self.send(worker)
            assert self.rounds.is_over
            self.close(saves=True)
        raise AssertionError("it does not end")


STARTS = [("ask", "a", True), ("ask", "b", True), ("send", "a", True), ("close", "a", True)]  # b is late


@settings(max_examples=400)
@example(size=1, total=3, actions=[*STARTS, ("kill the server", "a", True)])
@example(size=1, total=3, actions=[("ask", "a", True), ("late", "a", True), ("send", "a", True)])
@given(
    size=st.integers(1, 5),
    total=st.integers(1, 40),
    actions=st.lists(st.tuples(st.sampled_from(ACTIONS), st.sampled_from(WORKERS), st.booleans()), max_size=60),
)
def test_each_sample_counts_once_in_the_state_that_survives(size, total, actions):
    """G09: over any kills of workers and of the server, late and repeated contributions, and claims."""
    world = World(size, total)
    for action, worker, flag in actions:
        if action == "close":
            world.close(saves=flag)
        elif action == "kill the server":
            world.kill()
        else:
            getattr(world, action)(worker)
        assert len(set(world.counted)) == len(world.counted)
        waits = world.rounds.idle - world.rounds.sent.keys()
        assert not waits or world.rounds.units.is_exhausted, "a worker waits although there is work"
    world.finish()
    assert sorted(world.counted) == list(range(total))


def test_a_round_waits_for_its_members_and_for_nobody_else():
    rounds = Rounds(WorkUnits(4, 40), "m")
    rounds, first = rounds.hand_out("a")
    rounds, _ = rounds.hand_out("b")
    rounds = rounds.accept("a", "m", first)
    assert not rounds.is_over
    assert rounds.leave("b").is_over
    late = rounds.close("n")  # at the deadline
    assert late.members == {"a"}
    assert late.units.returned == (WorkUnit(4, 8),)


def test_who_waits_for_work_gets_that_of_a_worker_that_ends():
    """It waited for ever: it was still noted as one without work, so no server asked it again."""
    rounds, _ = Rounds(WorkUnits(4, 4), "m").hand_out("a")
    rounds, none = rounds.hand_out("b")
    assert (none, rounds.idle) == (None, {"b"})
    left = rounds.leave("a")
    assert (left.idle, left.units.returned) == (frozenset(), (WorkUnit(0, 4),))


def test_what_is_late_or_of_another_history_is_not_counted():
    rounds, unit = Rounds(WorkUnits(4, 40), "m").hand_out("a")
    assert rounds.accept("a", "other", unit) is None
    assert rounds.accept("a", "m", WorkUnit(1, 5)) is None
    sent = rounds.accept("a", "m", unit)
    assert sent.accept("a", "m", unit) is None
    assert sent.accept("b", "m", unit) is None
    assert sent.hand_out("a")[1] is None  # it waits for the next round
    assert sent.close("n").accept("a", "m", unit) is None


def test_a_unit_that_the_server_has_forgotten_is_counted_where_it_was_trained():
    """The server was killed after it had handed out three units."""
    rounds = resumed(Rounds(WorkUnits(4, 40), "m").position(), size=4, total=40)
    rounds = rounds.accept("c", "m", WorkUnit(8, 12))
    assert rounds.units.returned == (WorkUnit(0, 4), WorkUnit(4, 8))
    assert rounds.hand_out("d")[1] == WorkUnit(0, 4)


@pytest.mark.parametrize("unit", [(2, 6), (8, 13), (40, 44), (-4, 0), (0, 40), (4 * MOST_AHEAD, 4 * MOST_AHEAD + 4)])
def test_what_is_no_unit_cannot_be_claimed(unit):
    """U05: nor one so far ahead that those before it would fill the memory."""
    assert WorkUnits(4, 40 if unit[0] < 100 else None).claim(WorkUnit(*unit)) is None


def test_a_run_that_had_ended_goes_on_with_a_later_end():
    units = WorkUnits(4, 6, next_index=6)
    assert units.is_exhausted
    assert attrs.evolve(units, total=5).is_exhausted
    assert attrs.evolve(units, total=8).take()[1] == WorkUnit(6, 8)


@given(st.lists(st.integers(0, 10**15).map(lambda start: WorkUnit(start, start + 4))))
def test_units_survive_as_text(units):
    assert list(from_text(as_text(units))) == units
