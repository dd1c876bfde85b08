"""A cause that is certain is proven: whatever is hidden of two runs, the planted cause is named, or said to be open."""

import attrs
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from kit.core.planted_worlds import STEPS, STREAMS, Kept, Plant, Program, evidence, logs_of, run

from trainfold.core.flight.causes.parting import parting_of

KINDS = {
    "position": [""],
    "seed": ["torch", "numpy", "noise"],
    "batch": [""],
    "component": [""],
    "setting": ["contract", "loop", "once", "put back"],
    "streams": ["torch", "numpy", "noise", "evaluation", "evaluation with a buffer"],
    "buffer": ["before", "after"],
    "bit": ["before", "after"],
    "environment": [""],
    "arithmetic": [""],
    "update": [""],
    "chance": [""],
}
OF_THE_PROGRAM = ("position", "batch", "component", "setting", "streams", "buffer", "arithmetic", "update")
ALSO = {"bit": "fault", "chance": "arithmetic", "update": "arithmetic"}  # one cause by two names
STEP_SETS = st.frozensets(st.integers(1, STEPS), min_size=STEPS - 3) | st.frozensets(st.integers(1, STEPS))
CADENCES = st.sampled_from([frozenset(range(each, STEPS + 1, each)) for each in (1, 2, 4, STEPS)]) | STEP_SETS
LEAVES = ["model.", "optimizer.", "dataset.value['order']", "dataset.", "rng.", "rng.value['numpy']", "trainer."]  # fmt: skip


@st.composite
def worlds(draw):
    """A program, a cause in it, and whether the first run has it."""
    cause = draw(st.sampled_from(sorted(KINDS)))
    kind = draw(st.sampled_from(KINDS[cause]))
    drawn = draw(st.sets(st.sampled_from(["torch", "numpy", "noise"])))
    drawn |= {kind if kind in STREAMS else "torch"} if cause in ("seed", "streams") else set()
    shuffles = draw(st.booleans())
    unused = {"torch", "numpy"} - drawn - ({"torch"} if shuffles else set())
    strays = tuple(sorted(draw(st.sets(st.sampled_from(sorted(unused)))))) if unused else ()
    program = Program(
        tuple(sorted(drawn)),
        shuffles,
        draw(st.booleans()),
        strays,
        cause != "environment" and draw(st.booleans()),
        draw(st.booleans()),
        draw(st.booleans()),
    )
    plant = Plant(cause, 1 if cause == "seed" else draw(st.integers(1, STEPS - 1)), kind)
    return program, plant, draw(st.booleans())


@st.composite
def keeps(draw):
    """What is left of two runs: any of it may be missing."""
    lines = draw(CADENCES)
    missing = draw(st.sets(st.sampled_from(LEAVES)))
    return Kept(
        draw(st.frozensets(st.sampled_from(sorted(Kept().fields)), min_size=3) | st.just(Kept().fields)),
        (lines, draw(st.just(lines) | STEP_SETS)),
        draw(CADENCES),
        (saved := draw(CADENCES), draw(st.just(saved) | STEP_SETS)),
        lambda path: not any(path.startswith(each) for each in missing),
        draw(st.booleans()),
        draw(st.sampled_from([1, 9])),
        draw(st.booleans()),
        draw(st.just(frozenset()) | st.frozensets(st.integers(1, STEPS))),
    )


@st.composite
def replays(draw, plant, *, is_first):
    """What programs do again: that of a run as it was, or another one that was taken for it."""
    is_one = draw(st.booleans())
    wrong = plant.cause in OF_THE_PROGRAM and is_one
    again = [True, not (wrong or plant.cause in ("bit", "chance", "environment"))]
    if plant.cause == "chance":
        again[0] = draw(st.booleans())
    again = again[::-1] if is_first else again
    other = plant.cause == "bit" and is_first  # the program of the first does again what the second did
    tried = draw(st.sampled_from([(False, False), (True, False), (True, True)]))
    own = tuple(each if is_tried else None for each, is_tried in zip(again, tried, strict=True))
    away = plant.cause == "environment" and draw(st.booleans())
    return {
        "own": own,
        "repeats": (own[0], other if tried[0] else None),
        "elsewhere": (away and is_first, away and not is_first),
        "is_one_program": is_one and tried[1],
    }


