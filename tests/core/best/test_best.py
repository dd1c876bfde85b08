"""The best of a run: which result wins, which of the N best stay, and the file format of a record."""

import json
import math
from fractions import Fraction

import attrs
import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from trainfold.core.best.best_json import BestFile, best_file_from_json, best_to_json
from trainfold.core.best.record import BestRecord, is_better, make_best_record, updated
from trainfold.core.best.top_n import BestEntry, plan_best, ranked, rewound, updated_n
from trainfold.core.digest import digest_of
from trainfold.core.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointForeign,
    CheckpointHostile,
    FutureVersion,
    InvalidArgument,
)
from trainfold.core.evaluate.evaluation import Evaluation
from trainfold.core.evaluate.suite import Tally
from trainfold.core.format.file_names import directory_of
from trainfold.core.format.manifest import END, TAIL
from trainfold.core.save.retention import Saved, keep_last, plan_retention

directions = st.sampled_from(["min", "max"])
few = st.sampled_from([-1.0, -0.0, 0.0, 0.1, 0.2, 0.3, 1.0, 1.0 + 2**-52, 5e-324])  # ties and neighbours are likely
scores = st.one_of(few, st.floats(allow_nan=True, allow_infinity=True), st.none())
deltas = st.one_of(st.just(0.0), few.map(abs), st.floats(0, 1e300))
histories = st.lists(scores, max_size=12)


def evaluation(result, *, complete=True, suite=("m",)):
    """What `evaluate` returns."""
    tally = Tally(dict.fromkeys(suite), 1, dict.fromkeys(suite, ""), complete, -1)
    return Evaluation(result, tally=tally, nonfinite={})


def fold(record: BestRecord, history, *, start=0) -> BestRecord:
    for step, score in enumerate(history, start):
        record = updated(record, {"m": score}, step=step)
    return record


def best_by_hand(history, direction, min_delta):
    """The model: take each finite score that improves by more than the delta, compared as fractions."""
    best, sign = None, 1 if direction == "max" else -1
    for step, score in enumerate(history):
        if score is None or not math.isfinite(score):
            continue
        if best is None or sign * (Fraction(score) - Fraction(best[0])) > Fraction(min_delta):
            best = (score, step)
    return best or (None, None)


# --- one best --------------------------------------------------------------------------------------------------------


@given(history=histories, direction=directions, min_delta=deltas)
@example(history=[math.nan, 1.0], direction="min", min_delta=0.0)
@example(history=[math.nan, -1.0], direction="max", min_delta=0.0)
@example(history=[0.0, None, 0.1], direction="min", min_delta=0.0)
@example(history=[0.3, 0.2], direction="min", min_delta=0.1)
@example(history=[1.0, -(2.0**-60)], direction="min", min_delta=1.0)  # best - score would round to the delta
@example(
    history=[1.0, 1 - 2.0**-52], direction="min", min_delta=1.5 * 2.0**-53
)  # best - delta would round to the score
def test_the_best_is_what_a_person_would_pick_by_hand(history, direction, min_delta):
    """E08, Q11: strict improvement beyond min_delta; NaN (also a first one), infinities and absence never win; 0.0 is a value."""
    record = fold(make_best_record(metric="m", direction=direction, min_delta=min_delta), history)
    assert (record.score, record.step) == best_by_hand(history, direction, min_delta)


@given(history=histories, cut=st.integers(0, 12), direction=directions, min_delta=deltas)
def test_a_restart_anywhere_in_a_history_changes_no_verdict(history, cut, direction, min_delta):
    """P24: after a restart, the record read from its bytes gives the same verdicts on the rest of the history."""
    wanted = make_best_record(run_id="a", metric="m", direction=direction, min_delta=min_delta)
    first = fold(wanted, history[:cut])
    if first.score is not None:
        file = best_file_from_json(best_to_json(first))
        assert file.carried([file.best], wanted, timelines={first.step: 0}) == ((file.best,), ())
        first = file.record
    assert fold(first, history[cut:], start=len(history[:cut])) == fold(wanted, history)


@given(score=st.floats(allow_nan=False, allow_infinity=False), best=st.none() | few, direction=directions)
def test_an_evaluation_that_was_cut_short_never_wins(score, best, direction):
    """Q12: not even if there is no best yet."""
    record = fold(make_best_record(metric="m", direction=direction), [best])
    assert not is_better(record, evaluation({"m": score}, complete=False))
    assert is_better(record, evaluation({"m": score})) == is_better(record, {"m": score})


