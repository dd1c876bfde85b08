"""One decision per boundary: due saves, requests and finished saves, in any order."""

import itertools
import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainfold.backends.ranks.in_process import run_threads
from trainfold.core.errors import InvalidArgument
from trainfold.core.save.requests import REQUESTS, checked_request, merge_requests
from trainfold.core.save.triggers import Triggers, Verdict, decide, make_triggers, should_save

requests = st.lists(st.sampled_from(REQUESTS), max_size=4)
worlds = st.lists(requests, max_size=4)
triggers = st.builds(
    make_triggers,
    every=st.none() | st.integers(1, 7),
    every_secs=st.none() | st.floats(0.5, 50),
    at_end=st.booleans(),
)
steps = st.integers(0, 30)


@st.composite
def boundaries(draw):
    """Every input of one decision."""
    step = draw(steps)
    return step, {
        "triggers": draw(triggers),
        "last_saved": draw(st.none() | st.just(step) | steps),
        "secs_since_save": draw(st.floats(0, 100)),
        "requests": draw(requests),
        "is_last": draw(st.booleans()),
        "is_best": draw(st.booleans()),
    }


# --- requests --------------------------------------------------------------------------------------------------------


@given(world=worlds, data=st.data())
def test_the_order_of_ranks_and_requests_makes_no_difference(world, data):
    """R01: neither do repeated requests, or which ranks merge first."""
    merged = merge_requests(world)
    shuffled = [data.draw(st.permutations([*rank, *rank])) for rank in data.draw(st.permutations(world))]
    assert merge_requests(shuffled) == merged
    cut = data.draw(st.integers(0, len(world)))
    assert merge_requests([merge_requests(world[:cut]), merge_requests(world[cut:])]) == merged


@given(world=worlds)
def test_merging_is_the_union_except_that_an_abort_wins(world):
    """R02."""
    asked = set(itertools.chain.from_iterable(world))
    assert merge_requests(world) == (("abort",) if "abort" in asked else tuple(sorted(asked, key=REQUESTS.index)))


@pytest.mark.parametrize("request_", ["SIGTERM", "", None, 3, ["save"]])
def test_what_is_no_request_is_refused(request_):
    with pytest.raises(InvalidArgument, match="one of save, stop, save_and_stop, abort"):
        checked_request(request_)
    with pytest.raises(InvalidArgument, match="request"):
        merge_requests([[request_]])
    with pytest.raises(InvalidArgument, match="request"):
        decide(1, triggers=Triggers(), last_saved=None, secs_since_save=0.0, requests=[request_])


# --- one boundary ----------------------------------------------------------------------------------------------------


def by_hand(step, *, triggers, last_saved, secs_since_save, requests, is_last, is_best):
    """The model: (save, stop), by one rule after the other."""
    if "abort" in requests:
        return False, True
    stop = is_last or "stop" in requests or "save_and_stop" in requests
    if step == last_saved:
        return False, stop
    if is_best or "save" in requests or "save_and_stop" in requests or (stop and triggers.at_end):
        return True, stop
    if step == 0:
        return False, stop
    if triggers.every_secs is not None and secs_since_save >= triggers.every_secs:
        return True, stop
    if triggers.every is None:
        return False, stop
    if last_saved is not None and last_saved > step:
        return step % triggers.every == 0, stop
    return any(number % triggers.every == 0 for number in range((last_saved or 0) + 1, step + 1)), stop


@settings(max_examples=400)
@given(boundary=boundaries())
def test_a_decision_is_what_a_person_would_decide_by_hand(boundary):
    """O06, R01, R02."""
    step, facts = boundary
    verdict = decide(step, **facts)
    assert (verdict.save, verdict.stop) == by_hand(step, **facts)
    assert bool(verdict.reasons) or verdict == Verdict(save=False, stop=False)


@given(boundary=boundaries(), data=st.data())
def test_a_decision_does_not_depend_on_the_order_of_what_was_asked(boundary, data):
    """R01: merging on the ranks before a decision does not change it."""
    step, facts = boundary
    verdict = decide(step, **facts)
    for other in (data.draw(st.permutations(facts["requests"])), merge_requests([facts["requests"]])):
        assert decide(step, **{**facts, "requests": other}) == verdict


