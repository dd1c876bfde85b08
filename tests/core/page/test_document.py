"""The page of a run: every section is there, it is well-formed, it loads nothing, and no text of a file becomes markup."""

import re
from html.parser import HTMLParser

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kit.core.page_cases import manifest_of, page_of

from trainfold.core.flight.journal_line import JournalLine
from trainfold.core.format.manifest import (
    Head,
    Summary,
)
from trainfold.core.history.inventory import Entry, Inventory
from trainfold.core.history.recognise import no_manifest
from trainfold.core.markup.curve import curve_of
from trainfold.core.page.document import BEGIN, OFFLINE, page_html, sections_html
from trainfold.core.page.run_page import FlightFacts, ResumeFacts, RunPage
from trainfold.core.page.sections import SECTIONS
from trainfold.core.page.sizes import bytes_by_component
from trainfold.core.problem import problem_of

VOID = {"meta", "path"}
HOSTILE = st.text(st.sampled_from("<>&\"'=/ -`\x00\x1b\n\u202e\ud800ax{}") | st.characters(), min_size=1, max_size=12) | st.sampled_from(
    ["<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "</style><b>", "--><b>", "' onload='x", "&lt;b&gt;", "x" * 5000]
)  # fmt: skip


class Reader(HTMLParser):
    """The tags and attributes of a page, with values where these are not texts; every element is closed where it should be."""

    def __init__(self, text):
        super().__init__()
        self.found, self.open, self.ids, self.loads = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attributes):
        names = tuple(name for name, _ in attributes)
        self.found.append((tag, names))
        self.ids += [value for name, value in attributes if name == "id"]
        self.loads += [value for name, value in attributes if name in ("src", "href", "xlink:href", "action", "srcset")]
        assert not any(name.startswith("on") for name in names)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        assert tag in VOID

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_each_section_is_there_with_its_heading():
    """W22: a reader finds everything that the list of sections promises."""
    text = page_html(page_of())
    for key, (heading, short, _) in SECTIONS.items():
        assert f'<h2 id="{key}-h">{heading}</h2>' in text
        assert f'<a href="#{key}">{short}</a>' in text
    assert list(sections_html(page_of())) == ["overview", *SECTIONS]


PROMISES = {
    "starts": ("Steps over time", "killed, or died without a word", "steps computed again", "ended with an exception: plain"),
    "losses": ("Loss", "Norm of the gradient", "Evaluation: plain", "the best", "1 value not finite: step 5"),
    "saves": ("loop stood still", "writing", "call to durable", "200 ms", "1.7 s", "2 s"),
    "checkpoints": ("Checkpoints and timelines", "timeline", "one of the best 2; step-00000020 and step-00000030 refer to it", "refers to", "the last 2", "CheckpointTorn"),
    "findings": ("Not saved, and changed with training", "Warning", "A save failed, step 12", "What a resume on this machine would meet",
                 "What changed between checkpoints", "batch_size"),
    "sizes": ("In the newest checkpoint, step-00000020", "On disk, in the 2 newest checkpoints", "80 B", "headers and the rest"),
}  # fmt: skip


@pytest.mark.parametrize("key", SECTIONS)
def test_a_section_shows_what_is_recorded(key):
    """W22: each fact that the run has recorded is in its section."""
    shown = re.sub("<[^>]*>", "\n", sections_html(page_of())[key])
    missing = [each for each in PROMISES[key] if each not in shown]
    assert not missing, shown


def test_a_run_that_records_nothing_gives_a_page_that_says_what_is_not_known():
    bare = RunPage(Inventory("runs/a", "r", (Entry("step-00000010", Head("r", 10)),)), 1e9)
    text = page_html(bare)
    Reader(text)
    for sentence in ("are not recorded", "The moments of saves are not recorded", "has no flight log", "No evaluation is recorded",
                     "The rules of the run's retention are not recorded", "sizes are not known"):  # fmt: skip
        assert sentence in text
    Reader(page_html(RunPage(Inventory("runs/a", None, ()), 1e9)))