@pytest.mark.parametrize("result", [{}, {"other": 1.0}, {"m": None}, {"m": math.nan}, {"m": -math.inf}, {"m": 10**400}])
def test_what_is_empty_absent_or_not_finite_never_wins(result):
    """Q11: a record without a score stays without one."""
    record = make_best_record(metric="m", direction="min")
    assert updated(record, result, step=1) is record


def test_zero_is_a_score():
    """F43: a falsy metric is not a missing one, neither as the candidate nor as the current best."""
    record = fold(make_best_record(metric="m", direction="min"), [0.5, 0.0, 0.25])
    assert (record.score, record.step) == (0.0, 1)


@pytest.mark.parametrize("number", [2, 2.0, np.float32(2), torch.tensor(2.0), torch.tensor([2]), Fraction(2)])
def test_a_score_may_be_any_one_number(number):
    assert updated(make_best_record(metric="m", direction="max"), {"m": number}, step=0).score == 2.0


@pytest.mark.parametrize("value", [[0.5, 0.25], {"f1": 0.5}, torch.zeros(2), "0.5", True])
def test_a_result_that_is_not_one_number_has_to_be_selected_from(value):
    record = make_best_record(metric="m", direction="min")
    with pytest.raises(InvalidArgument, match=r"result\['m'\]: expected one number.*select one"):
        is_better(record, {"m": value})


def test_a_mistyped_metric_is_an_error_at_the_first_evaluation_that_knows_its_suite():
    """A metric of the suite may be absent, since its denominator may be 0. A name outside the suite is a mistake."""
    record = make_best_record(metric="los", direction="min")
    assert not is_better(record, {"loss": 0.5})
    assert not is_better(record, evaluation({}, suite=("loss", "los")))
    with pytest.raises(InvalidArgument, match=r"metric: expected one of \['loss'\], found 'los'"):
        is_better(record, evaluation({"loss": 0.5}, suite=("loss",)))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"direction": "lower"}, "direction"),
        ({"direction": None}, "direction"),
        ({"min_delta": -0.1}, "min_delta"),
        ({"min_delta": math.nan}, "min_delta"),
        ({"min_delta": math.inf}, "min_delta"),
        ({"min_delta": "0"}, "min_delta"),
        ({"metric": ""}, "metric"),
        ({"metric": 3}, "metric"),
        ({"metric": "m" * 201}, "metric"),
        ({"run_id": ""}, "run_id"),
    ],
)
def test_an_argument_that_cannot_be_is_named(arguments, named):
    with pytest.raises(InvalidArgument) as caught:
        make_best_record(**{"metric": "error", "direction": "min", **arguments})
    assert caught.value.where == named


def test_the_direction_is_never_guessed():
    """E08, P24: the direction is not derived from the metric's name."""
    with pytest.raises(TypeError, match="direction"):
        make_best_record(metric="loss")
    assert fold(make_best_record(metric="m", direction="max"), [1.0, 2.0]).score == 2.0


@pytest.mark.parametrize("step", [-1, 1.0, True, None])
def test_a_step_that_cannot_be_is_refused(step):
    with pytest.raises(InvalidArgument, match="step"):
        updated(make_best_record(metric="m", direction="min"), {"m": 1.0}, step=step)


@pytest.mark.parametrize("result", [None, [("m", 1.0)], 0.5])
def test_a_result_that_is_no_mapping_is_refused(result):
    with pytest.raises(InvalidArgument, match="result"):
        is_better(make_best_record(metric="m", direction="min"), result)


def test_a_record_and_a_result_in_the_wrong_order_are_told_apart():
    with pytest.raises(InvalidArgument, match="record: expected a BestRecord"):
        is_better({"m": 1.0}, make_best_record(metric="m", direction="min"))


# --- the N best ------------------------------------------------------------------------------------------------------


def keep(history, *, n, direction, kept=()):
    for entry in history:
        kept = plan_best(kept, entry, n=n, direction=direction).kept
    return kept


@st.composite
def entries(draw):
    """A history of entries, not sorted by step."""
    steps = draw(st.lists(st.integers(0, 30), unique=True, max_size=10))
    return [BestEntry(draw(scores), step) for step in steps]


