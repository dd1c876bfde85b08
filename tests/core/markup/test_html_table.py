"""Plans, refusals, runs and evaluations in a notebook: small tables in which text from a file is never active HTML."""

from html.parser import HTMLParser

import pytest
import torch

from trainfold import metrics as M
from trainfold.backends.runs.api import plan, save
from trainfold.backends.runs.scan import examine, read_inventory
from trainfold.backends.stores.memory import MemoryStore
from trainfold.core.errors import CheckpointTorn
from trainfold.core.evaluate.evaluation import evaluation_of
from trainfold.core.evaluate.suite import no_tally
from trainfold.core.format.manifest import Head
from trainfold.core.format.structure.describe import describe
from trainfold.core.history.inventory import Entry, Inventory
from trainfold.core.markup.html_table import MOST_CHARACTERS, MOST_ROWS, html_table
from trainfold.core.problem import problem_of
from trainfold.core.resume.drift import make_drift
from trainfold.core.resume.resume_plan import Refusal, ResumePlan
from trainfold.core.save.save_plan import plan_save
from trainfold.core.state.state import Progress, TrainState

HOSTILE = "<script>alert('x')</script>\x1b[2J\u202e&\"<img src=x onerror=alert(1)>"
TAGS = {"div", "style", "table", "caption", "thead", "tbody", "tr", "th", "td"}
OF_CHARTS = {"figure", "figcaption", "svg", "path", "span", "i", "ul", "li"}


class Page(HTMLParser):
    """The tags, attributes and text of a page."""

    def __init__(self):
        super().__init__()
        self.tags, self.attributes, self.text = set(), set(), ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data):
        if self.lasttag != "style":
            self.text += data + "\n"


def page(value):
    shown = value if isinstance(value, str) else value._repr_html_()
    found = Page()
    found.feed(shown)
    found.close()
    assert found.tags <= TAGS | OF_CHARTS, "tables and charts"
    assert not any(name.startswith("on") or name in {"src", "href"} for name in found.attributes)
    assert "\x1b" not in shown
    assert "\u202e" not in shown
    return found


@pytest.fixture
def store():
    held = MemoryStore()
    for step in (1, 2):
        save(TrainState(trainer=Progress(step=step), extra={"ema": torch.zeros(2)}), held)
    return held


def test_a_resume_plan_names_its_components_and_notes(store):
    found = plan(store, like=TrainState(trainer=Progress(), extra={"ema": torch.zeros(2)}))
    assert isinstance(found, ResumePlan)
    shown = page(found)
    assert "from step-00000002: step 2" in shown.text
    assert {"trainer", "ema"} <= set(shown.text.splitlines())


def test_a_refusal_names_every_reason_and_the_fix():
    refusal = Refusal("runs/a", None, (make_drift("batch_size", HOSTILE, saved=8, wanted=HOSTILE, policy={}),))
    shown = page(refusal)
    assert "no resume of runs/a" in shown.text
    assert "<script>" in shown.text, "shown as text"
    assert 'policy={"batch_size": "adapt"}' in shown.text


def test_a_run_names_its_checkpoints_and_what_is_wrong_with_them(store):
    inventory = examine(store, read_inventory(store), "step-00000001")
    lines = page(inventory).text.splitlines()
    assert "complete" in lines
    assert "a manifest, not read yet; a resume tries it first" in lines
    torn = problem_of(CheckpointTorn(HOSTILE, expected="a", found=HOSTILE, fix="b"))
    hostile = Inventory(HOSTILE, HOSTILE, (Entry(HOSTILE, Head(HOSTILE, 1, parent=HOSTILE), problem=torn),), torn)
    assert "CheckpointTorn" in page(hostile).text
    assert page(Inventory("r", None, ())).text.split("\n")[-7:-1] == [
        "r  run None",
        "checkpoint",
        "step",
        "timeline",
        "after",
        "status",
    ]


def test_a_save_plan_names_its_files():
    described, _ = describe({"w": torch.zeros(3)}, "ema")
    made = plan_save([{"ema": described}], step=7)
    assert "ema-00000-of-00001.safetensors" in page(made).text
    assert "save step-00000007: ema; 1 ranks" in page(made).text


def test_an_evaluation_names_its_results_and_what_was_not_finite():
    suite = {HOSTILE: M.Mean(), "loss": M.Mean()}
    tally = no_tally(suite)
    shown = page(evaluation_of(suite, tally) | {"loss": 0.1, HOSTILE: object()})
    assert "0.1" in shown.text.splitlines()
    assert "evaluation of 0 batches" in shown.text


def test_a_table_is_cut_where_it_is_too_long():
    shown = page(html_table("t", ("a", "b"), [("x" * 10_000, number) for number in range(1000)]))
    assert f"and {1000 - MOST_ROWS} more" in shown.text
    assert max(map(len, shown.text.splitlines())) == MOST_CHARACTERS + 1
    assert len(html_table("t", ("a", "b"), [("<" * 10_000, number) for number in range(1000)])) < 200_000
    assert html_table("", (), []) == "<table><tbody></tbody></table>"