@given(boundary=boundaries())
def test_a_step_is_not_saved_twice_for_another_reason(boundary):
    """E10, A14: best, interval, signal and last step at one boundary give one save."""
    step, facts = boundary
    verdict = decide(step, **facts)
    again = decide(step, **{**facts, "last_saved": step, "secs_since_save": 0.0})
    assert not again.save
    assert again.stop == verdict.stop


@given(boundary=boundaries())
def test_an_abort_saves_nothing_and_stops(boundary):
    """R02: even if a save is due."""
    step, facts = boundary
    verdict = decide(step, **{**facts, "requests": [*facts["requests"], "abort"]})
    assert (verdict.save, verdict.stop) == (False, True)
    assert "saved" not in verdict.reasons


@settings(max_examples=30)
@given(world=st.lists(requests, min_size=1, max_size=3), clocks=st.lists(st.floats(0, 20), min_size=3, max_size=3))
def test_ranks_that_gather_their_requests_and_take_the_clock_of_rank_0_decide_alike(world, clocks):
    """R01: a signal on any rank and different clocks give one decision, by one collective."""

    def boundary(rank):
        told = rank.gather((world[rank.rank], clocks[rank.rank]))
        merged, secs = merge_requests([asked for asked, _ in told]), told[0][1]
        return decide(7, triggers=make_triggers(every_secs=10), last_saved=5, secs_since_save=secs, requests=merged)

    verdicts = run_threads(len(world), boundary)
    assert set(verdicts) == {verdicts[0]}
    assert verdicts[0].stop == any(request != "save" for rank in world for request in rank)


def test_at_step_0_nothing_is_due_by_a_number_or_by_the_clock():
    """O06: a slow start does not save an untrained state; a request does."""
    facts = {"triggers": make_triggers(every=1, every_secs=1), "last_saved": None, "secs_since_save": 1e6}
    assert decide(0, **facts) == Verdict(save=False, stop=False)
    assert decide(0, **facts, requests=["save"]).save
    assert decide(0, **facts, is_last=True).save
    assert decide(1, **facts).reasons == ("every", "every_secs")


def test_a_finished_run_that_is_started_again_saves_nothing():
    """A11, M49: it resumed at its last step."""
    facts = {"triggers": make_triggers(every=100), "last_saved": 250, "secs_since_save": 0.0}
    assert decide(250, **facts, is_last=True) == Verdict(save=False, stop=True, reasons=("last", "saved"))


def test_a_run_that_does_not_save_its_end_does_where_it_is_told_to():
    """R02: the difference between a stop and a save-and-stop."""
    facts = {"triggers": make_triggers(every=100, at_end=False), "last_saved": 200, "secs_since_save": 0.0}
    assert not decide(250, **facts, is_last=True).save
    assert not decide(250, **facts, requests=["stop"]).save
    assert decide(250, **facts, requests=["save_and_stop"]).save
    assert decide(300, **facts, is_last=True).save


def test_a_decision_prints_as_a_sentence():
    facts = {"triggers": make_triggers(every=100, every_secs=60), "last_saved": 100, "secs_since_save": 61.0}
    told = str(decide(200, **facts, is_best=True, is_last=True, requests=["stop", "save"]))
    assert told == (
        "save and stop: the cadence in steps, the cadence in seconds, the best result so far, the last step, "
        "asked to save, asked to stop"
    )
    assert str(decide(150, **{**facts, "secs_since_save": 1.0})) == "do not save and go on: nothing is due"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"every": 0}, "every"),
        ({"every": True}, "every"),
        ({"every": 2.5}, "every"),
        ({"every_secs": 0}, "every_secs"),
        ({"every_secs": -1.0}, "every_secs"),
        ({"every_secs": math.nan}, "every_secs"),
        ({"every_secs": math.inf}, "every_secs"),
        ({"every_secs": "10m"}, "every_secs"),
        ({"every_secs": True}, "every_secs"),
        ({"at_end": None}, "at_end"),
    ],
)
def test_triggers_that_cannot_be_are_refused(arguments, named):
    with pytest.raises(InvalidArgument) as caught:
        make_triggers(**arguments)
    assert caught.value.where == named