@given(history=entries(), n=st.integers(1, 4), direction=directions)
def test_the_n_best_of_a_history_are_kept_in_whatever_order_it_came(history, n, direction):
    """E11, F43: ties are decided by step; the model sorts the whole history."""
    sign = 1 if direction == "min" else -1
    finite = [entry for entry in history if entry.score is not None and math.isfinite(entry.score)]
    assert keep(history, n=n, direction=direction) == tuple(sorted(finite, key=lambda e: (sign * e.score, e.step))[:n])


@given(history=entries(), newcomer=scores, n=st.integers(1, 4), direction=directions)
def test_nothing_is_dropped_to_make_room_for_something_worse(history, newcomer, n, direction):
    """E11, F43: at most the worst kept entry is dropped, and only for a better or an equal, earlier one."""
    before = keep(history, n=n, direction=direction)
    plan = plan_best(before, BestEntry(newcomer, 99), n=n, direction=direction)
    assert set(plan.kept) | set(plan.dropped) == set(before) | ({BestEntry(newcomer, 99)} if plan.accepted else set())
    assert len(plan.dropped) == (plan.accepted and len(before) == n)
    for gone in plan.dropped:
        assert gone == before[-1]
        assert newcomer < gone.score if direction == "min" else newcomer > gone.score


@given(history=histories, n=st.integers(1, 4), direction=directions, min_delta=deltas)
def test_the_best_and_the_n_best_are_decided_together_as_each_by_itself(history, n, direction, min_delta):
    """E08, E11: the winner is always among the N best, so one save serves both."""
    both = alone = make_best_record(metric="m", direction=direction, min_delta=min_delta)
    kept = ()
    for step, score in enumerate(history):
        expected = plan_best(kept, BestEntry(score, step), n=n, direction=direction)
        won = is_better(alone, {"m": score})
        alone = updated(alone, {"m": score}, step=step)
        both, plan = updated_n(both, kept, {"m": score}, step=step, n=n)
        assert (both, plan) == (alone, expected)
        assert plan.accepted or not won
        kept = plan.kept


@given(history=histories, direction=directions)
def test_the_best_one_of_one_is_the_best(history, direction):
    """E11: with n=1 and increasing steps, it decides like `is_better`."""
    record, kept = make_best_record(metric="m", direction=direction), ()
    for step, score in enumerate(history):
        plan = plan_best(kept, BestEntry(score, step), n=1, direction=direction)
        assert plan.accepted == is_better(record, {"m": score})
        record, kept = updated(record, {"m": score}, step=step), plan.kept
    assert [(entry.score, entry.step) for entry in kept] == (
        [] if record.score is None else [(record.score, record.step)]
    )


def test_a_lower_number_drops_the_worst():
    kept = keep([BestEntry(float(step), step) for step in range(5)], n=5, direction="max")
    plan = plan_best(kept, BestEntry(2.5, 9), n=2, direction="max")
    assert [entry.score for entry in plan.kept] == [4.0, 3.0]
    assert [entry.score for entry in plan.dropped] == [2.0, 1.0, 0.0]
    assert not plan.accepted


def test_a_step_is_judged_once():
    """A second evaluation of a kept step neither adds a duplicate entry nor drops another one."""
    kept = (BestEntry(0.3, 10), BestEntry(0.5, 20))
    plan = plan_best(kept, BestEntry(0.1, 20), n=2, direction="min")
    assert (plan.kept, plan.dropped, plan.accepted) == (kept, (), False)
    again = plan_best(kept, kept[0], n=2, direction="min")
    assert (again.kept, again.accepted) == (kept, False)


@pytest.mark.parametrize("n", [0, -1, 1.0, True])
def test_a_number_of_best_that_cannot_be_is_refused(n):
    with pytest.raises(InvalidArgument, match="n: expected an int >= 1"):
        plan_best((), BestEntry(1.0, 1), n=n, direction="min")


@pytest.mark.parametrize("kept", [(BestEntry(None, 1),), (BestEntry(math.nan, 1),), ((1.0, 1),)])
def test_what_no_plan_keeps_cannot_have_been_kept(kept):
    with pytest.raises(InvalidArgument, match=r"kept\[0\]"):
        plan_best(kept, BestEntry(1.0, 1), n=2, direction="min")


