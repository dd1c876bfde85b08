"""What is due at a boundary, whatever a loop does to its steps, and what all ranks agree on there."""

import signal
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.adapters.manager.manager_cases import state_at

from trainfold.adapters.manager.disabled import DisabledManager
from trainfold.adapters.manager.lease import raise_after
from trainfold.adapters.manager.manager import CheckpointManager
from trainfold.adapters.manager.triggers import _watched
from trainfold.adapters.requests.sources import Asked, SignalRequests
from trainfold.backends.ranks.in_process import SingleProcess, run_threads, thread_outcomes
from trainfold.backends.runs.scan import read_inventory
from trainfold.backends.stores.memory import ErrorAt, MemoryStore
from trainfold.core.errors import (
    InvalidArgument,
    RankFailed,
    RanksDisagree,
    RunLocked,
    SaveFailed,
    TrainfoldError,
    UnsupportedLeaf,
)
from trainfold.core.save.boundary import never_come
from trainfold.core.save.requests import REQUESTS
from trainfold.core.state.state import Progress, TrainState

# --- between ranks ---------------------------------------------------------------------------------------------------


class NoSource:
    """Asks for nothing; but there might be something, so the ranks speak at each boundary."""

    def take(self):
        return ()

    def close(self):
        pass


@pytest.mark.parametrize("what", ["is_last", "is_best"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_only_one_rank_says_of_a_boundary_is_refused_on_all_with_that_rank(what, mode):
    """R01, T53: a rank that acted alone would wait in its save for ranks that train on."""
    store = MemoryStore()

    def main(world):
        with CheckpointManager(store, every=100, mode=mode, requests=NoSource(), collectives=world) as manager:
            manager.step(state_at(5), **{what: world.rank == 1})
            manager.step(state_at(6))  # where the others hear of it

    for outcome in thread_outcomes(3, main):
        assert isinstance(outcome.error, RanksDisagree), outcome.error
        assert f"{what}: expected the same on every rank, found True on rank 1 of 3" in str(outcome.error)
    assert read_inventory(store).entries == ()


def waits_alone(what, left):
    """How two ranks end, of which rank 1 is given a flag at step 5, and rank 0 has left its boundaries without one."""
    store, has_left, has_ended = MemoryStore(), threading.Event(), threading.Event()

    def main(world):
        with CheckpointManager(store, every=100, collectives=world) as manager:
            if world.rank == 0:
                for step in left:
                    manager.step(state_at(step))
                has_left.set()
                has_ended.wait(20)  # as in an all-reduce of the training
                manager.step(state_at(6))
                return
            try:
                manager.step(state_at(4))
                has_left.wait(20)
                manager.step(state_at(5), **{what: True})
            finally:
                has_ended.set()

    return [each.error for each in thread_outcomes(2, main, timeout_secs=1.0)]


@pytest.mark.parametrize("what", ["is_last", "is_best"])
def test_a_rank_that_waits_alone_at_its_last_boundary_says_so_soon_and_again_in_its_error(what, monkeypatch, caplog):
    """X10: the other rank has not come to that boundary, and may never come: it may wait for this one in its backward."""
    monkeypatch.setattr("trainfold.adapters.manager.triggers.PATIENCE_SECS", 0.1)
    failed = waits_alone(what, [4])[1]
    assert isinstance(failed, RankFailed)
    assert "rank 0" in str(failed)
    said = (
        f"rank 1 was given {what}=True at step 5, and waits there for all ranks: give it on every rank at this boundary"
    )
    assert said in failed.__notes__
    assert [f"{said}, which some have not reached for 0.1 s"] == [each.getMessage() for each in caplog.records][:1]


@pytest.mark.parametrize("what", ["is_last", "is_best"])
def test_ranks_of_which_only_some_give_a_flag_raise_although_nothing_is_sent_at_their_boundaries(what, monkeypatch):
    """R01, X10: a deadline of ten minutes ended that. The rank that waits names the others; these raise at their next boundary."""
    monkeypatch.setattr("trainfold.adapters.manager.triggers.PATIENCE_SECS", 0.1)
    other, waited = waits_alone(what, [4, 5])
    assert isinstance(waited, RanksDisagree)
    text = f"{what}: expected the same on every rank, found True on rank 1, and not on rank 0, which went on"
    assert text in str(waited)
    assert waited.step == 5
    assert isinstance(other, RankFailed)
    assert (other.rank, other.step) == (1, 6)
    assert text in str(other)


def test_a_rank_that_ends_after_a_boundary_that_all_have_left_waits_for_those_that_do_so_later():
    """`finish` comes after the last boundary, and one rank may take its time before it."""
    store, is_slow = MemoryStore(), threading.Event()

    def main(world):
        with CheckpointManager(store, every=100, collectives=world) as manager:
            manager.step(state_at(5))
            if world.rank == 0:
                is_slow.wait(1.5)
            return manager.finish(state_at(5)).step

    assert run_threads(2, main) == [5, 5]


@pytest.mark.parametrize("before", [[], ["is_best"], ["is_last"]])
@pytest.mark.parametrize("what", ["finish", "is_best"])
def test_a_rank_that_waits_for_ranks_which_have_closed_their_managers_names_them(what, before, monkeypatch):
    """R07, R09: a deadline of ten minutes ended that, also where all had a flag before."""
    monkeypatch.setattr("trainfold.adapters.manager.triggers._LOOK_SECS", 0.02)
    store, has_ended = MemoryStore(), threading.Event()

    def main(world):
        with CheckpointManager(store, every=100, collectives=world) as manager:
            manager.step(state_at(4))
            for flag in before:
                manager.step(state_at(5), **{flag: True})
            try:
                if world.rank == 1:
                    manager.finish(state_at(6)) if what == "finish" else manager.step(state_at(6), is_best=True)
            finally:
                if world.rank == 1:
                    has_ended.set()
        has_ended.wait(20)  # these ranks have something else to do

    one, waited, other = (each.error for each in thread_outcomes(3, main, timeout_secs=5.0))
    assert one is other is None
    assert isinstance(waited, RanksDisagree)
    assert waited.step == 6
    assert "True on rank 1, and not on rank 0, 2, which has closed its manager" in str(waited)


@pytest.mark.parametrize("what", ["save", "async save", "request"])
def test_a_rank_at_a_boundary_to_which_others_never_come_names_them_when_they_have_closed_their_managers(
    what, monkeypatch
):
    """R07, R09: these ranks had fewer batches. A deadline of ten minutes ended the save, or the wait for what they would have sent."""
    monkeypatch.setattr("trainfold.adapters.manager.triggers._LOOK_SECS", 0.02)
    store, has_ended = MemoryStore(), threading.Event()
    mode = "async" if what == "async save" else "sync"

    def main(world):
        source = NoSource() if what == "request" else None
        try:
            with CheckpointManager(store, every=7, mode=mode, requests=source, collectives=world) as manager:
                for step in (5, 6, 7, 8) if world.rank == 1 else (5,) if what == "request" else (5, 6):
                    manager.step(state_at(step))
        finally:
            if world.rank == 1:
                has_ended.set()
        has_ended.wait(20)  # these ranks have something else to do

    one, waited, other = (each.error for each in thread_outcomes(3, main, timeout_secs=5.0))
    assert one is other is None
    last = 5 if what == "request" else 6
    assert waited.step == last + 1
    assert f"found rank 0, 2, which has closed its manager after step {last}" in str(waited)


def test_no_rank_is_said_to_have_closed_too_early_where_all_come_to_the_end(monkeypatch):
    """Some have closed before others have read that all were there."""
    monkeypatch.setattr("trainfold.adapters.manager.triggers._LOOK_SECS", 0.0)

    def main(world):
        for _ in range(4):
            with CheckpointManager(MemoryStore(), every=None, at_end=False, collectives=world) as manager:
                manager.step(state_at(1), is_best=world.rank < 0)
                manager.step(state_at(2), is_last=True)
                time.sleep(0.01 * world.rank)
                manager.finish(state_at(2))

    run_threads(3, main)


@pytest.mark.parametrize(
    "mine",
    [
        {"every": None},
        {"every_secs": 60},
        {"at_end": False},
        {"mode": "async"},
        {"when_busy": "skip"},
        {"components": ["trainer"]},
        {"check_replicas": "none"},
    ],
)
def test_ranks_whose_managers_have_other_arguments_are_told_so_when_these_are_made(mine):
    """C07, V05: a cadence on rank 0 alone, which saves for all in other libraries, would leave it waiting in a save while the others train."""
    store = MemoryStore()

    def main(world):
        with CheckpointManager(store, **{"every": 2, **(mine if world.rank == 1 else {})}, collectives=world):
            pass

    (name,), outcomes = mine, thread_outcomes(3, main)
    assert {type(each.error) for each in outcomes} == {RanksDisagree}
    assert all(f"CheckpointManager.{name}: expected the same on every rank" in str(each.error) for each in outcomes)
    assert all("on ranks 0, 2; " in str(each.error) for each in outcomes)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_all_ranks_say_of_a_boundary_is_done_at_that_boundary(mode):
    store = MemoryStore()

    def main(world):
        with CheckpointManager(store, every=100, mode=mode, collectives=world) as manager:
            told = [manager.step(state_at(step), is_best=step == 2, is_last=step == 4) for step in range(1, 5)]
            return [outcome is not None for outcome in told], manager.should_stop

    assert run_threads(2, main) == [([False, True, False, True], True)] * 2


@given(
    asked=st.lists(st.tuples(st.integers(1, 6), st.integers(0, 2), st.sampled_from(REQUESTS)), max_size=4),
    every=st.sampled_from([None, 2, 5]),
    mode=st.sampled_from(["sync", "async"]),
)
@settings(max_examples=60, deadline=None)
def test_a_request_on_any_rank_is_answered_by_all_at_the_next_boundary_and_none_is_lost(asked, every, mode):
    """R01: whenever and wherever it comes, all ranks save and stop at the same steps, one boundary after one process would."""

    def ran(world_size):
        store = MemoryStore()

        def main(world):
            source, told, late = Asked(), [], world_size > 1
            with CheckpointManager(store, every=every, mode=mode, requests=source, collectives=world) as manager:
                for step in range(1, 9):
                    for at, rank, request in asked:
                        if at == (step if late else step - 1) and rank % world_size == world.rank:
                            source.ask(request)
                    verdict = manager.should_save(state_at(step))
                    outcome = manager.save(state_at(step)) if verdict.save else None
                    told.append((outcome is not None, manager.should_stop))
                    if manager.should_stop:
                        break
                manager.finish(state_at(step))
            return told

        told = run_threads(world_size, main)
        assert told[1:] == told[:-1]
        return told[0], [entry.head.step for entry in read_inventory(store).entries]

    alone, together = ran(1), ran(3)
    assert alone[0][-1][1] == together[0][-1][1]
    if every is None or not asked:
        assert alone == together


def test_a_boundary_waits_for_no_rank_and_says_nothing_where_nothing_can_be_due():
    """X09: two ranks of which one is slow; a gather at each boundary cost 4 ms on two ranks and 10 ms on four."""
    store, is_done = MemoryStore(), threading.Event()

    def main(world):
        with CheckpointManager(store, every=4, requests=NoSource(), collectives=world) as manager:
            manager.step(state_at(1))
            if world.rank == 1:
                assert is_done.wait(20)
            before = len(world.schedule)
            manager.step(state_at(2))
            is_done.set()
            spoken = len(world.schedule) - before
        with CheckpointManager(store, every=4, collectives=world) as manager:
            manager.step(state_at(1))
            before = len(world.schedule)
            for step in (2, 3):
                manager.step(state_at(step))
            return spoken, len(world.schedule) - before

    assert run_threads(2, main) == [(1, 0)] * 2


def test_ranks_at_different_steps_are_told_so_on_every_rank():
    """R01, V05."""
    store = MemoryStore()

    def main(world):
        with CheckpointManager(store, collectives=world) as manager:
            manager.step(state_at(5 + world.rank), is_last=True)

    for outcome in thread_outcomes(2, main):
        assert isinstance(outcome.error, RanksDisagree)
        assert "[5, 6]" in str(outcome.error)


def test_a_source_that_fails_on_one_rank_fails_the_boundary_on_all_and_loses_no_request():
    """R01, P29: the others must not wait for it, and their requests stay pending."""
    store, fails = MemoryStore(), threading.Event()
    fails.set()

    class Source:
        def __init__(self, rank):
            self.rank, self.asked = rank, ["save"] if rank == 0 else []

        def take(self):
            if self.rank == 1 and fails.is_set():
                fails.clear()
                raise OSError("a stale file handle")
            taken, self.asked = tuple(self.asked), []
            return taken

        def close(self):
            pass

    def main(world):
        with CheckpointManager(store, collectives=world, requests=Source(world.rank)) as manager:
            manager.step(state_at(1))
            with pytest.raises((OSError, TrainfoldError), match="stale"):
                manager.step(state_at(2))
            return manager.step(state_at(3)).step

    assert run_threads(2, main) == [3, 3]


# --- nothing is left behind, nothing is masked -----------------------------------------------------------------------


def test_a_manager_that_cannot_be_made_lets_go_of_signals_and_lock(tmp_path):
    """P29: SIGTERM must not be caught by an object that is no longer used."""
    handler = signal.getsignal(signal.SIGTERM)
    with CheckpointManager(tmp_path), pytest.raises(RunLocked):
        CheckpointManager(tmp_path, requests=SignalRequests())
    assert signal.getsignal(signal.SIGTERM) == handler
    with pytest.raises(InvalidArgument):
        CheckpointManager(tmp_path, requests=SignalRequests(), mode="later")
    assert signal.getsignal(signal.SIGTERM) == handler

    class Unduplicable(SingleProcess):
        def duplicate(self):
            raise OSError("no more sockets")

    with pytest.raises(OSError, match="sockets"):
        CheckpointManager(tmp_path, mode="async", collectives=Unduplicable())
    CheckpointManager(tmp_path).close()


def test_what_is_no_source_of_requests_is_refused():
    with pytest.raises(InvalidArgument, match="requests"):
        CheckpointManager(MemoryStore(), requests="SIGTERM")


class FailingSource:
    def take(self):
        return ()

    def close(self):
        raise OSError("the source cannot be closed")


def failed_in_background(**options):
    store = MemoryStore()
    manager = CheckpointManager(store, mode="async", **options)
    store._fault = ErrorAt(store._attempts + 1)
    manager.save(state_at(1))
    job = manager._saves._under_way.job
    job.wait()
    assert isinstance(job.failure, SaveFailed)
    store._fault = None
    return manager


def test_a_failure_in_the_background_is_noted_on_what_fails_where_it_would_be_told():
    """D05: it is reported once, however the call ends."""
    manager = failed_in_background()
    with pytest.raises(UnsupportedLeaf) as raised:
        manager.save(TrainState(trainer=Progress(step=2), extra={"x": object()}))
    assert any("EIO" in note for note in raised.value.__notes__)
    manager.close()


def test_a_close_tells_of_the_save_first_and_of_what_else_failed_beside_it():
    """D07."""
    manager = failed_in_background(requests=FailingSource())
    with pytest.raises(SaveFailed) as raised:
        manager.close()
    assert any("cannot be closed" in note for note in raised.value.__notes__)
    manager.close()


def test_a_close_whose_source_fails_lets_go_of_the_run(tmp_path):
    """D07."""
    with pytest.raises(OSError, match="cannot be closed"):
        CheckpointManager(tmp_path, requests=FailingSource()).close()
    CheckpointManager(tmp_path).close()


def test_what_is_raised_first_carries_the_others():
    def fail():
        with raise_after() as failures:
            failures += [ValueError("one"), ValueError("two")]
            raise KeyError

    with pytest.raises(KeyError) as raised:
        fail()
    assert raised.value.__notes__ == ["and besides: ValueError: one", "and besides: ValueError: two"]


class SlowStore:
    """Its writes wait until they may go on."""

    def __init__(self):
        self.inner, self.may_go_on = MemoryStore(), threading.Event()

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def write(self, name, parts, *, size_bytes):
        assert self.may_go_on.wait(20)
        self.inner.write(name, parts, size_bytes=size_bytes)


@pytest.mark.parametrize("what", ["is_best", "is_last"])
def test_a_policy_that_skips_skips_nothing_that_does_not_come_again(what):
    """D04, E10, A14: the cadence is due again at the next boundary, but the best or last state is gone by then."""
    store = SlowStore()
    with CheckpointManager(store, mode="async", when_busy="skip", every=10) as manager:
        manager.step(state_at(10))
        assert manager.step(state_at(20)).status == "skipped"
        timer = threading.Timer(0.05, store.may_go_on.set)
        timer.start()
        assert manager.step(state_at(21), **{what: True}).status == "staged"
        timer.join()
    assert [name for name in store.list() if name.startswith("step")] == ["step-00000010", "step-00000021"]


# --- a loop that asks what is due, and saves by itself ---------------------------------------------------------------


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("request_", ["stop", "save_and_stop", "abort"])
def test_a_request_to_stop_is_not_lost_where_the_loop_saves_by_hand(request_, mode):
    """R01, P29: the protocol has only `should_save` and `save`; the save does not clear a boundary's decision to stop."""
    mine = Asked()
    with CheckpointManager(MemoryStore(), mode=mode, requests=mine) as manager:
        mine.ask(request_)
        assert manager.should_save(state_at(1)).stop
        manager.save(state_at(1))
        assert manager.should_stop
        manager.step(state_at(2))
        assert manager.should_stop
    disabled = DisabledManager(requests=mine)
    mine.ask(request_)
    assert disabled.should_save(state_at(1)).stop
    disabled.save(state_at(1))
    assert disabled.should_stop


@pytest.mark.parametrize(("elapsed", "is_due"), [((11.0, 3.0), True), ((3.0, 11.0), False)])
def test_the_cadence_in_seconds_goes_by_the_clock_of_one_rank(elapsed, is_due, monkeypatch):
    """R01: ranks with different clocks either all save or all skip."""
    store, clocks = MemoryStore(), threading.local()
    monkeypatch.setattr("trainfold.adapters.manager.triggers.time.monotonic", lambda: getattr(clocks, "now", 0.0))

    def run(collectives):
        with CheckpointManager(store, every_secs=10, collectives=collectives) as manager:
            clocks.now = elapsed[collectives.rank]
            return manager.step(state_at(1)) is None and manager.step(state_at(2)) is not None

    assert run_threads(2, run) == [is_due, is_due]


def test_no_thread_that_watches_for_a_flag_outlives_its_boundary(monkeypatch):
    """R07: one that still held the group of the ranks when Python shut down freed it there, and aborted a process that had trained to its end."""
    monkeypatch.setattr("trainfold.adapters.manager.triggers._LOOK_SECS", 0.0)
    looks = threading.Event()

    class Passed:
        def numbers(self):
            looks.set()
            time.sleep(0.2)  # a slow store
            return [-1]

    with _watched(SingleProcess(), lambda: never_come(Passed().numbers(), 4)):
        assert looks.wait(10)
    assert "trainfold-watch" not in {each.name for each in threading.enumerate()}
