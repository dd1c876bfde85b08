"""Evaluations on a page: none is dropped, all have their numbers, and the page stays bounded."""

import math
import re

import attrs
from hypothesis import given
from hypothesis import strategies as st
from kit.core.page_cases import page_of

from trainfold.core.best.best_json import BestFile
from trainfold.core.best.record import BestRecord
from trainfold.core.best.top_n import BestEntry
from trainfold.core.flight.journal_line import JournalLine
from trainfold.core.format.file_names import directory_of
from trainfold.core.format.manifest import Head
from trainfold.core.history.inventory import Entry, Inventory
from trainfold.core.markup.curve import curve_of
from trainfold.core.page.document import page_html
from trainfold.core.page.evaluations import MOST_METRICS, evaluations_of
from trainfold.core.page.kept import why_kept
from trainfold.core.page.run_page import FlightFacts


def page_with(*lines, losses=(), best=None):
    """A page with these lines of a journal, and these losses."""
    flight = FlightFacts(curve_of(range(1, len(losses) + 1), losses), last=len(losses))
    return attrs.evolve(page_of(), journal=tuple(lines), best=best, flight=flight)


def evaluated(step, score, *, metric="acc", at=1e9):
    return JournalLine(at, "evaluated", step, data={"metric": metric, "score": score})


def text_of(page):
    return re.sub(r"\s*<[^>]*>\s*", "\n", page_html(page))


def test_a_diverged_run_says_its_last_value_whatever_that_is():
    """W22, P33: the last finite loss stood beside the last step, as if the run were well."""
    text = text_of(page_with(losses=[3.0, 2.0, 1.0] + [math.nan] * 6))
    assert re.search(r"\nLoss\n+nan\n+not finite since step 4\n", text)
    assert "None is finite since step 4; the last one is nan, at step 9." in text


def test_an_evaluation_that_is_not_finite_is_shown():
    """W22: the evaluation in which a run diverged was dropped without a word."""
    page = page_with(evaluated(10, 0.5), evaluated(20, "nan"), evaluated(30, "-inf"), evaluated(40, "<b>"))
    assert (
        str([(each.step, each.score) for each in evaluations_of(page)["acc"]]) == "[(10, 0.5), (20, nan), (30, -inf)]"
    )
    text = text_of(page)
    assert "2 values not finite: step 20, 30. None is finite since step 20; the last one is -inf, at step 30." in text
    assert re.search(r"\n30\n+-inf\n.*\n20\n+nan\n.*\n10\n+0.5\n", text, re.DOTALL), "in numbers, the newest first"
    assert "Evaluations, the newest first: acc" in text_of(page_with(evaluated(20, "nan")))


def test_evaluations_of_states_that_a_resume_left_behind_are_no_part_of_the_line():
    """W22: the line went through results of two timelines. What is computed again with the same result is that of the run."""
    start, resume = JournalLine(1e9, "started", 0), JournalLine(1e9 + 9, "started", 10)
    page = page_with(
        start,
        evaluated(10, 0.1),
        evaluated(20, 0.2),
        evaluated(30, 0.3),
        resume,
        evaluated(20, 0.2),
        evaluated(30, 0.9),
    )
    found = [(each.step, each.score, each.is_left) for each in evaluations_of(page)["acc"]]
    assert sorted(found) == [(10, 0.1, False), (20, 0.2, False), (30, 0.3, True), (30, 0.9, False)]
    assert text_of(page).count("left behind by a resume") == 1
    assert (
        "left behind"
        not in text_of(page_with(start, evaluated(10, 0.1)))
        .partition("Evaluations, the newest")[2]
        .partition("Saves")[0]
    )


def test_a_resume_from_a_later_checkpoint_than_the_run_went_back_to_keeps_its_results():
    """W22: the run went back from 75 to 60 and was killed before it saved again. It was resumed from 70, whose evaluation was said to be left behind."""
    back, resume = JournalLine(1e9, "restored", 60), JournalLine(1e9, "started", 70)
    saves = [(evaluated(step, step / 100), JournalLine(1e9, "committed", step)) for step in (60, 70)]
    lines = [JournalLine(1e9, "started", 0), *saves[0], *saves[1], evaluated(72, 0.72)]
    page = page_with(*lines, back, evaluated(65, 0.65), resume, evaluated(80, 0.8))
    found = [(each.step, each.is_left) for each in evaluations_of(page)["acc"]]
    assert found == [(60, False), (65, True), (70, False), (72, True), (80, False)]
    page = page_with(*lines, back, evaluated(70, 0.1), JournalLine(1e9, "committed", 70), resume)
    found = [(each.score, each.is_left) for each in evaluations_of(page)["acc"] if each.step == 70]
    assert sorted(found) == [(0.1, False), (0.7, True)], "saved again: the newer state is the run"