def test_the_budget_of_the_newest_and_that_of_the_best_do_not_eat_each_other():
    """The best checkpoint is kept in addition to the last k; a best among the last k takes no slot."""
    saved = [Saved(directory_of(step), step) for step in (10, 20, 30, 40)]
    best = keep([BestEntry(0.1, 10), BestEntry(0.9, 20), BestEntry(0.2, 30), BestEntry(0.8, 40)], n=2, direction="min")
    protected = [directory_of(entry.step) for entry in best]
    gone = plan_retention(saved, policy=keep_last(2), written=saved[-1], protected=protected)
    assert gone.deleted == ()  # 10 and 30 are the best; 40 and 20 are the last two of the others
    one = plan_retention(saved, policy=keep_last(1), written=saved[-1], protected=protected)
    assert one.deleted == (directory_of(20),)


# --- rewinds ---------------------------------------------------------------------------------------------------------


@given(history=entries(), step=st.integers(0, 30), n=st.integers(1, 4), direction=directions)
def test_rewinding_clears_exactly_what_was_measured_later(history, step, n, direction):
    """E12: entries after the rewind point are removed; those at or before it are kept."""
    kept = keep(history, n=n, direction=direction)
    assert rewound(kept, step) == tuple(entry for entry in kept if entry.step <= step)


def test_a_best_below_the_rewind_point_is_kept_and_a_later_one_is_cleared():
    """E12: after the rewind, a worse score can win again."""
    record = updated(make_best_record(metric="m", direction="min"), {"m": 0.5}, step=10)
    assert rewound(record, 10) is record
    cleared = rewound(record, 9)
    assert (cleared.score, cleared.step, cleared.metric) == (None, None, "m")
    assert is_better(cleared, {"m": 0.9})
    assert rewound(cleared, 0) is cleared


@pytest.mark.parametrize("best", [None, [BestEntry(1.0, 1)], 3])
def test_only_a_best_can_be_rewound(best):
    with pytest.raises(InvalidArgument, match="best"):
        rewound(best, 1)


# --- what survives a restart -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"run_id": "b"}, "of run 'a', not 'b'"),
        ({"metric": "loss"}, "of metric 'm', not 'loss'"),
        ({"direction": "max"}, "of direction 'min', not 'max'"),
    ],
)
def test_a_persisted_best_that_is_about_something_else_is_left_with_a_reason(change, reason):
    """E09: a mismatch of run id, metric or direction is enough."""
    wanted = make_best_record(run_id="a", metric="m", direction="min")
    found = updated(wanted, {"m": 0.5}, step=10)
    file = BestFile(found)
    there, reasons = file.carried(file.entries, attrs.evolve(wanted, **change), timelines={10: 0})
    assert there == ()
    assert len(reasons) == 1
    assert reason in reasons[0]


def test_every_reason_is_told_at_once():
    """E09: including the missing checkpoint."""
    found = updated(make_best_record(run_id="a", metric="m", direction="min"), {"m": 0.5}, step=10)
    wanted = make_best_record(run_id="b", metric="n", direction="max", min_delta=0.1)
    file = BestFile(found)
    assert len(file.carried(file.entries, wanted, timelines={})[1]) == 4
    assert len(file.carried(file.entries, wanted, timelines={10: 1})[1]) == 4  # a step that was trained again


def test_an_entry_whose_checkpoint_is_gone_takes_no_other_with_it():
    """E09: and the order stays."""
    record = updated(make_best_record(run_id="a", metric="m", direction="min"), {"m": 0.3}, step=20)
    kept = ((BestEntry(0.3, 20), 1), (BestEntry(0.4, 30), 1), (BestEntry(0.5, 10), 0))
    there, reasons = BestFile(record, 1, kept).carried(kept, record, timelines={20: 1, 30: 2, 10: 0})
    assert there == (kept[0], kept[2])
    assert reasons == ("the checkpoint of step 30 is not there any more",)


steps_at = st.dictionaries(st.integers(0, 3), st.integers(0, 2), max_size=3)  # step -> timeline


@given(best=st.tuples(st.integers(0, 3), st.integers(0, 2)), kept=steps_at, known=steps_at, is_kept=st.booleans())
@example(best=(1, 0), kept={}, known={1: 1}, is_kept=False)
@example(best=(1, 0), kept={}, known={}, is_kept=False)
@example(best=(1, 1), kept={2: 0}, known={1: 1, 2: 1}, is_kept=True)
@example(best=(1, 1), kept={2: 0}, known={1: 0, 2: 0}, is_kept=False)
def test_a_step_that_was_trained_again_is_not_one_of_the_best_and_one_that_is_not_known_stays(
    best, kept, known, is_kept
):
    """E12: each entry counts by its own timeline; a best that cannot be read now must not be deleted for that."""
    step, timeline = best
    kept = {each: of for each, of in kept.items() if each != step} | ({step: timeline} if is_kept else {})
    record = updated(make_best_record(metric="m", direction="min"), {"m": 0.0}, step=step)
    file = BestFile(record, timeline, tuple((BestEntry(float(each != step), each), of) for each, of in kept.items()))
    measured = {step: timeline} | kept
    alive = {each for each, of in measured.items() if (each, of) in known.items() or each not in known}
    expected = {directory_of(each): f"one of the best {len(kept)}" for each in alive}
    expected |= {directory_of(step): "the best"} if step in alive else {}
    assert file.names_in({directory_of(each): of for each, of in known.items()}) == expected