def test_a_page_loads_nothing_and_names_each_part_once():
    """W22: one file that opens offline."""
    text = page_html(page_of())
    found = Reader(text)
    assert text.startswith(BEGIN)
    assert f'content="{OFFLINE}"' in text
    assert OFFLINE.startswith("default-src 'none'")
    assert len(set(found.ids)) == len(found.ids)
    assert all(each.startswith("#") and each[1:] in found.ids for each in found.loads)
    assert "script" not in {tag for tag, _ in found.found}
    assert {"header", "nav", "main", "footer", "figcaption", "caption"} <= {tag for tag, _ in found.found}
    svgs = [names for tag, names in found.found if tag == "svg" and "aria-hidden" not in names]
    assert svgs
    assert all({"role", "aria-label"} <= {*names} for names in svgs)
    assert all("scope" in names for tag, names in found.found if tag == "th")


PLAIN = Reader(page_html(page_of())).found


@settings(max_examples=60)
@given(text=HOSTILE)
def test_no_text_of_a_file_becomes_markup(text):
    """W22: whatever the names, warnings and reasons are, the elements of the page are those of a harmless one."""
    page = page_of(text)
    shown = page_html(page)
    shown.encode()
    assert "\x1b" not in shown
    assert Reader(shown).found == PLAIN


def test_the_bytes_of_components_are_those_of_the_files():
    manifests = [entry.manifest for entry in page_of("model").inventory.entries if entry.manifest is not None]
    assert bytes_by_component(manifests) == {"model": 80, "headers and the rest": 40}
    assert bytes_by_component(manifests[1:], references=True) == {
        "model": 40,
        "headers and the rest": 20,
        "in files of other checkpoints, not used": 60,
    }


def test_a_page_of_a_thousand_checkpoints_and_many_losses_stays_small():
    page = page_of()
    names = [f"step-{step:08d}" for step in range(1, 1001)]  # each refers to all before it
    entries = tuple(
        Entry(name, Head("r", at + 1), None, None, Summary(9, (), {}, tuple(names[:at])))
        for at, name in enumerate(names)
    )
    journal = tuple(line for step in range(1, 1001) for line in (
        JournalLine(1e9 + step, "called", step, data={"returned": 1e9 + step + 0.1}), JournalLine(1e9 + step + 0.5, "written", step, data={"began": 1e9})))  # fmt: skip
    curve = curve_of(range(20_000), [float(step * 37 % 1000) for step in range(20_000)])
    text = page_html(attrs.evolve(page, inventory=Inventory("r", "r", entries), journal=(page.journal[0], *journal), flight=FlightFacts(curve, curve, 0, 20_000)))  # fmt: skip
    assert len(text) < 1_000_000
    assert "drawn as the least and the largest of each" in text
    assert "970 more rows" in text


def test_of_several_ranks_the_end_is_that_of_rank_0():
    """W22: rank 1 raised, and its launcher ended rank 0: the page said of the whole run that it was killed, and nothing of the others."""
    lines = (JournalLine(1e9, "started", 0), JournalLine(1e9 + 9, "started", 0))
    alone = RunPage(Inventory("runs/a", "r", ()), 1e9 + 60, journal=lines, flight=FlightFacts(last=4))
    manifest = attrs.evolve(manifest_of(10, "model"), world_size=2)
    saved = attrs.evolve(alone, inventory=Inventory("runs/a", "r", (Entry("step-00000010", Head("r", 10), manifest),)))
    logged = attrs.evolve(alone, flight=FlightFacts(last=4, others={1: FlightFacts(last=4)}))
    for page, is_rank in ((alone, False), (saved, True), (logged, True)):
        sections = sections_html(page)
        assert ("rank 0: killed, or died without a word" in sections["starts"]) == is_rank
        assert ("How the other ranks ended is not recorded" in sections["starts"]) == is_rank
        assert ("<dt>Last process, rank 0</dt>" in sections["overview"]) == is_rank