@settings(deadline=None, max_examples=500)
@given(worlds(), keeps(), st.data())
def test_the_planted_cause_is_named_or_open_whatever_is_hidden(world, kept, data):
    """One cause is planted beside differences without an effect: unseeded streams that no program uses, another number of threads."""
    program, plant, is_first = world
    ran = [run(program, None, is_second=False), run(program, plant, is_second=True)]
    both = tuple(ran[::-1] if is_first else ran)
    known = evidence(both, kept)
    found = parting_of(attrs.evolve(known, **data.draw(replays(plant, is_first=is_first))))
    assume(found.step is not None)
    assert {plant.cause, ALSO.get(plant.cause)} & {found.cause, *found.may_be}, (
        found,
        sorted(known.alike),
        known.difference and known.difference.parts,
    )
    if "the same batch" in str(found):  # a claim, that both logs have to show
        records = [each.steps.get(found.step) for each in logs_of(both, kept)]
        assert None not in records, found
        assert records[0].shows(records[1], "batch"), found
        assert records[0].batch == records[1].batch, found


FULL = [
    (Plant("position", 3), ()),
    (Plant("batch", 3), ()),
    (Plant("streams", 3, "torch"), ()),
    (Plant("streams", 3, "evaluation"), ("position", "batch", "seed", "component", "buffer", "environment")),
    (Plant("streams", 3, "evaluation with a buffer"), ("position", "batch", "seed", "component", "environment")),
    (Plant("seed", 1, "torch"), ("position", "component", "setting", "environment")),
    (Plant("setting", 1, "contract"), ("position", "batch", "seed", "component", "streams", "environment")),
    (Plant("setting", 3, "loop"), ("position", "batch", "seed", "component", "streams", "environment")),
    (Plant("setting", 3, "put back"), ("position", "batch", "seed", "component", "streams", "environment")),
    (Plant("component", 1), ("position", "batch", "seed", "streams", "environment")),
    (Plant("environment", 3), ("position", "batch", "seed", "component", "setting", "streams")),
    (Plant("bit", 3, "after"), ("position", "batch", "seed", "component", "streams", "environment")),
    (Plant("buffer", 3, "after"), ("position", "batch", "seed", "component", "streams", "environment")),
    (Plant("update", 3), ("position", "batch", "seed", "component", "streams", "environment")),
    (Plant("arithmetic", 3), ("position", "batch", "seed", "component", "setting", "streams", "environment")),
]


@pytest.mark.parametrize(("plant", "excluded"), FULL)
def test_with_all_the_evidence_the_planted_cause_is_named_and_what_is_the_same_is_excluded(plant, excluded):
    """Where the first thing that differs is read or drawn, it is certain; where it is a result, no log excludes a fault or other code."""
    ran = [run(Program(), None, is_second=False), run(Program(), plant, is_second=True)]
    known = evidence(tuple(ran), Kept(elements=1 if plant.cause == "bit" else 9))
    found = parting_of(known)
    assert found.cause == plant.cause
    assert not {*found.may_be} & {*excluded}
    assert (found.may_be == ()) == (plant in [plant for plant, excluded in FULL if not excluded])
    replayed = parting_of(attrs.evolve(known, own=(True, True)))
    assert "bit" not in replayed.may_be


@pytest.mark.parametrize("plant", [Plant("batch", 1), Plant("streams", 1, "torch"), Plant("seed", 1, "torch"), Plant("seed", 1, "noise")])  # fmt: skip
def test_rates_that_follow_from_the_loss_hide_no_cause_that_is_read_or_drawn(plant):
    ran = [run(program := Program(draws=("torch", "noise"), rates_follow=True), None, is_second=False)]
    known = evidence((*ran, run(program, plant, is_second=True)), Kept())
    assert known.rates
    assert parting_of(known).cause == plant.cause


def test_one_program_that_does_again_what_both_did_makes_another_seed_certain():
    """It has no other code, and no other environment."""
    plant = Plant("seed", 1, "numpy")
    program = Program(draws=("numpy",), strays=("torch",), shuffles=False)
    ran = [run(program, None, is_second=False), run(program, plant, is_second=True)]
    known = attrs.evolve(evidence(tuple(ran), Kept()), own=(True, True), is_one_program=True)
    found = parting_of(known)
    assert found.cause == "seed"
    assert not {"bit", "environment", "arithmetic"} & {*found.may_be}