# --- bytes -----------------------------------------------------------------------------------------------------------

finite = st.floats(allow_nan=False, allow_infinity=False)
records = st.builds(
    BestRecord,
    run_id=st.text("abcXYZ019._-", min_size=1, max_size=200).filter(lambda text: text[0] != "."),
    metric=st.text(st.characters(codec=None, exclude_categories=()), min_size=1, max_size=200),
    direction=directions,
    min_delta=st.floats(0, 1e308),
    score=finite,
    step=st.integers(0, 2**62),
)


@given(record=records, timeline=st.integers(0, 2**40))
def test_a_record_comes_back_from_its_bytes(record, timeline):
    """E09: the score is restored bit for bit."""
    data = best_to_json(record, timeline=timeline)
    assert best_file_from_json(data) == BestFile(record, timeline)
    assert math.copysign(1, best_file_from_json(data).record.score) == math.copysign(1, record.score)
    assert json.loads(data)["format"] == "trainfold-best"


@given(
    record=records,
    timeline=st.integers(0, 2**40),
    kept=st.lists(
        st.tuples(st.builds(BestEntry, finite, st.integers(0, 2**62)), st.integers(0, 2**40)),
        unique_by=lambda pair: pair[0].step,
        max_size=5,
    ),
)
def test_the_n_best_come_back_from_their_bytes_with_the_best_one_first(record, timeline, kept):
    """E09: each entry keeps its timeline; a file without entries has version 1."""
    data = best_to_json(record, timeline=timeline, kept=kept)
    timelines = {entry.step: of for entry, of in kept}
    ordered = ranked((entry for entry, _ in kept), direction=record.direction)
    wanted = BestFile(record, timeline, tuple((entry, timelines[entry.step]) for entry in ordered))
    assert best_file_from_json(data) == wanted
    assert best_to_json(record, timeline=timeline, kept=kept[::-1]) == data
    assert json.loads(data)["version"] == (2 if kept else 1)
    assert wanted.entries == (wanted.kept or ((BestEntry(record.score, record.step), timeline),))


def test_as_many_as_may_be_kept_fit_into_the_file():
    """Even with the longest possible record; one entry more is refused by name."""
    record = make_best_record(run_id="a" * 200, metric="\U0001f600" * 200, direction="min", min_delta=1e-300)
    record = attrs.evolve(record, score=-1.2345678901234567e-300, step=2**62)
    kept = [(BestEntry(-1.2345678901234567e-300, 2**62 - place), 2**62) for place in range(501)]
    assert len(best_file_from_json(best_to_json(record, kept=kept[:500])).kept) == 500
    with pytest.raises(InvalidArgument, match="at most 500 entries"):
        best_to_json(record, kept=kept)


BEST = best_to_json(updated(make_best_record(run_id="a", metric="m", direction="min"), {"m": 0.5}, step=10))


def test_the_bytes_of_version_1_never_change():
    """Bytes outlive code: version 1 stays readable as long as the code knows that version."""
    assert BEST == (
        b'{"format":"trainfold-best","version":1,"run_id":"a","metric":"m","direction":"min","min_delta":0.0,"score":0.5,'
        b'"step":10,"timeline":0,\n"digest":"xxh3:d5ab511e139677a97a575d31275ff08a"}\n'
    )


@pytest.mark.parametrize("at", range(len(BEST)))
def test_no_byte_of_a_record_can_change_unseen(at):
    """A truncated record is detected too."""
    altered = BEST[:at] + bytes([BEST[at] ^ 1]) + BEST[at + 1 :]
    for data in (altered, BEST[:at]):
        with pytest.raises(CheckpointDamaged, match=r"restore best\.json from a copy of the run, or remove it"):
            best_file_from_json(data)


