"""How often to save: no cadence loses less than the advised one, by a model that agrees with a simulated attempt."""

import json
import math

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from trainfold.core.errors import InvalidArgument
from trainfold.core.save.cadence import advise_cadence, lost_fraction

costs = st.fixed_dictionaries(
    {
        "save_secs": st.sampled_from([0.0, 1e-3, 0.2, 5.0, 60.0]),
        "step_secs": st.sampled_from([0.05, 0.5, 3.0]),
        "mtbf_secs": st.sampled_from([1.0, 30.0, 600.0, 7200.0]),
        "restart_secs": st.sampled_from([0.0, 2.0, 90.0]),
        "write_secs": st.sampled_from([0.0, 0.1, 4.0, 100.0]),
    }
)


def simulated(every_steps, *, save_secs, step_secs, mtbf_secs, restart_secs, write_secs):
    """The model: one attempt without a failure, event by event; a save counts if it was durable before the failure."""
    now, durable, useful = restart_secs, 0.0, 0.0
    survives = 1.0
    while survives > 1e-12 and now < 60 * mtbf_secs:
        now += every_steps * step_secs
        begun = max(now, durable)
        now, durable = begun + save_secs, begun + max(save_secs, write_secs)
        survives = math.exp(-durable / mtbf_secs)
        useful += every_steps * step_secs * survives
    return 1 - useful / mtbf_secs


@settings(max_examples=60)
@given(every_steps=st.integers(1, 400), given_costs=costs)
@example(
    every_steps=1,
    given_costs={"save_secs": 0.2, "step_secs": 0.5, "mtbf_secs": 600.0, "restart_secs": 2.0, "write_secs": 4.0},
)
def test_what_a_cadence_loses_is_what_a_simulated_attempt_loses(every_steps, given_costs):
    """Blocking saves and background saves, including a save that waits for the previous one."""
    period = max(given_costs["write_secs"], every_steps * given_costs["step_secs"] + given_costs["save_secs"])
    if 30 * given_costs["mtbf_secs"] / period > 300_000:
        return
    found = lost_fraction(every_steps, **given_costs)
    assert found == pytest.approx(simulated(every_steps, **given_costs), abs=1e-9)


@settings(max_examples=60)
@given(given_costs=costs)
@example(given_costs={"save_secs": 0.0, "step_secs": 0.05, "mtbf_secs": 1.0, "restart_secs": 0.0, "write_secs": 4.0})
def test_no_other_number_of_steps_loses_less(given_costs):
    """Exhaustively up to 2,000 and around the advised number, even if a write takes longer than machines live."""
    advice = advise_cadence(**given_costs)
    near = range(max(1, advice.every_steps - 300), advice.every_steps + 300)
    least = min(lost_fraction(k, **given_costs) for k in (*range(1, 2_000), *near))
    assert advice.lost_fraction <= least + 1e-13
    assert advice.lost_fraction == lost_fraction(advice.every_steps, **given_costs)


def young_interval_secs(save_secs, mtbf_secs):
    """Young's first-order optimum of the work between two saves."""
    return math.sqrt(2 * save_secs * mtbf_secs)


def daly_interval_secs(save_secs, mtbf_secs):
    """Daly's higher-order optimum, for a save that takes less than twice the time between failures."""
    root = math.sqrt(save_secs / (2 * mtbf_secs))
    return young_interval_secs(save_secs, mtbf_secs) * (1 + root / 3 + root * root / 9) - save_secs


@given(
    save_secs=st.floats(1e-4, 100),
    mtbf_secs=st.floats(1, 1e7),
)
def test_the_advice_is_dalys_where_his_formula_holds_and_youngs_where_saves_are_cheap(save_secs, mtbf_secs):
    """Daly within 1 % of the work between saves and 1e-5 of the time lost, for C <= M / 2; Young within 5 % for C <= M / 100."""
    if save_secs > mtbf_secs / 2:
        return
    step_secs = young_interval_secs(save_secs, mtbf_secs) / 10_000  # so fine that rounding does not matter
    advice = advise_cadence(save_secs=save_secs, step_secs=step_secs, mtbf_secs=mtbf_secs)
    work_secs = advice.every_steps * step_secs
    daly_secs = daly_interval_secs(save_secs, mtbf_secs)
    assert work_secs == pytest.approx(daly_secs, rel=1e-2)
    at_daly = lost_fraction(round(daly_secs / step_secs), save_secs=save_secs, step_secs=step_secs, mtbf_secs=mtbf_secs)
    assert advice.lost_fraction <= at_daly <= advice.lost_fraction + 1e-5
    if save_secs <= mtbf_secs / 100:
        assert work_secs == pytest.approx(young_interval_secs(save_secs, mtbf_secs), rel=5e-2)