# --- whole runs ------------------------------------------------------------------------------------------------------


def train(limits, *, triggers, total, asked=None, best=(), stride=1, secs_per_step=1.0):
    """A run, killed right after each limit and restarted from its newest checkpoint.

    Returns the steps and reasons of all saves, in order.
    """
    saves, newest = [], None
    for limit in [*limits, math.inf]:
        step, last, waited = newest or 0, newest, 0.0
        while step < total:
            step, waited = min(total, step + stride), waited + secs_per_step * stride
            verdict = decide(
                step,
                triggers=triggers,
                last_saved=last,
                secs_since_save=waited,
                requests=(asked or {}).get(step, ()),
                is_last=step >= total,
                is_best=step in best,
            )
            if verdict.save:
                saves.append((step, verdict.reasons))
                newest = last = step
                waited = 0.0
            if verdict.stop or step >= limit:
                break
        if newest == total:
            break
    return saves


@settings(max_examples=300)
@given(
    every=st.integers(1, 7),
    total=st.integers(1, 40),
    stride=st.integers(1, 3),
    kills=st.lists(st.integers(1, 39), max_size=4),
    asked=st.dictionaries(st.integers(1, 39), st.just(["save"]), max_size=4),
    best=st.sets(st.integers(1, 39), max_size=4),
)
@example(every=5, total=20, stride=1, kills=[7, 7], asked={6: ["save"]}, best={5})
def test_the_steps_that_the_cadence_saves_depend_on_nothing_else(every, total, stride, kills, asked, best):
    """V14, F54: neither kills nor other saves change them; lost work is repeated and saved at the same steps."""
    triggers = make_triggers(every=every)
    expected = [min(total, -(-number // stride) * stride) for number in range(every, total + 1, every)]
    disturbed = train(sorted(kills), triggers=triggers, total=total, asked=asked, best=best, stride=stride)
    assert {step for step, reasons in disturbed if "every" in reasons} == set(expected)
    assert len({step for step, _ in disturbed}) == len(disturbed)  # no step is saved twice


@given(
    every=st.none() | st.integers(1, 7),
    every_secs=st.none() | st.integers(1, 9),
    total=st.integers(1, 30),
    best=st.sets(st.integers(1, 30), max_size=3),
    ending=st.sampled_from(["last step", "stop", "save_and_stop"]),
    data=st.data(),
)
def test_the_final_state_is_saved_exactly_once_however_the_run_ends(every, every_secs, total, best, ending, data):
    """A14: interval hit, max steps, data exhausted, signal, duration. M48, T53."""
    triggers = make_triggers(every=every, every_secs=every_secs)
    end = total if ending == "last step" else data.draw(st.integers(1, total))
    asked = {} if ending == "last step" else {end: [ending]}
    saves = [step for step, _ in train([end], triggers=triggers, total=total, asked=asked, best=best)]
    first_life = saves[: saves.index(end) + 1]
    assert first_life.count(end) == 1
    assert first_life == sorted(set(first_life))


@given(every_secs=st.integers(1, 20), secs_per_step=st.sampled_from([0.25, 0.5, 1.0, 3.0]), total=st.integers(1, 60))
def test_between_two_saves_by_the_clock_lies_at_least_its_cadence_and_less_than_a_step_more(
    every_secs, secs_per_step, total
):
    triggers = make_triggers(every_secs=every_secs, at_end=False)
    saves = [0, *(step for step, _ in train([], triggers=triggers, total=total, secs_per_step=secs_per_step))]
    waits = [(b - a) * secs_per_step for a, b in itertools.pairwise(saves)]
    assert all(every_secs <= wait < every_secs + secs_per_step for wait in waits)
    assert (total - saves[-1]) * secs_per_step < every_secs


@given(step=steps, every=st.none() | st.integers(1, 7), last=st.none() | steps)
def test_should_save_is_the_part_of_a_decision_that_looks_at_the_step(step, every, last):
    """O06."""
    verdict = decide(step, triggers=Triggers(every=every), last_saved=last, secs_since_save=0.0)
    assert verdict.save == should_save(step, every=every, last_saved=last)