def sealed(text: str) -> bytes:
    """These members with a matching digest."""
    covered = ("{" + text).encode()
    return covered + TAIL + digest_of(covered).encode() + END


WHOLE = BEST[1 : BEST.index(TAIL)].decode()


def test_the_seal_of_these_tests_is_the_real_one():
    assert sealed(WHOLE) == BEST


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ('"version":1', '"version":3', FutureVersion),
        ('"version":1', '"version":2', CheckpointHostile),  # the N best are part of it
        ('"version":1', '"version":0', CheckpointHostile),
        ('"version":1', '"version":true', CheckpointHostile),
        ("trainfold-best", "other", CheckpointForeign),
        ('"score":0.5', '"score":NaN', CheckpointHostile),
        ('"score":0.5', '"score":1e999', CheckpointHostile),
        ('"score":0.5', '"score":null', CheckpointHostile),
        ('"score":0.5', '"score":"0.5"', CheckpointHostile),
        ('"score":0.5', '"score":0.5,"score":0.1', CheckpointHostile),
        ('"score":0.5', '"other":0.5', CheckpointHostile),
        ('"score":0.5', '"score":0.5,"other":1', CheckpointHostile),
        ('"step":10', '"step":-1', CheckpointHostile),
        ('"step":10', '"step":1.0', CheckpointHostile),
        ('"timeline":0', '"timeline":-1', CheckpointHostile),
        ('"direction":"min"', '"direction":"low"', CheckpointHostile),
        ('"min_delta":0.0', '"min_delta":-0.5', CheckpointHostile),
        ('"metric":"m"', '"metric":["m"]', CheckpointHostile),
        ('"run_id":"a"', '"run_id":"../a"', CheckpointHostile),
        ('"run_id":"a"', '"run_id":null', CheckpointHostile),
    ],
)
def test_a_sealed_record_that_cannot_be_is_refused(old, new, error):
    """E09: duplicate keys, wrong types, NaN, foreign and future versions, each with a matching digest."""
    assert old in WHOLE
    with pytest.raises(error) as caught:
        best_file_from_json(sealed(WHOLE.replace(old, new)))
    assert "remove it" in caught.value.fix or error is FutureVersion


KEPT = best_to_json(
    best_file_from_json(BEST).record, timeline=1, kept=[(BestEntry(0.5, 10), 1), (BestEntry(0.25, 5), 0)]
)


def test_the_bytes_of_version_2_never_change():
    """Bytes outlive code."""
    assert KEPT == (
        b'{"format":"trainfold-best","version":2,"run_id":"a","metric":"m","direction":"min","min_delta":0.0,"score":0.5,'
        b'"step":10,"timeline":1,"kept":[[0.25,5,0],[0.5,10,1]],\n"digest":"xxh3:0d3eb0809abefed7f046d82ae58a7ea2"}\n'
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("[[0.25,5,0],[0.5,10,1]]", "[]"),
        ("[[0.25,5,0],[0.5,10,1]]", "null"),
        ("[[0.25,5,0],[0.5,10,1]]", "[[0.5,10,1],[0.25,5,0]]"),
        ("[0.25,5,0]", "[0.25,10,0]"),
        ("[0.25,5,0]", "[0.25,5]"),
        ("[0.25,5,0]", "[0.25,-5,0]"),
        ("[0.25,5,0]", "[0.25,5,-1]"),
        ("[0.25,5,0]", "[NaN,5,0]"),
        ("[0.25,5,0]", "[1,5,0]"),
        ("[0.25,5,0]", '["0.25",5,0]'),
        ('"version":2', '"version":1'),
    ],
)
def test_a_sealed_file_of_n_best_that_cannot_be_is_refused(old, new):
    whole = KEPT[1 : KEPT.index(TAIL)].decode()
    assert old in whole
    with pytest.raises(CheckpointHostile, match="remove it"):
        best_file_from_json(sealed(whole.replace(old, new)))


@given(data=st.binary(max_size=300))
def test_other_bytes_are_refused_by_name(data):
    with pytest.raises(CheckpointError):
        best_file_from_json(data)


@pytest.mark.parametrize(
    "change", [{"score": None, "step": None}, {"run_id": None}, {"run_id": "../a"}, {"score": math.inf}]
)
def test_what_could_not_be_read_again_is_not_written(change):
    record = attrs.evolve(best_file_from_json(BEST).record, **change)
    with pytest.raises(InvalidArgument, match="record"):
        best_to_json(record)
