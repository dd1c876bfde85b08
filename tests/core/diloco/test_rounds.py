"""Whichever workers join, die, are late or claim, and however often the server is killed: each sample counts once in the state that survives."""

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainfold.core.diloco.rounds import Rounds, resumed, waits_since
from trainfold.core.diloco.work_units import MOST_AHEAD, WorkUnit, WorkUnits, as_text, from_text

WORKERS = "abcd"
ACTIONS = ("ask", "send", "die", "late", "hand over", "close", "kill the server")


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

    def hand_over(self):
        """Others have waited for too long; those who were late have their units still."""
        self.rounds = self.rounds.hand_over()

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
        elif action == "hand over":
            world.hand_over()
        else:
            getattr(world, action)(worker)
        assert len(set(world.counted)) == len(world.counted)
        held = [*world.rounds.taken.values(), *world.rounds.sent.values(), *world.rounds.units.returned]
        assert len(set(held)) == len(held), "a unit is in two places"
    world.finish()
    assert sorted(world.counted) == list(range(total))


class Clocked:
    """Workers and a server in virtual time: each worker takes its own time for a unit, or hangs for ever; the server waits as `DilocoServer` does."""

    GRACE = 10

    def __init__(self, takes, units, order):
        self.takes, self.order = (
            takes,
            order,
        )  # worker -> seconds of a unit, None for ever; who is first among those that can go on
        self.rounds, self.now, self.waits = Rounds(WorkUnits(1, units), "0"), 0, {}
        self.trains = {}  # worker -> when it has ended, under which mark, on which unit
        self.sent = {}  # worker -> the mark under which it has sent
        self.counted = []

    def see(self, rounds):
        self.rounds, self.waits = rounds, waits_since(rounds, self.waits, self.now)

    def ask(self):
        """Those that have nothing to do ask for work, in the drawn order."""
        for worker in sorted(self.takes, key=lambda each: self.order[each]):
            waits = self.sent.get(worker) == self.rounds.mark or worker in self.rounds.waiting
            if worker not in self.trains and not waits:
                rounds, unit = self.rounds.hand_out(worker)
                self.see(rounds)
                if unit is not None:
                    secs = float("inf") if self.takes[worker] is None else self.takes[worker]
                    self.trains[worker] = self.now + secs, self.rounds.mark, unit

    def close_if_over(self, *, is_late=False):
        if self.rounds.is_over or (is_late and self.rounds.sent):
            self.counted += self.rounds.sent.values()
            self.see(self.rounds.close(str(int(self.rounds.mark) + 1)))
            return True
        return False

    def step(self):
        """Go to the next time at which something happens."""
        self.ask()
        if self.close_if_over():
            return
        deadline = min(self.waits.values(), default=float("inf")) + self.GRACE
        worker = min(self.trains, key=lambda each: (self.trains[each][0], self.order[each]))
        self.now = min(self.trains[worker][0], deadline)
        if self.trains[worker][0] <= self.now:
            _, mark, unit = self.trains.pop(worker)
            if (rounds := self.rounds.accept(worker, mark, unit)) is not None:
                self.sent[worker] = mark
                self.see(rounds)
        elif not self.close_if_over(is_late=True):
            self.see(self.rounds.hand_over())


@settings(max_examples=400)
@example(units=1, takes=[15, 15], order=[0, 1, 2, 3])
@example(units=2, takes=[25, 3, None], order=[2, 0, 1, 3])
@given(
    units=st.integers(1, 8),
    takes=st.lists(st.none() | st.integers(1, 60), min_size=1, max_size=4).filter(any),
    order=st.permutations(range(4)),
)
def test_each_unit_counts_in_time_however_long_one_takes(units, takes, order):
    """G09: also where a unit takes longer than the grace, and others hang. It was handed from one worker to the other for ever, and what each made of it was refused."""
    clocked = Clocked(dict(zip(WORKERS, takes, strict=False)), units, dict(zip(WORKERS, order, strict=True)))
    slowest = max(each for each in takes if each)
    while not clocked.rounds.is_finished:
        clocked.step()
        assert clocked.now <= units * (2 * slowest + (len(takes) + 1) * Clocked.GRACE), "it does not end"
    assert sorted(unit.start for unit in clocked.counted) == list(range(units))


def test_a_worker_that_hangs_costs_the_grace_of_one_round():
    """It was a member of all later rounds, and each of them waited for it."""
    rounds = Rounds(WorkUnits(4, 40), "m")
    for mark in "no":
        rounds, unit = rounds.hand_out("a")
        if mark == "n":
            rounds, other = rounds.hand_out("b")
            rounds = rounds.accept("b", "m", other)  # and hangs from now on
        rounds = rounds.accept("a", rounds.mark, unit)
        assert rounds.is_over == (mark == "n")
        rounds = rounds.close(mark)
    rounds, unit = rounds.hand_out("a")
    assert rounds.accept("a", "o", unit).is_over


def test_the_first_that_sends_a_unit_counts_and_the_other_one_is_not_waited_for():
    """The unit was given to `b`, because `a` seemed to hang and `b` had nothing to do."""
    rounds, unit = Rounds(WorkUnits(4, 4), "m").hand_out("a")
    rounds, _ = rounds.hand_out("b")
    rounds, again = rounds.hand_over().hand_out("b")
    assert again == unit
    counted = rounds.accept("a", "m", unit)
    assert counted.is_over
    assert counted.accept("b", "m", unit) is None


def test_only_as_much_is_handed_over_as_others_can_take():
    rounds = Rounds(WorkUnits(4, 12), "m")
    for worker in "abcd":
        rounds, _ = rounds.hand_out(worker)
    over = rounds.hand_over()
    assert (list(over.taken), over.members) == (["b", "c"], {"b", "c", "d"})


def test_a_clock_runs_for_those_that_wait_now():
    """One clock for two kinds of waiting ended a round at once, if another worker had been idle for long; and ran on after the idle one had got a unit."""
    rounds, first = Rounds(WorkUnits(4, 8), "m").hand_out("a")
    rounds, _ = rounds.hand_out("b")
    rounds, _ = rounds.hand_out("c")
    waits = waits_since(rounds, {}, 1.0)
    assert waits == {"c": 1.0}
    assert waits_since(rounds.accept("a", "m", first), waits, 9.0) == {"a": 9.0}
    given, _ = rounds.leave("a").hand_out("c")
    assert waits_since(given, waits, 9.0) == {}


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
    assert rounds.waiting == {"b"}
    left = rounds.leave("a")
    assert left.waiting == set()
    assert left.hand_out("b")[1] == WorkUnit(0, 4)


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