def test_the_median_of_an_even_number_of_stalls_is_between_the_two_in_the_middle():
    """R05, W22: it was the larger one."""
    lines = [JournalLine(0.0, "started", 0)]
    for step, secs in enumerate((1.0, 2.0, 4.0, 9.0), 1):
        at = 100.0 * step
        lines += [JournalLine(at, "called", step, data={"returned": at + secs}), JournalLine(at + secs, "written", step, data={"began": at})]  # fmt: skip
    shown = sections_html(RunPage(Inventory("runs/a", "r", ()), 1e3, journal=tuple(lines)))["overview"]
    assert "<dd>3 s<small>median of 4</small>" in shown


def test_a_save_under_way_is_not_called_torn():
    """W22: a page that followed a healthy run called each save torn while it was written, with the advice to use an older checkpoint."""
    begun = Entry("step-00000040", None, None, problem_of(no_manifest("step-00000040")))
    lines = (
        JournalLine(1e9, "started", 0),
        JournalLine(1e9 + 1, "called", 40, data={"returned": 1e9 + 1.2, "outcome": "staged"}),
    )
    resume = ResumeFacts(
        "step-00000020", problems=(str(begun.problem),)
    )  # as it is planned, of each checkpoint that is passed over
    facts = RunPage(Inventory("runs/a", "r", (begun,)), 1e9 + 2, journal=lines, resume=resume)

    def shown(*more, **others):
        sections = sections_html(attrs.evolve(facts, journal=(*lines, *more), **others))
        return ["being written" in sections[key] for key in ("checkpoints", "saves")], "older checkpoint" in sections[
            "findings"
        ]

    assert shown() == ([True, True], False)
    assert shown(JournalLine(1e9 + 2, "failed", 40)) == ([False, False], True)
    assert shown(JournalLine(1e9 + 2, "closed")) == ([False, False], True)
    assert shown(JournalLine(1e9 + 2, "started", 20)) == ([False, False], True)
    assert shown(JournalLine(1e9 + 2, "failed", 40), JournalLine(1e9 + 3, "called", 40)) == ([True, True], False)
    in_the_loop = attrs.evolve(facts, journal=lines[:1], flight=FlightFacts(last=40))
    assert "being written" in sections_html(in_the_loop)["checkpoints"], (
        "a save in the loop is written down when it has returned"
    )
    written = attrs.evolve(facts.inventory, writers={"step-00000040": "process 7 on a"})
    bare = attrs.evolve(facts, journal=(), inventory=written)
    assert "being written by process 7 on a" in sections_html(bare)["checkpoints"], (
        "without a journal, the lock says it"
    )
    assert "older checkpoint" not in sections_html(bare)["findings"]
    old = Entry("step-00000030", None, None, problem_of(no_manifest("step-00000030")))
    assert shown(inventory=Inventory("runs/a", "r", (old, begun))) == ([True, True], True), (
        "what an earlier process left stays a finding"
    )


def test_a_warning_of_several_lines_has_several_lines():
    """Each break of a line was shown as a backslash and an n."""
    lines = (JournalLine(1e9, "warned", detail="two reasons:\n  one\n  two\x1b"),)
    shown = sections_html(RunPage(Inventory("runs/a", "r", ()), 1e9, journal=lines))["findings"]
    assert '<div class="message">two reasons:\n  one\n  two\\x1b</div>' in shown


def test_what_a_run_could_not_do_is_shown_and_what_came_at_each_save_once():
    """W22: that nothing was deleted, or sent to the far tier, was in the journal and not on the page."""
    lines = [
        JournalLine(1e9 + at, kind, at, detail=detail)
        for at in range(3)
        for kind, detail in (
            ("not_pruned", "denied"),
            ("not_uploaded", f"503, {at}"),
            ("not_fetched", "lost"),
            ("pruned", "old"),
        )
    ]
    shown = re.sub(
        "<[^>]*>", "\n", sections_html(RunPage(Inventory("runs/a", "r", ()), 1e9, journal=tuple(lines)))["findings"]
    )
    assert (
        "Old checkpoints were not deleted, step 2, 2001-09-09 01:46:42, 3 times since 2001-09-09 01:46:40\n\ndenied"
        in shown
    )
    assert [shown.count(words) for words in ("not deleted", "not sent", "503, 0", "not fetched", "old")] == [
        1,
        3,
        1,
        1,
        0,
    ]
