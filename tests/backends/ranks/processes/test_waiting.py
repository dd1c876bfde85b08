"""How long a rank sleeps between two looks at an exchange."""

import pytest

from trainfold.backends.ranks.call import Call, Deadline
from trainfold.backends.ranks.processes import waiting
from trainfold.backends.ranks.processes.waiting import Waiting


class Clock:
    """A clock that only sleeping moves."""

    def __init__(self):
        self.now = 0.0
        self.sleeps = 0

    def monotonic(self):
        return self.now

    def sleep(self, secs):
        self.now += secs
        self.sleeps += 1


class Exchange:
    """One that ends at a time."""

    def __init__(self, clock, ends_at):
        self.clock, self.ends_at = clock, ends_at

    def is_completed(self):
        return self.clock.now >= self.ends_at


class Quiet:
    """A notice board without notices."""

    def has_trouble(self):
        return False


@pytest.mark.parametrize("secs", [0.0, 0.0002, 0.0033, 0.0101, 0.07, 0.9, 30.0])
def test_a_rank_sees_the_end_of_an_exchange_soon_and_looks_seldom_while_it_lasts(secs, monkeypatch):
    """Pauses that doubled made each wait of a save up to twice as long as the exchange: a quarter of a save of 100 MB on four ranks."""
    clock = Clock()
    monkeypatch.setattr(waiting, "time", clock)
    Waiting(Quiet(), 2).look_until_done(Exchange(clock, secs), Call("gather"), Deadline(1e9))
    assert clock.now - secs <= max(secs / 16, 5e-5) + 1e-9
    assert clock.now - secs <= 5e-3
    assert clock.sleeps <= 150 + secs / 5e-3