@given(given_costs=costs)
def test_more_failures_dearer_saves_and_slower_writes_never_lose_less(given_costs):
    least = advise_cadence(**given_costs).lost_fraction
    for name in ("save_secs", "restart_secs", "write_secs"):
        worse = advise_cadence(**{**given_costs, name: given_costs[name] + 1.0}).lost_fraction
        assert worse >= least - 1e-12
    assert advise_cadence(**{**given_costs, "mtbf_secs": given_costs["mtbf_secs"] / 2}).lost_fraction >= least - 1e-12


def test_a_save_that_costs_nothing_is_worth_every_step():
    assert advise_cadence(save_secs=0, step_secs=0.5, mtbf_secs=3600).every_steps == 1


def test_a_background_write_holds_the_advice_at_what_it_can_keep_up_with():
    """One save is in flight at a time: a save that costs the loop nothing is still limited by its write time."""
    advice = advise_cadence(save_secs=0, step_secs=0.5, mtbf_secs=1e6, write_secs=30)
    assert advice.every_steps == 60


def test_the_advice_prints_as_a_table_that_shows_how_flat_the_optimum_is():
    advice = advise_cadence(save_secs=0.2, step_secs=0.5, mtbf_secs=12 * 3600)
    assert [choice.every_steps for choice in advice.alternatives] == [33, 66, 132, 263, 526, 1052, 2104]
    assert [line.endswith("<- loses least") for line in str(advice).splitlines()].index(True) == 4
    best = next(choice for choice in advice.alternatives if choice.every_steps == 263)
    assert (best.interval_secs, best.lost_fraction) == (advice.interval_secs, advice.lost_fraction)
    json.dumps(attrs.asdict(advice), allow_nan=False)
    few = advise_cadence(save_secs=0, step_secs=1, mtbf_secs=10)
    assert [choice.every_steps for choice in few.alternatives] == [1, 2, 4, 8]


@pytest.mark.parametrize(
    "given_costs",
    [
        {"save_secs": 1e-300, "step_secs": 1e-300, "mtbf_secs": 1e300},
        {"save_secs": 1e300, "step_secs": 1e300, "mtbf_secs": 1e-300},
        {"save_secs": 0, "step_secs": 1e-300, "mtbf_secs": 1e300, "write_secs": 1e300, "restart_secs": 1e300},
        {"save_secs": 5e-324, "step_secs": 5e-324, "mtbf_secs": 5e-324},
    ],
)
def test_absurd_figures_get_an_advice_and_no_traceback(given_costs):
    advice = advise_cadence(**given_costs)
    assert advice.every_steps >= 1
    assert 0 <= advice.lost_fraction <= 1


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"save_secs": -1}, "save_secs"),
        ({"save_secs": math.nan}, "save_secs"),
        ({"save_secs": "0.2s"}, "save_secs"),
        ({"step_secs": 0}, "step_secs"),
        ({"mtbf_secs": 0}, "mtbf_secs"),
        ({"mtbf_secs": math.inf}, "mtbf_secs"),
        ({"restart_secs": -1}, "restart_secs"),
        ({"write_secs": None}, "write_secs"),
    ],
)
def test_figures_that_cannot_be_are_named(arguments, named):
    usual = {"save_secs": 1, "step_secs": 1, "mtbf_secs": 100}
    with pytest.raises(InvalidArgument) as caught:
        advise_cadence(**{**usual, **arguments})
    assert caught.value.where == named
    with pytest.raises(InvalidArgument, match="every_steps"):
        lost_fraction(0, **usual)