def test_thousands_of_names_are_counted_and_some_are_drawn():
    """A loop that records a name for each layer made a page of a thousand charts."""
    lines = [evaluated(10, number / 7, metric=f"m{number}") for number in range(1000)]
    html = page_html(page_with(*lines))
    assert html.count("Evaluation: m") == MOST_METRICS * 2, "a heading and a label of each"
    assert f"{1000 - MOST_METRICS} more names of evaluations are not shown here: m24, m25" in html
    best = page_of().best
    kept = attrs.evolve(page_with(*lines), best=attrs.evolve(best, record=attrs.evolve(best.record, metric="m999")))
    assert "Evaluation: m999" in page_html(kept), "the one that decides what is the best"


LINES = st.lists(
    st.builds(evaluated, st.integers(0, 9), st.sampled_from([0.5, 1.0, "nan", "inf", "x", None, True]), metric=st.sampled_from("ab"))
    | st.builds(JournalLine, st.just(1e9), st.sampled_from(["started", "restored", "committed"]), st.none() | st.integers(0, 9)),
    max_size=12,
)  # fmt: skip


@given(LINES)
def test_the_newest_results_of_each_step_belong_to_the_run(lines):
    """W22: what a plain model of a run keeps: a start at a step drops the results of later steps, and those of what came after the save it went on from."""
    model, seen, saved = {}, set(), {}
    for line in lines:
        if line.kind == "committed":
            if line.step is not None:
                saved[line.step] = model  # which has what comes before the next start, too
        elif line.kind != "evaluated":
            model = {key: None for key in saved.get(line.step, model) if line.step is None or key[1] <= line.step}
        elif line.data["score"] in (0.5, "nan", "inf") or (
            line.data["score"] is not True and line.data["score"] == 1.0
        ):
            key = (line.data["metric"], line.step, repr(float(line.data["score"])))
            model[key] = None
            seen.add(key)
    found = {
        (name, each.step, repr(each.score)): each.is_left
        for name, known in evaluations_of(page_with(*lines)).items()
        for each in known
    }
    assert set(found) == seen
    assert {key for key, is_left in found.items() if not is_left} == set(model)


def test_a_best_whose_checkpoint_a_rewind_has_left_behind_or_replaced_is_called_so():
    """E12, W22: the best of a state that is gone stood on the page as that of the run, and its step, trained again with a worse result, as the best."""
    best = BestFile(BestRecord("r", "acc", "max", 0.0, 0.9, 30), 0, ((BestEntry(0.9, 30), 0), (BestEntry(0.5, 10), 0)))

    def shown(*heads):
        inventory = Inventory("runs/a", "r", tuple(Entry(directory_of(head.step), head) for head in heads))
        page = attrs.evolve(page_with(best=best), inventory=inventory)
        return re.sub("\n+", "\n", text_of(page)), why_kept(page)

    forks = ((0, 10),)
    text, kept = shown(Head("r", 10), Head("r", 20, 1, forks), Head("r", 30, 1, forks))
    assert "0.9\nstep 30, its checkpoint is gone" in text
    assert (
        "The best by acc: more is better\nplace\nstep\nacc\ncheckpoint\n1\n30\n0.9\nits checkpoint is gone\n2\n10\n0.5\n"
        in text
    )
    assert kept == {"step-00000010": ("one of the best 2",), "step-00000020": ("the pointer plain",), "step-00000030": ("the newest",)}  # fmt: skip
    assert "0.9\nstep 30, left behind by the run" in shown(Head("r", 10), Head("r", 20, 1, forks), Head("r", 30))[0]
    text, kept = shown(Head("r", 10), Head("r", 30))
    assert "0.9\nstep 30\n" in text
    assert "checkpoint is gone" not in text
    assert "the best" in kept["step-00000030"]
